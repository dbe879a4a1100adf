"""Calibration files: what was measured of a model, or trained for it, beside its weights.

    thoughts*.json              layers and thresholds (ThinKV)
    steering.safetensors        a vector for each layer, and which layer it is added behind (SkipKV, SEAL)
    centers.safetensors         where the queries of each head lie before RoPE (TriAttention)
    predictor-*.safetensors     the weights of an importance predictor, with its settings as metadata (DynTS)
    foresight.json              texts of the full cache, for oracles

A safetensors file holds vectors, and everything else as JSON in its metadata. A file names the weights that it is
about. The engine reads it before it sets up a policy that asks for it; see `Policy.calibration`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minithink.checkpoint.adapter import Adapter, hash_of
from minithink.errors import MinithinkError, UsageError, quoted, reason
from minithink.results.files import read_bytes
from minithink.sampling import DRAWS

NEEDS = "needs"
TARGETS = ("answer", "hindsight", NEEDS)  # what predictors are trained to predict
STEERING = "steering.safetensors"
CENTERS = "centers.safetensors"
FORESIGHT = "foresight.json"
COMMANDS = {  # what makes each file
    "thoughts.json": "thoughts",
    "thoughts-2.json": "thoughts --thoughts 2",
    STEERING: "steering",
    CENTERS: "centers",
    FORESIGHT: "foresight",
    **{f"predictor-{target}.safetensors": f"predictor --targets {target}" for target in TARGETS},
}
# What ThinKV averages over the KV heads of a layer before it counts: attention weights (§C.2). It is a setting of
# thoughts*.json. Files of earlier versions lack it: each head was counted, and the shares were averaged.
AVERAGE = "weights"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # of tensors in these files
METADATA = "minithink"  # the field of a file of vectors that has its JSON
VECTORS = ("plain", "matched")  # tensors of STEERING, see `calibrate/steering.py`
QUERIES = ("center", "norm", "omega")  # tensors of CENTERS, see `calibrate/centers.py`
WEIGHTS = ("first", "second", "last")  # names of a predictor's tensors


def read(
    folder: Path,
    name: str,
    model: Path,
    spoken: str = "",
    adapter: Adapter | None = None,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """What a calibration file holds: its JSON, and its tensors by name.

    Args:
        folder: where it lies.
        name: of the file.
        model: folder of the weights that it must be about.
        spoken: how the user names the model, for the command that makes the file; "": the embedded one.
        adapter: what is merged into the weights; None: nothing.
        options: more words of that command, which say how the model is spoken to.

    Raises:
        MinithinkError: there is no such file, it is about other weights, or it cannot be read as one.
    """
    path = folder / name
    if folder.exists() and not folder.is_dir():
        raise MinithinkError(f"--calibration {folder} is no folder: give that in which {name} lies.")
    own = model if adapter is None else adapter.folder
    again = command(
        name,
        spoken,
        output=folder if folder != own else None,
        there=path.exists(),
        adapter=None if adapter is None else adapter.folder,
        options=options,
    )
    try:
        values = _content(path)
    except FileNotFoundError:
        raise MinithinkError(f"{path} does not exist; {again}.") from None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise MinithinkError(f"{path} cannot be read as a calibration ({reason(error)}); {again}.") from None
    if problem := wrong(values, name):
        raise MinithinkError(f"{path} is no calibration: {problem}; {again}.")
    weights = hash_of(model, adapter)
    if values["checkpoint"] != weights:
        raise MinithinkError(
            f"{path} was calibrated on the weights {values['checkpoint']}, and the model's are {weights}; {again}."
        )
    found: dict[str, Any] = values
    if name == FORESIGHT:
        rows = found.pop("texts")
        texts, numbers = ({tuple(row[0]): row[i] for row in rows} for i in (1, 2))
        found["text"] = lambda prompt: texts.get(tuple(prompt))
        found["number"] = lambda prompt: numbers.get(tuple(prompt))
    return found


def _content(path: Path) -> Any:
    """What a file holds. OSError, ValueError, SafetensorError: it cannot be read."""
    if path.suffix != ".safetensors":
        return json.loads(read_bytes(path).decode())
    if path.name not in (STEERING, CENTERS):
        return _predictor(path)
    values, tensors = vectors_of(path)
    return values | tensors if isinstance(values, dict) else {}


def vectors_of(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The JSON and the tensors of a file of vectors. OSError, ValueError, SafetensorError: it cannot be read."""
    with safe_open(path, framework="pt") as file:
        values = json.loads((file.metadata() or {}).get(METADATA, "null"))
        return values, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)


def _predictor(path: Path) -> dict[str, Any]:
    """What a predictor's file holds: its metadata, its weights, and their hash."""
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
        weights = [file.get_tensor(name) for name in WEIGHTS if name in file.keys()]  # noqa: SIM118
    values = {"checkpoint": about.get("checkpoint"), "weights": weights}
    values |= {name: json.loads(about[name]) for name in ("settings", "measurements") if name in about}
    return values | {"hash": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}


def identity(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a calibration decides the tokens that are generated under it, as JSON knows it. Foresight decides
    nothing of its own: its texts follow from the model, the problems and the draws (`check_draws`)."""
    if name == FORESIGHT:
        return {}
    if name == CENTERS:
        content = b"".join(values[x].contiguous().numpy().tobytes() for x in QUERIES)
        return {"queries": hashlib.sha256(content).hexdigest()[:16]}
    if name == STEERING:
        content = b"".join(values[x].float().contiguous().numpy().tobytes() for x in VECTORS)
        return {"layer": values["layer"], "vectors": hashlib.sha256(content).hexdigest()[:16]}
    return {x: values[x] for x in (("layers", "thresholds") if name.startswith("thoughts") else ("hash",))}


def check_draws(
    policy: str,
    recorded: Mapping[str, Any],
    drawing: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
) -> None:
    """Refuse recorded texts that were drawn otherwise than those of a run.

    Args:
        policy: the name of the policy that reads them.
        recorded: the values of FORESIGHT.
        drawing: options of `Engine.stream`: those that decide draws, and num_samples.
        prompts: ids of all prompts of the run.

    Raises:
        UsageError: other options decided the draws, or another number of a sequence.
    """
    then = recorded["settings"]
    if then["temperature"] == drawing["temperature"] == 0:
        return
    others = [name for name in DRAWS if then[name] != drawing[name]]
    if others:
        was = ", ".join(f"{name}={then[name]}" for name in others)
        now = ", ".join(f"{name}={drawing[name]}" for name in others)
        raise UsageError(
            f"{policy}: the texts of {FORESIGHT} were drawn with {was}, and this run draws with {now}: give the same "
            "options, or record with those of this run."
        )
    samples = drawing["num_samples"]
    for number in range(len(prompts) * samples):
        own = recorded["number"](prompts[number // samples])
        if own is not None and own != number:
            raise UsageError(
                f"{policy}: sequence {number} of this run was recorded in {FORESIGHT} as sequence {own}, which has "
                "other draws: give the recorded problems in their order, with one sample each."
            )


def cautions(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """What users must be told of a calibration that is read."""
    if name.startswith("thoughts") and _average(values) != AVERAGE:
        yield (
            f"{name} was made when ThinKV counted each KV head alone, and now it counts the mean of their attention: "
            "these layers and thresholds do not fit, so calibrate again"
        )
    if values.get("fallback"):
        yield (
            f"attention sparsity does not tell this model's thoughts apart, so the thresholds in {name} only give "
            "each type of thought its usual share"
        )


def _average(values: Mapping[str, Any]) -> object:
    """What a file of thresholds says was averaged over KV heads; None: it does not say."""
    settings = values.get("settings")
    return settings.get("average") if isinstance(settings, dict) else None


def command(
    name: str,
    spoken: str = "",
    output: Path | None = None,
    there: bool = False,
    adapter: Path | None = None,
    options: Sequence[str] = (),
) -> str:
    """The command that makes a file, which may be there, as part of a sentence."""
    if name not in COMMANDS:
        return "no command of this version makes it"
    words = ["python", "-m", "minithink.calibrate", *COMMANDS[name].split()]
    if spoken:
        words += ["--model", spoken, *_problems(name)]
    if adapter is not None:
        words += ["--adapter", str(adapter)]
    words += options
    if output is not None:
        words += ["--output", str(output)]
    if there:
        words += ["--replace"]
    return f"`{shlex.join(words)}` makes it" + (", or with a --dataset of your own" if spoken else "")


def _problems(name: str) -> list[str]:
    """Problems with which a command can make a file for a model that is not the embedded one."""
    if name == f"predictor-{NEEDS}.safetensors":  # only problems of the embedded families have needs
        return ["--dataset", "facts"]
    if name == FORESIGHT:  # of the problems of an evaluation: a test split
        return ["--dataset", "GSM8K"]
    return ["--dataset", "GSM8K", "--split", "train"]


def wrong(values: Any, name: str) -> str:
    """What keeps a tree from being the calibration that a file's name promises; "": nothing."""
    if not isinstance(values, dict):
        return "it holds no object"
    if not isinstance(values.get("checkpoint"), str):
        return "it does not say of which weights (checkpoint)"
    if name == FORESIGHT:
        texts = values.get("texts")
        fits = isinstance(texts, list) and all(map(_is_text, texts))
        drawn = isinstance(settings := values.get("settings"), dict) and settings.keys() >= {*DRAWS}
        return "it has no texts with numbers" if not fits else "" if drawn else "it does not say how texts were drawn"
    if name == STEERING:
        return _wrong_vectors(values)
    if name == CENTERS:
        return _wrong_centers(values)
    if name.startswith("predictor"):
        return _wrong_weights(values["weights"])
    layers = values.get("layers")
    thresholds = values.get("thresholds")
    if not (isinstance(layers, list) and layers and all(type(n) is int and n >= 0 for n in layers)):
        return f"its layers are {quoted(layers)}"
    if not (isinstance(thresholds, list) and thresholds and all(_is_finite(x) for x in thresholds)):
        return f"its thresholds are {quoted(thresholds)}"
    return ""


def _wrong_vectors(values: Mapping[str, Any]) -> str:
    """What keeps the content of a file from being steering vectors; "": nothing."""
    vectors = [x for x in map(values.get, VECTORS) if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in FLOATS]
    if len(vectors) < len(VECTORS):
        return f"it lacks a vector for each layer: {' and '.join(VECTORS)}"
    if len({x.shape for x in vectors}) > 1 or not all(x.isfinite().all() for x in vectors):
        return f"{' and '.join(VECTORS)} differ in their shapes, or hold what is no number"
    layer = values.get("layer")
    if type(layer) is not int or not 0 <= layer < len(vectors[0]):
        return f"its layer is {quoted(layer)}, and it has vectors of {len(vectors[0])}"
    return ""


def _wrong_centers(values: Mapping[str, Any]) -> str:
    """What keeps the content of a file from being the centres of queries; "": nothing."""
    found = [x for x in map(values.get, QUERIES) if isinstance(x, Tensor)]
    if len(found) < len(QUERIES):
        return f"it lacks one of {', '.join(QUERIES)}"
    center, norm, omega = found
    bands = len(omega) if omega.ndim == 1 else 0
    fits = center.ndim == 3 and center.shape[-1] == 2 * bands and norm.shape == (*center.shape[:2], bands)
    if not bands or not fits:
        shapes = [tuple(x.shape) for x in found]
        return f"{', '.join(QUERIES)} have the shapes {shapes}, and [L, Hq, D], [L, Hq, D/2] and [D/2] are due"
    types = [x.dtype for x in found]
    if types != [torch.float32, torch.float32, torch.float64]:
        said = [str(x).removeprefix("torch.") for x in types]
        return f"{', '.join(QUERIES)} are {', '.join(said)}, and float32, float32 and float64 are due"
    if not all(x.isfinite().all() for x in found):
        return "some of its numbers are not finite"
    # The mean of numbers is never longer than the mean of their lengths.
    if (torch.hypot(*center.chunk(2, dim=-1)) > norm * (1 + 1e-4)).any():
        return "some center is longer than its norm"
    if (omega <= 0).any() or (omega.diff() > 0).any():
        return "omega must be positive and fall from band to band"
    return ""


def _wrong_weights(weights: list[Any]) -> str:
    d = weights[0].shape[0] if weights and weights[0].dim() == 2 else 0
    shapes = [tuple(x.shape) for x in weights]
    due = [(d, 2 * d), (2 * d, d // 2), (d // 2, 1)]
    if not all(x.dtype in FLOATS for x in weights):
        return f"its weights are {', '.join(str(x.dtype).removeprefix('torch.') for x in weights)}"
    if d < 2 or shapes != due:
        return f"its weights have the shapes {shapes}, and d → 2d → d/2 → 1 is due"
    return "" if all(bool(x.isfinite().all()) for x in weights) else "some of its weights are no finite numbers"


def _is_text(x: Any) -> bool:
    """Three entries: the first two are lists of ids, the third is an id."""
    return isinstance(x, list) and len(x) == 3 and all(map(_are_ids, (*x[:2], x[2:])))


def _are_ids(x: Any) -> bool:
    return isinstance(x, list) and all(type(i) is int and i >= 0 for i in x)


def _is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
