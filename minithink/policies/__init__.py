"""The policies: what decides which keys and values stay in the cache, and in what form.

A policy is a dataclass whose fields are its hyperparameters. On the command line they are written

    window:budget=256,protect_prompt=true      name, and after a colon the fields that differ from their defaults
    a:x=1+b                                    a stack: both at work on one cache
    a:x=1,y=2,b                                (--policies) a list: a comma before a policy's name starts the next
    mine.py:Mine:budget=256                    a policy of your own: its file and class stand for the name (`own.py`)
    window:budget=2MiB                         a budget in bytes of keys and values, which a model makes tokens

`read`, `parse` and `split` only read texts. `load` and `register` make a policy of your own known to them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from minithink.errors import QUOTED, UsageError, escaped, quoted
from minithink.kv import checks
from minithink.kv.byte_size import EXAMPLE, ByteSize, looks_like_bytes
from minithink.kv.contract import Policy, is_whole, name_of
from minithink.kv.policy_errors import explaining
from minithink.kv.schedule import MOST, Schedule
from minithink.kv.stack import Stack
from minithink.policies import own
from minithink.policies.ada_snapkv import AdaSnapKV
from minithink.policies.crystal_kv import CrystalKV, CrystalKVLite
from minithink.policies.dynts import DynTS
from minithink.policies.dynts_oracles import AnswerOracle, HindsightOracle, NeedsOracle
from minithink.policies.full import Full
from minithink.policies.h2o import H2O
from minithink.policies.keydiff import KeyDiff
from minithink.policies.kivi import Kivi
from minithink.policies.knorm import Knorm
from minithink.policies.lazy_eviction import LazyEviction
from minithink.policies.morphkv import MorphKV
from minithink.policies.options import meanings
from minithink.policies.pm_kvq import PMKVQ
from minithink.policies.pyramidkv import PyramidKV
from minithink.policies.quant import Quant
from minithink.policies.raas import RaaS
from minithink.policies.random import Random
from minithink.policies.random_attention import RandomAttention
from minithink.policies.rkv import Rkv
from minithink.policies.scissorhands import Scissorhands
from minithink.policies.seal import Seal
from minithink.policies.sepllm import SepLLM
from minithink.policies.skipkv import SkipKV
from minithink.policies.snapkv import SnapKV
from minithink.policies.snapkv_decode import SnapKVDecode
from minithink.policies.streaming_llm import StreamingLLM
from minithink.policies.thinkv import Tbe, Tbq, ThinKV
from minithink.policies.tova import Tova
from minithink.policies.triattention import TriAttention
from minithink.policies.vase import VaSE
from minithink.policies.window import Window

_CLASSES: tuple[type[Policy], ...] = (
    Full,
    Window,
    StreamingLLM,
    SepLLM,
    Random,
    RandomAttention,
    VaSE,
    SnapKV,
    H2O,
    Tova,
    Scissorhands,
    SnapKVDecode,
    AdaSnapKV,
    PyramidKV,
    RaaS,
    LazyEviction,
    MorphKV,
    KeyDiff,
    Knorm,
    TriAttention,
    Rkv,
    SkipKV,
    Seal,
    CrystalKV,
    CrystalKVLite,
    DynTS,
    AnswerOracle,
    HindsightOracle,
    NeedsOracle,
    ThinKV,
    Tbe,
    Tbq,
    Quant,
    Kivi,
    PMKVQ,
)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in _CLASSES}
_OURS = frozenset(POLICIES)  # the others are of users
UNLISTED: dict[str, type[Policy]] = {}  # texts can name these too, but no list shows them: controls of comparisons
GROUP = "minithink.policies"  # of entry points: policies of installed packages
_HINTS: dict[type[Policy], dict[str, Any]] = {}
_MEMBERS = re.compile(r"\+(?!\d)")  # between the members of a stack; before a digit it is the + of 1e+5
_Class = TypeVar("_Class", bound=type[Policy])
# The tokens that bytes hold under a policy, which is given without its budget: `sizes.tokens_of_bytes` of a model.
TokensOf = Callable[[Policy, ByteSize], int]
AMPLE = 2**20  # tokens: stands for a budget whose tokens are not known yet; no policy finds it too small


def ample(policy: Policy, size: ByteSize) -> int:
    """Tokens that stand for bytes where no model is known yet (a TokensOf)."""
    return AMPLE


class _Member(NamedTuple):
    """One policy of a text, as it is written there."""

    name: str
    cls: type[Policy]
    values: dict[str, Any]  # the fields that the text gives


@dataclass(frozen=True)
class Written:
    """A policy or a stack as a text describes it. The text may leave a budget or a schedule open, so policies with
    several budgets can be made of it."""

    text: str
    members: tuple[_Member, ...]

    def leaves_open(self, field: str) -> bool:
        """Whether some member has this hyperparameter and the text does not say it."""
        return any(field in _fields(member.cls) and field not in member.values for member in self.members)

    @property
    def size(self) -> ByteSize | None:
        """The smallest budget in bytes that the text gives; None: it gives none."""
        sizes = [size for member in self.members if (size := _size_of(member)) is not None]
        return min(sizes, key=lambda size: size.number, default=None)

    def make(
        self,
        *,
        budget: int | ByteSize | None = None,
        schedule: str | None = None,
        option: str = "--budget",
        tokens_of: TokensOf | None = None,
    ) -> Policy:
        """A new policy, or stack. Arguments and errors: as of `parse`."""
        members = [member._replace(values=dict(member.values)) for member in self.members]
        said_budget = budget if isinstance(budget, ByteSize) else f"{quoted(budget)} tokens"
        given = (
            ("budget", budget, f"A budget of {said_budget}"),
            ("schedule", schedule, f"The schedule {quoted(schedule)}"),
        )
        for key, value, what in given:
            if value is None:
                continue
            takers = [member for member in members if key in _fields(member.cls)]
            if not takers:
                raise UsageError(f"{what} was given, and the policy {brief(self.text)} takes none: drop it.")
            for member in takers:
                said = member.values.setdefault(key, value)
                if said != value:
                    raise UsageError(f"{what} was given, and {member.name} says {key}={said}: drop one of them.")
        tokens = dict[ByteSize, int]()
        sizes = [size for member in members if (size := _size_of(member)) is not None]
        if sizes and tokens_of is None:
            raise UsageError(
                f"The policy {brief(self.text)} has a budget of {sizes[0]}, and no model says here how many tokens "
                "that is: give tokens."
            )
        if sizes and tokens_of is not None:
            # A member of a stack stores its tokens as the stack does, so the whole is made to be asked.
            whole = _together(members, option, dict.fromkeys(sizes, AMPLE))
            tokens = {size: tokens_of(whole, size) for size in sizes}
        return _together(members, option, tokens)


def _size_of(member: _Member) -> ByteSize | None:
    """The budget of a member, if it is in bytes."""
    budget = member.values.get("budget")
    return budget if isinstance(budget, ByteSize) else None


def _together(members: Sequence[_Member], option: str, tokens: Mapping[ByteSize, int]) -> Policy:
    """The policy, or the stack, of some members. tokens: what their budgets in bytes come to."""
    policies = [_make(member, option, tokens) for member in members]
    return policies[0] if len(policies) == 1 else Stack(policies)


def register(cls: _Class) -> _Class:
    """Make a policy of your own known by its `name`, in this process → the class, so that it can decorate one.

    Registering another class of the same name replaces the first, as in a notebook whose cell runs again.

    Raises:
        UsageError: it is no class that a text can describe, has no usable name, or that of a policy of minithink.
    """
    POLICIES[_name_of(cls)] = cls
    return cls


def register_unlisted(cls: _Class) -> _Class:
    """The same for a control that one comparison needs: texts can name it, and no list of policies shows it."""
    UNLISTED[_name_of(cls)] = cls
    return cls


def _name_of(cls: type[Policy]) -> str:
    """The name by which a class that is registered is known.

    Raises:
        UsageError: it is no class that a text can describe, has no usable name, or that of a policy of minithink.
    """
    name = vars(cls).get("name") if isinstance(cls, type) else None
    own.checked(cls, getattr(cls, "__name__", "The policy"))
    if not (isinstance(name, str) and own.NAME.fullmatch(name)):
        raise UsageError(
            f"{cls.__name__} has the name {quoted(name)}: give the class a `name` of letters, digits, _, - and dots, "
            "by which texts can name it."
        )
    if name in _OURS:
        raise UsageError(f"{cls.__name__} has the name {name}, as a policy of minithink has: give it another.")
    return name


def load(text: str) -> str:
    """Import the policies of a user's own that a text names, from their files, modules and packages → the same text,
    which `parse` and `split` understand from now on.

    To import a class is to run its file. Call this for what a user has written on a command line or in Python, and
    never for what a file says. A file that was edited since is run again.

    Args:
        text: a policy, a stack or a list.

    Raises:
        UsageError: a file's path has a character that parts texts; there is no such module or class; it is no policy.
        MinithinkError: a file cannot be read, or raised an error.
    """
    own.refuse_path(text)
    load_installed(text)
    for policy in split(text):
        for member in _MEMBERS.split(policy):
            name, _ = _head(member)
            if own.OWN.fullmatch(name):
                POLICIES[name] = own.imported(name, POLICIES)
    return text


def load_list(text: str) -> list[str]:
    """`load`, then `split`: for options that take a list of policies."""
    return split(load(text))


def load_installed(text: str) -> str:
    """Import the policies of installed packages that a text names → the same text. A name of minithink's own is never
    a package's. Arguments and errors: as in `load`."""
    for name, point in own.offered(GROUP).items():
        named = re.search(rf"(?:^|[,+])\s*{re.escape(name)}\s*(?:[:,+]|$)", text)
        if named and name not in POLICIES:
            POLICIES[name] = own.of_package(point)
    return text


def lookup(name: str, known: Iterable[str] | None = None) -> type[Policy]:
    """The policy of that name. UsageError: there is none; the message lists the names, or those in `known`."""
    if name in UNLISTED:
        return UNLISTED[name]
    if name not in POLICIES:
        if own.OWN.fullmatch(name):
            raise UsageError(
                f"The policy {brief(name)} is not loaded: name it on a command line, or call minithink.policies.load("
                f"{quoted(name)}) first. What a file says is never loaded."
            )
        names = [part.strip() for part in name.split(",")]  # of a list, whose names alone say where to split it
        if all(part in POLICIES for part in names):
            stack = brief("+".join(names))
            raise UsageError(f"{brief(name)} are {len(names)} policies: give one, or a stack, {stack}.")
        at = next(i for i, part in enumerate(names) if part not in POLICIES)
        name = names[at]
        if at and "=" in name:
            raise UsageError(
                f"The policy {quoted(name)} is unknown: what a policy is told follows a colon, "
                f"{names[at - 1]}:{brief(name)}."
            )
        if name.endswith(".py"):
            raise UsageError(
                f"The policy {quoted(name)} is a file: name a class in it, too, as in {brief(name)}:Class."
            )
        names = list(POLICIES if known is None else known)
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? There" if near else "there"
        raise UsageError(f"The policy {quoted(name)} is unknown; {hint} are: {', '.join(names)}.")
    return POLICIES[name]


def takes_budget(cls: type[Policy]) -> bool:
    """Whether the policy keeps to a number of tokens that one may choose."""
    return "budget" in _fields(cls)


def split(text: str) -> list[str]:
    """The policies of a list: "a:x=1,y=2,b" → ["a:x=1,y=2", "b"]. What they say is not looked at."""
    names = "|".join(map(re.escape, (*POLICIES, *UNLISTED)))
    return re.split(rf",\s*(?=(?:{names})(?:[:,+]|$)|[^\s:,+=][^:,+=]*:[A-Za-z_]\w*(?:[:,+]|$))", text.strip())


def extended(text: str, options: str) -> str:
    """A policy or a stack whose last member is given further options: "a:x=1", "y=2" → "a:x=1,y=2"."""
    _, given = _head(_MEMBERS.split(text)[-1])
    return f"{text}:{options}" if given is None else f"{text},{options}"


def read(text: str, known: Iterable[str] | None = None) -> Written:
    """What a text says, before a budget is known.

    Args:
        text: as above.
        known: the names that the message about an unknown one lists; None: all.

    Raises:
        UsageError: an unknown policy, hyperparameter or value; a stack with the same policy twice.
    """
    found = [_read(member, known) for member in _MEMBERS.split(text)]
    classes = [member.cls for member in found]
    for member in found:
        times = classes.count(member.cls)
        if times > 1:
            raise UsageError(f"The stack {brief(text)} names {member.name} {times} times: give it once.")
    return Written(text, tuple(found))


def parse(
    text: str,
    *,
    budget: int | ByteSize | None = None,
    schedule: str | None = None,
    option: str = "--budget",
    tokens_of: TokensOf | None = None,
) -> Policy:
    """The policy, or the stack, that a text describes.

    Args:
        text: as above.
        budget: tokens or bytes, for every member that takes a budget (`--budget`).
        schedule: likewise (`--schedule`).
        option: what else gives a budget, for the message that one is missing; "": nothing does.
        tokens_of: how many tokens a budget in bytes holds; None: there is no model that says it.

    Raises:
        UsageError: an unknown policy, hyperparameter, value or schedule; a budget that is missing, that no member
            takes, that the text contradicts, or whose bytes hold no token.
    """
    return read(text).make(budget=budget, schedule=schedule, option=option, tokens_of=tokens_of)


def _head(text: str) -> tuple[str, str | None]:
    """One policy's text: its name, and the text of its options; None: it has no colon behind its name."""
    name, colon, rest = text.partition(":")
    found = own.OWN.match(text)
    if found and name.strip() not in POLICIES:
        name = found[0]
        colon = text[found.end() : found.end() + 1]
        rest = text[found.end() + 1 :]
    return name.strip(), rest if colon else None


def _read(text: str, known: Iterable[str] | None) -> _Member:
    """One policy's text: its name, its class, and its fields as the text gives them. known: as of `read`."""
    name, options = _head(text)
    cls = lookup(name, known)
    values: dict[str, Any] = {}
    for part in [] if options is None else options.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if key not in _fields(cls):
            hint = _meant(cls, key, bool(equals))
            names = ", ".join(_fields(cls)) or "none"
            raise UsageError(f"The policy {name} has no hyperparameter {quoted(key)}{hint}; it takes {names}.")
        if key in values:
            raise UsageError(f"The policy {name} is given {key} twice; leave one of them out.")
        kind = _hints(cls)[key]
        if not _is_readable(kind):
            raise UsageError(
                f"The policy {name} cannot be given {key} in a text, because its type is {quoted(kind)}: only int, "
                "float, bool, str, a Literal of texts, and each of them or None can be."
            )
        if key == "budget" and looks_like_bytes(value.strip()):
            values[key] = _bytes(name, value.strip())
            continue
        try:
            values[key] = _typed(value, kind)
        except ValueError as error:
            raise UsageError(
                f"The policy {name} cannot have {key}={brief(value)}: {key} is {_worded(kind)}."
            ) from error
    return _Member(name, cls, values)


def _bytes(name: str, text: str) -> ByteSize:
    """A budget in bytes. name: of its policy."""
    try:
        return ByteSize(text)
    except ValueError:
        raise UsageError(
            f"The policy {name} cannot have budget={brief(text)}: give whole tokens, or bytes such as {EXAMPLE}."
        ) from None


def _meant(cls: type[Policy], key: str, has_value: bool) -> str:
    """What somebody may have meant by a field that the policy does not have, in brackets; "": nothing is near."""
    first, colon, _ = key.partition(":")  # perhaps the next policy of a list
    policies = difflib.get_close_matches(first, POLICIES, 1) if colon or not has_value else []
    if policies:
        return f" (did you mean the policy {policies[0]}?)"
    similar = difflib.get_close_matches(key, _fields(cls), 1)
    return f" (did you mean {similar[0]}?)" if similar else ""


@explaining()
def _make(member: _Member, option: str, tokens: Mapping[ByteSize, int]) -> Policy:
    """The policy of these fields. Its budget, if it takes one, is a number or follows from its schedule; `tokens` has
    the number where it is in bytes."""
    name, cls, values = member
    known = _fields(cls)
    if "schedule" in values:
        grow = Schedule.parse(values["schedule"]).grow
        if grow is not None and "budget" in known and values.setdefault("budget", grow) != grow:
            raise UsageError(
                f"{name}: the schedule {brief(values['schedule'])} lets lanes grow to {grow} tokens, and the "
                f"budget is {quoted(values['budget'])}: drop the budget, or make them equal."
            )
    if "budget" in known and values.get("budget", known["budget"].default) in (None, MISSING):
        advice = f"give {option}, or" if option else "write"
        raise UsageError(f"The policy {name} needs a budget in tokens: {advice} {name}:budget=….")
    missing = [key for key, field in known.items() if key not in values and _is_required(field)]
    if missing:
        raise UsageError(f"The policy {name} needs a value of {missing[0]}: write {name}:{missing[0]}=….")
    size = _size_of(member)
    policy = cls(**values) if size is None else cls(**{**values, "budget": tokens[size]})
    check_numbers(policy)
    checks.stored(policy)
    block = policy.storage.block
    if block < 1 or block & (block - 1):
        raise UsageError(f"{name}: block={block}; the tokens of a page must be a power of two.")
    return policy


def check_member(policy: Policy) -> None:
    """Check what a policy that is no stack says of itself, and its numbers. UsageError: something is wrong."""
    if is_dataclass(policy):
        check_numbers(policy)  # first: it names options, of which the attributes below may be made
    checks.declared(policy)


def check_numbers(policy: Policy) -> None:
    """Refuse numbers that no cache can use.

    Raises:
        UsageError: a whole number is too large for 32 bits, beside a budget; a seed has more than 63 bits; another
            number is infinite or NaN.
    """
    for f in fields(policy):  # type: ignore[arg-type]
        value = getattr(policy, f.name)
        if isinstance(value, float) and not isfinite(value):
            raise UsageError(f"{name_of(policy)}: {f.name} is {value:g}; it must be a finite number.")
        if not is_whole(value) or f.name == "budget":  # `check_budget` knows the bounds of budgets
            continue
        most = 2**63 - 1 if f.name == "seed" else MOST
        if abs(value) > most:
            raise UsageError(f"{name_of(policy)}: {f.name} is {quoted(value)}; it must be at most {most:,}.")


def check_given_budget(policy: Policy) -> None:
    """Refuse a policy without a budget that evicts as policies of this project do, which all need one. A `decide` or
    `due` of a user's own may do without. Call it behind `Policy.bind`, which may set the budget.

    Raises:
        UsageError: its option `budget` is None, and its schedule gives none.
    """
    if not is_dataclass(policy) or "budget" not in _fields(type(policy)):
        return
    cls = type(policy)
    if cls.decide is Policy.decide or not (_is_ours(cls.decide) and _is_ours(cls.due)):
        return
    if policy.budget is None and Schedule.parse(policy.schedule).grow is None:
        raise UsageError(
            f"The policy {name_of(policy)} needs a budget in tokens: give one, as in {cls.__name__}(budget=256)."
        )


def _is_ours(method: Callable[..., Any]) -> bool:
    """Whether a method was written in this project."""
    return str(getattr(method, "__module__", "")).partition(".")[0] == "minithink"


def brief(text: str) -> str:
    """A text as it is, in at most 80 characters."""
    return escaped(text if len(text) <= QUOTED else text[: QUOTED - 1] + "…")


def _fields(cls: type[Policy]) -> dict[str, Field[Any]]:
    """The hyperparameters by name."""
    return {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]


def _is_required(field: Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def _hints(cls: type[Policy]) -> dict[str, Any]:
    """The types of a class's hyperparameters by name. Finding them takes Python milliseconds, so they are kept."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def _typed(text: str, kind: Any) -> Any:
    """A field's value. ValueError: the text is not of the field's type."""
    if get_origin(kind) in (Union, UnionType):  # X | None
        if text == "none" and NoneType in get_args(kind):
            return None
        (kind,) = (k for k in get_args(kind) if k is not NoneType)
    if kind is bool:
        allowed = {"true": True, "false": False}
    else:
        allowed = {name: name for name in get_args(kind)}  # Literal
    if not allowed:
        if kind is not str and not (text.isascii() and "_" not in text):  # int("٣") and int("1_0") are numbers, too
            raise ValueError(text)
        return kind(text)  # int, float, str
    if text not in allowed:
        raise ValueError(text)
    return allowed[text]


def _is_readable(kind: Any) -> bool:
    """Whether a text can give a value of a field's type."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [k for k in get_args(kind) if k is not NoneType]
        return len(kinds) == 1 and _is_readable(kinds[0])
    if get_origin(kind) is Literal:
        return all(isinstance(value, str) for value in get_args(kind))
    return kind in (int, float, bool, str)


def _worded(kind: Any) -> str:
    """A field's type in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_worded(k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    words = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "none"}
    return words.get(kind, "a text")


def summary_of(cls: type[Policy]) -> str:
    """What a policy does, in a line: its `summary` or, where it has none, the beginning of its docstring."""
    if cls.summary:
        return cls.summary
    first = (vars(cls).get("__doc__") or "").strip().partition("\n")[0]
    return "" if first.startswith(f"{cls.__name__}(") else first  # what @dataclass writes where there is none


def describe(cls: type[Policy]) -> dict[str, str]:
    """All hyperparameters with their defaults, as on the command line → what each means, "" where nothing says it. In
    brackets stands what else an option takes, where that is not another number, text, or the other of true and
    false."""
    said_of = meanings(cls)
    hints = _hints(cls)
    out = {}
    for name, f in _fields(cls).items():
        meaning = said_of.get(name, "")
        others = _others(hints[name], f.default)
        if name == "budget" and others:
            others.append("bytes: 2MiB")
        said = f" ({', '.join(others)})" if others else ""
        if f.default is MISSING:
            out[f"{name}{said}"] = meaning
            continue
        default = str(f.default)
        if f.default is None or isinstance(f.default, bool):
            default = default.lower()
        out[f"{name}={default}{said}"] = meaning
    return out


def _others(hint: Any, default: Any) -> list[str]:
    """What a field of this type takes beside its default, in words."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if default in (None, MISSING):
        return [_worded(kind) for kind in kinds if kind is not NoneType]
    words: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += get_args(kind)
    return [str(word) for word in words if word != default]
