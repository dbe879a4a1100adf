"""The import directions of the project, read from the source with `ast`, so that nothing has to be imported."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names
RUNTIME = {"torch", "triton", "tiktoken", "safetensors", "huggingface_hub", "numpy", "rich", "jinja2"}
EXTRAS = {"transformers", "tokenizers", "matplotlib", "pyarrow"}

# package → what it may import of the project (prefixes); a package that is not listed may import anything but LEAVES
ALLOWED = {
    "minithink.ref": ("minithink.ref", "minithink.quant"),
    "minithink.quant": ("minithink.quant", "minithink.ref"),
    "minithink.kernels": ("minithink.kernels",),
    "minithink.policies": ("minithink.policies", "minithink.kv.contract", "minithink.quant", "minithink.errors"),
    "minithink.model": ("minithink.backend", "minithink.config", "minithink.errors"),
    "minithink.tasks": ("minithink.tasks", "minithink.errors", "minithink.tokenizer"),
}
# nothing imports these, except themselves
LEAVES = ("calibrate", "evaluate", "analysis", "trace", "bench", "train", "generate")


def sources() -> dict[str, Path]:
    """Every module of the project by its import name."""
    found = {}
    for folder, package in (("minithink", "minithink"), ("kernels", "minithink.kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


def imported(source: str) -> Iterator[str]:
    """The full names that a module imports; `from a import b` counts as a.b, for b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(name: str, source: str) -> list[str]:
    """What a module imports against the rules."""
    rules = next((r for p, r in ALLOWED.items() if name == p or name.startswith(p + ".")), None)
    wrong = []
    for target in imported(source):
        top = target.split(".")[0]
        if top != "minithink":
            if top not in STDLIB | RUNTIME | EXTRAS:
                wrong.append(f"{name} imports {target}, which the project does not depend on")
            continue
        within = [target.startswith(allowed + ".") or target == allowed for allowed in rules or ()]
        if rules is not None and not any(within):
            wrong.append(f"{name} imports {target}; it may import {', '.join(rules)}")
        leaf = target.split(".")[1] if "." in target else ""
        if leaf in LEAVES and not name.startswith(f"minithink.{leaf}"):
            wrong.append(f"{name} imports {target}, which nothing may import")
    return wrong


def signature(source: str, function: str) -> list[str] | None:
    """The parameter names of a function at the top level of a module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
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


@pytest.mark.parametrize("name", sorted(sources()))
def test_imports_follow_the_rules(name):
    assert violations(name, sources()[name].read_text(encoding="utf-8")) == []


def test_kernels_and_twins_have_equal_signatures():
    assert unequal_twins({n: p.read_text(encoding="utf-8") for n, p in sources().items()}) == []


def test_the_checks_find_what_is_wrong():
    assert violations("minithink.ref.x", "from minithink.model import Decoder")
    assert violations("minithink.model", "import minithink.kv.full")
    assert violations("minithink.engine", "from minithink import bench")
    assert violations("minithink.engine", "import requests")
    assert not violations("minithink.bench.x", "from minithink.bench import record\nimport torch, json")
    same, other = "def op(a, b): ...", "def op(a, c): ..."
    assert unequal_twins({"minithink.kernels.op": same, "minithink.ref.op": same}) == []
    assert unequal_twins({"minithink.kernels.op": same, "minithink.ref.op": other})
    assert unequal_twins({"minithink.kernels.op": same})


def test_the_model_and_the_cache_name_no_policy():
    from minithink.policies import POLICIES

    for name in ("model.py", *(f"kv/{p.name}" for p in (ROOT / "minithink" / "kv").glob("*.py"))):
        tree = ast.parse((ROOT / "minithink" / name).read_text(encoding="utf-8"))
        words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert not words & (set(POLICIES) - {"full"}), name


def test_kernels_are_found_below_the_package_only():
    module = importlib.import_module("minithink.kernels")
    assert [Path(p).name for p in module.__path__] == ["kernels"]
    # Hugging Face ships a package named `kernels`: this checkout must not stand in for it with one of its own.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_the_package_imports_no_torch():
    code = "import sys, minithink; sys.exit('torch' in sys.modules or hasattr(minithink, 'generate'))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
