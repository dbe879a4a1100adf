"""Calibration files: what was measured of a model, in JSON beside its weights.

A file names the weights that it is about. The engine reads it before it sets up a policy that asks for it; see
`Policy.calibration`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from minithink.errors import MinithinkError, reason
from minithink.weights import checkpoint_hash

COMMANDS = {"thoughts.json": "thoughts", "thoughts-2.json": "thoughts --thoughts 2"}  # what makes each file


def read(folder: Path, name: str, model: Path, spoken: str = "") -> dict[str, Any]:
    """What a calibration file holds.

    Args:
        folder: where it lies.
        name: of the file.
        model: folder of the weights that it must be about.
        spoken: how the user names the model, for the command that makes the file; "": the embedded one.

    Raises:
        MinithinkError: there is no such file, it is about other weights, or it cannot be read as one.
    """
    path = folder / name
    if folder.exists() and not folder.is_dir():
        raise MinithinkError(f"--calibration {folder} is no folder: give that in which {name} lies.")
    again = command(name, spoken, folder if folder != model else None, path.exists())
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinithinkError(f"{path} does not exist; {again}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MinithinkError(f"{path} cannot be read as a calibration ({reason(error)}); {again}.") from None
    if problem := wrong(values):
        raise MinithinkError(f"{path} is no calibration: {problem}; {again}.")
    if values["checkpoint"] != (own := checkpoint_hash(model)):
        raise MinithinkError(
            f"{path} was calibrated on the weights {values['checkpoint']}, and the model's are {own}; {again}."
        )
    found: dict[str, Any] = values
    return found


def caution(name: str, values: dict[str, Any]) -> str:
    """What users must be told of a calibration that is read; "": nothing."""
    if not values.get("fallback"):
        return ""
    return (
        f"no layer of this model shows clear modes of sparsity, so {name} has quantiles for thresholds: types of "
        "thoughts have usual shares and little meaning"
    )


def command(name: str, spoken: str = "", output: Path | None = None, there: bool = False) -> str:
    """The command that makes a file, which may be there, as part of a sentence."""
    if name not in COMMANDS:
        return "no command of this version makes it"
    words = ["python -m minithink.calibrate", COMMANDS[name]]
    words += [f"--model {spoken}"] if spoken else []
    words += [f"--output {output}"] if output is not None else []
    words += ["--replace"] if there else []
    return f"`{' '.join(words)}` makes it"


def wrong(values: Any) -> str:
    """What keeps a tree from being a calibration of thoughts; "": nothing."""
    if not isinstance(values, dict):
        return "it holds no object"
    if not isinstance(values.get("checkpoint"), str):
        return "it does not say of which weights (checkpoint)"
    layers, thresholds = values.get("layers"), values.get("thresholds")
    if not (isinstance(layers, list) and layers and all(type(n) is int and n >= 0 for n in layers)):
        return f"its layers are {layers!r}"
    if not (isinstance(thresholds, list) and thresholds and all(_is_finite(x) for x in thresholds)):
        return f"its thresholds are {thresholds!r}"
    return ""


def _is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
