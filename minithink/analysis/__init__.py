"""Tests in the embedded model what methods take for granted. Sketches for understanding, not the methods."""
