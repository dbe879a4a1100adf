"""DynTS (Guo et al.), beside the authors' code: Robin930/DynTS@a55dc37."""

from __future__ import annotations

from minithink.bench.fidelity.item import Item, Paper

PAGE = "dynts.md"
EVIDENCE = "appendix/dynts.md"
POLICY = "policies.dynts:DynTS"
WINDOWS = "policies.dynts:Windows"
TEST = "policies/test_dynts.py"
TRAINING = "calibrate/test_predictor.py"

METHOD = (
    Item(
        of="§2, equations 1 and 2: a text is thinking between tags, then the answer",
        verdict="agrees",
        code=("text.thinking:split_thinking", "reread.later:thinking_of"),
        tests=(
            "text/test_thinking.py:test_a_text_is_split_at_its_tags",
            "reread/test_later.py:test_which_tokens_think_and_answer",
        ),
    ),
    Item(
        of="§2, equations 3 to 5: attention of one query",
        verdict="agrees",
        code=("ref.attention:attention", "ref.decode_attention:decode_attention"),
        tests=("ref/test_attention.py:test_loops", "ref/test_decode_attention.py:test_loops"),
    ),
    Item(
        of="§3.1, equation 6, B.1: a token's importance is the attention of the answer to it, over layers and heads",
        verdict="agrees",
        code=("reread.importance:importance", "reread.later:attention"),
        tests=(
            "reread/test_later.py:test_targets_by_hand",
            "reread/test_later.py:test_blocks_of_queries_give_the_whole",
        ),
        paper="Layers and heads are “aggregated”.",
        here="Their mean, summed over the answer's tokens.",
    ),
    Item(
        of="§4.1, equation 7, figure 4: a predictor d → 2d → d/2 → 1 on the final hidden state",
        verdict="agrees",
        code=("ref.predict:predict", "kernels.predict:predict"),
        tests=(
            f"{TEST}:test_a_score_is_the_predictors_of_the_tokens_own_pass",
            "kernels/test_predict.py:test_equals_its_twin",
        ),
        paper="It names no activation and no bias.",
        authors="Softplus, no bias.",
        here="The same, on the state after the final norm.",
    ),
    Item(
        of="§4.1, equation 8: mean squared error, with the model frozen",
        verdict="differs by choice",
        code=("calibrate.training:train",),
        tests=(f"{TRAINING}:test_a_step_clips_its_gradient_and_does_not_depend_on_micro",),
        paper="The error of the importance itself, as printed a mean over K numbers, K the length of the answer.",
        here="Importance is divided by its mean in the text, so that it does not depend on the answer's length. "
        "The error is the mean over a text's thinking, then over texts.",
    ),
    Item(
        of="C.2, §6.1: 15 epochs, 256 texts a step, 5e-4, AdamW, cosine, clipped at 1",
        verdict="differs by choice",
        code=("calibrate.training:Recipe",),
        tests=(f"{TRAINING}:test_the_recipe_is_the_papers",),
        shown=(f"{EVIDENCE}#what-the-predictors-know",),
        paper="About 7,000 texts of the MATH training set.",
        here="The defaults are the paper's. The predictors that ship learned from 118 texts, in 40 epochs, 8 "
        "texts a step.",
    ),
    Item(
        of="§4.1, C.2: texts that are wrong or incomplete are left out; 5 texts a problem, at most 18,000 tokens",
        verdict="partial",
        code=("calibrate.traces:sample", "calibrate.problems:is_right"),
        tests=(
            f"{TRAINING}:test_incomplete_texts_are_dropped",
            f"{TRAINING}:test_a_trace_is_a_right_text_and_its_targets",
        ),
        here="`--num-samples` and `--grader` say how many, and what is right. `--max-new-tokens` bounds a text, "
        "and one that is cut off is left out. It is one process, and was not run on the MATH training set.",
    ),
    Item(
        of="§4.2: three windows; when the budget is full, the k best of the selection window stay",
        verdict="agrees",
        code=(WINDOWS, "ref.select:select", "kernels.select:select"),
        tests=(
            f"{TEST}:test_selection_by_hand",
            f"{TEST}:test_windows_add_up",
            f"{TEST}:test_the_sawtooth_is_that_of_the_appendix",
        ),
        authors="A trigger comes one token later. Compared, with this and its prompt: equal.",
        here="When the budget is full, as in the paper.",
    ),
    Item(
        of="§4.2: the question has the score +∞ and stays",
        verdict="agrees",
        code=(WINDOWS,),
        tests=(f"{TEST}:test_variants_of_the_ablation",),
        shown=(f"{EVIDENCE}#right-answers",),
        authors="The prompt lies in the selection window with this score, so it takes some of the k places.",
        here="It stays, as in the paper. Without its window (`question=false`) 42.2 and 68.3 points are lost.",
    ),
    Item(
        of="§4.2: selection goes on until decoding ends",
        verdict="differs by choice",
        code=(WINDOWS,),
        tests=(
            f"{TEST}:test_nothing_is_selected_after_the_thought",
            f"{TEST}:test_an_answer_has_room_beside_the_budget",
        ),
        shown=(f"{EVIDENCE}#times",),
        paper="The answer is selected from, too.",
        authors="So it is, and tokens of the answer have the score +∞.",
        here="It ends with the thinking, because the predictor learned nothing of answers. So a sequence holds a "
        "whole text at worst. If memory is short, the engine reserves the budget, and sequences may have to wait.",
    ),
    Item(
        of="Theorem 5.1, corollary 5.2, equations 9 to 18, A: what a predictor costs and an eviction saves",
        verdict="agrees",
        code=("policies.dynts_cost:gain", "policies.dynts_cost:break_even", "policies.dynts_cost:length"),
        tests=(
            f"{TEST}:test_flops_by_hand",
            f"{TEST}:test_a_gain_is_the_difference_of_both_costs",
            f"{TEST}:test_lengths_by_hand",
        ),
        here="The attention of a trigger's own step still reads what it evicts, so equation `9` counts each "
        "saving one step early.",
    ),
    Item(
        of="§6.1: budgets, windows and shares of R1-Llama and R1-Qwen; temperature 0.6, top-p 0.95, top-k 20, 5 "
        "answers",
        verdict="cannot be tested here",
        code=("evaluate.paper:run",),
        tests=(
            "evaluate/test_paper.py:test_methods_of_dynts_keep_equally_many_tokens",
            f"{TEST}:test_the_papers_settings",
        ),
        shown=("evaluate.md#tables-of-papers",),
        here="The command has these settings. Nobody has run it on these models for the project.",
    ),
    Item(
        of="§6.1: AIME24, AIME25, AMC23, GPQA-Diamond, GK23EN, MATH500",
        verdict="agrees",
        code=("evaluate.datasets:load_dataset",),
        tests=("evaluate/test_datasets.py:test_every_entry_loads_its_fixture",),
        shown=("evaluate.md",),
        here="All six have names. They are tested with small copies of their files; none was downloaded for the "
        "tests.",
    ),
    Item(
        of="§6.1, C.3: Window, StreamingLLM, SepLLM, H2O, SnapKV while decoding and R-KV keep as many tokens",
        verdict="agrees",
        code=("kv.schedule:share_of", "policies.sepllm:SepLLM"),
        tests=(
            f"{TEST}:test_others_can_have_the_same_triggers_and_keep_as_many",
            f"{TEST}:test_sepllm_keeps_as_many_only_if_it_fills_all_places",
        ),
        shown=(f"{EVIDENCE}#right-answers",),
        authors="H2O goes by the last query alone, by mistake. SnapKV averages over layers and heads and does not "
        "pool.",
        here="H2O and SnapKV are those of [the baselines](#baselines), not these forms.",
    ),
)

FINDINGS = (
    Item(
        of="Figure 1: the idea, and accuracy against memory",
        verdict="partial",
        code=(POLICY,),
        tests=(f"{TEST}:test_selection_by_hand",),
        shown=("sweep-dynts-overall.svg", "../tutorials/12_dynts.py"),
        here="The idea is built. Accuracy against memory is drawn by bytes, for each family.",
    ),
    Item(
        of="Figure 2, §3.1: the importance of the thinking is sparse, that of the question is not",
        verdict="agrees",
        code=("analysis.importance:measured",),
        tests=("analysis/test_importance.py:test_measures_of_constructed_scores",),
        shown=(PAGE, f"{EVIDENCE}#what-the-answer-attends-to"),
        paper="21.1 % of the thinking tokens are above the mean, in one text.",
        here="27.1 to 29.9 %, and 33.7 to 37.7 % of the question's, in 64 texts of each family.",
    ),
    Item(
        of="Figures 3 and 12, §3.2, B.1: the top 30 % of the thinking give nearly all right answers, others far "
        "fewer",
        verdict="partial",
        code=("analysis.importance:pareto",),
        tests=("analysis/test_importance.py:test_a_pareto_curve_is_a_mean_over_draws",),
        shown=(f"{EVIDENCE}#answers-from-a-part-of-the-thinking",),
        paper="The tokens that stay are a new prompt.",
        here="As a new prompt the top 30 % give 48 to 87 %. If the others are only masked, 97 to 100 %. In both "
        "the top wins wherever any answers are right.",
    ),
    Item(
        of="Figure 9, B.2: important tokens are more often content words",
        verdict="contradicts here",
        code=("analysis.importance:content_by_tenth",),
        tests=("analysis/test_importance.py:test_content_is_numbers_operators_and_names",),
        shown=(PAGE, "importance-search.svg"),
        paper="Parts of speech, by a tagger.",
        here="Numbers, operators and names are 29 to 42 % of the most important tenth, 51 to 64 % of the least.",
    ),
    Item(
        of="Figures 10 and 11: scores along single texts",
        verdict="agrees",
        code=("analysis.importance:draw",),
        tests=("analysis/test_importance.py:test_the_picture",),
        shown=("importance-search.svg", "importance-facts.svg", "importance-ledger.svg"),
        here="One text of each family.",
    ),
    Item(
        of="Table 1, §6.2: more right answers than six other methods",
        verdict="partial",
        code=("bench.methods.dynts:SWEEPS",),
        tests=(f"{TEST}:test_others_can_have_the_same_triggers_and_keep_as_many",),
        shown=(PAGE, f"{EVIDENCE}#right-answers", "sweep-dynts-overall.svg"),
        runs=("dynts-table1-llama", "dynts-table1-qwen"),
        paper="2.6 points above the best of them. R-KV has a local window as large as DynTS's.",
        here="Above all six with the paper's settings for them. R-KV with its own small window is 4.7 points "
        "above DynTS at 25 %, and at 50 % not told apart.",
    ),
    Item(
        of="Table 1, §6.2: as good as the full cache",
        verdict="contradicts here",
        shown=(PAGE,),
        here="With half of the tokens 77.0, 81.5 and 93.0 % are right, with the full cache all.",
    ),
    Item(
        of="Table 1, figures 5 and 14, §6.2: faster than the full cache, with less memory and fewer operations",
        verdict="partial",
        code=("bench.methods.dynts:CASES",),
        tests=(
            "bench/methods/test_dynts.py:test_a_generation_is_measured",
            "bench/methods/test_dynts.py:test_operations_of_a_length_contain_the_predictor",
        ),
        shown=(f"{EVIDENCE}#times", "dynts-levels.svg"),
        paper="1.9 × on average, up to 4.51 × late in a text (R1-Llama).",
        here="Faster, but only 1.33 and 1.55 × with 20 and 48 sequences, 1.86 and 2.38 × at the end. R1-Qwen's shape "
        "is not measured.",
    ),
    Item(
        of="Figure 13: the cache is 3.32 to 5.73 × shorter",
        verdict="agrees",
        code=("policies.dynts_cost:length",),
        tests=(f"{TEST}:test_mean_lengths",),
        shown=(PAGE,),
        here="3.30 × at the peak by equation `13` with 16,512 tokens; 2.35 × on average.",
    ),
    Item(
        of="Table 2, §6.3: every window counts",
        verdict="agrees",
        code=(POLICY,),
        tests=(f"{TEST}:test_variants_of_the_ablation",),
        shown=(f"{EVIDENCE}#right-answers",),
        runs=("dynts-table2-llama", "dynts-table2-qwen"),
        here="Without thinking tokens, local window or question 26.5 to 68.3 points are lost.",
    ),
    Item(
        of="Table 2, §6.3: random thinking tokens are much worse, and badly chosen ones are worse than none",
        verdict="contradicts here",
        code=(POLICY,),
        tests=(f"{TEST}:test_variants_of_the_ablation",),
        shown=(PAGE, f"{EVIDENCE}#without-a-window-and-with-random-scores"),
        paper="T-Random and T-Bottom are about as bad as no question (R1-Llama: 42.2, 39.8 and 39.8).",
        authors="Both draw from the question's tokens, too. T-Bottom evicts the question first.",
        here="The question stays. Random scores are not told apart from DynTS's. The lowest scores are better "
        "than none, which keeps fewer tokens.",
    ),
    Item(
        of="Figures 6 and 17, §6.3: a local window of 1,000 to 2,000 and r of 0.3 to 0.4 are best",
        verdict="contradicts here",
        code=("bench.methods.dynts:SWEEPS",),
        shown=(f"{EVIDENCE}#windows-and-budgets",),
        here="The largest r tried, 0.7, is best at every local window; it also keeps most.",
    ),
    Item(
        of="Figures 8 and 16, §6.3: more budget, more right answers, less throughput",
        verdict="partial",
        code=("bench.methods.dynts:SWEEPS",),
        shown=(f"{EVIDENCE}#windows-and-budgets", "sweep-dynts-budget-search.svg"),
        here="18.3 to 94.8 % right from an eighth to three quarters of the tokens. Throughput by budget is not "
        "measured.",
    ),
    Item(
        of="Figures 7 and 15, §6.4: error and rank correlation converge, and important tokens are found",
        verdict="contradicts here",
        code=("calibrate.quality:quality", "calibrate.quality:by_position"),
        tests=(
            "calibrate/test_quality.py:test_overlap_is_a_share_of_the_true_best",
            "calibrate/test_quality.py:test_kendall_counts_pairs",
        ),
        shown=(f"{EVIDENCE}#what-the-predictors-know", "predictor-answer.svg"),
        paper="Above 80 % of the true top 20 % are in the predicted top 30 % (R1-Llama).",
        here="69 % on held-out problems, and 77 % by the position alone. Trained on far fewer texts.",
    ),
)

PAPER = Paper("DynTS", METHOD + FINDINGS, figures=17, tables=2, equations=18)
