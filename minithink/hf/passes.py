"""One forward pass of a model of transformers over a manager of keys and values.

A model feeds its tokens as [B, n], with padding on the left of short prompts. A manager takes the tokens of all
sequences as one flat row of N, without padding, and without the rows of sequences that have ended. `Pass` translates.

While a pass is under way, the model's attention is ours. `Hooks` switches it: before the forward pass of the model
that has the layers, and back behind it. transformers finds the attention of a model by a name in its config. The name
that is set here has the original name in it, so that the original can be found again:

    sdpa  ──► minithink:sdpa  ──► sdpa

Only the thread that runs the pass sees it. If anything else calls the model while the name is set, such as another
thread, its attention is the original one. Two threads may run passes over caches of their own: the last that ends
sets the original name.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minithink.errors import UsageError
from minithink.kv.contract import Policy, See
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.stack import members
from minithink.model import Rope

PREFIX = "minithink:"  # of the names of our attention
CACHE_NAMES = ("past_key_values", "cache")  # a model's argument for its cache, up to transformers 5.23 and later

_thread = threading.local()
_passing: dict[int, set[Pass]] = {}  # the passes that are under way over a model, by the id of its config
_lock = threading.RLock()  # of `_passing`; a cache that is collected meanwhile takes it once more


def under_way() -> Pass | None:
    """The pass that this thread runs; None: there is none."""
    running: Pass | None = getattr(_thread, "running", None)
    return running


class Pass:
    """A forward pass that is under way."""

    def __init__(self, manager: KVManager | PlainCache, batch: int, columns: int, place: Tensor | None) -> None:
        """
        Args:
            batch, columns: of the tokens that the model is fed, [B, n].
            place: int64 [T], the numbers of the manager's tokens among these B·n, row by row; None: it has all.
        """
        self.manager = manager
        self.batch = batch
        self.columns = columns
        self.place = place

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, and attend over what each head of each sequence holds.

        Args:
            query: [B, Hq, n, D].
            key, value: [B, Hkv, n, D].

        Returns:
            [B, n, Hq, D]; 0 for padding and for sequences that have ended.
        """
        with torch.inference_mode():
            qk = torch.cat((query, key), dim=1)
            qk = self._taken(qk.transpose(1, 2))  # [T, Hq + Hkv, D]
            v = self._taken(value.transpose(1, 2))  # [T, Hkv, D]
            dtype = self.manager.dtype
            out = self.manager.attend(layer, qk.to(dtype), v.to(dtype))
            out = out.to(query.dtype)
            if self.place is not None:
                whole = out.new_zeros(self.batch * self.columns, *out.shape[1:])
                out = whole.index_copy(0, self.place, out)
            out = out.view(self.batch, self.columns, *out.shape[1:])
        return ordinary(out)

    def tap(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Show the residual stream to the policy, [B, n, d] → as it is steered; None: it stays as it is."""
        with torch.inference_mode():
            seen = self.manager.tap(layer, self._taken(hidden))
            if not self.manager.steers:
                return None
            if self.place is not None:
                flat = hidden.flatten(0, 1)
                seen = flat.index_copy(0, self.place, seen)
            seen = seen.view(hidden.shape)
        return ordinary(seen)

    def _taken(self, x: Tensor) -> Tensor:
        """The manager's tokens: [B, n, …] → [T, …]."""
        flat = x.flatten(0, 1)
        return flat if self.place is None else flat[self.place]


def ordinary(x: Tensor) -> Tensor:
    """A tensor of inference mode as one that may take part in a graph, if gradients are on; nothing flows back."""
    return x.clone() if torch.is_grad_enabled() else x


class Passing(Protocol):
    """What hooks ask of a cache."""

    manager: KVManager | PlainCache | None

    def begin(self, inputs: Mapping[str, Any]) -> Pass:
        """A forward pass begins. inputs: the arguments of the model."""

    def end(self) -> None:
        """The forward pass is over."""

    def fail(self) -> None:
        """The forward pass has not come to its end."""


class Hooks:
    """What stands on a model for one cache: it switches the attention for the passes over this cache.

    The cache is not kept alive, and with it go the hooks.
    """

    def __init__(self, decoder: Any, cache: Passing) -> None:
        """decoder: the part of the model that has the layers."""
        self.decoder = decoder
        self.own = weakref.ref(cache)
        self.running: Pass | None = None
        self.thread = 0  # which runs it
        self.taps: list[Any] = []  # handles of the hooks of the pass that is under way
        self.handles = [
            decoder.register_forward_pre_hook(self.before, with_kwargs=True),
            decoder.register_forward_hook(self.after, always_call=True),
        ]
        weakref.finalize(cache, self.remove).atexit = False

    def __deepcopy__(self, memo: Any) -> Hooks:
        """A copy of the model calls these hooks, too, and for it they do nothing."""
        return self

    def remove(self) -> None:
        """Leave the model as it was."""
        self._finish()
        for handle in self.handles:
            handle.remove()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Begin a pass, if the model is given our cache.

        torch leaves out kwargs if another thread makes or deletes our cache at this moment: it is not given then.
        """
        if module is not self.decoder or kwargs is None:
            return
        cache = self.own()
        mine = self.thread == threading.get_ident()
        if self.running is not None and mine:  # it was interrupted, and `after` was not called
            self._finish()
            if cache is not None:
                cache.fail()
        given = [kwargs.get(name) for name in CACHE_NAMES]
        if cache is None or not any(one is cache for one in given):
            return
        if self.running is not None:
            raise UsageError(
                "A pass over this cache is under way in another thread, or was interrupted there: make a cache with "
                "minithink.hf.cache for every call of generate."
            )
        inputs = dict(kwargs)
        if args:
            inputs["input_ids"] = args[0]
        found = cache.begin(inputs)
        switch(self.decoder.config, found)
        self.thread = threading.get_ident()
        self.running = found
        _thread.running = found
        self._tap(found)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the pass. output: None if the model has raised an error."""
        if module is not self.decoder or not self._is_under_way():
            return
        self._finish()
        cache = self.own()
        if cache is None:
            return
        if output is None:
            cache.fail()
        else:
            cache.end()

    def _is_under_way(self) -> bool:
        """Whether this thread runs a pass over our cache."""
        return self.running is not None and self.running is under_way()

    def _finish(self) -> None:
        found = self.running
        if found is None:
            return
        self.running = None
        if found is under_way():
            _thread.running = None
        for handle in self.taps:
            handle.remove()
        self.taps = []
        switch_back(self.decoder.config, found)

    def _tap(self, found: Pass) -> None:
        """Hooks for this pass alone: on the layers, if a policy looks at the residual stream, and on the rotation.

        They are called for passes of other threads, too, and leave these alone.
        """
        manager = found.manager

        def unrotated(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
            """The model rotates nothing, because the manager does."""
            if under_way() is not found:
                return None
            cos, sin = output
            return torch.ones_like(cos), torch.zeros_like(sin)

        if manager.policy.pull:
            self.taps.append(self.decoder.rotary_emb.register_forward_hook(unrotated))
        looks = any(demand.what & See.HIDDEN for demand in manager.policy.demands)
        watches = any(type(p).watch is not Policy.watch for p in members(manager.policy))
        if not (looks or watches or manager.steers):
            return

        def tap(number: int, module: nn.Module) -> None:
            def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
                if under_way() is not found:
                    return None
                return found.tap(number, output)

            self.taps.append(module.register_forward_hook(hook))

        for number, layer in enumerate(self.decoder.layers):
            tap(number, layer)
        tap(-1, self.decoder.norm)


def switch(config: Any, begun: Pass) -> None:
    """Set the name of our attention."""
    with _lock:
        _passing.setdefault(id(config), set()).add(begun)
        name = config._attn_implementation
        if name.startswith(PREFIX):
            return
        own = PREFIX + name
        AttentionInterface.register(own, _attend)
        AttentionMaskInterface.register(own, _mask)
        config._attn_implementation = own


def switch_back(config: Any, ended: Pass) -> None:
    """Set the name that was there before, if no other thread runs a pass."""
    with _lock:
        others = _passing.pop(id(config), set())
        others.discard(ended)
        if others:
            _passing[id(config)] = others
            return
        config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it → its output [B, n, Hq, D], and no weights."""
    running = under_way()
    if running is not None:
        return running.attend(module.layer_idx, query, key, value), None
    name = module.config._attn_implementation.removeprefix(PREFIX)
    if name in ALL_ATTENTION_FUNCTIONS:
        original = ALL_ATTENTION_FUNCTIONS[name]
    else:
        original = sys.modules[type(module).__module__].eager_attention_forward
    return original(module, query, key, value, attention_mask, **options)


def _mask(*args: Any, **options: Any) -> Any:
    """The mask of our attention: None."""
    if under_way() is not None:
        return None
    name = options["config"]._attn_implementation.removeprefix(PREFIX)
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **options)


# -- rotation


class OfModel(Rope):
    """The model's own rotation, for queries and keys that arrive unrotated (`Hooks._tap`)."""

    def __init__(self, rotary: nn.Module, device: torch.device) -> None:
        self.rotary = rotary
        self.like = torch.empty(0, device=device)  # float32: what the rotation shall be computed in

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary.forward(self.like, pos[None])  # [1, T, D]; without hooks
        first, second = sin.chunk(2, dim=-1)
        sin = torch.cat((-first, second), dim=-1)
        return cos[0, :, None], sin[0, :, None]
