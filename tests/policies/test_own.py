"""A policy of a user's own, from a file, a module, a package or Python. Alone: pytest tests/policies/test_own.py"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minithink
from minithink import policies
from minithink.errors import MinithinkError, UsageError
from minithink.kv.checks import declared
from minithink.kv.plain import PlainCache
from minithink.kv.stack import Stack
from minithink.model import Rope
from minithink.policies import POLICIES, extended, load, load_list, lookup, own, parse, register, split
from minithink.policies.window import Window
from tests.kv.run import feed
from tests.own_policies import MINE, unloaded
from tests.strategies import example_config, random_decoder


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test starts in a folder of its own, with nothing loaded."""
    monkeypatch.chdir(tmp_path)
    with unloaded():
        yield


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_the_page_s_policy_keeps_what_it_says(tmp_path: Path) -> None:
    """Docs/own-policy.md: the newest tokens, and of the older ones every fourth, as far as they fit."""
    page = Path(__file__).parents[2] / "docs" / "own-policy.md"
    (tmp_path / "newest.py").write_text(page.read_text().split("```python\n")[1].split("```")[0])
    load("newest.py:Newest")
    decoder = random_decoder(example_config(), 1)
    policy = parse("newest.py:Newest:budget=28")
    cache: Any = PlainCache(decoder.config, Rope(decoder.config), policy, rows=1, tokens=128, dtype=torch.float32)
    cache.join(0, 128, 8)
    feed(decoder, cache, {0: list(range(10, 18))})
    for token in range(100):
        feed(decoder, cache, {0: [10 + token % 50]})
    prompt = list(range(8))
    older = list(range(60, 98, 4))
    newest = list(range(98, 108))
    for lane in cache.positions(0).flatten(0, 1).tolist():
        assert sorted(pos for pos in lane if pos >= 0) == prompt + older + newest


def test_a_file_that_was_broken_for_a_while_is_as_before(mine: Path) -> None:
    good = "from __future__ import annotations\n\n" + MINE
    mine.write_text(good)
    load("mine.py:Mine")
    mine.write_text(good + "x y")
    with pytest.raises(MinithinkError, match="SyntaxError"):
        load("mine.py:Mine")
    mine.write_text(good)
    load("mine.py:Mine")
    assert parse("mine.py:Mine:budget=9,which=old").which == "old"  # type: ignore[attr-defined]


def test_neighbours_of_one_name_in_two_folders_are_refused(tmp_path: Path) -> None:
    """Python would give the second policy the first one's neighbour."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a_neighbour.py").write_text(f"NAME = '{name}'")
        (tmp_path / name / "mine.py").write_text("from a_neighbour import NAME\n" + MINE)
    load("one/mine.py:Mine")
    with pytest.raises(UsageError, match="are both the module a_neighbour, and Python has one of a name"):
        load("two/mine.py:Mine")
    (tmp_path / "two" / "a_neighbour.py").unlink()
    (tmp_path / "two" / "mine.py").write_text(MINE)
    load("two/mine.py:Mine")


def test_a_file_stands_for_a_name(mine: Path) -> None:
    text = "mine.py:Mine:budget=9,sign=-1,which=old"
    assert load(text) == text
    policy = parse(text)
    assert (policy.budget, policy.sign, policy.which) == (9, -1.0, "old")  # type: ignore[attr-defined]
    assert policy.name == "Mine"
    load("mine.py:Typed")
    assert parse("mine.py:Typed:budget=3").traced == "older"  # type: ignore[attr-defined]
    assert parse("mine.py:Mine", budget=5, schedule="interval:4").schedule == "interval:4"


def test_a_module_stands_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "ideas").mkdir()
    (tmp_path / "ideas" / "newest.py").write_text(MINE)
    load("ideas.newest:Mine")
    assert parse("ideas.newest:Mine:budget=4").budget == 4


def test_lists_and_stacks_take_them(mine: Path) -> None:
    text = "window:budget=9,mine.py:Mine:budget=8,sign=-1+kivi:bits=4, mine.py:Mine,full+mine.py:Mine:budget=3,kivi"
    assert load_list(text) == [
        "window:budget=9",
        "mine.py:Mine:budget=8,sign=-1+kivi:bits=4",
        "mine.py:Mine",
        "full+mine.py:Mine:budget=3",
        "kivi",
    ]
    stack = parse(load_list(text)[1])
    assert isinstance(stack, Stack)
    assert stack.name == "Mine+kivi"
    assert parse("mine.py:Mine:budget=8,sign=1e+5").sign == 1e5  # type: ignore[attr-defined]


def test_it_decides(mine: Path) -> None:
    load("mine.py:Mine")
    engine = minithink.load("tiny", device="cpu")
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    [own_result] = engine.generate("Alpha sits", policy="mine.py:Mine:budget=16", **options)
    [window] = engine.generate("Alpha sits", policy="window:budget=16", **options)
    assert own_result.token_ids == window.token_ids
    assert own_result.kv_tokens == 16


def test_options_follow_a_name_or_other_options(mine: Path) -> None:
    load("mine.py:Mine")
    assert extended("mine.py:Mine", "sign=2") == "mine.py:Mine:sign=2"
    assert extended("mine.py:Mine:budget=3", "sign=2") == "mine.py:Mine:budget=3,sign=2"
    assert extended("kivi:bits=4+mine.py:Mine", "sign=2") == "kivi:bits=4+mine.py:Mine:sign=2"
    assert extended("rkv", "lam=1") == "rkv:lam=1"
    assert extended("rkv:lam=1", "alpha=2") == "rkv:lam=1,alpha=2"


def test_an_edited_file_runs_again(mine: Path) -> None:
    load("mine.py:Mine")
    first = lookup("mine.py:Mine")
    load("full,mine.py:Mine+kivi")
    assert lookup("mine.py:Mine") is first
    mine.write_text(MINE.replace("sign: float = 1.0", "sign: float = 2.0"))
    load("mine.py:Mine")
    assert parse("mine.py:Mine:budget=3").sign == 2.0  # type: ignore[attr-defined]


def test_equal_names_in_two_folders_are_two_policies(tmp_path: Path) -> None:
    for folder, sign in (("a", "3.0"), ("b", "4.0")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MINE.replace("float = 1.0", f"float = {sign}"))
    assert load_list("a/mine.py:Mine,b/mine.py:Mine") == ["a/mine.py:Mine", "b/mine.py:Mine"]
    signs = [parse(f"{folder}/mine.py:Mine:budget=3").sign for folder in "ab"]  # type: ignore[attr-defined]
    assert signs == [3.0, 4.0]


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    folder = tmp_path / "ideas"
    folder.mkdir()
    (folder / "beside.py").write_text("SIGN = -1.0")
    (folder / "mine.py").write_text(
        MINE.replace("float = 1.0", "float = SIGN").replace("\n", "\nfrom beside import *\n", 1)
    )
    load("ideas/mine.py:Mine")
    assert parse("ideas/mine.py:Mine:budget=3").sign == -1.0  # type: ignore[attr-defined]


def test_a_file_named_as_a_module_of_python_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(MINE)
    load("random.py:Mine")
    import random

    assert random.__file__ != str(tmp_path / "random.py")
    assert lookup("random.py:Mine").__module__ != "random"


def test_reading_a_text_runs_no_file(mine: Path) -> None:
    """A trace, a journal, a result or a checkpoint may name a file; only `load` runs it."""
    mine.write_text("raise SystemExit('was run')")
    text = "rkv:buffer=0,mine.py:Mine:budget=3"
    assert split(text) == ["rkv:buffer=0", "mine.py:Mine:budget=3"]
    for read in (parse, policies.read, lookup):
        with pytest.raises(UsageError, match=r"mine.py:Mine is not loaded: name it on a command line, or call"):
            read("mine.py:Mine")
    engine = minithink.load("tiny", device="cpu")
    with pytest.raises(UsageError, match="is not loaded"):
        engine.generate("Alpha sits", policy="mine.py:Mine", budget=9)


def test_registered_classes_have_their_names() -> None:
    @register
    class Newest(Window):
        name = "newest"

    assert parse("newest:budget=3+kivi").members[0] == Newest(3)  # type: ignore[attr-defined]
    assert split("kivi,newest") == ["kivi", "newest"]

    class Again(Window):
        name = "newest"

    register(Again)
    assert lookup("newest") is Again


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "Newest has the name None: give the class a `name`"),
        ("a+b", r"Newest has the name 'a\+b': give the class a `name` of letters"),
        ("window", "Newest has the name window, as a policy of minithink has: give it another"),
    ],
)
def test_names_that_no_text_can_say_are_refused(name: str | None, message: str) -> None:
    class Newest(Window):
        pass

    if name is not None:
        Newest.name = name
    with pytest.raises(UsageError, match=message):
        register(Newest)


def test_an_object_is_not_registered() -> None:
    with pytest.raises(UsageError, match="and a policy is a class that is derived from"):
        register(Window(3))  # type: ignore[type-var]


def test_installed_packages_offer_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("newest", "mine:Mine", policies.GROUP),
        EntryPoint("window", "mine:Mine", policies.GROUP),
        EntryPoint("broken", "mine:Missing", policies.GROUP),
        EntryPoint("function", "mine:no_policy", policies.GROUP),
    ]
    monkeypatch.setattr(own, "entry_points", lambda group: points)
    with pytest.raises(UsageError, match="'newest' is unknown"):
        parse("newest:budget=3")
    assert load_list("kivi,newest:budget=3+full") == ["kivi", "newest:budget=3+full"]
    assert parse("newest:budget=3").name == "Mine"
    load("window")
    assert lookup("window") is Window, "a package cannot take the place of minithink's own"
    with pytest.raises(MinithinkError, match="The policy broken cannot be imported: AttributeError"):
        load("broken")
    with pytest.raises(UsageError, match="function is <function no_policy"):
        load("function")
    del POLICIES["newest"]
    engine = minithink.load("tiny", device="cpu")
    [result] = engine.generate("Alpha sits", policy="newest", budget=9, max_new_tokens=4)
    assert result.kv_tokens == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other.py:Mine", "The policy's file other.py cannot be read: No such file or directory."),
        ("mine.py:Other", "mine.py has no class Other; its policies are Mine, Needs, Bare, Half, Typed."),
        ("mine.py", "The policy 'mine.py' is a file: name a class in it, too, as in mine.py:Class."),
        ("mine.py:sign=1", "The policy 'mine.py' is a file: name a class in it, too"),
        ("mine.py:Mine:budget=9+mine.py", "The policy 'mine.py' is a file: name a class in it, too"),
        ("mine.py:no_policy", "mine.py:no_policy is <function no_policy"),
        ("mine.py:Bare", "mine.py:Bare is no dataclass: write @dataclass above it"),
        ("mine.py:Half", "mine.py:Half is no dataclass: write @dataclass above it"),
        (
            "mine.py:Mine:sing=1",
            "mine.py:Mine has no hyperparameter 'sing' (did you mean sign?); it takes budget",
        ),
        ("mine.py:Mine:sign=x", "mine.py:Mine cannot have sign=x: sign is a number."),
        ("mine.py:Mine:which=x", "mine.py:Mine cannot have which=x: which is new or old."),
        ("mine.py:Mine", "mine.py:Mine needs a budget in tokens: give --budget, or mine.py:Mine:budget=…."),
        ("mine.py:Mine:budget=3+mine.py:Mine:budget=4", "names mine.py:Mine 2 times"),
        ("mine.py:Needs", "mine.py:Needs needs a value of size: write mine.py:Needs:size=…."),
        ("mine.py:Needs:size=2,shape=3", "cannot be given shape in a text, because its type is tuple[int, ...]"),
        ("mine.py:Needs:size=7", "The policy Needs fails in `__post_init__` (mine.py, line 32): 'seven'."),
        ("syntax.py:Mine", "file syntax.py raised an error: SyntaxError: invalid syntax (syntax.py, line 2)."),
        ("raises.py:Mine", "file raises.py raised an error (line 3): ZeroDivisionError: division by zero."),
        ("full_stop.py:Mine", "file full_stop.py raised an error (line 1): ValueError: it ends."),
        ("exits.py:Mine", "file exits.py raised an error (line 1): SystemExit: bye."),
        ("nowhere:Mine", "There is no module nowhere: name a policy's class as FILE.py:Class, or as module:Class"),
        ("importss:Mine", "There is no module importss (did you mean imports?): name a policy's class"),
        ("rvk:Budget", "There is no module rvk (did you mean the policy rkv?): name a policy's class"),
        ("package.mien:Mine", "There is no module package.mien (did you mean mine?): name a policy's class"),
        ("mien.py:Mine", "file mien.py cannot be read: No such file or directory (did you mean mine.py?)."),
        ("none/mine.py:Mine", "The policy's file none/mine.py cannot be read: No such file or directory."),
        ("imports:Mine", "module imports cannot be imported: ModuleNotFoundError: No module named 'nothing'."),
        ("minithink.policies.rkv:Rkv", "minithink.policies.rkv is a part of minithink, whose policies have names"),
        ("ideas/mine:Mine", "'ideas/mine' is no module: name a policy's class as FILE.py:Class or module:Class."),
        ("a,b/mine.py:Mine", "The path a,b/mine.py has a comma, a plus, a colon or an equals sign"),
        ("full,a+b/mine.py:Mine:budget=3", "The path a+b/mine.py has a comma, a plus, a colon"),
        ("a:b/mine.py:Mine", "The path a:b/mine.py has a comma, a plus, a colon"),
        ("window:budget=3+a=b/mine.py:Mine", "The path a=b/mine.py has a comma, a plus, a colon"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(mine: Path, text: str, message: str) -> None:
    (mine.parent / "syntax.py").write_text("x = 3\nx y")
    (mine.parent / "raises.py").write_text("x = 3\n\nx / 0")
    (mine.parent / "full_stop.py").write_text("raise ValueError('it ends.')")
    (mine.parent / "exits.py").write_text("raise SystemExit('bye')")
    (mine.parent / "imports.py").write_text("import nothing")
    (mine.parent / "package").mkdir()
    (mine.parent / "package" / "mine.py").write_text(MINE)
    for folder in ("a,b", "a+b", "a:b", "a=b"):
        (mine.parent / folder).mkdir()
        (mine.parent / folder / "mine.py").write_text(MINE)
    with pytest.raises(MinithinkError) as refused:
        list(map(parse, load_list(text)))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not str(refused.value).endswith("..")


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ('storage = "x"', "storage is 'x', and it must be an object such as Storage"),
        ("storage = None", "storage is None, and it must be an object such as Storage"),
        ("name = 3", "name is 3, and it must be a text of one line"),
        ("import numpy; name = numpy.zeros(2)", r"name is array\(\[0., 0.\]\), and it must be a text of one line"),
        ('slack = "x"', "slack is 'x', and it must be a whole number of tokens"),
    ],
)
def test_what_a_class_says_is_checked_before_there_is_a_model(mine: Path, attribute: str, said: str) -> None:
    """Its storage already when the policy is made, because budgets in bytes ask for it."""
    (mine.parent / "wrong.py").write_text(MINE.replace('scope = "sequence"', attribute))
    load("wrong.py:Mine")
    with pytest.raises(UsageError, match=f"^The policy Mine: {said}"):
        declared(parse("wrong.py:Mine:budget=9"))


OURS = st.sampled_from(["full", "window:budget=3", "rkv:schedule=sawtooth:9/3,budget=3", "kivi:bits=4+window"])
THEIRS = st.sampled_from(
    ["mine.py:Mine", "a/b c.py:Mine:x=1,y=2", "mod.mine:Mine:word=a/b", "m:C+full", "full+m:C:x=1"]
)


@given(st.lists(st.one_of(OURS, THEIRS), min_size=1, max_size=5), st.sampled_from([",", ", "]))
def test_lists_are_split_before_files_and_modules(texts: list[str], comma: str) -> None:
    assert split(comma.join(texts)) == texts
