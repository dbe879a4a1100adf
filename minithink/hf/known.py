"""What a cache must know of a model of transformers, and the models that are refused."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minithink.checkpoint import calibration as files
from minithink.checkpoint.weights import MODEL, other_value
from minithink.config import ARCHITECTURES, ModelConfig
from minithink.errors import MinithinkError, UsageError, quoted
from minithink.kv.byte_size import ByteSize
from minithink.kv.contract import Policy
from minithink.kv.policy_errors import explaining
from minithink.kv.sizes import tokens_of_bytes
from minithink.kv.stack import members
from minithink.policies import check_given_budget, check_member, load_installed, read
from minithink.policies.dynts_oracles import AnswerOracle, NeedsOracle
from minithink.text.tags import Tags
from minithink.text.tokenizer import Tokenizer

KINDS = {kind: architecture for architecture, kind in ARCHITECTURES.items()}


class Known:
    """A model of transformers as policies may know it (`kv.contract.Model`)."""

    def __init__(self, model: Any, folder: str | Path | None, tokenizer: Any) -> None:
        """
        Args:
            model: a causal language model.
            folder: of its checkpoint, with the files of `minithink.calibrate`; None: where the model was loaded
                from, if that is a folder.
            tokenizer: of minithink or of transformers; None: that of the folder, if there is one.

        Raises:
            UsageError: this kind of model is not supported.
            MinithinkError: the tokenizer or the folder cannot be read.
        """
        _refuse_others(model)
        self.decoder = model.get_decoder()
        self.config = config_of(self.decoder)
        weight = self.decoder.norm.weight
        self.device = weight.device
        self.dtype = weight.dtype
        self.folder = _folder_of(model, folder)
        self.tokenizer = tokenizer_of(tokenizer, self.folder, given=folder is not None)

    def name_tags(self, tags: Tags) -> None:
        """Let the model think between these tags. The caller's tokenizer stays as it is."""
        tokenizer = copy.copy(self._tokenizer())
        tokenizer.tags = tags
        self.tokenizer = tokenizer

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes of every token id; b"" if an id has no token."""
        tokenizer = self._tokenizer()
        return tuple(tokenizer.token_bytes(id) for id in range(self.config.vocab_size))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of every token of a text. Joined, they are the text."""
        return self._tokenizer().pieces(ids)

    def calibration(self, name: str) -> Mapping[str, Any]:
        """The values of this model's calibration file of that name.

        Raises:
            UsageError: the folder is not known, or its weights are those of another model.
            MinithinkError: the file is missing, is about another model, or cannot be read.
        """
        if self.folder is None:
            raise UsageError(
                f"The policy reads {name}, and the folder of the checkpoint is not known: give "
                "minithink.hf.cache(…, folder=…)."
            )
        found = files.read(folder=self.folder, name=name, model=self.folder, spoken=str(self.folder))
        if self._other_value:
            raise UsageError(
                f"The policy reads {self.folder / name}, and that folder has the weights of another model "
                f"({self._other_value} differs): give the folder of this model's checkpoint."
            )
        return found

    @cached_property
    def _other_value(self) -> str:
        """The name of a parameter that the folder has with other numbers; "": there is none."""
        assert self.folder is not None
        parameters = {MODEL + name: parameter for name, parameter in self.decoder.named_parameters()}
        return other_value(self.folder, parameters)

    def tokens_of(self, policy: Policy, size: ByteSize) -> int:
        """The tokens that so many bytes hold with this model under a policy. UsageError: they hold none."""
        return tokens_of_bytes(policy, size, config=self.config, dtype=self.dtype)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(
                "The policy reads the text, and the tokenizer is not known: give minithink.hf.cache(…, tokenizer=…)."
            )
        return self.tokenizer

    @explaining()
    def bind(self, policy: str | Policy) -> Policy:
        """A policy of this text, or a copy of this one, that knows the model.

        A text may name a policy of an installed package, which is then imported. No file is imported: that is what
        `minithink.policies.load` is for.

        Raises:
            UsageError: the policy or one of its numbers makes no sense, or it cannot run here.
            MinithinkError: as in `calibration`.
        """
        if isinstance(policy, Policy):
            _refuse_oracles(type(member) for member in members(policy))
            bound = copy.deepcopy(policy)
        elif isinstance(policy, str):
            written = read(load_installed(policy))
            _refuse_oracles(member.cls for member in written.members)
            bound = written.make(option="a budget", tokens_of=self.tokens_of)
        elif isinstance(policy, type) and issubclass(policy, Policy):
            name = policy.__name__
            raise UsageError(f"{name} is the class of a policy: give an object, as in {name}(…).")
        else:
            raise UsageError(f"The policy is {quoted(policy)}: give a text, as in rkv:budget=1024, or an object.")
        for member in members(bound):
            check_member(member)
            member.bind(self)
            check_member(member)  # once more: `bind` may have set something
            check_given_budget(member)
        return bound


def _refuse_oracles(classes: Iterable[type[Policy]]) -> None:
    """UsageError: one of these policies knows the future, from recorded texts or from the rules of the puzzles."""
    for cls in classes:
        if issubclass(cls, (AnswerOracle, NeedsOracle)):
            raise UsageError(
                f"{cls.name} is an oracle, which knows what will be read, and runs in minithink alone: give another "
                "policy."
            )


def config_of(decoder: Any) -> ModelConfig:
    """The shape of a decoder of transformers. Its RoPE is left out, because the model rotates by itself."""
    config = decoder.config
    attention = decoder.layers[0].self_attn
    return ModelConfig(
        architecture=KINDS[config.model_type],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=len(decoder.layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        max_position=config.max_position_embeddings,
        qkv_bias=getattr(attention.k_proj, "bias", None) is not None,
    )


def _refuse_others(model: Any) -> None:
    """UsageError: the model is of another kind, cannot generate, has sliding layers, or lies on several devices or on
    none."""
    if isinstance(model, str):
        raise UsageError(
            f"The model is a name, {quoted(model)}: load it first, with AutoModelForCausalLM.from_pretrained."
        )
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in KINDS:
        raise UsageError(
            f"The model is {type(model).__name__} of type {quoted(kind)}: caches are for models of transformers of "
            f"the types {', '.join(KINDS)}."
        )
    if getattr(model, "generation_config", None) is None:
        raise UsageError(
            f"The model is {type(model).__name__}, which cannot generate: load it with AutoModelForCausalLM."
        )
    layers = getattr(config, "layer_types", None) or []
    others = sorted(set(layers) - {"full_attention"})
    if others or getattr(config, "use_sliding_window", False):
        named = others[0] if others else "sliding_attention"
        raise UsageError(f"The model has layers of {named}, and caches are for full attention: give another model.")
    devices = sorted({str(p.device) for p in model.parameters()})
    if devices == ["meta"]:
        raise UsageError(
            "The model is on the device meta, where weights have no numbers: load them, as with "
            'AutoModelForCausalLM.from_pretrained(…, device_map="cpu").'
        )
    if len(devices) > 1:
        named = ", ".join(devices)
        real = [device for device in devices if device != "meta"]  # where weights are that are not offloaded
        raise UsageError(
            f'The model lies on several devices, {named}, and a cache on one: load it with device_map="{real[-1]}".'
        )


def _folder_of(model: Any, folder: str | Path | None) -> Path | None:
    """The folder of the checkpoint. MinithinkError: one was given that does not exist."""
    if folder is not None:
        found = Path(folder)
        if not found.is_dir():
            raise MinithinkError(f"The folder {found} does not exist: give that of the checkpoint.")
        return found
    loaded_from = getattr(model, "name_or_path", "") or ""
    return Path(loaded_from) if loaded_from and Path(loaded_from).is_dir() else None


def tokenizer_of(tokenizer: Any, folder: Path | None, given: bool) -> Tokenizer | None:
    """The tokenizer in minithink's own reading; None: it is not known.

    Args:
        tokenizer: of minithink or of transformers; None: read that of the folder.
        folder: of the checkpoint; None: it is not known.
        given: whether the user has named the folder, and wants to know if its tokenizer cannot be read.

    Raises:
        MinithinkError: it cannot be read.
        UsageError: the argument is no tokenizer.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        if not hasattr(tokenizer, "save_pretrained"):
            raise UsageError(f"The tokenizer is {quoted(tokenizer)}: give one of transformers or of minithink.")
        with tempfile.TemporaryDirectory() as there:
            tokenizer.save_pretrained(there)
            return Tokenizer.from_folder(there)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        return Tokenizer.from_folder(folder)
    except MinithinkError:
        if given:
            raise
        return None


def ids_of(value: Any) -> list[int]:
    """Token ids of a field of a generation config: a number, several, or None."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [value] if isinstance(value, int) else list(value)
