"""What became of each part of the papers here: the rows of docs/fidelity.md, one module for each paper."""
