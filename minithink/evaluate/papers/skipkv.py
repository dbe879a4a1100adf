"""Tables of SkipKV (Tian et al. 2025).

Section 5.1 and A.2 have what all tables share: at most 8,192 new tokens on GSM8K and MATH-500, 16,384 on AIME-24,
10,000 on LiveCodeBench; batches of 10; eviction every 128 steps; σ = 0.1, τ from 0.95 to 0.99, α_0 = 1 or 1.25,
γ = 0.02.
"""

from __future__ import annotations

from collections.abc import Sequence

from minithink.evaluate.papers.table import R1_LLAMA_8B, R1_QWEN_7B, R1_QWEN_14B, Column, Numbers, Row, Table

PAPER = "SkipKV"
NEW_TOKENS = {"GSM8K": 8192, "MATH-500": 8192, "AIME24": 16_384, "LiveCodeBench": 10_000}  # §5.1
BATCH = 10  # §5.1

# SkipKV builds on R-KV, which keeps no prompt; the paper says nothing of prompts.
SKIPKV = "skipkv:protect_prompt=false"
FULL = Row("FullKV", "full")
RKV = Row("R-KV", "rkv")
H2O = Row("H2O", "h2o:schedule=interval:128")  # "we compress and update KV cache every 128 decoding steps" (A.2)

COMMON = (
    "The paper names neither the samples of a problem nor how tokens are drawn: here it is one sample, drawn as the "
    "model's generation_config.json says.",
    "SkipKV's score is that of its released code (R-KV's importance and redundancy); τ is 0.95 and α_0 is 1, of the "
    "values that A.2 names.",
    "The paper steers after layer 20 (R1-Qwen-7B, R1-Llama-8B) or 35 (R1-Qwen-14B); here the model's calibration "
    "names the layer.",
)
NO_PADDING = "minithink pads no prompts, so a budget is whole in any batch."

_OF_TABLE_1 = (FULL, Row("SEAL", "seal"), RKV, Row("SkipKV (ours)", SKIPKV))
_OF_TABLE_2 = (
    FULL,
    RKV,
    Row("+ Sentence Scoring", f"{SKIPKV},steering=false"),
    Row("+ Adaptive Steering", SKIPKV),
)
_OF_FIGURE_9 = (FULL, H2O, RKV, Row("SkipKV", SKIPKV))


def _by_budget(row: str, budgets: Sequence[int], percents: Sequence[float]) -> Numbers:
    """What the paper reports of a row, in the order of the budgets."""
    return {(row, budget): percent for budget, percent in zip(budgets, percents, strict=True)}


# Right answers, by budget: of AIME24 in table 2, of MATH-500 in table 3.
_OF_2 = (2220, 3072, 4096)
_IN_TABLE_2 = {
    ("FullKV", None): 46.7,
    **_by_budget("R-KV", _OF_2, (36.7, 33.3, 36.7)),
    **_by_budget("+ Sentence Scoring", _OF_2, (40.0, 36.7, 40.0)),
    **_by_budget("+ Adaptive Steering", _OF_2, (40.0, 43.3, 40.0)),
}
_OF_3 = (768, 1024, 1260, 1536)
_NOT_GROUPED = _by_budget("SkipKV", _OF_3, (77.8, 85.2, 85.8, 86.0))
_GROUPED = _by_budget("SkipKV", _OF_3, (83.4, 86.4, 86.0, 88.0))


def _padded(label: str, group: bool) -> Column:
    """SkipKV on MATH-500 in budgets that pay for padding (table 3)."""
    return Column(
        dataset="MATH-500",
        rows=(Row("SkipKV", SKIPKV),),
        budgets=_OF_3,
        reported={R1_QWEN_7B: _GROUPED if group else _NOT_GROUPED},
        max_new_tokens=NEW_TOKENS["MATH-500"],
        padded_budget=BATCH,
        group=group,
        label=label,
    )


def _by_share() -> tuple[Column, ...]:
    """The columns of figures 9 and 10."""
    columns = []
    for dataset in ("MATH-500", "AIME24", "LiveCodeBench"):
        column = Column(
            dataset=dataset,
            rows=_OF_FIGURE_9,
            budgets=(0.15, 0.25, 0.4, 0.5),
            max_new_tokens=NEW_TOKENS[dataset],
        )
        columns.append(column)
    return tuple(columns)


TABLES = {
    "skipkv-table1": Table(
        paper=PAPER,
        place="table 1",
        shows="tokens and accuracy with 512 tokens (minutes by batch size are not measured here)",
        models=(R1_QWEN_7B,),
        columns=(Column(dataset="GSM8K", rows=_OF_TABLE_1, budgets=(512,), max_new_tokens=NEW_TOKENS["GSM8K"]),),
        samples=None,
        differs=(*COMMON, NO_PADDING),
    ),
    "skipkv-table2": Table(
        paper=PAPER,
        place="table 2",
        shows="SkipKV's parts, one after the other",
        models=(R1_QWEN_7B,),
        columns=(
            Column(
                dataset="AIME24",
                rows=_OF_TABLE_2,
                budgets=_OF_2,
                reported={R1_QWEN_7B: _IN_TABLE_2},
                max_new_tokens=NEW_TOKENS["AIME24"],
            ),
        ),
        samples=None,
        differs=(
            *COMMON,
            f"{NO_PADDING} So the row + Batch Grouping is the row above it, and is not run; --padded-budget {BATCH} "
            "charges the padding, and --group with it groups.",
        ),
    ),
    "skipkv-table3": Table(
        paper=PAPER,
        place="table 3",
        shows="batch grouping: budgets that pay for padding, prompts in their order and sorted by length",
        models=(R1_QWEN_7B,),
        columns=(
            _padded("MATH-500-not-grouped", group=False),
            _padded("MATH-500-grouped", group=True),
        ),
        samples=None,
        differs=(*COMMON, f"{NO_PADDING} The padding of batches of {BATCH} is charged to the budgets instead."),
    ),
    "skipkv-figure9": Table(
        paper=PAPER,
        place="figures 9, 10 and 13",
        shows="accuracy and length by budget beside H2O and R-KV",
        models=(R1_QWEN_7B, R1_QWEN_14B, R1_LLAMA_8B),
        columns=_by_share(),
        samples=None,
        differs=(
            *COMMON,
            NO_PADDING,
            "The axis of the figures is not in the text: the shares here are those that §5.2 names, 15 % and "
            "compressions of 4, 2.5 and 2.",
            "A share of a budget leaves the prompt out; the paper's budgets count it.",
        ),
    ),
}
