"""Which layers and thresholds follow from modes, and what takes their place where there are none."""

from __future__ import annotations

import pytest
import torch

from minithink.calibrate.choose import by_modes, choose, look, quantiles, ranked
from minithink.policies.thinkv import type_of
from minithink.reread.density import Peaks
from minithink.results.files import rounded
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION

FLAT = Peaks([0.5], [], [])


def three(low: float, high: float, depth: float = 0.5) -> Peaks:
    return Peaks([low - 0.1, low + 0.05, high + 0.1], [low, high], [depth, 0.9])


def test_layers_that_have_the_modes_for_every_prompt_are_chosen() -> None:
    prompts = [
        [three(0.2, 0.6), FLAT, three(0.3, 0.7), three(0.5, 0.8)],
        [three(0.4, 0.8), three(0.9, 0.95), three(0.5, 0.7), FLAT],
    ]
    how, layers, theta = by_modes(prompts, 3, 4) or pytest.fail("nothing chosen")
    assert (how, layers) == ("every", [0, 2])
    assert theta == pytest.approx([(0.2 + 0.4 + 0.3 + 0.5) / 4, (0.6 + 0.8 + 0.7 + 0.7) / 4])


def test_of_too_many_layers_the_deepest_valleys_stay() -> None:
    """A layer is as deep as its shallowest valley is, on average over the prompts."""
    depths = [[0.3, 0.2], [0.1, 0.1], [0.1, 0.5], [0.8, 0.0]]
    prompts = [[three(0.1 * i + 0.2, 0.9, of[p]) for i, of in enumerate(depths)] for p in range(2)]
    how, layers, theta = by_modes(prompts, 3, 2) or pytest.fail("nothing chosen")
    assert (how, layers) == ("every", [2, 3])
    assert theta == pytest.approx([(0.4 + 0.5) / 2, 0.9])


def test_without_such_a_layer_those_with_the_modes_for_most_prompts_are_chosen() -> None:
    a, b = three(0.2, 0.6), three(0.4, 0.8)
    prompts = [[a, FLAT, FLAT, b], [b, a, FLAT, b], [FLAT, FLAT, b, b], [a, FLAT, a, FLAT]]
    how, layers, theta = by_modes(prompts, 3, 4) or pytest.fail("nothing chosen")
    assert (how, layers) == ("most", [0, 3]), "half of the prompts, as in layer 2, is not most"
    assert theta == pytest.approx([(0.2 + 0.4 + 0.2 + 3 * 0.4) / 6, (0.6 + 0.8 + 0.6 + 3 * 0.8) / 6])
    assert [x.share for x in look(prompts, 3)] == [0.75, 0.25, 0.5, 0.75]
    how, layers, _ = by_modes(prompts, 3, 1) or pytest.fail("nothing chosen")
    assert layers == [0], "of equals the first"
    deep = three(0.2, 0.6, 0.9)
    prompts = [[a, deep], [a, deep], [a, FLAT]]
    assert (by_modes(prompts, 3, 1) or pytest.fail("nothing chosen"))[:2] == ("every", [0])
    prompts.append([FLAT, FLAT])
    prompts.append([FLAT, deep])  # 3 of 5 prompts each
    prompts.append([a, deep])
    prompts.append([a, FLAT])  # 5 and 4 of 7
    assert (by_modes(prompts, 3, 1) or pytest.fail("nothing chosen"))[:2] == ("most", [1]), "deeper, in fewer prompts"
    assert [x.layer for x in ranked(look(prompts, 3))] == [0, 1], "in more prompts goes before deeper in a fallback"


def test_every_prompt_is_every_one_of_a_hundred() -> None:
    """Algorithm 1; and a prompt that has more modes than there are types has no say in the thresholds."""
    a, more = three(0.2, 0.6), Peaks([0.1, 0.3, 0.5, 0.7], [0.15, 0.35, 0.65], [0.5, 0.5, 0.5])
    prompts = [[a, a] for _ in range(99)] + [[a, more]]
    assert (by_modes(prompts, 3, 4) or pytest.fail("nothing chosen"))[:2] == ("every", [0])
    prompts = [[more, a] for _ in range(2)] + [[a, more] for _ in range(3)]
    how, layers, theta = by_modes(prompts, 3, 4) or pytest.fail("nothing chosen")
    assert (how, layers) == ("most", [0])
    assert theta == pytest.approx([0.2, 0.6])


def test_no_layer_is_chosen_where_none_has_the_modes_for_most() -> None:
    prompts = [[three(0.2, 0.6), FLAT], [FLAT, FLAT]]
    assert by_modes(prompts, 3, 4) is None
    first = look(prompts, 3)[0]
    assert (first.share, first.depth, first.valleys) == (0.5, 0.5, (0.2, 0.6))
    assert [x.layer for x in ranked(look(prompts, 3))] == [0, 1]


def test_two_types_need_two_modes() -> None:
    two = Peaks([0.2, 0.8], [0.4], [0.7])
    assert by_modes([[two, three(0.2, 0.6)]], 2, 4) == ("every", [0], [0.4])


def test_quantiles_give_the_types_their_shares() -> None:
    x = torch.rand(2001, generator=torch.Generator().manual_seed(0))
    shares = type_of(x, quantiles(x, 3)).bincount().double() / len(x)
    torch.testing.assert_close(
        shares[[EXECUTION, REASONING, TRANSITION]], torch.tensor([0.35, 0.35, 0.3]).double(), atol=2e-3, rtol=0
    )
    assert quantiles(x, 2) == quantiles(x, 3)[:1]


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_fallback_takes_as_many_layers_as_were_asked_for(count: int) -> None:
    """Of equals the first; types have the shares of the fallback, and thresholds are as the file has them."""
    refresh = torch.rand(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how, layers, theta = choose([[FLAT] * 6] * 3, refresh, 3, count)
    assert (how, layers) == ("fallback", list(range(count)))
    assert theta == rounded(theta)
    shares = [float((refresh[:, :count].mean(1) < t).double().mean()) for t in theta]
    assert shares == pytest.approx([0.35, 0.7], abs=0.01)


def test_where_modes_choose_there_is_no_fallback() -> None:
    refresh = torch.rand(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert choose([[FLAT, three(0.25, 0.625)]], refresh, 3, 2) == ("every", [1], [0.25, 0.625])
