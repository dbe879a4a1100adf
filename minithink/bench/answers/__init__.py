"""How many answers are right: comparisons of policies, and the pool of their runs."""
