"""SEAL: where it steers, how strongly, and beside a policy that evicts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.calibrate.steering import Sums
from minithink.errors import UsageError
from minithink.kv.contract import Shape
from minithink.kv.stack import Stack
from minithink.policies import parse
from minithink.policies.rkv import Rkv
from minithink.policies.seal import Seal
from minithink.text.openings import Thought
from tests.compare import assert_close, assert_same
from tests.kv import run
from tests.kv.run import BYTES, Known, Spy, feed, kept, manager_for, text_of
from tests.policies.test_laws import CLOSE, OPEN, decoder_of

torch.set_num_threads(1)
WORD, END, PARAGRAPH = 6, 13, 10  # tokens, see `BYTES`; none of them opens or closes the thinking


def test_it_steers_at_blank_lines_of_the_thinking() -> None:
    """By α·V after its layer; at="every" at each token. Prompts, answers and other layers stay as they are."""
    text = [WORD, PARAGRAPH, END, PARAGRAPH, WORD, CLOSE, PARAGRAPH, WORD, OPEN, PARAGRAPH]
    thinks = [True, True, True, True, True, False, False, False, True, True]
    blank = [False, True, False, True, False, False, False, False, False, True]
    assert [b"\n\n" in BYTES[t % 6] for t in text] == [i or t == 10 for i, t in zip(blank, text, strict=True)]
    for at, where in (("boundary", blank), ("every", thinks)):
        decoder = decoder_of(0)
        policy = Seal(at=at, alpha_0=-0.5, layer=1)  # type: ignore[arg-type]
        manager = manager_for(decoder, policy, think_ids=(OPEN, CLOSE))
        spy = Spy(manager)
        for seq in (0, 1):
            manager.join(seq, 60, 3)
            feed(decoder, manager, {seq: [WORD, PARAGRAPH, PARAGRAPH]}, spy)
        for token in text:
            feed(decoder, manager, {1: [WORD], 0: [token]}, spy)
        assert policy._v is not None
        for layer in (0, 1, -1):
            added = spy.get("after", 0, layer) - spy.get("before", 0, layer)
            want = torch.tensor([[0.0]] * 3 + [[float(x and layer == 1)] for x in where]) * -0.5 * policy._v
            assert_close(f"{at}, layer {layer}", added, want, atol=1e-5)
            if at == "boundary":
                assert_same("a neighbour", spy.get("after", 1, layer), spy.get("before", 1, layer))


def test_a_blank_line_may_be_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in GPT-2's and SmolLM2's vocabularies. Another row's line break, or that of an earlier sequence, is not its
    first half."""
    monkeypatch.setattr(run, "BYTES", (b" x", b".\n", b"\n", b" y", b"z\n\n", b"\nw"))
    word, end, newline, blank, behind = 12, 13, 14, 16, 17  # none of them opens or closes the thinking
    text = [newline, word, end, newline, newline, word, newline, end, behind, word, blank, word, end]
    lines = [False, False, False, True, True, False, False, False, True, False, True, False, False]
    decoder = decoder_of(0)
    policy = Seal(layer=1)
    manager = manager_for(decoder, policy, think_ids=(OPEN, CLOSE))
    for seq in (0, 1):
        manager.join(seq, 60, 1)
        feed(decoder, manager, {seq: [word]})
    for again in range(2):
        spy = Spy(manager)
        for token in text:
            feed(decoder, manager, {1: [newline], 0: [token]}, spy)
        added = spy.get("after", 0, 1) - spy.get("before", 0, 1)
        assert (added.abs().amax(-1) > 0).tolist() == lines
        assert (spy.get("after", 1, 1) - spy.get("before", 1, 1)).abs().amax(-1).count_nonzero() >= len(text) - 1
        if not again:
            manager.leave(0)
            manager.join(0, 60, 1)
            feed(decoder, manager, {0: [word]})


def test_seals_example() -> None:
    """V = execution − others = (−1, 0); SEAL's coefficient −1 of the opposite vector moves (.5, .5) to (−.5, .5)."""
    sums = Sums()
    for other, state in ((True, (1.0, 2.0)), (True, (3.0, 0.0)), (False, (0.0, 1.0)), (False, (2.0, 1.0))):
        sums.add(Thought(0, other, "execution"), torch.tensor([state]))
    vectors = sums.vectors()
    assert vectors["plain"].tolist() == [[-1, 0]]
    policy = Seal(at="every")
    policy.bind(Known(values=vectors | {"layer": 0}))
    policy.setup(Shape(1, 1, 1, 1, 2, 2, "head", torch.device("cpu"), 20))
    on = torch.ones(1, dtype=torch.bool)
    step: Any = SimpleNamespace(row=torch.tensor([0]), active=on, thinking=on)
    assert policy.steer(step, 0, torch.tensor([[0.5, 0.5]])).tolist() == [[-0.5, 0.5]]


def test_the_sum_is_rounded_once() -> None:
    """Of states in bfloat16: 1 and a little more than half of its last place are the next number. A vector that is
    rounded first is half of it, which goes to the even number, 1."""
    policy = Seal(at="every")
    policy.bind(Known(values={"plain": torch.tensor([[2**-8 * 1.003, 0.0]]), "layer": 0}))
    policy.setup(Shape(1, 1, 1, 1, 2, 2, "head", torch.device("cpu"), 20))
    on = torch.ones(1, dtype=torch.bool)
    step: Any = SimpleNamespace(row=torch.tensor([0]), active=on, thinking=on)
    found = policy.steer(step, 0, torch.ones(1, 2, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[1 + 2**-7, 1]]


def test_the_defaults_are_seals() -> None:
    assert (Seal().alpha_0, Seal().at, Seal().vector, Seal().layer) == (1, "boundary", "plain", None)


def test_vector_and_layer_are_chosen() -> None:
    """`matched` is the other vector of the file; without a layer it is the file's."""
    values = {"plain": torch.tensor([[1.0], [2.0]]), "matched": torch.tensor([[3.0], [4.0]]), "layer": 1}
    both = {"layer": 0, "vector": "matched"}
    for options, layer, v in (({}, 1, 2.0), ({"vector": "matched"}, 1, 4.0), ({"layer": 0}, 0, 1.0), (both, 0, 3.0)):
        policy = Seal(at="every", **options)  # type: ignore[arg-type]
        policy.bind(Known(values=values))
        policy.setup(Shape(2, 1, 1, 1, 2, 1, "head", torch.device("cpu"), 20))
        on = torch.ones(1, dtype=torch.bool)
        step: Any = SimpleNamespace(row=torch.tensor([0]), active=on, thinking=on)
        added = [float(policy.steer(step, i, torch.zeros(1, 1))) for i in (0, 1, -1)]
        assert added == [v * (i == layer) for i in (0, 1, -1)]


def test_tokens_that_the_tokenizer_lacks_are_no_blank_lines() -> None:
    """A model's vocabulary may be larger than its tokenizer's; −1 stands for no token."""
    policy = Seal()
    # the last token is a blank line, so −1 must not count from the end
    policy.bind(Known(vocabulary=[b"x", b"\n\n"], values={"plain": torch.ones(1, 2), "layer": 0}))
    policy.setup(Shape(1, 4, 1, 1, 2, 2, "head", torch.device("cpu"), 20))
    on = torch.ones(4, dtype=torch.bool)
    step: Any = SimpleNamespace(row=torch.arange(4), active=on, thinking=on, tokens=torch.tensor([1, -1, 2, 0]))
    assert policy.steer(step, 0, torch.zeros(4, 2)).tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_beside_a_policy_that_evicts() -> None:
    """Strength 0 is R-KV, bit for bit; another strength is not. Evictions are R-KV's own, of what it then sees."""
    decoder, rkv = decoder_of(0), "rkv:budget=14,buffer=4,alpha=3"
    found: list[tuple[Tensor, list[list[int]]]] = []
    for text in (rkv, f"seal:alpha_0=0+{rkv}", f"seal:alpha_0=3,at=every+{rkv}"):
        manager = manager_for(decoder, parse(text), tokens=60)
        manager.join(0, 60, 5)
        out = [feed(decoder, manager, {0: text_of(decoder.config, 5, 1)})[0][-1]]
        out += [feed(decoder, manager, {0: [t]})[0][0] for t in text_of(decoder.config, 30, 2)]
        found.append((torch.stack(out), kept(manager, 0)))
        assert all(14 <= len(lane) < 18 for lane in found[-1][1])
    assert_same("logits", found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not torch.equal(found[0][0], found[2][0])


def test_a_stack_is_captured_if_both_can_be() -> None:
    class Asking(Seal):
        """Not capturable: it does not say so."""

    decoder = decoder_of(0)
    for steering, captured in ((Seal(), True), (Asking(), False)):
        manager = manager_for(decoder, Stack([steering, Rkv(budget=14)]), columns="fit")
        assert manager.capturable == captured
        assert manager.policy.capturable, "its decisions are R-KV's"


def test_what_it_needs_is_said() -> None:
    shape = Shape(2, 1, 1, 1, 2, 4, "head", torch.device("cpu"), 20)
    policy = Seal()
    with pytest.raises(UsageError, match="seal knows no steering vector"):
        policy.setup(shape)
    policy._v = torch.zeros(4)
    with pytest.raises(UsageError, match="seal reads the text, and there is no tokenizer"):
        policy.setup(shape)
    policy.bind(Known(vocabulary=BYTES, values={"plain": torch.zeros(2, 4), "layer": 0}))
    policy.setup(shape)
    assert Seal(alpha_0=0).calibration == ""


@pytest.mark.parametrize("strength", [float("inf"), float("nan"), 1e18, -1e18, 100.5])
def test_a_strength_that_leaves_nothing_of_the_model_is_refused(strength: float) -> None:
    with pytest.raises(UsageError, match=rf"alpha_0 is {re.escape(f'{strength:g}')}; it must be from -100 to 100"):
        Seal(alpha_0=strength)
    assert Seal(alpha_0=-100.0).steers


@pytest.mark.parametrize("text", ["seal+skipkv", "skipkv:gamma=0+seal:at=every"])
def test_two_policies_that_steer_are_refused(text: str) -> None:
    """Unless one of them steers nothing."""
    with pytest.raises(UsageError, match=r"both steer the model, and their vectors would be added: leave one out"):
        parse(text, budget=64)
    for one in ("seal+skipkv:steering=false", "seal:alpha_0=0+skipkv", "seal+rkv"):
        assert parse(one, budget=64).name == "+".join(part.partition(":")[0] for part in one.split("+"))
