"""Traces: what happened in a cache, token by token. `python -m minithink.trace view FILE` shows them."""
