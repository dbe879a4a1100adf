"""Policies inside transformers: `generate` of a Llama, Qwen2 or Qwen3 model, with a cache that a policy keeps small.

    cache = minithink.hf.cache(model, "rkv:budget=1024")
    model.generate(**inputs, past_key_values=cache)
    print(cache.report())

The files, in the order in which to read them:

    policy_cache   what transformers sees: a cache; the manager of keys and values behind it
    passes         one forward pass: whose tokens are whose, and how the model's attention is switched for it
    known          what policies may know of the model, and which models are refused
    report         what has been kept

Everything of transformers is imported here and nowhere else. It is an optional extra, `hf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minithink.errors import MinithinkError, UsageError, quoted
from minithink.kv.contract import Policy
from minithink.text.tags import tags_of

if TYPE_CHECKING:
    from minithink.hf.policy_cache import PolicyCache

__all__ = ["cache"]

OLDEST = (5, 10)  # of transformers
ADVICE = "run `pip install 'transformers>=5.10'`"


def cache(
    model: Any,
    policy: str | Policy,
    max_length: int | None = None,
    folder: str | Path | None = None,
    tokenizer: Any = None,
    *,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    pages: bool = False,
    think_tags: Sequence[str] | None = None,
) -> PolicyCache:
    """A cache for one call of `model.generate(…, past_key_values=cache)`.

    Args:
        model: a Llama, Qwen2 or Qwen3 model of transformers, on one device.
        policy: decides what stays: a text such as "rkv:budget=1024" (see `minithink.policies`) or a Policy.
        max_length: tokens that a sequence may have, prompt and answer; None: the context of the model.
        folder: of the checkpoint, with the files of `minithink.calibrate`, for policies that need them; None: where
            the model was loaded from, if that is a folder.
        tokenizer: of transformers or of minithink, for policies that read the text or tell thinking from answers;
            None: the one in the folder, if there is one.
        eos_token_id, pad_token_id: those that `generate` has; None: those of the model's own generation config. A
            sequence that is fed one of them has ended, and leaves the cache.
        pages: keep keys and values in pages (`kv/manager.py`), packed in their formats, instead of ordinary tensors
            (`kv/plain.py`).
        think_tags: the texts that open and close the thinking, as in ("[THINK]", "[/THINK]"); None: <think> and
            </think>, or those of a tokenizer of minithink.

    Raises:
        UsageError: the model, the policy or another argument is not supported.
        MinithinkError: transformers is missing or too old; a tokenizer or a calibration cannot be read.
    """
    _require_transformers()
    # These import transformers.
    from minithink.hf.known import Known
    from minithink.hf.policy_cache import PolicyCache, ends_of

    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise UsageError(f"max_length is {quoted(max_length)}; it must be a whole number and at least 1.")
    known = Known(model, folder, tokenizer)
    if think_tags is not None:
        known.name_tags(tags_of(think_tags))
    return PolicyCache(
        known,
        known.bind(policy),
        max_length=max_length,
        ends=ends_of(model, eos_token_id, pad_token_id),
        pages=pages,
    )


def _require_transformers() -> None:
    """MinithinkError: transformers is missing, or too old."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise MinithinkError(f"transformers is not installed: {ADVICE}.") from None
    numbers = [int(part) for part in found.split(".")[:2]]
    if tuple(numbers) < OLDEST:
        raise MinithinkError(f"transformers {found} is too old for these caches: {ADVICE}.")
