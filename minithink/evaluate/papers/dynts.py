"""Tables of DynTS (Guo et al.).

Section 6.1 and C.3 have what both share: B = 5,000 tokens and a local window of 2,000 on AIME24, AIME25, AMC23 and
GPQA-D; 3,000 on GK23EN and MATH500, with a local window of 1,000 (R1-Llama) or 1,500 (R1-Qwen); of the selection
window 0.3 (R1-Llama) or 0.4 (R1-Qwen) stay. Temperature 0.6, top-p 0.95, top-k 20, at most 16,384 new tokens, 5
answers a problem. All methods evict when the cache reaches B, and keep equally many tokens.
"""

from __future__ import annotations

from minithink.evaluate.papers.table import R1_LLAMA_8B, R1_QWEN_7B, Column, Numbers, Row, Table

PAPER = "DynTS"
NEW_TOKENS = 16_384
SAMPLES = 5
TEMPERATURE = 0.6
TOP_P = 0.95
TOP_K = 20
HARD = ("AIME24", "AIME25", "AMC23", "GPQA-Diamond")
EASY = ("GK23EN", "MATH-500")
PROMPT = 100  # tokens of a prompt, where the local window is turned into a share

COMMON = (
    "The predictor is the model's calibration for minithink; the paper trains one on its own answers to the MATH "
    "training set (C.2).",
    "After </think> minithink's DynTS evicts nothing more; the paper does not stop there.",
)
OF_TABLE_1 = (
    "The local windows of H2O, SnapKV and R-KV are given as a share of the kept tokens, which is exact at the "
    f"table's budgets for a prompt of {PROMPT} tokens.",
    "StreamingLLM has 4 sinks, as its own paper.",
    "Window, StreamingLLM, H2O, SnapKV and R-KV may evict the prompt, as their own papers have it; SepLLM evicts "
    "generated tokens alone (C.3).",
)


def _of_table_1(budget: int, ratio: float, local: float) -> tuple[Row, ...]:
    """The methods at one trigger, all with as many tokens. local: W_l in tokens, or below 1 a share of the budget."""
    window = local if local >= 1 else int(local * (budget - PROMPT))
    kept = PROMPT + int(ratio * (budget - PROMPT - window)) + window
    recent = f"recent={window / kept:.3f}"
    same = f"schedule=share:{ratio:g}/{local:g}"
    return (
        Row("Transformers", "full"),
        Row("Window", f"window:{same}"),
        Row("StreamingLLM", f"streaming_llm:{same}"),
        Row("SepLLM", f"sepllm:fill=true,separators={budget},window=1,initial=0,{same},protect_prompt=true"),
        Row("H2O", f"h2o:{recent},{same}"),
        Row("SnapKV", f"snapkv_decode:{recent},{same}"),
        Row("R-KV", f"rkv:{recent},{same}"),
        Row("DynTS (Ours)", f"dynts:ratio={ratio:g},local={local:g}"),
    )


def _of_table_2(budget: int, ratio: float, local: float) -> tuple[Row, ...]:
    """DynTS without one of its windows, and with other thinking tokens."""
    own = f"dynts:ratio={ratio:g},local={local:g}"
    return (
        Row("DynTS", own),
        Row("w.o. L", f"dynts:ratio={ratio:g},local=0"),
        Row("w.o. Q", f"{own},question=false"),
        Row("w.o. T", f"dynts:ratio=0,local={local:g}"),
        Row("T-Random", f"{own},select=random"),
        Row("T-Bottom", f"{own},select=bottom"),
    )


# Right answers in table 1 and 2, in the order of (*HARD, *EASY).
_IN_TABLE_1 = {
    R1_LLAMA_8B: {
        "Transformers": (47.3, 28.6, 86.5, 46.4, 73.1, 87.5),
        "Window": (18.6, 14.6, 59.5, 37.6, 47.0, 58.1),
        "StreamingLLM": (20.6, 16.6, 65.0, 37.8, 53.4, 66.1),
        "SepLLM": (30.0, 20.0, 71.0, 39.7, 61.4, 74.5),
        "H2O": (38.6, 22.6, 82.5, 41.6, 67.5, 82.7),
        "SnapKV": (39.3, 24.6, 80.5, 41.9, 68.7, 83.1),
        "R-KV": (44.0, 26.0, 86.5, 44.5, 71.4, 85.2),
        "DynTS (Ours)": (49.3, 29.3, 87.0, 46.3, 72.3, 87.2),
    },
    R1_QWEN_7B: {
        "Transformers": (52.0, 35.3, 87.5, 49.0, 77.9, 91.3),
        "Window": (41.3, 31.3, 82.0, 45.9, 71.8, 85.0),
        "StreamingLLM": (42.0, 29.3, 85.0, 45.9, 71.2, 85.8),
        "SepLLM": (38.6, 31.3, 85.5, 45.6, 72.0, 84.4),
        "H2O": (42.6, 33.3, 84.5, 48.1, 74.1, 87.0),
        "SnapKV": (48.6, 33.3, 87.5, 46.5, 74.9, 88.2),
        "R-KV": (44.0, 32.6, 85.0, 47.2, 75.8, 88.8),
        "DynTS (Ours)": (52.0, 36.6, 88.5, 48.1, 76.4, 90.0),
    },
}
_IN_TABLE_2 = {
    R1_LLAMA_8B: {
        "DynTS": (49.3, 29.3, 87.0, 46.3, 72.3, 87.2),
        "w.o. L": (40.6, 23.3, 86.5, 46.3, 72.0, 85.5),
        "w.o. Q": (19.3, 14.6, 59.0, 38.1, 47.8, 59.8),
        "w.o. T": (44.0, 27.3, 85.0, 44.0, 71.5, 85.9),
        "T-Random": (24.6, 16.0, 59.5, 37.4, 51.7, 63.9),
        "T-Bottom": (20.6, 15.3, 59.0, 37.3, 47.3, 59.5),
    },
    R1_QWEN_7B: {
        "DynTS": (52.0, 36.6, 88.5, 48.1, 76.4, 90.0),
        "w.o. L": (42.0, 32.0, 87.5, 46.3, 75.2, 87.0),
        "w.o. Q": (46.0, 36.0, 86.0, 43.9, 75.1, 89.0),
        "w.o. T": (47.3, 34.6, 85.5, 49.1, 75.1, 89.2),
        "T-Random": (46.0, 32.6, 84.5, 47.5, 73.8, 86.9),
        "T-Bottom": (38.0, 30.0, 80.0, 44.3, 69.8, 83.3),
    },
}


def _reported(number: int, model: str, place: int, budget: int) -> Numbers:
    """What a table reports of a dataset. place: of the dataset in (*HARD, *EASY)."""
    by_row = (_IN_TABLE_1 if number == 1 else _IN_TABLE_2)[model]
    found = dict[tuple[str, int | None], float]()
    for row, percents in by_row.items():
        found[row, None if row == "Transformers" else budget] = percents[place]
    return found


def _table(number: int, shows: str, model: str, ratio: float, local_of_easy: int) -> Table:
    rows_of = _of_table_1 if number == 1 else _of_table_2
    columns = []
    for place, dataset in enumerate((*HARD, *EASY)):
        budget = 5000 if dataset in HARD else 3000
        local = 2000 if dataset in HARD else local_of_easy
        share = round(local / budget, 3)
        column = Column(
            dataset=dataset,
            rows=rows_of(budget, ratio, local),
            budgets=(budget,),
            max_new_tokens=NEW_TOKENS,
            scaled=rows_of(budget, ratio, share),
            reported={model: _reported(number, model, place, budget)},
        )
        columns.append(column)
    differs = (*COMMON, *OF_TABLE_1) if number == 1 else COMMON
    return Table(
        paper=PAPER,
        place=f"table {number}",
        shows=shows,
        models=(model,),
        columns=tuple(columns),
        samples=SAMPLES,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        top_k=TOP_K,
        differs=differs,
    )


BESIDE = "accuracy beside six methods that keep as many tokens"
PARTS = "DynTS without its windows, and with other thinking tokens"
TABLES = {
    "dynts-table1-llama": _table(1, f"{BESIDE}, settings of R1-Llama", R1_LLAMA_8B, 0.3, 1000),
    "dynts-table1-qwen": _table(1, f"{BESIDE}, settings of R1-Qwen", R1_QWEN_7B, 0.4, 1500),
    "dynts-table2-llama": _table(2, f"{PARTS}, settings of R1-Llama", R1_LLAMA_8B, 0.3, 1000),
    "dynts-table2-qwen": _table(2, f"{PARTS}, settings of R1-Qwen", R1_QWEN_7B, 0.4, 1500),
}
