"""Evaluation: datasets, and graders of what a model answers."""
