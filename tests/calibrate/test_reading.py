"""What is measured when a text is read again is what the policy measures when it decodes."""

from __future__ import annotations

import pytest
import torch

from minithink.calibrate import reading
from minithink.calibrate.reading import averaged, types
from minithink.engine import Engine, load
from minithink.policies import parse
from minithink.policies.thinkv import type_of
from minithink.reread.attention import sparsity
from minithink.tasks import load_problems

torch.set_num_threads(1)
NEW = 40


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return load(None, device="cpu")


@pytest.fixture(scope="module")
def text(tiny: Engine) -> tuple[list[int], list[int]]:
    prompt = tiny.prompt_ids(load_problems("validation")[0].question)[-70:]
    [result] = tiny.generate([prompt], max_new_tokens=NEW, temperature=0)
    return prompt, result.token_ids


@pytest.mark.parametrize("rows", [1, 5])
def test_the_policy_sees_the_same(tiny: Engine, text: tuple[list[int], list[int]], rows: int) -> None:
    """Where nothing is evicted, types follow from the second reading; thresholds between the values that occur."""
    prompt, generated = text
    found = sparsity(tiny.loaded, [*prompt, *generated[:-1]], len(prompt) - rows)
    u = averaged(found, rows, NEW)[::8][:, [0, 7]].mean(1)
    low, high = u.sort().values[[1, 3]] - 1e-3
    theta = f"layers=0/7,thresholds={low:.6f}/{high:.6f}"
    want = type_of(u, [float(low), float(high)]).tolist()
    assert len(set(want)) == 3
    policy = parse(f"tbe:tau=8,sparsity_rows={rows},{theta}", budget=999)
    assert types(tiny, policy, prompt, generated[:-1]) == want


def test_a_long_prompt_is_read_in_chunks(
    tiny: Engine, text: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "tbe:tau=8,layers=1,thresholds=0.3/0.5"
    want = types(tiny, parse(policy, budget=999), *text)
    monkeypatch.setattr(reading, "PREFILL_CHUNK", 16)
    assert types(tiny, parse(policy, budget=999), *text) == want


def test_averages_are_over_the_queries_that_there_are() -> None:
    u = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert averaged(u, 1, 3).flatten().tolist() == [2, 4, 8]
    assert averaged(u, 2, 3).flatten().tolist() == [1.5, 3, 6]
    assert averaged(u, 9, 2).flatten().tolist() == pytest.approx([7 / 3, 15 / 4])
