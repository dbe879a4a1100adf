"""Load the model that is calibrated."""

from __future__ import annotations

import argparse
import sys

from minithink.cli.models import model_options
from minithink.engine import Engine, load
from minithink.errors import escaped


def load_model(args: argparse.Namespace) -> Engine:
    """The model that the options name. What is doubtful about it is said. Errors: as in `load`."""
    engine = load(args.model, device=args.device, dtype=args.dtype, **model_options(args))
    for caution in sorted(engine.cautions):
        print(f"minithink.calibrate: {escaped(caution)}", file=sys.stderr, flush=True)
    return engine
