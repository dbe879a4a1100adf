"""Crystal-KV (Wang et al.). The authors have released no code, so nothing could be compared with it."""

from __future__ import annotations

from minithink.bench.fidelity.item import Item, Paper

EVIDENCE = "appendix/crystal_kv.md"
POLICY = "policies.crystal_kv:CrystalKV"
LITE = "policies.crystal_kv:CrystalKVLite"
TEST = "policies/test_crystal_kv.py"

METHOD = (
    Item(
        of="Figures 1 and 3, §4: think stage, then answer; a new token is PotentialKV and becomes CrystalKV or "
        "SlipKV",
        verdict="agrees",
        code=(POLICY,),
        tests=(f"{TEST}:test_decisions_follow_from_the_whole_history",),
        shown=("../tutorials/09_crystal_kv.py",),
        here="The code needs no such labels: a token that LRFU evicts was SlipKV.",
    ),
    Item(
        of="§5.2: CRF, the sum of a token's hits, each multiplied by λ for every step since; its incremental form",
        verdict="agrees",
        code=("ref.lrfu:lrfu", "kernels.retain:retain"),
        tests=(
            "ref/test_lrfu.py:test_the_recursion_is_the_sum_over_all_hits",
            "ref/test_lrfu.py:test_long_histories_compare_as_exact_numbers_do",
        ),
        here="CRF is a float64 and is compared without loss. A hit long before a token's last one is rounded "
        "away; `window` in `ref/lrfu.py` says how long.",
    ),
    Item(
        of="§5.2, algorithm 1, lines 3 and 4: the hits are the smallest set of tokens with the share p of the "
        "attention",
        verdict="agrees",
        code=("ref.lrfu:hit_set",),
        tests=("ref/test_lrfu.py:test_hit_set_is_the_smallest_that_reaches_p",),
        paper="The sum exceeds p. How query heads that share a KV head count, it does not say.",
        here="The token with which the sum reaches p is hit, too. Of a group's query heads the largest "
        "probability counts, renormalised.",
    ),
    Item(
        of="Algorithm 1: update CRF of hits, decay the others, keep the B largest, in each head",
        verdict="differs by choice",
        code=("ref.retain:retain", "kernels.retain:retain"),
        tests=(
            f"{TEST}:test_decisions_follow_from_the_whole_history",
            f"{TEST}:test_the_smallest_crf_goes_then_the_older_hit_then_the_older_token",
        ),
        paper="Lines 1 and 2: hits count once the head is full.",
        here="Hits count from the first token, as §5.2's sum over the whole history does; `track=full` is the "
        "letter. What it changes is not measured.",
    ),
    Item(
        of="§5.2: λ = 0 is LRU, λ = 1 is LFU",
        verdict="agrees",
        code=(LITE,),
        tests=(f"{TEST}:test_lambda_0_is_lru", f"{TEST}:test_lambda_1_is_lfu"),
        shown=(f"{EVIDENCE}#λ-and-p",),
        here="For every λ above 0 and up to ½ the last hit decides, so these λ decide alike.",
    ),
    Item(
        of="§5.3, algorithm 2: utilization η = ΣCRF / ΣBudget; budgets go to layers, then to heads, in proportion",
        verdict="differs by choice",
        code=("ref.reallocate:reallocate", "kernels.reallocate:reallocate"),
        tests=(
            "ref/test_reallocate.py:test_the_letter_by_fractions",
            f"{TEST}:test_algorithm_2_by_hand",
            f"{TEST}:test_moving_budgets_follow_from_the_whole_history",
        ),
        shown=(f"{EVIDENCE}#damping", f"{EVIDENCE}#a-floor"),
        paper="New budgets are proportional to η. It names no bounds.",
        here="Budgets move less far by default, because the letter swings where CRF does not depend on the "
        "budget; `damping=1` is the letter, and has fewer right answers. A head has a least budget, and at most "
        "what it can fill.",
    ),
    Item(
        of="§5.3: the algorithm is triggered periodically; B_total is the budget of the LLM",
        verdict="agrees",
        code=(POLICY,),
        tests=(f"{TEST}:test_moving_budgets_follow_from_the_whole_history",),
        paper="No period, and no word on requests that run at once.",
        here="Every `realloc_every=128` tokens. B_total is of one sequence; sequences share nothing.",
    ),
    Item(
        of="§4, §5.2: only the think stage is compressed",
        verdict="agrees",
        code=(LITE,),
        tests=(
            f"{TEST}:test_only_an_answer_after_thinking_is_beside_the_budget",
            f"{TEST}:test_queries_of_the_prompt_record_no_hits",
        ),
        paper="It does not say whether the prompt counts in the budget.",
        here="The prompt stays and counts in the budget. The answer is appended beside the budget.",
    ),
    Item(
        of="§6.1: Crystal-KV Lite, with budgets that stay equal",
        verdict="agrees",
        code=(LITE,),
        tests=(f"{TEST}:test_decisions_follow_from_the_whole_history",),
        shown=(f"{EVIDENCE}#right-answers",),
    ),
    Item(
        of="§6.1: baselines R-KV, RaaS, SnapKV, StreamingLLM, H2O and Ada-SnapKV",
        verdict="agrees",
        code=(
            "policies.rkv:Rkv",
            "policies.raas:RaaS",
            "policies.snapkv_decode:SnapKVDecode",
            "policies.streaming_llm:StreamingLLM",
            "policies.h2o:H2O",
            "policies.ada_snapkv:AdaSnapKV",
        ),
        tests=("policies/test_laws.py:test_every_policy_is_tried",),
        shown=(f"{EVIDENCE}#right-answers",),
        paper="It gives no settings of theirs, and does not say when SnapKV evicts while decoding.",
        here="Settings are chosen on validation problems; [the baselines](#baselines) have rows of their own.",
    ),
    Item(
        of="§6.1: three distillates of DeepSeek-R1; MATH-500; 8 answers a problem, temperature 0.6, top-p 0.95",
        verdict="cannot be tested here",
        code=("evaluate.paper:run",),
        tests=("evaluate/test_paper.py:test_every_row_of_every_table_is_a_policy_at_budgets_that_it_can_have",),
        shown=("evaluate.md#tables-of-papers",),
        here="The command has these settings. Nobody has run it on these models for the project.",
    ),
    Item(
        of="§6.1: CodeForces, problems below a rating of 1500",
        verdict="missing",
        shown=("evaluate.md#tables-of-papers",),
        here="No grader runs code, and none is planned (README, *Not goals*).",
    ),
    Item(
        of="§6.2: budgets are shares",
        verdict="differs by choice",
        code=("evaluate.plan:plan",),
        tests=("evaluate/test_runner.py:test_a_share_is_of_what_the_full_cache_generates",),
        shown=("evaluate.md",),
        paper="Of the average use of the full cache, for each question.",
        here="Of what the full cache generates on average over all problems; each problem's prompt is added.",
    ),
)

FINDINGS = (
    Item(
        of="§3, figure 2: rows of the answer look sparsely, and at the same keys of the thinking",
        verdict="partial",
        code=("analysis.answer_attention:concentration", "analysis.answer_attention:agreement"),
        tests=(
            "analysis/test_answer_attention.py:test_concentration_is_the_share_of_the_top_tenth",
            "analysis/test_answer_attention.py:test_rows_agree_on_what_their_top_tenths_share",
        ),
        shown=(f"{EVIDENCE}#heads", "answer-attention-search-map.svg"),
        here="In `search`, the top tenth of the thinking gets 41% of the answer's attention to it, and two rows "
        "of the answer share 27% of their top tenths (10% by chance).",
    ),
    Item(
        of="§3, figure 2: the 30 % that the answer attends to most are hit now and then until the thinking ends",
        verdict="contradicts here",
        code=("analysis.answer_attention:life", "analysis.answer_attention:ends"),
        tests=("analysis/test_answer_attention.py:test_runs_of_hits_are_apart_by_more_than_64_tokens",),
        shown=(f"{EVIDENCE}#heads",),
        paper="A “sink-to-bottom pattern”: attention comes and goes, and lasts until the thinking ends.",
        here="Hits of such a token come in 1.13 runs on average, those of the bottom 30 % in 1.68. They do last "
        "to the end. One family, 16 texts.",
    ),
    Item(
        of="§3, figure 2: the 30 % that the answer attends to least get local attention, which fades",
        verdict="partial",
        code=("analysis.answer_attention:life",),
        tests=("analysis/test_answer_attention.py:test_attention_is_late_more_than_64_tokens_after_birth",),
        shown=(f"{EVIDENCE}#heads",),
        here="Attention fades, in all heads. Hits hardly do.",
    ),
    Item(
        of="§3: tokens that stay, CrystalKV, are what the answer needs",
        verdict="partial",
        code=("analysis.needed_ranks:of_pairs",),
        tests=(
            "analysis/test_answer_attention.py:test_needs_of_the_answer_are_sought_among_the_top_and_hits_are_of_"
            "the_thinking",
        ),
        shown=(f"{EVIDENCE}#what-each-score-finds", "answer-attention-search-milestone.svg"),
        paper="CrystalKV “truly contributes to the correctness of the final answer”.",
        here="By the rules of the puzzles, the best quarter of a head's tokens by CRF has what the answer needs as "
        "often as a random quarter, 48.8% and 47.9%, and in heads that read it more often, 78.3% and 56.5%. Of what "
        "lines of the text need it has less: 57.8% and 67.2%. There are 18 needs of answers, and no intervals.",
    ),
    Item(
        of="§6.2 (i), figure 4: more right answers than six other methods at equal budgets",
        verdict="contradicts here",
        code=("bench.methods.crystal_kv:SWEEPS",),
        shown=(f"{EVIDENCE}#right-answers", "sweep-crystal-kv-overall.svg"),
        runs=("crystal_kv-figure4",),
        paper="On average 7 to 24 % above the others.",
        here="Moving budgets are below all six at every budget, equal ones below all but H2O. Both are below "
        "random eviction with a protected prompt; the embedded model was trained under random eviction.",
    ),
    Item(
        of="§6.2 (ii): at some budgets of code tasks more right answers than with the full cache",
        verdict="cannot be tested here",
        shown=(f"{EVIDENCE}#right-answers",),
        here="With the full cache the embedded model solves all test problems.",
    ),
    Item(
        of="§5.3, §6.2 (iii): budgets that move help, above all at very small budgets",
        verdict="contradicts here",
        code=("analysis.budgets:budgets_of",),
        tests=("analysis/test_budgets.py:test_budgets_go_where_the_hits_are",),
        shown=(f"{EVIDENCE}#right-answers", f"{EVIDENCE}#where-budgets-go", "budgets-search.svg"),
        here="Below equal budgets at every budget, by 6.3 to 41.2 points. Budgets go to heads that spread their "
        "attention widely.",
    ),
    Item(
        of="Table I: memory",
        verdict="agrees",
        code=("kv.ledger:Ledger",),
        tests=(f"{TEST}:test_the_state_is_bounded_and_in_the_ledger",),
        shown=(f"{EVIDENCE}#table-i",),
        runs=("crystal_kv-table1",),
        paper="89.05 and 94.52 % less, without the policy's state.",
        here="88.7 and 94.5 % less, with the state. Measured with 12 bytes of state for a token, which now takes 16.",
    ),
    Item(
        of="Table I: throughput at the largest batch",
        verdict="partial",
        code=("kv.sizes:needs",),
        tests=("bench/speed/test_cases.py:test_a_smaller_pool",),
        shown=(f"{EVIDENCE}#table-i", f"{EVIDENCE}#a-small-pool"),
        paper="5.01 and 12.24 × the full cache's, by more sequences.",
        here="2.84 and 5.51 ×, because the benchmark makes the pool of pages small. If memory is short, the engine "
        "reserves what Crystal-KV promises, and sequences may have to wait; this was not measured.",
    ),
    Item(
        of="Table I, §6.3: one sequence alone is faster",
        verdict="contradicts here",
        shown=(f"{EVIDENCE}#table-i", f"{EVIDENCE}#steps"),
        paper="1.12 and 1.36 ×.",
        here="0.99 and 1.03 ×.",
    ),
    Item(
        of="Figure 5, §5.2, §6.4: α < λ < β; λ of 0.5 to 0.7 and p = 0.9 are best",
        verdict="cannot be tested here",
        code=("bench.methods.crystal_kv:heat",),
        shown=(f"{EVIDENCE}#λ-and-p",),
        runs=("crystal_kv-figure5",),
        here="At a quarter of the tokens no setting is right in more than 9 of 64 problems, too few to compare.",
    ),
)

PAPER = Paper("Crystal-KV", METHOD + FINDINGS, figures=5, tables=1, algorithms=2)
