"""Calibration files: what was measured of a model, in JSON or safetensors beside its weights.

A safetensors file holds vectors, and everything else as JSON in its metadata. A file names the weights that it is
about. The engine reads it before it sets up a policy that asks for it; see `Policy.calibration`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minithink.errors import MinithinkError, reason
from minithink.weights import checkpoint_hash

COMMANDS = {  # what makes each file
    "thoughts.json": "thoughts", "thoughts-2.json": "thoughts --thoughts 2", "steering.safetensors": "steering",
}  # fmt: skip
METADATA = "minithink"  # the field of a file's metadata that has its JSON
VECTORS = ("plain", "matched")  # tensors of a file of vectors, see `calibrate/steering.py`


def read(folder: Path, name: str, model: Path, spoken: str = "") -> dict[str, Any]:
    """What a calibration file holds: its JSON, and its tensors by name.

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
        if path.suffix == ".safetensors":
            values, tensors = vectors_of(path)
            values = values | tensors if isinstance(values, dict) else {}
        else:
            values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinithinkError(f"{path} does not exist; {again}.") from None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise MinithinkError(f"{path} cannot be read as a calibration ({reason(error)}); {again}.") from None
    if problem := (wrong_vectors(values) if path.suffix == ".safetensors" else wrong(values)):
        raise MinithinkError(f"{path} is no calibration: {problem}; {again}.")
    if values["checkpoint"] != (own := checkpoint_hash(model)):
        raise MinithinkError(
            f"{path} was calibrated on the weights {values['checkpoint']}, and the model's are {own}; {again}."
        )
    found: dict[str, Any] = values
    return found


def vectors_of(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The JSON and the tensors of a file of vectors. OSError, ValueError, SafetensorError: it cannot be read."""
    with safe_open(path, framework="pt") as file:
        values = json.loads((file.metadata() or {}).get(METADATA, "null"))
        return values, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)


def decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a calibration decides the tokens that are generated under it, as JSON knows it."""
    if "thresholds" in values:
        return {name: values[name] for name in ("layers", "thresholds")}
    content = b"".join(values[name].float().contiguous().numpy().tobytes() for name in VECTORS)
    return {"layer": values["layer"], "vectors": hashlib.sha256(content).hexdigest()[:16]}


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


def wrong_vectors(values: Mapping[str, Any]) -> str:
    """What keeps the content of a file from being steering vectors; "": nothing."""
    if not isinstance(values.get("checkpoint"), str):
        return "it does not say of which weights (checkpoint)"
    vectors = [x for x in map(values.get, VECTORS) if isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()]
    if len(vectors) < len(VECTORS):
        return f"it lacks a vector for each layer: {' and '.join(VECTORS)}"
    if len({x.shape for x in vectors}) > 1 or not all(x.isfinite().all() for x in vectors):
        return f"{' and '.join(VECTORS)} differ in their shapes, or hold what is no number"
    layer = values.get("layer")
    if type(layer) is not int or not 0 <= layer < len(vectors[0]):
        return f"its layer is {layer!r}, and it has vectors of {len(vectors[0])}"
    return ""


def _is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
