"""Evaluation: what every finished sequence was like, and what a policy does to accuracy, length and memory."""
