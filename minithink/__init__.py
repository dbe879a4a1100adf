"""minithink: KV-cache management for reasoning models, readable."""

from __future__ import annotations

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from importlib.machinery import PathFinder as _PathFinder
from importlib.util import module_from_spec as _module_from_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The kernels live in the sibling folder `kernels/`, which installs as `minithink.kernels`. In a checkout (an editable
# install, or running from its root) that folder stands beside this one, where Python does not look for it. So the
# package `minithink.kernels` is made here from that folder. Nothing else of the checkout can be imported as a part of
# minithink, and no folder named `kernels` becomes a top-level import name.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "kernels")):
    _spec = _PathFinder.find_spec("minithink.kernels", [_os.path.dirname(_here)])
    if _spec is not None:
        kernels = _module_from_spec(_spec)
        _sys.modules["minithink.kernels"] = kernels

__all__ = ["Engine", "__version__", "hf", "load"]

if TYPE_CHECKING:
    from minithink import hf as hf
    from minithink.engine import Engine, load
else:  # a type checker that saw this function would take every name for one of this module

    def __getattr__(name: str) -> Any:
        # Lazy, so that `import minithink` does not import torch and `python -m minithink.generate` warns of nothing.
        if name in ("load", "Engine"):
            from minithink import engine

            return getattr(engine, name)
        if name == "hf":  # so that `minithink.hf.cache` needs no other import
            return _import_module("minithink.hf")
        raise AttributeError(f"module 'minithink' has no attribute {name!r}")
