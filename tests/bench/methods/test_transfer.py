"""The lists of cells that are compared on several models.

To run it alone: pytest tests/bench/methods/test_transfer.py
"""

from __future__ import annotations

from minithink.bench.methods import transfer as lists
from minithink.policies import POLICIES


def test_every_policy_is_compared_with_equally_many_tries() -> None:
    assert {len(texts) for texts in lists.TRIES.values()} == {3}
    assert all(len(set(texts)) == 3 for texts in lists.TRIES.values())
    assert set(lists.CHOSEN) == set(lists.TRIES)
    assert all(lists.CHOSEN[name] in lists.TRIES[name] for name in lists.TRIES)
    compared = {text.partition("+")[0].partition(":")[0] for text in lists.ALL}
    recorded = {name for name in POLICIES if name.endswith("_oracle")}
    of_prompts = {"snapkv"}
    assert compared == set(POLICIES) - recorded - of_prompts - {"full"}


def test_policies_of_few_bits_have_the_settings_of_their_parts() -> None:
    for name in ("rkv", "random_attention"):
        assert f"{lists.CHOSEN[name]}+quant:fmt=nvfp4" in lists.ALL
    chosen = (lists.CHOSEN[name] for name in ("thinkv:types=1", "kivi", "kivi:bits=4", "crystal_kv"))
    others = ("tbq:precision=R4E4T4", "crystal_kv", "crystal_kv:birth=0")
    assert {*chosen, *others} <= set(lists.ALL)


def test_the_order_is_of_policies_that_evict() -> None:
    """One text of each, and all of them are run."""
    ranked = lists.TRANSFERS["transfer"].ranked
    assert set(ranked.values()) <= set(lists.ALL)
    assert len(set(ranked.values())) == len(ranked)
    assert not set(ranked) & set(lists.KEEPING)
