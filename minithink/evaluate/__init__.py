"""Evaluation: datasets, graders, what is kept of every finished sequence, and what that adds up to."""
