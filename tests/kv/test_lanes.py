"""Room for the tokens of one sequence in the plain manager. To run it alone: pytest tests/kv/test_lanes.py"""

from __future__ import annotations

import pytest
import torch

from minithink.kv.contract import Shape, Storage
from minithink.kv.lanes import FIRST_COLUMNS, Lanes
from minithink.kv.plain import most_bytes
from minithink.policies import parse
from tests.kv.test_plain import TOKENS, feed, plain, text_of
from tests.policies.test_laws import decoder_of

torch.set_num_threads(1)


def test_full_columns_can_be_quantized() -> None:
    """Quantizing writes empty places to a column behind the last token, which must be there."""
    shape = Shape(
        layers=1,
        rows=1,
        kv_heads=2,
        query_heads=2,
        head_dim=16,
        hidden=8,
        scope="head",
        device=torch.device("cpu"),
    )
    lanes = Lanes(shape, Storage(thoughts=("int8",)), torch.float32)
    lanes.append(FIRST_COLUMNS)
    numbers = torch.randn(FIRST_COLUMNS, 2, 16)
    lanes.write(0, numbers, numbers)
    lanes.settle()
    assert bool((lanes.formats() == 1).all())
    assert torch.allclose(lanes.keys(0), numbers.transpose(0, 1), atol=0.1)


@pytest.mark.parametrize("text", ["full", "window:budget=12", "pm_kvq"])
def test_lanes_take_no_more_than_is_foretold(text: str) -> None:
    """Numbers that shrink bit by bit lie there twice."""
    decoder = decoder_of(0)
    cache = plain(decoder, parse(text))
    cache.join(0, TOKENS, 9)
    words = text_of(decoder.config, TOKENS, 9)
    foretold = most_bytes(decoder.config, cache.policy, torch.float32, rows=1, tokens=39, prompt=9)
    start = 0
    for count in (9, *[1] * 30):
        feed(decoder, cache, {0: words[start : start + count]})
        start += count
    lanes = cache.sequences[0].lanes
    taken = sum(x.nbytes for x in (lanes.k, lanes.v, lanes.exact_k, lanes.exact_v))
    full = 2 * FIRST_COLUMNS * decoder.config.kv_bytes_per_token(4)
    assert taken == (full if text == "pm_kvq" else full // 2)
    assert taken <= foretold
