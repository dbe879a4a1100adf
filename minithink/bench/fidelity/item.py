"""A row of docs/fidelity.md, and the words of its verdict."""

from __future__ import annotations

from dataclasses import dataclass

# Verdict → what it means, in the order in which rows of a table stand.
VERDICTS = {
    "contradicts here": "measured, and something else was found than in the paper; on small models",
    "differs by choice": "done in another way on purpose; the row says how, and which option is the paper's way",
    "partial": "a part is built, measured or found; the row says which",
    "missing": "not built, or built and not measured",
    "cannot be tested here": "needs models, data or machines that are not here, or what small models cannot show",
    "agrees": "done as the paper says, or in one reading of what it leaves open; or found as in the paper",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One equation, algorithm, table, figure or setting of a paper, or one baseline.

    A text or a tuple that is empty is shown as a dash. A test checks that everything that is named exists, and that
    each number in `here`, other than in code, stands in a page that `shown` names; another one that most of ThinKV's
    are those of the results.
    """

    of: str  # its place in the paper, a colon, what it says
    verdict: str  # of VERDICTS
    code: tuple[str, ...] = ()  # below the package, as in ref.lrfu:hit_set
    tests: tuple[str, ...] = ()  # below tests/, as in ref/test_lrfu.py:test_by_hand
    shown: tuple[str, ...] = ()  # pages with anchors, and pictures, as seen from docs/
    runs: tuple[str, ...] = ()  # tables of `python -m minithink.evaluate paper`
    paper: str = ""  # what the paper says or does
    authors: str = ""  # what the authors' code does
    here: str = ""  # what is done or was found here


@dataclass(frozen=True)
class Paper:
    """The rows of a paper, and how many things it numbers. A test checks that each of them is named in a row."""

    name: str
    items: tuple[Item, ...]
    figures: int = 0
    tables: int = 0
    equations: int = 0
    algorithms: int = 0
    heading: str = "of the paper"  # of the first column

    def ordered(self) -> list[Item]:
        """The rows by verdict, and of equal verdicts in the order of the paper."""
        order = [*VERDICTS]
        return sorted(self.items, key=lambda item: order.index(item.verdict))
