"""What code a policy runs, and which changes of it count. Alone: pytest tests/results/test_sources.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from minithink.policies import POLICIES, parse, read
from minithink.results import sources
from minithink.results.sources import files_of, normal, source_of


def files(text: str) -> dict[str, tuple[str, ...]]:
    written = read(text)
    return files_of(written.make(budget=2**20 if written.leaves_open("budget") else None))


def test_the_files_of_a_policy_are_those_that_it_runs() -> None:
    of_thinkv = files("thinkv")
    own = ("minithink/policies/thinkv.py", "minithink/policies/thinkv_options.py", "minithink/text/thoughts.py")
    assert of_thinkv["policy"] == own
    assert {"minithink/quant/nvfp4.py", "minithink/quant/ternary.py"} <= {*of_thinkv["formats"]}
    assert {"minithink/ref/anneal.py", "minithink/ref/sparsity.py"} <= {*of_thinkv["twins"]}
    assert {"minithink/ref/survivors.py", "minithink/ref/kmeans.py"} <= {*of_thinkv["twins"]}, "through the step"
    assert "minithink/ref/redundancy.py" not in of_thinkv["twins"]
    assert {"kernels/anneal.py", "kernels/paged_attention.py"} <= {*of_thinkv["kernels"]}
    assert "kernels/redundancy.py" not in of_thinkv["kernels"], "only R-KV and SkipKV call it"
    assert "kernels/survivors.py" not in files("rkv")["kernels"], "only ThinKV calls it"
    of_morphkv = {*files("morphkv")["kernels"]}
    assert {"kernels/window_peak.py", "kernels/window_importance.py"} <= of_morphkv, "the first imports the second"
    stack = files("snapkv:cap=128+thinkv")
    assert stack["policy"] == ("minithink/policies/snapkv.py", *own)
    assert "minithink/text/sentences.py" in files("seal+rkv")["policy"], "a module beside the policies"
    assert "minithink/ref/similarity.py" in files("skipkv")["twins"]
    assert "kernels/similarity.py" not in files("rkv")["kernels"]
    assert files("window")["formats"] == ()
    assert source_of(parse("window:budget=9"), "reference")["kernels"] == ""


def test_a_policy_is_of_the_modules_that_it_uses_indirectly_too() -> None:
    """VaSE takes functions of random_attention.py, which takes others of random.py. All three are `scored.py`'s."""
    names = ("random", "random_attention", "scored", "vase")
    assert files("vase")["policy"] == tuple(f"minithink/policies/{name}.py" for name in names)
    assert "minithink/ref/draw.py" in files("vase")["twins"], "random.py calls it"
    of_oracle = files("needs_oracle")["policy"]
    assert {"minithink/policies/dynts_cost.py", "minithink/policies/random.py"} <= {*of_oracle}
    assert "minithink/kv/schedule.py" in of_oracle, "dynts.py takes its shares"


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_is_of_the_whole_project(name: str) -> None:
    """Modules of the top level count where a policy's modules import them; what they import does not."""
    own = {*files(name)["policy"]}
    assert not own & {f"minithink/{module}.py" for module in ("model", "text/tokenizer", "engine", "loop")}
    assert len(own) <= 10


def test_imports_are_found_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of policies in parentheses, within a function and by `import`; imports of top modules end there."""
    texts = {
        "policies/first": "from minithink.policies import (\n    second,\n    third as other,\n)\nimport torch\n",
        "policies/second": "def f():\n    import minithink.policies.fourth\n",
        "policies/third": "from minithink.policies.first import f\nfrom minithink.text.tokenizer import Tokenizer\n",
        "policies/fourth": "from minithink.errors import UsageError\nfrom minithink.kv.contract import Policy\n",
        "text/tokenizer": "from minithink.results.files import loads\n",
        "results/files": "",
        "errors": "",
        "kv/contract": "",
    }
    for name, text in texts.items():
        path = tmp_path / "minithink" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "_read", sources._read.__wrapped__)
    monkeypatch.setattr(sources, "_imported", sources._imported.__wrapped__)
    found = sources._beside(["minithink/policies/first.py"])
    policies = {f"minithink/policies/{name}.py" for name in ("first", "second", "third", "fourth")}
    assert found == policies | {"minithink/text/tokenizer.py"}


def test_docstrings_comments_and_imports_do_not_count() -> None:
    code = 'import a\n\ndef f(x):\n    """Doc."""\n    return x + 1  # one\n'
    assert normal(code) == normal("from b import c\ndef f(x):\n    import d\n    return (x + 1)\n")
    assert normal(code) != normal(code.replace("+ 1", "+ 2"))
    assert normal("class A:\n    x: int = 1") != normal("class A:\n    x: int = 2")


def test_code_is_the_same_in_every_version_of_python() -> None:
    """Syntax trees differ between versions; a run on another machine must not be stale for that."""
    code = 'class A:\n    """Said."""\n    x: int = 1\n\n\ndef f(x, *, y=None):\n    return f"{x}: {y!r}"\n'
    assert hashlib.sha256(normal(code).encode()).hexdigest()[:16] == "6f02bb883a479e86"
