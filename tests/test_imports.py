"""The import directions of the project, read from the source with `ast`, so that nothing has to be imported."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names
RUNTIME = {"torch", "triton", "tiktoken", "regex", "safetensors", "huggingface_hub", "numpy", "rich", "jinja2"}
EXTRAS = {"transformers", "tokenizers", "matplotlib", "pyarrow", "math_verify", "sympy", "gguf", "kvpress"}
# an extra → the places that may import it
ONLY_IN = {
    "transformers": ("minithink.hf", "minithink.bench.speed.peer"),
    "kvpress": ("minithink.bench.speed.inside",),  # it is compared with, in an environment of its own
    "tokenizers": ("minithink.tasks.prepare",),
    "gguf": ("minithink.checkpoint.gguf_weights",),
    "pyarrow": ("minithink.evaluate.datasets",),
    "math_verify": ("minithink.evaluate.mathematics",),
    "sympy": ("minithink.evaluate.mathematics",),  # math-verify needs it
}

# package → what it may import of the project (prefixes); BELOW and LAYERS say what the others may import
ALLOWED = {
    "minithink.ref": ("minithink.ref", "minithink.quant"),
    "minithink.quant": ("minithink.quant", "minithink.errors"),
    "minithink.kernels": ("minithink.kernels",),
    "minithink.policies": (
        "minithink.policies",
        "minithink.kv.byte_size",
        "minithink.kv.checks",
        "minithink.kv.contract",
        "minithink.kv.policy_errors",
        "minithink.kv.schedule",
        "minithink.kv.stack",
        "minithink.quant",
        "minithink.errors",
        "minithink.text.sentences",
        "minithink.text.thoughts",
        "minithink.ref.lrfu",
        "minithink.ref.sparsity",
        # for the oracles, which read whole texts with the model
        "minithink.reread.later",
        "minithink.loaded",
        "minithink.tasks.needs_follower",
    ),
    "minithink.model": ("minithink.backend", "minithink.config", "minithink.errors"),
    "minithink.tasks": ("minithink.tasks", "minithink.cli.commands", "minithink.errors", "minithink.text.tokenizer"),
}
# package → what it may import beside the standard library and the project; others may import RUNTIME and EXTRAS
THIRD_PARTY = {f"minithink.{name}": {"torch", "triton"} for name in ("ref", "quant", "kernels")}
# rooms that the engine stands on: they import neither it nor what stands above it
BELOW = (
    "backend",
    "checkpoint",
    "cli",
    "config",
    "errors",
    "generation",
    "kernels",
    "kv",
    "loaded",
    "loop",
    "model",
    "policies",
    "quant",
    "ref",
    "reread",
    "results",  # but results.record names the engine
    "sampling",
    "sequence",
    "tasks",
    "text",
)
# The other rooms from the bottom to the top, and which of them each may import: those that it stands on. All may
# import BELOW. A room in no list is imported by nothing but itself.
LAYERS: dict[str, tuple[str, ...]] = {
    "stream": (),
    "engine": ("stream",),
    "results.record": ("engine",),
    "hf": (),
    "__init__": ("engine", "hf"),  # the public names
    "trace.format": (),
    "trace.recorder": ("trace.format",),
    "generate": ("stream", "engine", "trace.recorder"),
    "evaluate": ("stream", "engine", "results.record", "trace.recorder"),
    "trace": ("stream", "engine", "trace.format", "trace.recorder", "evaluate"),  # `trace compare` grades answers
    "analysis": ("stream", "engine", "results.record"),
    "calibrate": ("stream", "engine", "results.record", "evaluate"),  # it calibrates on datasets
    "check": ("stream", "engine"),
    "vectors": (),
    "train": (),
    "models": ("evaluate",),  # `models texts` gets what `evaluate loss` reads
    "bench": ("stream", "engine", "results.record", "evaluate", "hf"),
    "__main__": (
        "generate",
        "check",
        "vectors",
        "evaluate",
        "trace",
        "calibrate",
        "analysis",
        "train",
        "models",
        "bench",
    ),  # its commands
}
# what the model and the cache must not know: the registered policies, and the methods that the design names
METHODS = set(
    "thinkv skipkv crystal_kv dynts h2o snapkv rkv streaming_llm kivi pm_kvq window".split()  # noqa: SIM905
)


def within(name: str, package: str) -> bool:
    """Whether a module is the package or in it: minithink.trainer is not in minithink.train."""
    return name == package or name.startswith(package + ".")


def sources() -> dict[str, Path]:
    """Every module of the project by its import name."""
    found = {}
    for folder, package in (("minithink", "minithink"), ("kernels", "minithink.kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


def room_of(name: str) -> str | None:
    """The room that a module or a name in it belongs to, the innermost of several; None: it is in none."""
    name = "minithink.__init__" if name == "minithink" else name
    rooms = [room for room in (*BELOW, *LAYERS) if within(name, f"minithink.{room}")]
    return max(rooms, key=len, default=None)


def imported(source: str) -> Iterator[str]:
    """The full names that a module imports; `from a import b` counts as a.b, for b may be a module.

    A module that calls `import_module` takes names from tables: there a text such as "minithink.engine" counts, too.
    """
    tree = ast.parse(source)
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    by_name = bool(calls & {"import_module", "importlib.import_module", "__import__"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
        elif by_name and isinstance(node, ast.Constant) and re.fullmatch(r"minithink(\.\w+)+", str(node.value)):
            yield node.value


def violations(name: str, source: str) -> list[str]:
    """What a module imports against the rules."""
    rules = next((r for package, r in ALLOWED.items() if within(name, package)), None)
    packages = next((p for package, p in THIRD_PARTY.items() if within(name, package)), RUNTIME | EXTRAS)
    room = room_of(name)
    above = LAYERS.get(room or "", ())
    wrong = []
    for target in imported(source):
        top = target.split(".")[0]
        if top != "minithink":
            if top not in STDLIB | packages:
                wrong.append(f"{name} imports {target}, which it may not depend on")
            places = ONLY_IN.get(top, (name,))
            if not any(within(name, place) for place in places):
                wrong.append(f"{name} imports {target}, which only {' and '.join(places)} may import")
            continue
        if rules is not None and not any(within(target, allowed) for allowed in rules):
            wrong.append(f"{name} imports {target}; it may import {', '.join(rules)}")
        if target in ("minithink", "minithink.__version__"):
            continue
        there = room_of(target)
        if there is None:
            wrong.append(f"{name} imports {target}, which is in no room")
        elif there in LAYERS and there not in (room, *above):
            wrong.append(f"{name} imports {target}; of the layers {room} may import {', '.join(above) or 'none'}")
    return wrong


def imports_of(modules: dict[str, str]) -> dict[str, set[str]]:
    """The modules of the project that each module imports, from any place in its code, also for types alone."""
    found = {}
    for name, source in modules.items():
        found[name] = set()
        for target in imported(source):
            while target not in modules and "." in target:
                target = target.rpartition(".")[0]  # a name in a module
            if target in modules and target != name:
                found[name].add(target)
    return found


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves by way of others, and those between two such circles."""
    left = set(imports)
    while True:
        needed = {target for name in left for target in imports[name] & left}
        inner = {name for name in left & needed if imports[name] & left}
        if inner == left:
            return left
        left = inner


def signature(source: str, function: str) -> str | None:
    """The parameters of a function at the top level of a module: names, kinds and defaults, not annotations."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for child in ast.walk(node.args):
                if isinstance(child, ast.arg):
                    child.annotation = None
            return ast.unparse(node.args)
    return None


def unequal_twins(modules: dict[str, str]) -> list[str]:
    """The kernels whose function of the module's name has not the parameters of its twin in `ref`."""
    wrong = []
    for name, source in modules.items():
        package, _, op = name.rpartition(".")
        if package != "minithink.kernels" or op.startswith("_"):
            continue
        twin = modules.get(f"minithink.ref.{op}")
        if twin is None or signature(source, op) is None or signature(twin, op) != signature(source, op):
            wrong.append(f"kernels/{op}.py and ref/{op}.py differ in the signature of {op}")
    return wrong


def policies_named(source: str, policies: set[str]) -> set[str]:
    """The policies that a module names in its code: identifiers, imports and strings, but not docstrings."""
    tree = ast.parse(source)
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}
    nodes = [node for node in ast.walk(tree) if id(node) not in docstrings]
    words = {value.lower() for node in nodes for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return {p for p in policies for word in words if p in word or p.replace("_", "") in word}


@pytest.mark.parametrize("name", sorted(sources()))
def test_imports_follow_the_rules(name):
    assert violations(name, sources()[name].read_text(encoding="utf-8")) == []


def test_every_module_is_in_a_room():
    assert [name for name in sources() if room_of(name) is None] == []


def test_layers_stand_on_earlier_ones():
    assert not set(BELOW) & set(LAYERS)
    earlier = set[str]()
    for room, below in LAYERS.items():
        assert set(below) <= earlier, room
        earlier.add(room)


def test_nothing_but_the_list_of_commands_imports_what_measures():
    assert [room for room, below in LAYERS.items() if "bench" in below] == ["__main__"]


def test_no_imports_go_in_a_circle():
    imports = imports_of({name: path.read_text(encoding="utf-8") for name, path in sources().items()})
    assert "minithink.loaded" in imports["minithink.stream"]
    assert in_circles(imports) == set()


def test_circles_are_found():
    modules = {
        "minithink.a": "from minithink.b import f",
        "minithink.b": "if TYPE_CHECKING:\n    from minithink import c",
        "minithink.c": "def f():\n    import minithink.a",
        "minithink.above": "from minithink import a",
        "minithink.below": "import torch",
    }
    assert in_circles(imports_of(modules)) == {"minithink.a", "minithink.b", "minithink.c"}
    modules["minithink.c"] = "from minithink.below import x"
    assert in_circles(imports_of(modules)) == set()


def test_the_engine_loads_no_puzzles_and_nothing_that_measures():
    rooms = ("tasks", "evaluate", "bench", "analysis", "calibrate", "trace", "train")
    code = (
        "import sys, minithink.engine\n"
        f"rooms = {rooms}\n"
        "print([name for name in sys.modules if name.startswith('minithink.') and name.split('.')[1] in rooms])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_kernels_and_twins_have_equal_signatures():
    assert unequal_twins({n: p.read_text(encoding="utf-8") for n, p in sources().items()}) == []


def test_the_checks_find_what_is_wrong():
    assert violations("minithink.ref.x", "from minithink.model import Decoder")
    assert violations("minithink.model", "import minithink.kv.full")
    assert violations("minithink.modelling", "import minithink.kv.full") == []
    assert violations("minithink.engine", "import requests")
    assert violations("minithink.bench.x", "import selenium"), "only tests drive a browser"
    for package in ("ref", "quant", "kernels"):
        assert violations(f"minithink.{package}.x", "import numpy")
        assert violations(f"minithink.{package}.x", "from transformers import AutoModel")
        assert not violations(f"minithink.{package}.x", "import math, torch\nimport triton.language as tl")
    for code in ("import transformers", "def f():\n    importlib.import_module('transformers')"):
        assert violations("minithink.engine", code)
        assert violations("minithink.bench.x", code)
        assert not violations("minithink.bench.speed.peer", code)
        assert not violations("minithink.hf.passes", code)
    assert violations("minithink.tasks", "from tokenizers import Tokenizer")
    assert not violations("minithink.tasks.prepare", "from tokenizers import Tokenizer")


def test_an_import_against_the_layers_is_found():
    engine = "from minithink.engine import TINY"
    for room in BELOW:
        for above in LAYERS:
            assert violations(f"minithink.{room}.x", f"import minithink.{above}.y"), (room, above)
    assert violations("minithink.checkpoint.calibration", engine)
    assert violations("minithink.stream", engine)
    assert violations("minithink.engine", "from minithink.results import record"), "it names the engine"
    assert not violations("minithink.engine", "from minithink.results import files")
    assert not violations("minithink.engine", "from minithink.checkpoint import calibration")
    for room in LAYERS.keys() - {"__main__", "bench"}:
        assert violations(f"minithink.{room}", "from minithink import bench"), room
        assert violations(f"minithink.{room}.x", "from minithink.bench.speed import decode"), room
    for room in LAYERS.keys() - {"__main__", "train"}:
        assert violations(f"minithink.{room}", "import minithink.train"), room
    for room in ("analysis", "calibrate", "evaluate", "bench"):
        assert not violations(f"minithink.{room}.x", "from minithink.reread.attention import read")
        assert not violations(f"minithink.{room}.x", "from minithink.results import record")
        assert violations(f"minithink.{room}.x", "import minithink.trace.page")
        assert violations(f"minithink.{room}.x", "from minithink import generate")
    assert violations("minithink.engine", "from minithink.calibrate import thoughts")
    assert violations("minithink.analysis.x", "from minithink.calibrate import segments")
    assert violations("minithink.analysis.x", "from minithink.evaluate import runner")
    assert violations("minithink.bench.x", "from minithink.calibrate import segments")
    assert violations("minithink.evaluate.x", "from minithink.calibrate import segments")
    assert not violations("minithink.calibrate.x", "from minithink.evaluate.datasets import load_dataset")
    assert not violations("minithink.bench.x", "from minithink.bench.speed import decode\nimport torch, json")
    assert violations("minithink.trainer", "import minithink.train")
    assert not violations("minithink.train.x", "import minithink.train")


def test_an_import_of_the_recorder_is_found():
    recorder = "from minithink.trace.recorder import Recorder"
    for room in LAYERS.keys() - {"trace", "trace.recorder", "generate", "evaluate"}:
        assert violations(f"minithink.{room}", recorder), room
    for room in ("trace.page", "generate", "evaluate.runner"):
        assert not violations(f"minithink.{room}", recorder), room
    assert violations("minithink.generate", "from minithink.trace import page")
    assert violations("minithink.generate", "from minithink.trace import format")
    assert violations("minithink.evaluate.runner", "import minithink.trace.page")
    assert violations("minithink.trace.recorder", "import minithink.trace.page")


def test_an_import_by_name_is_found():
    table = "COMMANDS = {'reproduce': 'minithink.bench.answers.reproduce'}\n"
    for call in ("import_module(COMMANDS[word])", "importlib.import_module(COMMANDS[word])"):
        assert violations("minithink.evaluate.__main__", table + call)
        assert not violations("minithink.__main__", table + call)
    assert not violations("minithink.results.record", "PROGRAM = 'minithink.bench'"), "it imports nothing by name"


def test_an_import_of_no_room_is_found():
    assert violations("minithink.kv.x", "from minithink import load"), "that is the engine's"
    assert violations("minithink.bench.x", "import minithink.experiments")
    assert not violations("minithink.cli.x", "import minithink\nfrom minithink import __version__")


@pytest.mark.parametrize("other", ["a, c, *, d=1", "b, a, *, d=1", "a, b, *, d=2", "a, b, *, d", "a, b, d=1", "a, b"])
def test_unequal_twins_are_found(other):
    same, other = "def op(a, b, *, d=1): ...", f"def op({other}): ..."
    annotated = "def op(a: Tensor, b: Tensor, *, d: int = 1) -> Tensor: ..."
    assert unequal_twins({"minithink.kernels.op": same, "minithink.ref.op": annotated}) == []
    assert unequal_twins({"minithink.kernels.op": same, "minithink.ref.op": other})
    assert unequal_twins({"minithink.kernels.op": same})


@pytest.mark.parametrize(
    "code",
    [
        "thinkv = 1",
        "if self.snapkv: ...",
        "if policy == 'window': ...",
        "from minithink.policies import h2o",
        "import minithink.policies.kivi",
        "class SnapKVCache: ...",
        "f(crystal_kv=1)",
        "def f(rkv_budget): ...",
        "CrystalKV()",
    ],
)
def test_named_policies_are_found(code):
    assert policies_named(code, METHODS)
    assert not policies_named(f'"""As the paper of H2O, and thinkv."""\n{code}', {"dynts"})


def test_the_model_and_the_cache_name_no_policy():
    from minithink.policies import POLICIES

    assert not policies_named('"""Unlike thinkv."""\ndef f():\n    """Not h2o."""', METHODS)
    for name, path in sources().items():
        if within(name, "minithink.model") or within(name, "minithink.kv"):
            source = path.read_text(encoding="utf-8")
            # "full" is a word, "quant" a package
            assert not policies_named(source, METHODS | set(POLICIES) - {"full", "quant"}), name


# engines of measurement, which run whatever minithink/bench/methods lists
ENGINES = (
    "answers.differences",
    "answers.losses",
    "answers.pool",
    "answers.sweep",
    "answers.transfer",
    "speed.cases",
    "speed.compare",
    "speed.ops",
    "speed.parts",
    "speed.plots",
    "speed.steady",
    "tables.markdown",
    "tables.pages",
)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_measurement_names_no_method(name):
    from minithink.policies import POLICIES

    source = sources()[f"minithink.bench.{name}"].read_text(encoding="utf-8")
    assert not policies_named(source, METHODS | set(POLICIES) - {"full", "quant", "random"})


def test_kernels_are_found_below_the_package_only():
    module = importlib.import_module("minithink.kernels")
    assert [Path(p).name for p in module.__path__] == ["kernels"]
    # Hugging Face ships a package named `kernels`: this checkout must not stand in for it with one of its own.
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("folder", ["tests", "docs", "minithink", "tutorials"])
def test_other_folders_of_the_checkout_are_no_part_of_the_package(folder):
    import minithink

    assert [Path(path) for path in minithink.__path__] == [ROOT / "minithink"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"minithink.{folder}")


def test_a_kernel_keeps_its_source_and_its_name():
    """Triton reads the source of a kernel, and a process that is started gets functions by their names."""
    code = """
import inspect, pickle, pkgutil, importlib.util
import minithink.kernels
from minithink.kernels import rope
importlib.invalidate_caches()
assert minithink.kernels.rope is rope
assert inspect.getsource(rope.rope).startswith("def rope(")
assert pickle.loads(pickle.dumps(rope.rope)) is rope.rope
assert "rope" in [module.name for module in pkgutil.iter_modules(minithink.kernels.__path__)]
assert importlib.util.find_spec("minithink.kernels").submodule_search_locations
"""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("kernels", "found"), [("minithink/kernels", "ours"), ("kernels", "ours")])
def test_an_installed_package_takes_its_own_kernels(tmp_path, kernels, found):
    """A wheel has them inside. Beside it may be a package of that name from someone else."""
    for folder in ("minithink", "kernels", kernels):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "minithink" / "__init__.py").write_bytes((ROOT / "minithink" / "__init__.py").read_bytes())
    (tmp_path / "kernels" / "whose.py").write_text("name = 'theirs'")
    (tmp_path / kernels / "whose.py").write_text(f"name = {found!r}")
    code = "import minithink.kernels.whose as whose; print(whose.name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{found}\n", "")


def test_importing_the_package_imports_no_torch():
    code = "import sys, minithink; sys.exit('torch' in sys.modules or hasattr(minithink, 'generate'))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_start_imports_nothing_large_beside_torch():
    """A cache on `meta` tells the bytes that a run needs. Some operations on `meta` import torch's compiler."""
    code = """
import sys, torch
before = set(sys.modules)
import minithink
engine = minithink.load("tiny", device="cpu")
for policy in (None, "thinkv:budget=256"):
    engine.generate("a", max_new_tokens=1, policy=policy, cache="paged")
print(sorted({"sympy", "torch._dynamo", "transformers", "huggingface_hub"} & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
