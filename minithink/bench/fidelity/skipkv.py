"""SkipKV (Tian et al. 2025), beside the public parts of the authors' code: TTTTTTris/SkipKV@4492840."""

from __future__ import annotations

from minithink.bench.fidelity.item import Item, Paper

PAGE = "skipkv.md"
EVIDENCE = "appendix/skipkv.md"
POLICY = "policies.skipkv:SkipKV"
TEST = "policies/test_skipkv.py"

SENTENCES = (
    Item(
        of="Definition in §4, equation 1: similarity of two sentences is the cosine of their vectors, v_i·v_j",
        verdict="agrees",
        code=("ref.similarity:similarity", "kernels.similarity:similarity"),
        tests=(f"{TEST}:test_similarities_of_worked_example_2", "kernels/test_similarity.py:test_equals_its_twin"),
    ),
    Item(
        of="§4.1, equation 2: a sentence's vector is the mean of its tokens' last hidden states",
        verdict="agrees",
        code=("ref.similarity:similarity",),
        tests=(f"{TEST}:test_a_sentences_vector_is_its_mean_normalised",),
        shown=(f"{EVIDENCE}#sentences",),
        paper="The mean, not normalised; the definition wants a cosine.",
        authors="Hidden states after the final norm, and the mean normalised.",
        here="The same as the code. Only the newest `vectors=512` sentences keep a vector.",
    ),
    Item(
        of="§4.1, equation 3: of two similar sentences the earlier one is redundant",
        verdict="differs by choice",
        code=("ref.similarity:similarity",),
        tests=(
            f"{TEST}:test_only_earlier_sentences_are_penalised",
            f"{TEST}:test_a_similarity_of_tau_is_not_above_it",
            f"{TEST}:test_the_later_sentence_is_penalised_once_a_still_later_one_resembles_it",
        ),
        paper="i ≤ j, which would flag every sentence.",
        authors="i < j. The penalty is that of the last similar sentence. A sentence with one token left has none.",
        here="i < j, too. The penalty is the largest, and stays until the last token is gone.",
    ),
    Item(
        of="§4.1, equation 4: importance of a token, two softmaxes around a maximum over the group",
        verdict="differs by choice",
        code=("policies.skipkv:letter_importance", "ref.window_importance:window_importance"),
        tests=(f"{TEST}:test_the_letter_flattens_importance", f"{TEST}:test_the_letter_is_over_all_keys"),
        shown=(f"{EVIDENCE}#beside-r-kv",),
        authors="R-KV's importance: one softmax, max-pooled over neighbours.",
        here="R-KV's, as in the code. `form=paper` is equations 4 and 5 as printed; both together are 6.8, 3.5 "
        "and 1.2 points worse.",
    ),
    Item(
        of="§4.1, equation 5: redundancy of a token, the mean of a softmax of cosines of keys",
        verdict="differs by choice",
        code=("policies.skipkv:letter_redundancy", "ref.redundancy:redundancy"),
        tests=(f"{TEST}:test_the_letters_redundancy", f"{TEST}:test_a_key_of_zeros_resembles_no_other"),
        authors="R-KV's redundancy, with its threshold and the last similar key spared.",
        here="R-KV's, as in the code; `form=paper` is the letter.",
    ),
    Item(
        of="§4.1, equation 6: σ·I − (1 − σ)·R, less the penalty of the token's sentence",
        verdict="agrees",
        code=("ref.cumulative_score:cumulative_score", "kernels.cumulative_score:cumulative_score"),
        tests=(f"{TEST}:test_worked_example_3", "kernels/test_cumulative_score.py:test_equals_its_twin"),
        authors="Compared: penalties are equal, but for sentences that end in the very step, which count one step "
        "later here.",
        here="A sentence counts at the eviction after the one in whose step it ends, as in algorithm `2`.",
    ),
    Item(
        of="§4.1: the penalty outweighs the rest, so similar sentences leave before any other token",
        verdict="agrees",
        code=(POLICY,),
        tests=(
            f"{TEST}:test_a_sentence_that_was_said_again_leaves_as_a_whole",
            f"{TEST}:test_tokens_that_leave_before_a_penalised_sentence_are_counted",
        ),
        shown=(PAGE,),
        paper="At least 0.95 against about 0.1.",
        here="In all 7,200 texts no other token left first.",
    ),
    Item(
        of="§4.1, equations 7 to 11, figure 7: sentence ranges are carried from the text into the cache",
        verdict="agrees",
        code=("ref.cumulative_score:cumulative_score",),
        tests=(f"{TEST}:test_looking_up_positions_is_the_papers_range_arithmetic", f"{TEST}:test_worked_example_4"),
        here="A look-up by the token's position, with the same result.",
    ),
    Item(
        of="Algorithm 1, A.1, equation 13: update ranges, evict, update again",
        verdict="agrees",
        code=(POLICY,),
        tests=(f"{TEST}:test_laws_in_a_running_decoder",),
        paper="It says nothing of the prompt, nor of the newest tokens.",
        here="The last `alpha=8` tokens stay, as in R-KV, and by default the prompt; `protect_prompt=false` is "
        "R-KV's rule.",
    ),
    Item(
        of="Algorithm 2, A.1: the whole procedure, eviction every Δt steps",
        verdict="differs by choice",
        code=(POLICY,),
        tests=(f"{TEST}:test_laws_in_a_running_decoder", f"{TEST}:test_only_what_is_read_is_counted"),
        paper="It begins with the prompt, whose sentences count, too.",
        here="Only generated text is cut into sentences.",
    ),
    Item(
        of="A.1: sentences end at tokens of the delimiter set D",
        verdict="differs by choice",
        code=("text.sentences:table", "ref.sentences:sentences"),
        tests=(
            "text/test_sentences.py:test_tokens_may_be_cut_anywhere",
            "text/test_sentences.py:test_worked_example_1",
        ),
        shown=(f"{EVIDENCE}#sentences",),
        paper="Six tokens, each with a line break.",
        here="Every token whose bytes have a line break, because the six miss some.",
    ),
    Item(
        of="A.2: eviction every 128 steps, σ = 0.1, τ from 0.95, α_0 = 1 or 1.25, γ = 0.02, layer 20 or 35",
        verdict="differs by choice",
        code=(POLICY,),
        tests=(f"{TEST}:test_the_defaults_are_the_papers",),
        shown=(f"{EVIDENCE}#the-threshold", f"{EVIDENCE}#steering"),
        paper="One setting for its models.",
        here="These are the defaults. What is measured is not: every 16 tokens, τ = 0.9, steering at blank lines, "
        "chosen on validation problems. The layer is the calibration's.",
    ),
)

STEERING = (
    Item(
        of="§4.2: V, mean state before execution thoughts less that before others, from 500 problems of MATH",
        verdict="agrees",
        code=("calibrate.steering:fit", "text.openings:direction"),
        tests=(
            "calibrate/test_steering.py:test_the_vectors_are_differences_of_means",
            "calibrate/test_steering.py:test_seals_example",
        ),
        shown=(f"{EVIDENCE}#vectors", "steering-separation.svg"),
        here="500 embedded problems, of the split on which settings were chosen. `vector=matched`, which compares "
        "thoughts after the same kind of sentence, is an extension.",
    ),
    Item(
        of="§4.2: H ← H + α_t·V at one layer",
        verdict="differs by choice",
        code=("policies.steering:Steered",),
        tests=(f"{TEST}:test_the_vector_is_added_as_the_example_says", f"{TEST}:test_strength_0_keeps_every_bit"),
        shown=(f"{EVIDENCE}#steering",),
        paper="In every forward pass, that of the prompt too.",
        authors="Only at blank lines of the thinking.",
        here="Only for generated tokens of the thinking; with `at=boundary` only at blank lines. At every token "
        "with the paper's strength it spoils `facts`: 23.5 points less.",
    ),
    Item(
        of="§4.2: α_t = α_0 + γ·N_o, N_o sentences with Wait, Alternatively or again",
        verdict="agrees",
        code=(f"{POLICY}.strength", "text.sentences:automaton"),
        tests=(
            f"{TEST}:test_the_strength_grows_by_gamma_for_each_doubt_of_the_own_text",
            f"{TEST}:test_worked_example_5",
        ),
        paper="Sentences are counted.",
        authors="Sentences, each once. The strength is renewed only when the cache is compressed.",
        here="Sentences, each once. The strength is renewed at every token.",
    ),
    Item(
        of="§4.3, equation 12, figure 8: padding takes from the budget; batches of prompts of similar length",
        verdict="partial",
        code=("evaluate.padding:group_by_length", "evaluate.padding:charge"),
        tests=(
            "evaluate/test_padding.py:test_worked_example_6",
            "evaluate/test_padding.py:test_grouping_never_costs_budget",
        ),
        shown=(f"{EVIDENCE}#budgets-that-pay-for-padding", "appendix/evaluate.md#budgets-minus-padding"),
        here="Nothing is padded here, so budgets are charged what padding would take.",
    ),
)

FINDINGS = (
    Item(
        of="Figure 2, figure 6: the idea beside other methods, and an overview",
        verdict="agrees",
        code=(POLICY,),
        tests=(f"{TEST}:test_without_both_halves_it_is_rkv",),
        shown=("../tutorials/11_skipkv.py",),
    ),
    Item(
        of="Figure 3, observation 1: R-KV and H2O lose right answers in batches of 10, above all at low budgets",
        verdict="partial",
        code=("evaluate.padding:charge",),
        tests=("evaluate/test_runner.py:test_budgets_pay_for_padding_if_asked",),
        shown=(f"{EVIDENCE}#budgets-that-pay-for-padding",),
        here="With charged budgets R-KV loses 27.8 points at 25 % and nothing at 50 %. H2O was not run.",
    ),
    Item(
        of="§3, observation 1: padding distorts attention",
        verdict="cannot be tested here",
        here="The engine pads nothing.",
    ),
    Item(
        of="Figure 3, observation 2: with R-KV texts are longer than with the full cache, at every budget",
        verdict="contradicts here",
        shown=(f"{EVIDENCE}#the-paper-row-by-row",),
        here="At 12.5 % they are, by 10.3 %, in `search` alone (27.9 % there); at 25, 50 and 75 % they are not "
        "(−0.4, −1.9, −1.2 %).",
    ),
    Item(
        of="Figure 4, observation 3: evicting tokens leaves fragments, and the model checks itself again",
        verdict="partial",
        code=("trace.recorder:Recorder",),
        shown=("kept-search.svg", f"{EVIDENCE}#what-the-cache-keeps"),
        here="One text shows fragments under R-KV and whole sentences under SkipKV. That fragments cause doubts "
        "is not shown.",
    ),
    Item(
        of="Figure 5, observations 4 and 5: wrong answers have more similar sentences and more doubts",
        verdict="partial",
        shown=(f"{EVIDENCE}#the-paper-row-by-row",),
        paper="Up to 1.7 ×, 1.8 and 2.6 ×, by a sentence transformer on texts of the full cache.",
        here="2.0, 1.5, 2.0 × and 1.2, 1.5, 2.3 ×, but wrong texts are longer; at like length 0.8 to 0.9 ×. "
        "Vectors are the model's own states, and the texts are of evicted caches, because the full cache is never "
        "wrong.",
    ),
    Item(
        of="Figures 1, 9 and 13: more right answers than R-KV and H2O",
        verdict="agrees",
        code=("bench.methods.skipkv:SWEEPS",),
        shown=(f"{EVIDENCE}#beside-r-kv", "sweep-skipkv-overall.svg"),
        runs=("skipkv-figure9",),
        here="+6.3 points on R-KV at 25 %, +1.5 at 50 %, +0.2 at 75 %. At equal bytes the gain remains in "
        "`search` only.",
    ),
    Item(
        of="Figure 9, §5.2: the full cache's accuracy with 15 % of it; at some budgets more than that",
        verdict="contradicts here",
        shown=(PAGE,),
        here="`search` has 99.5 % right with a quarter of the tokens, the other families need half or three "
        "quarters. More than the full cache is impossible: it solves all problems.",
    ),
    Item(
        of="Figures 10 and 13: fewer tokens than R-KV and the full cache; less time for an answer",
        verdict="partial",
        shown=(PAGE,),
        paper="Up to 48 % fewer tokens than R-KV; 1.5 to 2 × less time.",
        here="7.7 to 9.6 % fewer tokens. In the 8B shape an answer takes only 1.8 to 3.8 % less time, because a step "
        "takes longer.",
    ),
    Item(
        of="Figure 11: beside SEAL",
        verdict="contradicts here",
        code=("policies.seal:Seal",),
        tests=("policies/test_seal.py:test_the_defaults_are_seals",),
        shown=(PAGE, f"{EVIDENCE}#steering"),
        paper="Up to 13.3 points more right answers; SEAL saves about 10 % of the tokens.",
        here="SEAL saves 8.2 % and keeps 599 of 600 answers right. SkipKV less SEAL: −17.8, −1.5 and −0.2 points "
        "at 25, 50 and 75 % of the tokens.",
    ),
    Item(
        of="Table 1: throughput and time by batch size",
        verdict="contradicts here",
        code=("bench.methods.skipkv:CASES",),
        tests=("bench/methods/test_skipkv.py:test_steps_are_measured",),
        shown=(f"{EVIDENCE}#a-step", f"{EVIDENCE}#steps-on-the-embedded-model"),
        runs=("skipkv-table1",),
        paper="Up to 1.7 × R-KV's and 9.6 × the full cache's.",
        here="Fewer tokens a second than R-KV at every batch measured. Batches for which only an evicted cache "
        "has room are not measured.",
    ),
    Item(
        of="Table 2: sentences bring right answers, steering brings shorter texts, grouping both",
        verdict="agrees",
        code=("bench.methods.skipkv:SWEEPS",),
        tests=(f"{TEST}:test_without_both_halves_it_is_rkv",),
        shown=(f"{EVIDENCE}#each-half-alone",),
        runs=("skipkv-table2",),
        here="On test problems at 25 %: sentences +4.2 points, steering on top 8.5 % fewer tokens.",
    ),
    Item(
        of="Table 3, figure 12: what grouping gives back",
        verdict="agrees",
        code=("evaluate.padding:group_by_length",),
        tests=("evaluate/test_padding.py:test_grouping_never_costs_budget",),
        shown=(f"{EVIDENCE}#budgets-that-pay-for-padding",),
        runs=("skipkv-table3",),
        here="+26.2 points at 25 %, −0.2 at 50 %. The lengths of prompts are not drawn.",
    ),
    Item(
        of="Figure 14, A.4: fewer doubts and similar sentences than R-KV, SEAL and the full cache",
        verdict="partial",
        shown=(PAGE, f"{EVIDENCE}#similar-sentences"),
        here="Doubts fall by 1.6 to 1.7 × against SkipKV without steering. In 24 texts no reduction of similar "
        "sentences is told apart. SEAL, and right and wrong apart, are not measured.",
    ),
    Item(
        of="Figures 15 and 16, A.5: one text under R-KV and SkipKV, token by token",
        verdict="agrees",
        code=("trace.recorder:Recorder",),
        shown=("kept-search.svg",),
        here="One text of `search`: of ten attempts that failed SkipKV drops nine whole, R-KV keeps parts.",
    ),
    Item(
        of="§5.1: R1-Qwen 7B and 14B, R1-Llama-8B; MATH-500, AIME-24, GSM8K; batches of 10",
        verdict="cannot be tested here",
        code=("evaluate.paper:run",),
        tests=("evaluate/test_paper.py:test_every_row_of_every_table_is_a_policy_at_budgets_that_it_can_have",),
        shown=("evaluate.md#tables-of-papers",),
        here="The command has these settings. Nobody has run it on these models for the project.",
    ),
    Item(
        of="§5.1: LiveCodeBench",
        verdict="missing",
        shown=("evaluate.md#tables-of-papers",),
        here="No grader runs code, and none is planned (README, *Not goals*).",
    ),
    Item(
        of="A.2: baselines H2O, R-KV and SEAL",
        verdict="agrees",
        code=("policies.h2o:H2O", "policies.rkv:Rkv", "policies.seal:Seal"),
        tests=("policies/test_laws.py:test_every_policy_is_tried",),
        shown=(f"{EVIDENCE}#beside-r-kv",),
        here="[The baselines](#baselines) have rows of their own.",
    ),
)

PAPER = Paper("SkipKV", SENTENCES + STEERING + FINDINGS, figures=16, tables=3, equations=13, algorithms=2)
