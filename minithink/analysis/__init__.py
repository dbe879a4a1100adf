"""Measures what methods take for granted. Written to be understood; none of it is a method."""
