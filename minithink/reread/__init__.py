"""Whole texts read once more with full attention: what tokens attend to, and which are needed later."""
