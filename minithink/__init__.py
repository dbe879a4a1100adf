"""minithink: KV-cache management for reasoning models, readable."""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The kernels live in the sibling folder `kernels/`, which installs as `minithink.kernels`. In a checkout (an
# editable install, or running from its root) that folder is not below this one: add the root to the search path,
# so that `minithink.kernels` is found there. No folder named `kernels` becomes a top-level import name.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "kernels", "README.md")) and _root not in __path__:
    __path__.append(_root)

if TYPE_CHECKING:
    from minithink.engine import Engine, load

__all__ = ["Engine", "__version__", "load"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import minithink` does not import torch and `python -m minithink.generate` warns of nothing.
    if name in ("load", "Engine"):
        from minithink import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'minithink' has no attribute {name!r}")
