"""A loaded checkpoint: what generating and reading texts with a model needs, and nothing that they do with it.

`Engine` has one and hands it down to its streams. What only reads texts (`reading.py`, `foresight.py`,
`diagnosis.py`) takes it too, and needs no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from minithink.checkpoint import calibration
from minithink.checkpoint.adapter import Adapter, hash_of
from minithink.errors import MinithinkError
from minithink.kv.byte_size import ByteSize
from minithink.kv.contract import Policy
from minithink.kv.sizes import said_of_bytes, tokens_of_bytes
from minithink.model import Decoder, Rope
from minithink.text.spoken import differences
from minithink.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Home:
    """Where a model's files are."""

    folder: Path  # of its weights; or a GGUF file
    calibration: Path  # of the files of `minithink.calibrate`
    spoken: str = ""  # the model's name on the command line; "": it is the embedded one
    adapter: Adapter | None = None  # what was merged into the weights
    options: tuple[str, ...] = ()  # more words of a command line that speaks to the model in the same way
    template: Mapping[str, Any] | None = None  # variables of the chat template; None: they are not known

    @property
    def checkpoint(self) -> str:
        """The hash of the weights, those of the adapter merged."""
        return hash_of(self.folder, self.adapter)


class Loaded:
    """A decoder with its tokenizer, and what follows from the two."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int] = frozenset(),
        home: Home | None = None,
    ) -> None:
        """
        Args:
            decoder: the model.
            tokenizer: the one that belongs to it.
            stop_ids: the tokens that end a text, as the checkpoint says.
            home: None: the model has no files, and no policy can read a calibration.
        """
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.home = home
        self.config = decoder.config
        # warnings about the model's files, and about the calibrations that were read
        self.cautions = set(decoder.config.cautions)
        self.device = decoder.embed.device
        self.dtype = decoder.embed.dtype
        self.rope = Rope(decoder.config, self.device)
        # Whether decoding steps are CUDA graphs; their caches have fixed widths.
        self.captures = decoder.backend.capturable and self.device.type == "cuda"
        self.columns: Literal["fit"] | None = "fit" if self.captures else None

    def tokens_of(self, policy: Policy, size: ByteSize) -> int:
        """The tokens that so many bytes hold with this model under a policy. UsageError: they hold none."""
        return tokens_of_bytes(policy, size, config=self.config, dtype=self.dtype)

    def said_of_bytes(self, policy: Policy, size: ByteSize) -> str:
        """What a budget in bytes comes to, in words. policy: with the budget in tokens."""
        return said_of_bytes(policy, size, config=self.config, dtype=self.dtype)

    # -- what policies may learn (`kv.contract.Model`)

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes of every token id; b"" if an id has no token."""
        return tuple(self.tokenizer.token_bytes(id) for id in range(self.config.vocab_size))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of every token of a text. Joined, they are the text."""
        return self.tokenizer.pieces(ids)

    def calibration(self, name: str) -> dict[str, Any]:
        """The values in this model's calibration file of that name.

        Raises:
            MinithinkError: the file is missing, is about another model, or cannot be read.
        """
        if self.home is None:
            raise MinithinkError(f"There is no {name} for this model, which has no folder: load it from one.")
        values = calibration.read(
            folder=self.home.calibration,
            name=name,
            model=self.home.folder,
            spoken=self.home.spoken,
            adapter=self.home.adapter,
            options=self.home.options,
        )
        self.cautions.update(calibration.cautions(name, values))
        other = differences(values.get("settings"), self.home.template, self.tokenizer.tags)
        if other:
            self.cautions.add(
                f"{name} was calibrated with {other}: give the same --template and --think-tags, or calibrate again"
            )
        return values
