"""Measurements of this project, run as `python -m minithink.bench decode | sweep | tables | …`.

speed       how fast decoding, its kernels and the methods are
answers     how many answers are right: comparisons of policies, and the pool of their runs
methods     what is measured of each method, as data
tables      tables of the documents, filled in from docs/results
"""
