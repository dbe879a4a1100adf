"""What methods take for granted, looked at in the embedded model. Sketches for understanding, not the methods."""
