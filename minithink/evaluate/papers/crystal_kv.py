"""Tables of Crystal-KV (Wang et al.).

Section 6.1 has what all share: temperature 0.6, top-p 0.95, k = 8 answers a problem; CodeForces (below a rating of
1500) and MATH-500. Budgets are shares of what the full cache holds. The paper has one table; its accuracies are in
figures, whose axes are not in the text.
"""

from __future__ import annotations

from minithink.evaluate.papers.table import R1_LLAMA_8B, R1_QWEN_14B, R1_QWEN_32B, Column, Row, Table

PAPER = "Crystal-KV"
TEMPERATURE = 0.6
TOP_P = 0.95
SAMPLES = 8
NEW_TOKENS = 32_768  # the paper names no limit

LETTER = "damping=1"  # algorithm 2 as it is written
CRYSTAL_KV = f"crystal_kv:{LETTER}"
FULL = Row("FullKV", "full")

LIMIT = "The paper names no limit of new tokens: 32,768 is ours."
COMMON = (
    "Shares are of what the full cache generates on average over all problems, beside the prompt; the paper's are of "
    "each question's use.",
    f"Budgets move as algorithm 2 is written ({LETTER}), every 128 tokens; the paper says only that they do "
    "periodically. minithink's own default is damping=0.5.",
    LIMIT,
)
BASELINES = (
    "The paper gives no settings of its baselines: SnapKV and Ada-SnapKV gather 128 tokens before they evict, as "
    "R-KV does, and all others have minithink's defaults.",
)

_OF_FIGURE_4 = (
    FULL,
    Row("StreamingLLM", "streaming_llm"),
    Row("H2O", "h2o"),
    Row("R-KV", "rkv"),
    Row("Fixed-SnapKV", "snapkv_decode"),
    Row("Ada-SnapKV", "ada_snapkv"),
    Row("RaaS", "raas"),
    Row("Crystal-KV Lite", "crystal_kv_lite"),
    Row("Crystal-KV", CRYSTAL_KV),
)


def _heat() -> tuple[Row, ...]:
    """The 55 points of figure 5."""
    rows = []
    for p in (0.5, 0.6, 0.7, 0.8, 0.9):
        for tenths in range(11):
            lam = tenths / 10
            rows.append(Row(f"λ={lam:g} p={p:g}", f"crystal_kv:lam={lam:g},p={p:g},{LETTER}"))
    return tuple(rows)


def _columns(*datasets: str, rows: tuple[Row, ...], budgets: tuple[int | float, ...]) -> tuple[Column, ...]:
    columns = []
    for dataset in datasets:
        column = Column(dataset=dataset, rows=rows, budgets=budgets, max_new_tokens=NEW_TOKENS)
        columns.append(column)
    return tuple(columns)


TABLES = {
    "crystal_kv-table1": Table(
        paper=PAPER,
        place="table I",
        shows="memory at 1,024 tokens and at a tenth (batches and throughput are not measured here)",
        models=(R1_LLAMA_8B,),
        columns=_columns("CodeForces", rows=(FULL, Row("Crystal-KV", CRYSTAL_KV)), budgets=(1024, 0.1)),
        samples=SAMPLES,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        differs=(*COMMON, "The paper generates 9,350 and 18,700 tokens; here a text ends where the model ends it."),
    ),
    "crystal_kv-figure4": Table(
        paper=PAPER,
        place="figure 4",
        shows="accuracy by budget beside StreamingLLM, H2O, R-KV, SnapKV, Ada-SnapKV and RaaS",
        models=(R1_LLAMA_8B, R1_QWEN_14B, R1_QWEN_32B),
        columns=_columns("MATH-500", "CodeForces", rows=_OF_FIGURE_4, budgets=(0.1, 0.2, 0.3, 0.4, 0.5)),
        samples=SAMPLES,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        differs=(
            *COMMON,
            *BASELINES,
            "The axis of figure 4 is not in the text, which names 10 %: the other shares are ours.",
        ),
    ),
    "crystal_kv-figure5": Table(
        paper=PAPER,
        place="figure 5",
        shows="the decay λ and the attention share p of a hit, 55 points",
        models=(R1_LLAMA_8B, R1_QWEN_14B, R1_QWEN_32B),
        columns=_columns("MATH-500", "CodeForces", rows=_heat(), budgets=(0.1,)),
        samples=SAMPLES,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        differs=(*COMMON, "Figure 5 names neither model nor budget: the share is the 10 % of §1."),
    ),
}
