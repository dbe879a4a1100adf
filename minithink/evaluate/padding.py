"""Batch grouping, and the budget that padding costs (SkipKV §4.3).

An engine that pads the prompts of a batch to one length keeps the padding in its cache. Of its budget B a sequence
then has only what the padding leaves, the valid budget (eq. 12):

    B' = B − (N_max − N_p)      N_p: tokens of the prompt; N_max: of the longest prompt in the batch

Batches of prompts of similar length have less padding. The cache of this project has no padding, so B' = B in any
batch. `padded_budgets` only charges the padding, to reproduce and compare.
"""

from __future__ import annotations

from collections.abc import Sequence

from minithink.errors import UsageError
from minithink.kv.contract import Policy, name_of
from minithink.sequence import Track


def group_by_length(lengths: Sequence[int], batch_size: int) -> tuple[list[list[int]], list[int]]:
    """Sort prompts by increasing length, and cut them into batches.

    Args:
        lengths: tokens of each prompt; equal ones stay in their order.
        batch_size: sequences of a batch; the last batch may be smaller.

    Returns:
        The batches, as indices into `lengths`; and the inverse permutation: prompt i stands at inverse[i] when all
        batches are put one after the other.

    Raises:
        UsageError: the batch size is below 1.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    inverse = [0] * len(order)
    for place, i in enumerate(order):
        inverse[i] = place
    return cut(order, batch_size), inverse


def cut(order: Sequence[int], batch_size: int) -> list[list[int]]:
    """Cut indices into batches. UsageError: the batch size is below 1."""
    if batch_size < 1:
        raise UsageError(f"A batch of {batch_size} sequences makes no sense: give 1 or more.")
    return [list(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]


def padded_budgets(lengths: Sequence[int], budgets: Sequence[int], batch_size: int, group: bool) -> list[int]:
    """The valid budget B' of each sequence (eq. 12).

    Args:
        lengths: tokens of each prompt.
        budgets: B of each sequence, in tokens, as many as lengths.
        batch_size: sequences of a padded batch.
        group: whether prompts are sorted by length before they are cut into batches; if not, they are in their order.

    Returns:
        Tokens, in the order of the prompts; 0 or less where the padding is as long as the budget.

    Raises:
        UsageError: the batch size is below 1.
    """
    batches = group_by_length(lengths, batch_size)[0] if group else cut(range(len(lengths)), batch_size)
    out = list(budgets)
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        for i in batch:
            out[i] -= longest - lengths[i]
    return out


def charge(sequences: Sequence[Track], policy: Policy, batch_size: int, group: bool) -> None:
    """Take the padding off the budget of each sequence. A sequence keeps at least what its policy needs.

    Args:
        sequences: of a stream that has not begun. Each pays from its own budget, or the policy's if it has none.
        policy: under which they run.
        batch_size, group: as in `padded_budgets`.

    Raises:
        UsageError: the policy has no budget.
    """
    if policy.budget is None:
        raise UsageError(f"padded_budget charges a budget, and the policy {name_of(policy)} has none: leave it out.")
    lengths = [len(s.prompt) for s in sequences]
    own = [policy.budget if s.budget is None else s.budget for s in sequences]
    left = padded_budgets(lengths, own, batch_size, group)
    for s, whole, budget in zip(sequences, own, left, strict=True):
        stays = len(s.prompt) if policy.cap is None else min(len(s.prompt), policy.cap)
        protected = stays if policy.protect_prompt else 0
        s.budget = min(whole, max(budget, protected + policy.beside))
