"""Measurements of this project, run as `python -m minithink.bench decode | accuracy | tables`."""
