"""How fast decoding, its kernels and the methods are."""
