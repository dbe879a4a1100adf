"""A model's files: where they come from, what the weights are, what calibrations say, and whether all of it fits."""
