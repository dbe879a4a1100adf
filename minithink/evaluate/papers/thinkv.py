"""Tables of ThinKV (Ramachandran et al. 2025, arXiv 2510.01290).

Section 6.1 has what all tables share: τ = 128, g = 16, R = {64, 32, 16, 8, 4}, R4E4T2, pages of 8 tokens, at most 32K
new tokens, 8 answers a problem. Section E.1: AIME is 15 problems of 2024 and 15 of 2025. Tables 2, 5 and 12 measure
speed. Table 9 needs GPT-OSS, table 11 a judge, and table 15 prompts of 16K to 32K tokens: they are not here.
"""

from __future__ import annotations

from collections.abc import Mapping

from minithink.evaluate.papers.table import CODE, R1_LLAMA_8B, R1_QWEN_14B, Column, Numbers, Row, Table

PAPER = "ThinKV"
NEW_TOKENS = 32_768  # "32K", §6.1
SAMPLES = 8  # §6.1

# The paper's letter, where the defaults of minithink differ: keys have a scale per channel (§4.2), and segments keep
# at least the last number of R (§4.3).
LETTER = "key_axis=channel,hard_budget=false"
THINKV = f"thinkv:{LETTER}"
TBQ = "tbq:key_axis=channel"
TBE = "tbe:hard_budget=false"
RKV = "rkv:buffer=0"  # table 5: R-KV evicts in 82.93 % of the steps, one token at a time
FULL = Row("FullKV", "full")

BUDGETS = (
    "The paper does not say whether a budget counts the prompt; here it does, and ThinKV always keeps the prompt. A "
    "budget that cannot hold the longest prompt is left out."
)
AIME = (
    "The paper's AIME is a draw of 15 problems of 2024 and 15 of 2025 (§E.1), which it does not list; here both "
    "years are run as a whole, each in a folder of its own."
)
AIME_DRAW = "15 problems each of AIME24 and AIME25"
LETTERS = f"ThinKV runs with {LETTER}, as the paper describes it; minithink's own defaults differ."
CALIBRATED = "The paper calibrates ThinKV on 100 prompts of s1K (§6.1); here the model's calibration decides."
ONE_BY_ONE = "R-KV runs with buffer=0, because table 5 has it evict one token in nearly every step."
COMMON = (BUDGETS, LETTERS, CALIBRATED)


def _columns(
    *datasets: str,
    rows: tuple[Row, ...],
    budgets: tuple[int, ...] = (),
    reported: Mapping[str, Numbers] | None = None,
) -> tuple[Column, ...]:
    """Columns that differ in their dataset alone. reported: of those that are graded here."""
    columns = []
    for dataset in datasets:
        column = Column(
            dataset=dataset,
            rows=rows,
            budgets=budgets,
            max_new_tokens=NEW_TOKENS,
            reported={} if dataset in CODE else reported or {},
            reported_on=AIME_DRAW if dataset in ("AIME24", "AIME25") else "",
        )
        columns.append(column)
    return tuple(columns)


# Right answers, of AIME but for table 8.
_IN_TABLE_1 = {
    R1_QWEN_14B: {
        ("Baseline", None): 53.33,
        ("KIVI", None): 40.00,
        ("PM-KVQ", None): 43.33,
        ("ThinKV", 1024): 50.00,
    },
    "QwQ-32B": {
        ("Baseline", None): 73.33,
        ("KIVI", None): 60.56,
        ("PM-KVQ", None): 67.86,
        ("ThinKV", 1024): 70.28,
    },
}
_IN_TABLE_3 = {R1_LLAMA_8B: {("FullKV", None): 50.0, ("ThinKV", 2048): 50.0}}
_IN_TABLE_8 = {
    "MobileLLM-R1-950M": {
        ("FullKV", None): 67.5,
        ("R-KV", 256): 60.8,
        ("ThinKV", 256): 60.1,
    },
}
_IN_TABLE_10 = {
    R1_LLAMA_8B: {
        ("Baseline", None): 50.0,
        ("ThinKV w/ INT", 1024): 46.7,
        ("ThinKV", 1024): 50.0,
    },
}
_IN_TABLE_14 = {
    R1_LLAMA_8B: {
        ("FullKV", None): 50.0,
        ("R-KV", 512): 40.0,
        ("R-KV", 1024): 46.7,
        ("R-KV", 2048): 50.0,
        ("ThinKV", 512): 46.7,
        ("ThinKV", 1024): 50.0,
        ("ThinKV", 2048): 50.0,
    },
}

_OF_TABLE_1 = (
    Row("Baseline", "full"),
    Row("KIVI", "kivi"),
    Row("PM-KVQ", "pm_kvq:bits=2,max_len=32768"),
    Row("ThinKV", THINKV),
)
_OF_TABLE_3 = (FULL, Row("ThinKV", THINKV))
_OF_TABLE_4 = (
    FULL,
    Row("TBQ", TBQ),
    Row("TBE", TBE, (512, 1024, 2048)),
    Row("ThinKV (TBQ+TBE)", THINKV, (1024,)),
)
_OF_TABLE_10 = (
    Row("Baseline", "full"),
    Row("ThinKV w/ INT", f"{THINKV},four=int4s,two=int2s"),
    Row("ThinKV", THINKV),
)
_OF_TABLE_14 = (FULL, Row("R-KV", RKV), Row("ThinKV", THINKV))
_OF_FIGURE_8 = (
    FULL,
    Row("H2O", "h2o"),
    Row("RaaS", "raas"),
    Row("R-KV", RKV),
    Row("LazyEviction", "lazy_eviction"),
    Row("ThinKV", THINKV),
)

TABLES = {
    "thinkv-table1": Table(
        paper=PAPER,
        place="table 1",
        shows="accuracy beside KIVI and PM-KVQ, which only quantize",
        models=(R1_QWEN_14B, "QwQ-32B"),
        columns=_columns(
            "AIME24",
            "AIME25",
            "LiveCodeBench",
            rows=_OF_TABLE_1,
            budgets=(1024,),
            reported=_IN_TABLE_1,
        ),
        samples=SAMPLES,
        differs=(
            *COMMON,
            AIME,
            "PM-KVQ ends in 2 bits (§6.2): here it has memory for 2 bits at 32,768 tokens. Table 1 gives averages, "
            "3.2 and 3.5 bits.",
        ),
    ),
    "thinkv-table3": Table(
        paper=PAPER,
        place="table 3",
        shows="accuracy with 2,048 tokens (its throughput is not measured here)",
        models=(R1_LLAMA_8B,),
        columns=_columns("AIME24", "AIME25", rows=_OF_TABLE_3, budgets=(2048,), reported=_IN_TABLE_3),
        samples=SAMPLES,
        differs=(
            *COMMON,
            AIME,
            "Table 3 names no dataset; its accuracy of FullKV, 50, is that of AIME in table 10.",
        ),
    ),
    "thinkv-table4": Table(
        paper=PAPER,
        place="table 4",
        shows="ThinKV's two halves alone, and together",
        models=("GPT-OSS-20B",),
        columns=_columns("LiveCodeBench", rows=_OF_TABLE_4),
        samples=SAMPLES,
        differs=(*COMMON, "GPT-OSS is a mixture of experts, which minithink does not load: take another model."),
    ),
    "thinkv-table8": Table(
        paper=PAPER,
        place="table 8",
        shows="a small model on GSM8K, ThinKV and R-KV with 256 tokens",
        models=("MobileLLM-R1-950M",),
        columns=_columns("GSM8K", rows=_OF_TABLE_14, budgets=(256,), reported=_IN_TABLE_8),
        samples=SAMPLES,
        differs=(
            *COMMON,
            ONE_BY_ONE,
            "The paper gives 256 tokens of about 1,500 (§E.6), and for R-KV a compression of 6, which is as many.",
        ),
    ),
    "thinkv-table10": Table(
        paper=PAPER,
        place="table 10",
        shows="NVFP4 and ternary numbers beside INT4 and INT2",
        models=(R1_LLAMA_8B,),
        columns=_columns(
            "AIME24",
            "AIME25",
            "LiveCodeBench",
            rows=_OF_TABLE_10,
            budgets=(1024,),
            reported=_IN_TABLE_10,
        ),
        samples=SAMPLES,
        differs=(*COMMON, AIME, "Table 10 names no budget; here it is that of table 1, 1,024 tokens."),
    ),
    "thinkv-table13": Table(
        paper=PAPER,
        place="table 13",
        shows="ThinKV on Qwen3-8B with thinking",
        models=("Qwen3-8B",),
        columns=_columns("LiveCodeBench", rows=_OF_TABLE_3, budgets=(1024, 2048)),
        samples=SAMPLES,
        differs=(
            *COMMON,
            "The row without thinking is a run of its own: --rows FullKV --template enable_thinking=false.",
        ),
    ),
    "thinkv-table14": Table(
        paper=PAPER,
        place="table 14",
        shows="accuracy of R-KV and ThinKV at three budgets (latency and energy are not measured here)",
        models=(R1_LLAMA_8B,),
        columns=_columns(
            "AIME24",
            "AIME25",
            rows=_OF_TABLE_14,
            budgets=(512, 1024, 2048),
            reported=_IN_TABLE_14,
        ),
        samples=SAMPLES,
        differs=(
            *COMMON,
            AIME,
            ONE_BY_ONE,
            "R-KV (seq) and R-KV (ovl) differ only in how they gather, so they are one row here.",
        ),
    ),
    "thinkv-figure8": Table(
        paper=PAPER,
        place="figure 8",
        shows="accuracy by budget beside H2O, RaaS, R-KV and LazyEviction",
        models=(R1_LLAMA_8B, R1_QWEN_14B, "QwQ-32B", "AceReason-Nemotron-14B", "DeepSeek-R1-Distill-Llama-70B"),
        columns=_columns(
            "MATH-500",
            "AIME24",
            "AIME25",
            "LiveCodeBench",
            rows=_OF_FIGURE_8,
            budgets=(64, 128, 256, 512, 1024, 2048, 4096),
        ),
        samples=SAMPLES,
        differs=(
            *COMMON,
            AIME,
            ONE_BY_ONE,
            "The paper says that budgets range from 64 to 4,096 tokens (§6.2); the powers of two between are ours.",
            "H2O, RaaS and LazyEviction have minithink's defaults, for the paper gives no settings of theirs.",
        ),
    ),
}
