"""The backends: which one is chosen where, and that their fields are the functions of those names."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch

from minithink.backend import NAMES, REFERENCE, Backend, choose, triton_backend
from minithink.errors import UsageError
from minithink.kernels import _common

ROOT = Path(__file__).parents[1]
FUNCTIONS = [f.name for f in fields(Backend) if f.name not in ("name", "capturable")]
NO_KERNEL = {"attention", "decode_attention"}  # torch's own, see `triton_backend`


def refusal(name: str, device: str) -> str:
    """What is said: one sentence on one line."""
    with pytest.raises(UsageError) as caught:
        choose(name, device)
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert ". " not in said
    return said


def test_the_reference_is_chosen() -> None:
    assert choose("reference") is choose("auto") is choose("auto", "cpu") is REFERENCE
    assert choose("auto", torch.device("mps")) is REFERENCE
    assert choose("reference", "cuda:1") is REFERENCE


def test_the_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; elsewhere where they are interpreted, and only if they are asked for."""
    assert choose("auto", "cuda") is choose("triton", "cuda:0") is triton_backend()
    monkeypatch.setattr(_common, "INTERPRETED", True)
    assert choose("triton", "cpu") is triton_backend()
    assert choose("auto", "cpu") is REFERENCE


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_no_kernels_without_a_gpu_and_an_interpreter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "INTERPRETED", False)
    said = refusal("triton", device)
    assert f"this is {device}" in said
    assert "TRITON_INTERPRET=1" in said
    assert choose("triton", "cuda") is triton_backend()


def test_no_kernels_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # its import fails
    assert choose("auto", "cuda") is REFERENCE
    for device in ("cpu", "cuda"):
        assert "Triton is not installed" in refusal("triton", device)


@pytest.mark.parametrize("name", ["", "Triton", "cuda", "ref"])
def test_unknown_names(name: str) -> None:
    for device in ("cpu", "cuda"):
        said = refusal(name, device)
        assert repr(name) in said
        assert all(known in said for known in NAMES)


def test_every_name_can_be_chosen() -> None:
    assert [choose(name, "cuda").name for name in NAMES] == ["triton", "reference", "triton"]


def test_backends_are_made_once() -> None:
    assert triton_backend() is triton_backend()
    assert (REFERENCE.name, REFERENCE.capturable) == ("reference", False)
    assert (triton_backend().name, triton_backend().capturable) == ("triton", True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fields_are_the_functions_of_that_name(name: str) -> None:
    """Those of `minithink/ref/`, and the kernels of `kernels/`, one for each that there is."""
    twin = getattr(import_module(f"minithink.ref.{name}"), name)
    assert getattr(REFERENCE, name) is twin
    assert (ROOT / "kernels" / f"{name}.py").exists() == (name not in NO_KERNEL)
    if name in NO_KERNEL:
        assert getattr(triton_backend(), name) is twin
    else:
        assert getattr(triton_backend(), name) is getattr(import_module(f"minithink.kernels.{name}"), name)
