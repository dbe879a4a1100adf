"""What happened in a cache, token by token, and ways to look at it (`python -m minithink.trace view FILE`)."""
