"""What methods must know of a model before they run on it: measured once, and written beside the model."""
