"""Training of the embedded model: python -m minithink.train"""
