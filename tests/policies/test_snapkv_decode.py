"""SnapKV while decoding: the worked example, when it evicts, and R-KV without redundancy."""

from __future__ import annotations

import pytest

from minithink.errors import UsageError
from minithink.policies import parse
from minithink.policies.rkv import Rkv
from minithink.policies.snapkv_decode import SnapKVDecode
from tests.policies.drive import follow, held
from tests.policies.test_rkv import SIX, evictions


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_worked_example(kernel_size: int) -> None:
    """What `rkv/compression/snapkv.py` keeps of 6 keys, with a window of 2 and a budget of 4."""
    policy = SnapKVDecode(budget=4, alpha=2, buffer=2, kernel_size=kernel_size)
    (edit,) = policy.decide(SIX)  # type: ignore[arg-type]
    assert (~edit.drop[0, 0, 0]).nonzero().flatten().tolist() == [0, 1, 4, 5]


def test_it_is_rkv_without_redundancy() -> None:
    for pooling in ("max", "avg"):
        policies = (cls(budget=9, alpha=3, buffer=4, pooling=pooling, **more) for cls, more in  # type: ignore
                    ((SnapKVDecode, {}), (Rkv, {"lam": 1.0})))  # fmt: skip
        got, want = ([[held(m, seq) for seq in (0, 1)] for m in follow(p, [9, 3], 25)] for p in policies)
        assert got == want


def test_it_evicts_when_rkv_does() -> None:
    """The spec's schedule of R-KV's code."""
    assert evictions(SnapKVDecode(21, buffer=7), 9, 36) == [(28, 28, 21), (35, 28, 21), (42, 28, 21)]
    clock = SnapKVDecode(256, global_clock=True)
    assert evictions(clock, 100, 290) == [(257, 257, 256), (385, 384, 256)]


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="snapkv_decode: kernel_size is 4 keys; it must be odd"):
        parse("snapkv_decode:kernel_size=4", budget=64)
    with pytest.raises(UsageError, match="no hyperparameter 'lam'"):
        parse("snapkv_decode:lam=0.5", budget=64)
