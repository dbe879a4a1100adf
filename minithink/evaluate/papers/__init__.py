"""Tables of the papers: which policies, at which budgets, on which problems, and how tokens were drawn.

A paper has a file, which lists its tables (`TABLES`). `python -m minithink.evaluate paper` runs one of them.
"""

from __future__ import annotations

from minithink.evaluate.papers import crystal_kv, dynts, skipkv, thinkv
from minithink.evaluate.papers.table import Table

TABLES: dict[str, Table] = {
    **thinkv.TABLES,
    **skipkv.TABLES,
    **crystal_kv.TABLES,
    **dynts.TABLES,
}
