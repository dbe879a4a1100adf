"""ThinKV's options: what follows from them, and which are refused."""

from __future__ import annotations

import pytest

from minithink.errors import UsageError
from minithink.policies import parse
from minithink.policies.thinkv import ThinKV
from tests.policies.drive import followed
from tests.strategies import example_config, random_decoder

WIDE = random_decoder(example_config(hidden_size=8, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=16))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("thinkv:budget=999,types=1", (64, 32, 16, 8, 4)),
        ("thinkv:budget=999,types=1,tau=256", (128, 64, 32, 16, 8, 4)),
        ("thinkv:budget=999,types=1,tau=48,retention=64/2", (32, 16, 8, 4, 2)),
        ("thinkv:budget=999,types=1,tau=16,retention=0", (8, 4, 2, 1, 0)),
        ("thinkv:budget=999,types=2,tau=256", (64, 32, 16, 8, 4)),
    ],
)
def test_one_type_halves(text: str, kept: tuple[int, ...]) -> None:
    """§E.10: without types a segment goes to the next lower power of two."""
    policy = parse(text)
    assert isinstance(policy, ThinKV)
    assert policy.kept == kept


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thinkv:budget=64,thoughts=keyword,types=2", "words tell three types, and types=2"),
        ("thinkv:budget=64,tau=24", "tau=24 tokens is no multiple of a group of g=16: choose tau=32"),
        ("thinkv:budget=64,types=4", "types=4"),
        ("thinkv:budget=64,precision=R4E4", "R4E4"),
        ("thinkv:budget=64,precision=R16E4T2,v_precision=R4E4T2", "both of 16 bits"),
        ("thinkv:budget=64,four=nf4", "nf4"),
        ("thinkv:budget=64,retention=4/8", "must descend"),
        ("thinkv:budget=64,retention=a", "retention=a"),
        ("thinkv:budget=64,retention=4/-1", "must descend"),
        ("thinkv:budget=64,g=0", "g=0"),
        ("thinkv:budget=64,g=24,tau=48", "thinkv: g=24: .*group=24.*a group has 16, 32, 64, 128"),
        ("tbe:budget=64,block=6", "tbe: block=6; .*a power of two"),
        ("thinkv:budget=64,sparsity_rows=1025", "sparsity_rows=1025; .*: choose at most 1,024"),
        ("thinkv:budget=64,layers=1/2", "layers=1/2 without thresholds: they belong together"),
        ("tbq:thresholds=0.1/0.2", "tbq: thresholds=0.1/0.2 without layers: they belong together"),
        ("thinkv:budget=64,layers=1,thresholds=0.5", "3 types need 2 ascending thresholds"),
        ("thinkv:budget=64,types=1,thresholds=0.5", "nothing to tell with types=1: drop thresholds=0.5"),
        ("thinkv:budget=64,tau=4294967296", "tau=4294967296; it must be from 1 to 1,073,741,824"),
        ("thinkv:budget=64,retention=99999999999999999999/4", "from 1,073,741,824 or less"),
        ("thinkv:budget=64,four=fp32", "four=fp32: four is nvfp4 or int4s or tq4"),
        ("thinkv:budget=64,four=tq4,key_axis=channel", "with tq4 a head of one token has one: use key_axis=token"),
        (
            "thinkv:budget=64,layers=1,thresholds=0.6/0.5",
            "ascending, and there are 0.6, 0.5: give thresholds=0.5/0.6",
        ),
        ("thinkv:budget=64,layers=1,thresholds=nan/nan", "ascending"),
        ("thinkv:budget=64,v_precision=R4E4T0", "drops values of transitions and precision=R4E4T2 keeps their keys"),
        ("tbq:precision=R4E4T0", "tbq keeps every token, and precision=R4E4T0 drops transitions: use thinkv, or T2"),
        ("tbq:budget=64", "no hyperparameter 'budget'"),
        ("tbe:budget=64,precision=R4E4T2", "no hyperparameter 'precision'"),
        ("thinkv", "needs a budget"),
    ],
)
def test_nonsense_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_what_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match="knows no thresholds"):
        followed(parse("thinkv:budget=64"), [4], 1, decoder=WIDE)
    with pytest.raises(UsageError, match="layer 7 is measured, and the model has 2"):
        followed(parse("thinkv:budget=64,layers=0/7,thresholds=0.1/0.2"), [4], 1, decoder=WIDE)
    odd = random_decoder(example_config(hidden_size=8, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=24))
    with pytest.raises(UsageError, match="does not divide a head of 24 channels"):
        followed(parse("thinkv:budget=64,types=1"), [4], 1, decoder=odd)
    with pytest.raises(UsageError, match="prompt of 40 and 21 tokens beside it: give at least 61"):
        followed(parse("thinkv:budget=60,types=1"), [40], 1, decoder=WIDE)
