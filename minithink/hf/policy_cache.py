"""PolicyCache: a cache of transformers in which a policy of minithink decides what stays.

To transformers it looks like any cache: `get_seq_length` says how many tokens each row of the batch was fed, padding
included. What is stored is another matter: keys and values lie in a manager (`kv/plain.py`, `kv/manager.py`), each
sequence by itself, without padding.

The life of a cache:

    begin   the first pass of a model reads the prompts: now the number of sequences and their lengths are known, and
            the manager is made. Each later pass feeds one token to every row.
    end     the policy acts on every sequence
    leave   generate feeds padding to a row that has ended, until all rows have. The row of an end token leaves.
    reset   everything is forgotten
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from minithink.backend import REFERENCE, choose
from minithink.errors import MinithinkError, UsageError, counted
from minithink.hf.known import Known, ids_of
from minithink.hf.passes import Hooks, OfModel, Pass, under_way
from minithink.hf.report import Report, SequenceReport, report_of, summed
from minithink.kv.cautions import cautions
from minithink.kv.contract import Policy, Shape, name_of
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.policy_errors import explaining
from minithink.model import Rope, Rotated
from minithink.text.tags import THINK
from minithink.text.thinking import Stage

AGAIN = "make a new cache for every call of generate, or call reset() between them"
FIRST = 256  # tokens behind the prompts for which a pool that grows has room at first
DYNAMIC = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the length of the text


class Layer(CacheLayerMixin):
    """One layer as transformers sees it: a number of tokens."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PolicyCache) -> None:
        """cache: the one that the layer is in, which it does not keep alive."""
        super().__init__()
        self.own = weakref.ref(cache)
        self.length = 0  # columns that were fed, padding included

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to allocate here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Pass on the new keys and values: our attention stores them.

        Raises:
            UsageError: the pass is not one over this cache, so the ordinary attention would see these tokens alone.
        """
        cache = self.own()
        running = under_way()
        if cache is None or running is None or running.manager is not cache.manager:
            raise UsageError(
                "This pass of a model is not one over this cache: call minithink.hf.cache with the very model that "
                "runs, not with another or a copy of it, and give the cache by its name, past_key_values=cache."
            )
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns that were fed."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask, which is never made."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit, for transformers 5.11 and later."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit, for transformers 5.10."""
        return -1


class PolicyCache(Cache):
    """Keys and values of one batch under a policy. `minithink.hf.cache` makes one."""

    def __init__(
        self,
        known: Known,
        policy: Policy,
        max_length: int | None,
        ends: Sequence[int],
        pages: bool,
    ) -> None:
        """
        Args:
            known: the model.
            policy: bound to it.
            max_length: tokens that a sequence may have, prompt and answer; None: the context of the model.
            ends: tokens behind which a sequence has ended.
            pages: keep keys and values in pages.
        """
        super().__init__(layers=[Layer(self) for _ in range(known.config.num_layers)])
        if policy.pull and known.decoder.rotary_emb.rope_type in DYNAMIC:
            kind = known.decoder.rotary_emb.rope_type
            raise UsageError(
                f"{name_of(policy)} moves tokens nearer, and the RoPE of this model, {kind}, depends on the length "
                "of the text: give rerotate=false."
            )
        self.known = known
        self.policy = policy
        self.max_length = known.config.max_position if max_length is None else max_length
        self._grows = max_length is None
        self.ends = frozenset(ends)
        self.pages = pages
        self.manager: KVManager | PlainCache | None = None
        self.running: list[int] = []  # rows whose sequences have not ended
        self._prompts: list[int] = []  # tokens of each row's prompt
        # How far each row's positions are ahead of its tokens; None: the model is given no positions.
        self._ahead: list[int] | None = None
        self._unopened: set[int] = set()  # rows whose texts have not opened their thinking yet
        self._left: dict[int, SequenceReport] = {}  # rows that have left
        self._padding: set[int] = set()  # tokens that may come behind an end token
        self._columns = 0  # of the pass that is under way
        self._failed = False  # whether a pass has not come to its end
        self._warn()
        Hooks(known.decoder, self)

    def _warn(self) -> None:
        """Say what the policy must say of its settings on this model."""
        shape = Shape.of(
            self.known.config,
            self.policy,
            rows=1,
            tokens=self.max_length,
            device=self.known.device,
            dtype=self.known.dtype,
        )
        for caution in cautions(self.policy, shape, self.known.config.qkv_bias):
            warnings.warn(f"{caution}.", stacklevel=4)  # where minithink.hf.cache is called

    # -- what users call

    def report(self) -> Report:
        """What is held now of each sequence, or was when it ended; which budgets had an effect."""
        sequences = []
        for row, prompt in enumerate(self._prompts):
            if row in self._left:
                sequences.append(self._left[row])
            elif self.manager is not None:
                opened = row not in self._unopened
                sequences.append(report_of(self.manager, row, prompt, opened=opened))
        tokenizer = self.known.tokenizer
        return summed(self.policy, sequences, THINK if tokenizer is None else tokenizer.tags)

    def reset(self) -> None:
        """Forget all sequences, so that the cache can be used for another call of generate."""
        self.manager = None
        self.running = []
        self._prompts = []
        self._ahead = None
        self._unopened = set()
        self._left = {}
        self._padding = set()
        self._failed = False
        for layer in self.layers:
            layer.length = 0

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refused: no model would know of the copy."""
        raise UsageError(
            "A cache cannot be copied: make another with minithink.hf.cache, which reads the prompt again."
        )

    # -- a pass; `Hooks` calls these

    @torch.inference_mode()
    def begin(self, inputs: Mapping[str, Any]) -> Pass:
        """A forward pass begins.

        Args:
            inputs: the arguments of the model: `input_ids` [B, n] or `inputs_embeds` [B, n, d], `attention_mask`,
                `position_ids`.

        Raises:
            UsageError: this use of a cache is not supported.
            MinithinkError: an earlier pass has failed, or there is no room for the tokens.
        """
        if self._failed:
            raise MinithinkError(f"An earlier pass of this cache has failed or was interrupted: {AGAIN}.")
        if inputs.get("output_attentions"):
            raise UsageError("Attention weights cannot be returned with this cache: drop output_attentions=True.")
        ids = inputs.get("input_ids")
        batch, self._columns = _shape_of(ids, inputs.get("inputs_embeds"))
        positions = inputs.get("position_ids")
        if self.manager is None:
            if not batch or not self._columns:
                raise UsageError(
                    f"The model is given {counted(batch, 'sequence')} of {counted(self._columns, 'token')}: give at "
                    "least one of each."
                )
            if positions is not None:
                _check_positions(positions, batch, self._columns)
            begun = self._read_prompts(ids, inputs.get("attention_mask"), batch)
            if positions is not None:
                last = _last_of(positions, batch).tolist()
                self._ahead = [at + 1 - count for at, count in zip(last, self._prompts, strict=True)]
            return begun
        if batch != len(self._prompts):
            raise UsageError(
                f"The cache holds {counted(len(self._prompts), 'sequence')} and is given {batch}: {AGAIN}."
            )
        if self._columns != 1:
            self._refuse_several(positions)
        if positions is not None:
            _check_positions(positions, batch, 1)
        return self._feed(ids, positions)

    def _refuse_several(self, positions: Tensor | None) -> NoReturn:
        """UsageError: a later pass has another number of tokens than one. positions: [B or 1, n]; None: not known."""
        held = max(self._length(row) for row in range(len(self._prompts)))
        text = self._longest_text(positions)
        if text is not None and (text <= held or not self._columns):
            raise UsageError(f"The cache holds {held:,} tokens, and this call's text has {text:,}: {AGAIN}.")
        given = "several at once" if self._columns else "none"
        of_text = "" if text is None else f", of a text of {text:,}"
        raise UsageError(
            f"The cache holds {held:,} tokens and is given {given}{of_text}: prompts are read in one pass, "
            f"without prefill_chunk_size, and tokens one by one, without use_cache=False; {AGAIN}."
        )

    def _length(self, row: int) -> int:
        """Tokens of a sequence that were read, without padding."""
        if row in self._left:
            return self._left[row].tokens
        assert self.manager is not None
        return self.manager.length(row)

    def _longest_text(self, positions: Tensor | None) -> int | None:
        """Tokens of the longest text of which a pass reads the end, without padding; None: it is not known.
        positions: as the model is given them; generate may give more columns than tokens."""
        batch = len(self._prompts)
        if positions is None or positions.dim() != 2 or not positions.numel() or len(positions) not in (1, batch):
            return None
        last = _last_of(positions, batch).tolist()
        ahead = self._ahead or [0] * batch
        return max(at + 1 - before for at, before in zip(last, ahead, strict=True))

    @torch.inference_mode()
    @explaining()
    def end(self) -> None:
        """The forward pass is over: the policy acts."""
        assert self.manager is not None
        self._failed = True  # if this fails
        self.manager.end_step()
        self._failed = False
        for layer in self.layers:
            layer.length += self._columns

    def fail(self) -> None:
        """The forward pass has not come to its end: what the manager holds is of no use."""
        self._failed = True

    # -- prompts

    def _read_prompts(self, ids: Tensor | None, mask: Tensor | None, batch: int) -> Pass:
        """The first pass. ids: [B, n]; None: they are not known."""
        counts = self._lengths(mask, batch)
        longest = max(counts)
        if longest >= self.max_length:
            raise UsageError(
                f"A prompt has {longest:,} tokens and a sequence may have {self.max_length:,}: give "
                "minithink.hf.cache a larger max_length, or a shorter prompt."
            )
        texts: list[list[int]] = []
        if ids is not None:
            texts = [row[-count:] for row, count in zip(ids.tolist(), counts, strict=True)]
        manager = self._make_manager(batch, longest)
        if ids is None and (manager.listening or self.policy.exempt_answer):
            raise UsageError(f"{name_of(self.policy)} reads the text, and inputs_embeds have none: give input_ids.")
        tags_are_known = None not in self._think_ids()
        self._unopened = set()
        for row, count in enumerate(counts):
            thinking = self._begins_thinking(texts[row] if texts else [])
            manager.join(row, self.max_length, count, thinking)
            if tags_are_known and not thinking:
                self._unopened.add(row)
        tokens = [token for text in texts for token in text]
        manager.begin_step(range(batch), counts, tokens or None)
        self.manager = manager
        self.running = list(range(batch))
        self._prompts = counts
        if ids is not None:
            self._padding = {row[0] for row, count in zip(ids.tolist(), counts, strict=True) if count < len(row)}
        place = None
        if min(counts) < self._columns:
            place = _places(counts, self._columns, self.known.device)
        return Pass(manager, batch, self._columns, place)

    def _lengths(self, mask: Tensor | None, batch: int) -> list[int]:
        """Tokens of every prompt, without padding. mask: [B, n], 0 for padding; None: there is none."""
        if mask is None:
            return [self._columns] * batch
        if mask.dim() != 2:
            raise UsageError(
                f"The attention mask has {mask.dim()} dimensions: give one of [{batch}, {self._columns}], which is 0 "
                "for padding."
            )
        counts: list[int] = (mask != 0).sum(1).tolist()
        column = torch.arange(self._columns, device=mask.device)
        first = self._columns - (mask != 0).sum(1, keepdim=True)
        if mask.shape != (batch, self._columns) or bool(((mask != 0) != (column >= first)).any()):
            raise UsageError(
                "The attention mask is not 0 on the left and 1 on the right: pad prompts on the left "
                '(tokenizer.padding_side = "left"), and mask nothing else.'
            )
        if min(counts) == 0:
            raise UsageError(
                f"Prompt {counts.index(0)} has no token that is not padding in the first pass: leave it out, or give "
                "no prefill_chunk_size."
            )
        return counts

    def _make_manager(self, rows: int, prompt: int) -> KVManager | PlainCache:
        """A manager for so many sequences. prompt: tokens of the longest prompt."""
        known = self.known
        rope: Rope = Rotated(known.config, known.device)
        if self.policy.pull:
            rope = OfModel(known.decoder.rotary_emb, known.device)
        options: dict[str, Any] = {
            "rows": rows,
            "tokens": self.max_length,
            "device": known.device,
            "dtype": known.dtype,
            "think_ids": self._think_ids(),
        }
        policy = copy.deepcopy(self.policy)
        if not self.pages:
            return PlainCache(known.config, rope, policy, backend=REFERENCE, **options)
        # With a limit the pool has its final size, and without one it grows.
        first = prompt + FIRST if self._grows else None
        backend = choose("auto", known.device)
        return KVManager(known.config, rope, policy, backend=backend, prompt=prompt, first=first, **options)

    def _think_ids(self) -> tuple[int | None, int | None]:
        """The tokens that open and close the think stage."""
        tokenizer = self.known.tokenizer
        if tokenizer is None:
            return None, None
        return tokenizer.think_ids

    def _begins_thinking(self, prompt: list[int]) -> bool:
        """Whether a prompt ends inside the think stage."""
        if self.known.tokenizer is None:
            return True
        return Stage(self.known.tokenizer, prompt).name == "think"

    # -- generated tokens

    def _feed(self, ids: Tensor | None, positions: Tensor | None) -> Pass:
        """A later pass, with one token of each row. ids: [B, 1]; positions: [B or 1, 1]; None: they are not known."""
        assert self.manager is not None
        if ids is None:
            raise UsageError(
                "Generated tokens are given as inputs_embeds, and the cache reads input_ids: give these."
            )
        if positions is None or self._ahead is None:
            tokens: list[int] = ids[:, 0].tolist()
        else:  # one copy from the device
            tokens, at = torch.stack((ids[:, 0], _last_of(positions, len(ids)))).tolist()
            self._refuse_another_text(at)
        for row in range(len(tokens)):
            if row not in self.running:
                self._refuse_living(row, tokens[row])
            elif tokens[row] in self.ends:
                self._leave(row)
        if not self.running:
            ends = ", ".join(map(str, sorted(self.ends)))
            raise UsageError(
                f"All sequences of this cache have ended, each with a token of {ends}, and are given more: give "
                f"minithink.hf.cache the eos_token_id and the pad_token_id that generate has, and {AGAIN}."
            )
        for row in self.running:
            length = self.manager.length(row)
            if length >= self.max_length:
                raise UsageError(
                    f"Sequence {row} has {length:,} tokens and may have {self.max_length:,}: give minithink.hf.cache "
                    "a larger max_length."
                )
        tags = self._think_ids()
        self._unopened -= {row for row in self.running if tokens[row] in tags}
        fed = [tokens[row] for row in self.running]
        self.manager.begin_step(self.running, [1] * len(fed), fed)
        place = None
        if len(fed) < len(tokens):
            place = torch.tensor(self.running, device=self.known.device)
        return Pass(self.manager, len(tokens), 1, place)

    def _refuse_another_text(self, positions: Sequence[int]) -> None:
        """UsageError: the next token of a row does not stand behind those that the cache has read.

        generate gives a model the tokens alone that the cache does not hold. So this is how another text is noticed.
        """
        assert self.manager is not None
        assert self._ahead is not None
        for row in self.running:
            length = self.manager.length(row)
            text = positions[row] - self._ahead[row]
            if text != length:
                raise UsageError(
                    f"The cache holds {length:,} tokens of sequence {row}, and this call's text goes on behind "
                    f"{text:,}, so it is another text: {AGAIN}."
                )

    def _leave(self, row: int) -> None:
        """A sequence has ended: free its memory."""
        assert self.manager is not None
        opened = row not in self._unopened
        self._left[row] = report_of(self.manager, row, self._prompts[row], opened=opened, ended=True)
        self.manager.leave(row)
        self.running.remove(row)

    def _refuse_living(self, row: int, token: int) -> None:
        """UsageError: a row goes on behind its end token."""
        if token not in self.ends and token not in self._padding:
            raise UsageError(
                f"Sequence {row} has ended, and is given the token {token}, which is no padding: give "
                "minithink.hf.cache the eos_token_id and the pad_token_id that generate has."
            )

    # -- what no policy can do

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search is refused."""
        _refuse("Beam search", "num_beams=1")

    def crop(self, tokens_to_remove: int) -> None:
        """Assisted decoding is refused."""
        _refuse("Assisted decoding", "no assistant_model and no prompt_lookup_num_tokens")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Contrastive search is refused."""
        _refuse("Contrastive search", "no penalty_alpha")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Contrastive search is refused."""
        _refuse("Contrastive search", "no penalty_alpha")


def _refuse(what: str, instead: str) -> NoReturn:
    raise UsageError(f"{what} takes tokens back, and evicted tokens do not come back: call generate with {instead}.")


def _shape_of(ids: Tensor | None, embeddings: Tensor | None) -> tuple[int, int]:
    """Sequences and columns that a model is given. ids: [B, n]; embeddings: [B, n, d], where there are no ids.

    Raises:
        UsageError: there are neither, or they have another shape.
    """
    fed = embeddings if ids is None else ids
    if fed is None:
        raise UsageError("The model is given no tokens: give input_ids.")
    name = "inputs_embeds" if ids is None else "input_ids"
    form = "[B, n, d]" if ids is None else "[B, n]"
    if fed.dim() != (3 if ids is None else 2):
        raise UsageError(f"The {name} have the shape {list(fed.shape)}: give {form}.")
    return fed.shape[0], fed.shape[1]


def _check_positions(positions: Tensor, batch: int, columns: int) -> None:
    """UsageError: these are no positions of the tokens of a pass, [B or 1, n]."""
    shape = list(positions.shape)
    if shape not in ([batch, columns], [1, columns]):
        raise UsageError(f"The position_ids have the shape {shape}: give {[batch, columns]} or {[1, columns]}.")


def _last_of(positions: Tensor, batch: int) -> Tensor:
    """The position of the newest token of every row: int64 [B]. positions: [B or 1, n]."""
    return positions[:, -1].expand(batch)


def _places(counts: Sequence[int], columns: int, device: torch.device) -> Tensor:
    """The numbers of the tokens among B·n, if the last counts[i] of the n tokens of row i are no padding."""
    found = []
    for row, count in enumerate(counts):
        end = (row + 1) * columns
        found.append(torch.arange(end - count, end))
    return torch.cat(found).to(device)


def ends_of(model: Any, eos: Any, pad: Any) -> list[int]:
    """Tokens behind which a sequence has ended: `generate` feeds padding then. Without an end token it never does.

    Args:
        eos, pad: as they were given; None: those of the model's own generation config.
    """
    config = model.generation_config
    ends = ids_of(config.eos_token_id if eos is None else eos)
    padding = ids_of(config.pad_token_id if pad is None else pad)
    return ends + padding if ends else []
