"""Traces that are made up, without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from minithink.trace.format import ARRAYS, VERSION, Writer, as_json, pack

HEAD: dict[str, Any] = {
    "layers": 2,
    "kv_heads": 2,
    "scope": "head",
    "policies": ["first", "second"],
    "formats": ["plain", "int4"],
    "thoughts": [0, 1],
    "thought_names": ["<b>slow</b>", "fast"],
    "prompt_thought": 0,
    "buffer": 0,
    "full_bytes": 64,
    "about": {"model": "<script>window.hacked = 1</script>"},
}
TEXTS = [
    "Is ",
    "<script>",
    "window.hacked = 1",
    "</script>",
    "?",
    "\n",
    "<img src=x onerror=hacked()>",
    " & so",
    ".\n",
    "\n",
    "That",
    "&amp;",
    " \x1b[31m",
    "",
    "ü",
    "\n",
]
PROMPT = 5


def arrays(texts: list[str] = TEXTS, prompt: int = PROMPT, **changes: Any) -> dict[str, np.ndarray]:
    """A sequence of these tokens: from step 3 on, head 1 of layer 1 (unit 3) loses its oldest token, the others lose
    the prompt's first token at the end."""
    n, steps = len(texts), len(texts) - prompt
    coded = [text.encode() for text in texts]
    at = list(range(3, steps + 1))
    made: dict[str, Any] = {
        "ids": range(n),
        "pieces": map(len, coded),
        "text": list(b"".join(coded)),
        "thinks": [1 if t < steps - 2 else 0 for t in range(steps + 1)],
        "thought": [0, *(t // 2 % 2 for t in range(1, steps + 1))],
        "bytes": [x for t in range(steps + 1) for x in (48 * (prompt + min(t, 3)), 0, t, 0, 8, 2)],
        "evict_step": [*at, steps, steps, steps],
        "evict_unit": [3] * len(at) + [0, 1, 2],
        "evict_pos": [*range(len(at)), 0, 0, 0],
        "evict_by": [0] * len(at) + [1, 1, 1],
        "evict_score": [*np.linspace(-1, 1, len(at)), np.nan, np.inf, -np.inf],
        "move_step": [2],
        "move_unit": [1],
        "move_pos": [1],
        "move_to": [1],
        "budget_step": [0, 4],
        "budget": [-1, 9, 9, 9, 7, 9, 9, 9],
        "score_step": [4],
        "score_by": [0],
        "score_count": [3],
        "score_pos": [2, 6, 7],
        "rank": [255, 0, 130],
    }
    made |= changes
    return {name: np.array(list(made[name]), dtype=dtype) for name, (dtype, _) in ARRAYS.items()}


def write(path: Path, *parts: dict[str, np.ndarray], head: dict[str, Any] | None = None, done: bool = True) -> Path:
    """A file of one part for each sequence: 0, 1, …"""
    writer = Writer(path)
    writer.chunk(b"HEAD", as_json({"version": VERSION, **HEAD, **(head or {})}))
    for number, part in enumerate(parts):
        writer.chunk(b"PART", pack({"sequence": number, "prompt": PROMPT}, part))
    if done:
        writer.chunk(b"DONE", as_json({"seconds": 0.25, "steps": 11, "events": 12}))
    writer.close()
    return path
