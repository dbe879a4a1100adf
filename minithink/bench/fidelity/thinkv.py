"""ThinKV (Ramachandran et al. 2025, arXiv 2510.01290). No code of the authors was found."""

from __future__ import annotations

from minithink.bench.fidelity.item import Item, Paper

PAGE = "thinkv.md"
EVIDENCE = "appendix/thinkv.md"
POLICY = "policies.thinkv:ThinKV"
OPTIONS = "policies.thinkv_options:ThinKVOptions"
TEST = "policies/test_thinkv.py"

TYPES = (
    Item(
        of="§3.1, footnote 2: sparsity, the share of weights below 1 % of the row's largest",
        verdict="agrees",
        code=("ref.sparsity:sparsity", "kernels.sparsity:sparsity"),
        tests=("ref/test_sparsity.py:test_counted_by_hand", "kernels/test_sparsity.py:test_equals_its_twin"),
    ),
    Item(
        of="§C.2, equations 1 to 4: attention of a head; of a group of query heads the largest logit, renormalised",
        verdict="agrees",
        code=("ref.decode_attention:group_reduce",),
        tests=(
            "ref/test_decode_attention.py:test_group_rules_by_hand",
            "ref/test_decode_attention.py:test_group_rules",
        ),
    ),
    Item(
        of="§C.2, last sentence: for sparsity, attention is averaged across groups",
        verdict="agrees",
        code=("ref.sparsity:mean_row", "ref.sparsity:mean_row_by_position"),
        tests=(
            "ref/test_sparsity.py:test_rows_of_heads_are_averaged_before_they_are_counted",
            f"{TEST}:test_the_type_is_that_of_the_sparsity_of_the_last_queries",
            f"{TEST}:test_heads_that_hold_different_tokens_give_the_others_no_weight",
        ),
        shown=("appendix/thinkv-sparsity.md", "appendix/thinkv.md#parts-taken-out"),
        here="The weights of equation 4 are averaged over KV heads, and then counted. In the paper the heads of a "
        "layer hold the same tokens. In a stack they may hold different ones; then a head gives a token that it does "
        "not hold the weight 0. The control `thinkv_head_rows` counts each head and averages the shares.",
    ),
    Item(
        of="§3.1, observation 1a: sparsity has three modes",
        verdict="contradicts here",
        code=("reread.density:peaks", "analysis.attention:modes_of"),
        tests=(
            "reread/test_density.py:test_modes_of_mixtures",
            "analysis/test_attention.py:test_modes_are_counted_in_every_layer",
        ),
        shown=("appendix/calibration.md#the-embedded-model", "backbone.md#by-layer"),
        here="In the embedded model no layer has three modes for most prompts. In smollm2-think, a pretrained "
        "model, one of 30 layers has them in 55 % of 60 texts, its noise in 22 %.",
    ),
    Item(
        of="§3.1, observation 1b: transitions are sparsest, then reasoning, then execution",
        verdict="contradicts here",
        code=("calibrate.agreement:compare", "calibrate.agreement:related"),
        tests=(
            "calibrate/test_agreement.py:test_kappa_is_agreement_beyond_chance",
            "calibrate/test_agreement.py:test_what_the_length_explains_is_told_from_what_it_does_not",
        ),
        shown=("appendix/calibration.md#types-and-keywords", "backbone.md"),
        here="By keywords transitions are more often among the sparsest segments, but reasoning is among the "
        "densest, on the embedded model and its control (V 0.16 and 0.14). More than half of this is the place in "
        "the text. On smollm2-think no relation is shown (V 0.04). Types by sparsity agree with keywords hardly "
        "better than chance on the three (κ −0.01 to 0.03).",
    ),
    Item(
        of="Figures 3, 13 and 14, §E.3, §E.4: sparsity by layer over a text, and maps of attention",
        verdict="partial",
        code=("analysis.attention:layers",),
        tests=("analysis/test_attention.py:test_sparsity_is_of_the_thinking_and_in_segments",),
        shown=("../tutorials/10_thinkv.py", "backbone.md#by-layer"),
        here="A tutorial draws the sparsity of one text, and tables have the means by layer. No map of attention "
        "by type is drawn.",
    ),
    Item(
        of="Figure 1: the idea beside other methods; the prompt is reasoning",
        verdict="agrees",
        code=(OPTIONS,),
        tests=(f"{TEST}:test_a_group_is_stored_as_its_thought_is",),
        shown=("../tutorials/10_thinkv.py",),
        here="The prompt is also protected, and part of no segment.",
    ),
    Item(
        of="Algorithm 1, §4.1, §D.1: L* and thresholds from a density estimate for each prompt and layer",
        verdict="agrees",
        code=("calibrate.choose:choose", "reread.density:density"),
        tests=(
            "calibrate/test_choose.py:test_layers_that_have_the_modes_for_every_prompt_are_chosen",
            "calibrate/test_thoughts.py:test_thresholds_lie_in_the_valleys_of_tri_modal_layers",
        ),
        shown=("appendix/calibration.md#how",),
        paper="It does not say what to do if no layer has the modes for every prompt.",
        here="Then layers that have them for most prompts are taken, and else thresholds are quantiles, which the "
        "command says.",
    ),
    Item(
        of="§6.1: calibrated on 100 prompts of s1K",
        verdict="differs by choice",
        code=("calibrate.thoughts:measure",),
        tests=("calibrate/test_thoughts.py:test_what_ships_is_of_the_weights_and_of_the_problems_that_ship",),
        shown=("appendix/calibration.md#the-embedded-model",),
        paper="One random sample of one dataset.",
        here="The embedded model's own 60 problems, and its thresholds are quantiles. For another model "
        "`--dataset` takes any dataset of the hub.",
    ),
    Item(
        of="§4.1: the type is that of the mean sparsity over L*, told every τ = 128 tokens",
        verdict="agrees",
        code=(f"{POLICY}.classify", "policies.thinkv:type_of"),
        tests=(
            f"{TEST}:test_the_type_is_that_of_the_sparsity_of_the_last_queries",
            f"{TEST}:test_a_threshold_belongs_to_what_is_above",
        ),
    ),
    Item(
        of="Listing 1, §D.5: the loop of generation",
        verdict="differs by choice",
        code=(f"{POLICY}.decide",),
        tests=(f"{TEST}:test_figure_6",),
        paper="A type for each layer, measured one token after a segment has begun; §4.1 and §D.6 say otherwise.",
        here="A type for all layers, measured when a segment ends, as §4.1 and §D.6 have it.",
    ),
    Item(
        of="Table 7, §D.2: keywords of the three types, to interpret sparsity",
        verdict="agrees",
        code=("text.thoughts:kinds",),
        tests=("text/test_thoughts.py:test_keywords_of_the_table",),
        shown=("appendix/calibration.md#how",),
        paper="Words are not used during inference.",
        here="Nor here by default. The lists also have words of the embedded model, whatever model is read. "
        "`thoughts=keyword` goes by words; it is an extension.",
    ),
    Item(
        of="Table 6: notation",
        verdict="agrees",
        code=(POLICY,),
        shown=(f"{EVIDENCE}#words",),
        here="The head of `policies/thinkv.py` lists the symbols that the code uses, with their names there.",
    ),
    Item(
        of="Figure 4, §3.2, observation 2: reasoning matters most to the answer, then execution, then transitions",
        verdict="contradicts here",
        code=("analysis.segments:means", "analysis.suppress:divergence"),
        tests=("analysis/test_segments.py:test_importance_is_the_mean_over_the_answers_that_were_drawn",),
        shown=(f"{EVIDENCE}#without-one-segment",),
        paper="KL divergence of the answer, 50 rollouts, GPT-OSS-20B.",
        here="In `facts`: execution 1.97 nats, reasoning 0.44, transitions 0.31; the last two are not told apart. "
        "16 problems, 8 rollouts. The place in the text matters as much as the type.",
    ),
    Item(
        of="§3.2, §E.17: some transitions matter much; without them the model loops for ever",
        verdict="partial",
        code=(f"{POLICY}.classify",),
        tests=(f"{TEST}:test_t0_keeps_no_transition",),
        shown=(f"{EVIDENCE}#bits-by-type",),
        here="Dropping all transitions costs 9.0 to 21.2 points, and 0.8 to 2.3 % of the texts end in a loop. "
        "Single transitions were not looked at.",
    ),
    Item(
        of="Figures 5 and 15, §3.3, observation 3: after a transition earlier segments matter less",
        verdict="cannot be tested here",
        code=("analysis.suppress:suppress", "analysis.segments:pairs"),
        tests=("analysis/test_suppress.py:test_only_the_segment_that_attention_goes_to_matters",),
        shown=(f"{EVIDENCE}#without-one-segment",),
        here="The association falls with the number of transitions between two segments, but distance alone does "
        "as much. No map is drawn.",
    ),
)

STORAGE = (
    Item(
        of="§4.2, problem 1: more important types get more bits, R ≥ E ≥ T",
        verdict="agrees",
        code=(OPTIONS,),
        tests=(f"{TEST}:test_a_group_is_stored_as_its_thought_is",),
        here="`precision=R4E4T2` is the default, as in §6.1; `R8E4T2` is §4.2's first choice.",
    ),
    Item(
        of="§4.2, §D.3: FP8 (E4M3) with a scale for the tensor",
        verdict="agrees",
        code=("quant.fp8:Fp8",),
        tests=(
            "quant/test_plain_fp8.py:test_fp8_example",
            "quant/test_format.py:test_tensor_scale_has_headroom_and_is_normal",
        ),
        paper="It does not say when the scale is measured.",
        here="One scale for each layer and sequence, from the prompt, with room for numbers twice as large.",
    ),
    Item(
        of="§4.2, §D.3: NVFP4, groups of 16 with an E4M3 scale",
        verdict="agrees",
        code=("quant.nvfp4:Nvfp4",),
        tests=("quant/test_symmetric.py:test_points_and_ties", "quant/test_symmetric.py:test_equals_the_table"),
        paper="It names no second scale, which NVIDIA's format has.",
        here="It has an FP32 scale for the tensor, too, because the scales of groups underflow without it.",
    ),
    Item(
        of="§4.2, §D.3: ternary numbers, groups of 16 with an E4M3 scale",
        verdict="partial",
        code=("quant.ternary:Ternary", "quant.ternary_best:TernaryBest", "analysis.best_scale:best_scale"),
        tests=(
            "quant/test_symmetric.py:test_points_and_ties",
            "quant/test_symmetric.py:test_errors_on_gaussians",
            "quant/test_ternary_best.py:test_no_scale_has_a_smaller_error",
            "analysis/test_best_scale.py:test_no_other_scale_is_better",
        ),
        shown=(f"{EVIDENCE}#bits-by-type", f"{EVIDENCE}#the-scale-of-2-bits", f"{EVIDENCE}#parts-taken-out"),
        paper="It gives neither the threshold of 0 nor a rule for the scale that is its own.",
        here="The scale is the largest value of a group, and numbers up to half of it become zero. The scale of "
        "least squared error would halve the error of values, 16.58 instead of 34.21 % on the embedded model. So a "
        "part of what 2 bits lose here may be this rule's fault. The format `ternary_best` stores that scale: with "
        "it 3.5 points fewer are right at 25 % of the tokens and 3.3 at 50 %, neither significant.",
    ),
    Item(
        of="§C.4: group quantization, Δ = max / (2^b − 1)",
        verdict="differs by choice",
        code=("quant.int_symmetric:Int4Symmetric", "quant.int_symmetric:Int2Symmetric"),
        tests=("quant/test_symmetric.py:test_int2s_is_not_ternary",),
        paper="Background, written for numbers without a sign.",
        here="Symmetric integers: the largest magnitude of a group is the format's largest number.",
    ),
    Item(
        of="§4.2: keys are quantized per channel, values per token",
        verdict="differs by choice",
        code=(OPTIONS,),
        tests=(
            f"{TEST}:test_a_group_is_stored_as_its_thought_is",
            "quant/test_format.py:test_by_token_is_by_channel_of_the_transpose",
        ),
        shown=(f"{EVIDENCE}#other-settings", f"{EVIDENCE}#bytes"),
        paper="A key scale belongs to a channel of g tokens.",
        here="By default to 16 channels of one token: with R4E4T2 no difference to the paper's way, "
        "`key_axis=channel`, is shown, and that takes 1.39 instead of 0.88 % of the bytes.",
    ),
    Item(
        of="§4.2: a buffer holds g tokens in full precision until the group is full",
        verdict="agrees",
        code=("ref.flush:flush", "kernels.flush:flush"),
        tests=("kv/test_table.py:test_walkthrough",),
    ),
    Item(
        of="§6.1: two transition tokens of 2 bits are packed as one of 4 bits",
        verdict="differs by choice",
        code=("kv.pages:Pages",),
        tests=("kv/test_table.py:test_formats_and_types_do_not_mix",),
        paper="One layout for all types.",
        here="Each format has its own pages. A page of transitions has twice the slots in the same bytes.",
    ),
    Item(
        of="Table 10, §E.8: integers are worse than NVFP4 and ternary",
        verdict="partial",
        code=("quant.int_symmetric:Int4Symmetric", "quant.int_symmetric:Int2Symmetric"),
        tests=("quant/test_symmetric.py:test_int2s_is_not_ternary",),
        shown=(f"{EVIDENCE}#other-settings",),
        runs=("thinkv-table10",),
        paper="3.3 and 3.6 points less.",
        here="No difference is shown: +1.8, +1.7 and −1.3 points, each interval contains 0. The INT2 of this project "
        "uses all four codes, ternary three.",
    ),
    Item(
        of="Figure 16, §E.9: keys of reasoning need bits; execution is stable at 4, transitions at 2",
        verdict="partial",
        code=("bench.methods.thinkv:SWEEPS",),
        shown=(f"{EVIDENCE}#keys-or-values",),
        paper="Integers, R1-Llama-70B.",
        here="Keys of reasoning need most. But keys of every type in 2 bits lose 21.5 points or more; values "
        "lose at most 4.0.",
    ),
    Item(
        of="Figure 11 (b), §6.3: R4E4T2 for its accuracy and compression; T0 drops transitions",
        verdict="contradicts here",
        code=(OPTIONS,),
        tests=(f"{TEST}:test_t0_keeps_no_transition",),
        shown=(f"{EVIDENCE}#bits-by-type",),
        here="R4E4T4 is 11.3, 26.8 and 30.2 points better with at most 0.7 points more bytes. T0 is worse than "
        "T2, as in the paper.",
    ),
    Item(
        of="Tables 1, 4, 13: average precision, 3.4 to 3.9 bits",
        verdict="partial",
        code=("analysis.bits:of_text", "kv.sizes:mean_bits"),
        tests=(
            "analysis/test_bits.py:test_a_text_has_bits_of_codes_and_of_scales",
            "kv/test_sizes.py:test_bits_follow_from_the_types",
        ),
        shown=(f"{EVIDENCE}#average-precision",),
        paper="It does not say whether scales count; TBQ has 3.5 bits and ThinKV 3.8 in table 4.",
        here="TBQ has 3.37 bits and ThinKV 3.74 when a text ends, and with scales half a bit more. Few problems of "
        "the embedded model, one budget, in the order of averaging before 2026-11-30. `generate` prints the bits of "
        "each text.",
    ),
)

EVICTION = (
    Item(
        of="§4.3, problem 2, case 1: when a transition comes, all earlier segments shrink by one step of R",
        verdict="agrees",
        code=("ref.anneal:anneal", "kernels.anneal:anneal"),
        tests=(f"{TEST}:test_case_1_by_hand", "ref/test_anneal.py:test_it_is_the_rules_one_after_the_other"),
        paper="“At each transition thought”; listing 1 and §D.6 say when it ends.",
        here="When it ends.",
    ),
    Item(
        of="§4.3, problem 2, case 2: above the budget, the oldest segment of the least important type shrinks",
        verdict="agrees",
        code=("ref.anneal:anneal", "kernels.anneal:anneal"),
        tests=(f"{TEST}:test_case_2_by_hand", f"{TEST}:test_segments_shrink_as_the_plain_rules_say"),
        here="The fullest lane decides for all layers.",
    ),
    Item(
        of="§4.3, §6.1: R = {64, 32, 16, 8, 4}; a segment keeps at least 4 tokens",
        verdict="differs by choice",
        code=(OPTIONS,),
        tests=(
            f"{TEST}:test_there_is_room_where_the_budget_is_soft",
            "ref/test_anneal.py:test_a_hard_budget_decides_most_where_its_room_is_a_number_of_r",
        ),
        shown=(f"{EVIDENCE}#words", f"{EVIDENCE}#other-settings", f"{EVIDENCE}#parts-taken-out"),
        paper="Segments at the minimum stay, even above the budget.",
        here="The budget is hard: then segments go on to 2, 1 and 0 tokens. `hard_budget=false` is the paper's "
        "way; at 25 and 50 % of the tokens it changes no answer.",
    ),
    Item(
        of="§4.3, §D.4, figure 12: K-means over a segment's keys after RoPE says which tokens stay",
        verdict="agrees",
        code=("ref.kmeans:kmeans", "ref.survivors:survivors"),
        tests=(
            "ref/test_kmeans.py:test_it_is_the_plain_loop",
            f"{TEST}:test_survivors_are_those_of_k_means_over_all_heads_of_a_layer",
        ),
        shown=(f"{EVIDENCE}#parts-taken-out",),
        paper="Centroids “correspond to keys that are retained” (§4.3), or replace their cluster (§D.4). It does "
        "not say how K-means begins.",
        here="The token nearest to a centroid stays, with its own key and value. Nothing is random. With "
        "survivors drawn at random 6.5 points fewer are right at 25 % of the tokens; at 50 % no difference is shown.",
    ),
    Item(
        of="§D.4: windowed RoPE, should keys drift within a segment",
        verdict="missing",
        here="The paper itself does without it.",
    ),
    Item(
        of="Figure 11 (a), §6.3: 4 layers, 3 types and a minimum of 4 tokens are best; 0 tokens end in endless loops",
        verdict="contradicts here",
        code=("bench.methods.thinkv:SWEEPS",),
        tests=("policies/test_thinkv_options.py:test_one_type_halves",),
        shown=(f"{EVIDENCE}#other-settings",),
        here="One or two types are better than three with R4E4T2. At a quarter of the tokens a minimum of 16 or 8 is "
        "11.7 and 8.7 points better than 4, and one of 0 is 8.0 points worse, with as few loops. In the order of "
        "averaging before 2026-11-30 2 and 8 layers were not told apart from 4.",
    ),
    Item(
        of="Figure 10 (c), §6.3: τ = 128; larger is worse",
        verdict="partial",
        code=("bench.methods.thinkv:SWEEPS",),
        shown=(f"{EVIDENCE}#other-settings",),
        here="No difference between 32, 64, 128 and 256 is significant after Holm's correction.",
    ),
    Item(
        of="§E.10, table 11: for other models |T| = 1 with 4 bits, halving; LongWriter, graded by a model",
        verdict="partial",
        code=(OPTIONS,),
        tests=("policies/test_thinkv_options.py:test_one_type_halves",),
        shown=(f"{EVIDENCE}#equal-bytes",),
        paper="Prior tokens go to the nearest power of two.",
        here="They go to the next lower one. `types=1` is the best of ThinKV's forms at equal bytes. LongWriter "
        "and its judge are not here.",
    ),
    Item(
        of="Table 15, §E.16: SnapKV for the prompt, ThinKV for the rest",
        verdict="contradicts here",
        code=("policies.snapkv:SnapKV",),
        tests=("policies/test_snapkv.py:test_thinkv_anneals_segments_behind_what_is_left_of_the_prompt",),
        shown=(f"{EVIDENCE}#a-cut-prompt",),
        paper="4 points less with 2,048 tokens of the prompt, none with 4,096.",
        here="In the order of averaging before 2026-11-30 17.3 to 20.3 points less with 128 tokens, the only size "
        "tried. Long puzzles are cut then; but where nothing is cut, 13.1 points are lost at 25 %, too.",
    ),
)

CACHE = (
    Item(
        of="§5.1, figure 7, observations 4a and 4b: gathering slows decoding, also when it overlaps",
        verdict="contradicts here",
        code=("kv.compaction:Compaction", "kernels.gather:gather"),
        tests=("kv/test_compaction.py:test_overlapped_moves_when_the_next_step_begins",),
        shown=(f"{EVIDENCE}#a-step-at-the-steady-state",),
        paper="Up to 37 × the time of a step; overlapped, attention takes up to 35 % longer.",
        here="A gather takes 1.0 % of R-KV's step with 64 sequences, 2.4 % if R-KV evicts at every step, and "
        "overlapping hardly changes this. How far it slows attention is not measured.",
    ),
    Item(
        of="§5.2, §D.6, figure 6: a block table with types, start indices, segment masks and eviction masks",
        verdict="agrees",
        code=("kv.table:BlockTable", "kv.table:printed"),
        tests=("kv/test_table.py:test_walkthrough", f"{TEST}:test_figure_6"),
        shown=("../tutorials/10_thinkv.py",),
        here="Start indices and masks follow from the position that each slot has. The walkthrough is the figure's.",
    ),
    Item(
        of="§5.2: evicted slots are marked, and new tokens of the same type overwrite them in place",
        verdict="agrees",
        code=("kv.slots:Slots", "kernels.allocate:allocate"),
        tests=(
            "kv/test_table.py:test_evicted_slots_are_used_again_before_a_page_is_opened",
            "kv/test_table.py:test_an_empty_page_returns_to_everybody",
        ),
        shown=("appendix/kv-cache.md#pages-and-slots",),
        paper="It does not say what becomes of a block whose slots are all free.",
        here="It returns to the pool.",
    ),
    Item(
        of="§C.3, theorem 1: attention does not depend on the order of keys and values",
        verdict="agrees",
        code=("ref.decode_attention:decode_attention",),
        tests=("ref/test_decode_attention.py:test_slots_may_lie_in_any_order",),
    ),
    Item(
        of="§6.1: attention in pages reads quantized keys and values, and K-means runs on the GPU",
        verdict="agrees",
        code=("kernels.paged_attention:paged_attention", "kernels.survivors:survivors"),
        tests=(
            "kernels/test_paged_attention.py:test_equals_its_twin",
            "kernels/test_survivors.py:test_equals_its_twin",
        ),
        shown=("appendix/kernel-times.md#decode-attention",),
        paper="CUDA for quantization and K-means, Triton for attention.",
        here="Triton throughout.",
    ),
    Item(
        of="Table 2, §6.2: memory with 1,024 tokens after 32K",
        verdict="agrees",
        code=("kv.ledger:Ledger",),
        tests=("bench/speed/test_cases.py:test_bytes_are_known_before_anything_is_allocated",),
        shown=(f"{EVIDENCE}#bytes",),
        paper="2.51 % of the full cache's bytes.",
        here="0.88 %; the pool that is reserved takes 2.78 %.",
    ),
    Item(
        of="Table 2, §6.2: throughput at the largest batch, beside the full cache",
        verdict="partial",
        code=("bench.speed.cases:Bench",),
        tests=("bench/speed/test_cases.py:test_the_largest_batch_is_the_last_that_fits",),
        shown=(f"{EVIDENCE}#throughput-at-the-largest-batch",),
        paper="28 and 23 × a full cache in transformers, on an A100 and a GH200.",
        here="66 × transformers' full cache, 14.2 × this project's. On another GPU and with random weights, so it "
        "does not compare with the paper's.",
    ),
    Item(
        of="Table 2, §6.2: throughput at the largest batch, beside R-KV",
        verdict="contradicts here",
        code=("bench.speed.cases:Bench",),
        shown=(f"{EVIDENCE}#throughput-at-the-largest-batch",),
        paper="5.8 and 3.6 × (gather in sequence, overlapped; R-KV evicts in 82.93 % of the steps).",
        here="1.64 × an R-KV that gathers nothing and evicts every 128 tokens.",
    ),
    Item(
        of="Table 2: equal batches without quantization, beside R-KV",
        verdict="partial",
        code=("policies.thinkv:Tbe",),
        shown=(f"{EVIDENCE}#a-step-at-the-steady-state",),
        paper="3.2 and 1.6 ×.",
        here="1.47 × R-KV without gather. 34 × R-KV that evicts at every step says little: 94.7 % of that step was "
        "this project's own eviction, before R-KV remembered similar keys.",
    ),
    Item(
        of="Table 3: accuracy, largest batch and throughput with 2,048 tokens",
        verdict="missing",
        shown=(f"{EVIDENCE}#throughput-at-the-largest-batch",),
        runs=("thinkv-table3",),
        paper="290 sequences instead of 13, and 15.8 × the full cache's throughput, with as many right answers.",
        here="Not measured with 2,048 tokens. Both halves can be run: the accuracy with the weights of "
        "R1-Llama-8B, the throughput with `bench thinkv --budget 2048`. With 1,024 tokens, as in table 2, the "
        "throughput is 14.2 × the full cache's.",
    ),
    Item(
        of="Figure 9: requests a second against the latency of a user, in vLLM",
        verdict="partial",
        code=("bench.speed.plots:latency",),
        tests=("bench/speed/test_cases.py:test_steps_are_drawn",),
        shown=("thinkv-latency.svg", PAGE),
        here="The time of a step by batch, on caches of noise. No requests arrive here, and nothing runs in vLLM.",
    ),
    Item(
        of="Table 5, figure 18, §6.3, §E.14: parts of a step and how often they run",
        verdict="partial",
        code=("bench.speed.parts:parts",),
        tests=("bench/speed/test_cases.py:test_rates",),
        shown=(f"{EVIDENCE}#parts-of-a-step", "thinkv-parts.svg"),
        paper="Refresh and eviction take 14 % of a step that has both; a layer evicts in 4.59 % of the steps, "
        "R-KV in 82.93 %.",
        here="4.7 % of the mean step of 64 sequences, and up to 27 % late in a long text at the largest batch. A "
        "sequence evicts in 1.95 % of the steps, R-KV in 0.78 %, because it has its buffer.",
    ),
    Item(
        of="Figure 10 (e), §6.3: blocks of 8 to 16 tokens are fastest",
        verdict="contradicts here",
        code=("bench.methods.thinkv:CASES",),
        shown=(f"{EVIDENCE}#slots-of-a-page",),
        here="4 to 32 slots differ by 2 %.",
    ),
    Item(
        of="Table 12, §E.12: throughput in vLLM with 8 and 256 sequences",
        verdict="cannot be tested here",
        shown=(f"{EVIDENCE}#the-paper-row-by-row",),
        paper="1.52 × the full cache with 8 sequences.",
        here="Nothing here runs in vLLM. This project's own engine: 1.05 × with 8 sequences after 4,096 tokens.",
    ),
    Item(
        of="Table 14, §E.15: time of a request, accuracy and accuracy per watt, at three budgets",
        verdict="partial",
        code=("bench.speed.cases:Bench",),
        tests=("bench/speed/test_cases.py:test_a_request_is_one_sequence_through_whole_cycles",),
        shown=(f"{EVIDENCE}#a-request", f"{EVIDENCE}#equal-budgets"),
        runs=("thinkv-table14",),
        paper="With 1,024 tokens 6 % less time than the full cache, and 1 to 2 % less than R-KV. ThinKV is right "
        "more often than R-KV with 512 and 1,024 tokens.",
        here="At one budget: 5 % less than the full cache, 2 % more than R-KV. Accuracy on AIME can be run and is "
        "not measured; on the embedded model ThinKV is right less often than R-KV at equal budgets. Energy is not "
        "measured, so there is no accuracy per watt.",
    ),
)

ACCURACY = (
    Item(
        of="Figure 2, §2: quantization and eviction together beat either alone",
        verdict="partial",
        code=("bench.methods.thinkv:SWEEPS",),
        shown=(f"{EVIDENCE}#equal-bytes", "sweep-main-search.svg"),
        here="At equal bytes the hybrid is above R-KV. But with one type in 4 bits it is better still, and KIVI "
        "with 4 bits is right in 99.8 % with about twice the bytes.",
    ),
    Item(
        of="Figure 8, §6.2: above H2O, RaaS, R-KV and LazyEviction, at budgets of 64 to 4,096 tokens",
        verdict="partial",
        code=("bench.methods.thinkv:SWEEPS",),
        shown=(f"{EVIDENCE}#equal-budgets", f"{EVIDENCE}#equal-bytes", "appendix/baselines.md#all-budgets"),
        runs=("thinkv-figure8",),
        paper="Competitive with less than 3.67 % of the memory, where others need more than 12 %.",
        here="At equal budgets 10.2 to 47.8 points below R-KV. At equal bytes 16.8 to 36.8 points above it; the "
        "others were not compared at equal bytes. ThinKV holds fewer tokens than its budget allows.",
    ),
    Item(
        of="Table 1, §6.2: above KIVI with 2 bits and PM-KVQ with 3.2 to 3.5",
        verdict="contradicts here",
        code=("policies.kivi:Kivi", "policies.pm_kvq:PMKVQ"),
        tests=("policies/test_kivi.py:test_defaults_are_the_papers", "policies/test_pm_kvq.py:test_memory_is_real"),
        shown=(PAGE, f"{EVIDENCE}#each-family"),
        runs=("thinkv-table1",),
        here="`thinkv` is right in at most 51.7 %, not told apart from KIVI with 2 bits (47.5 %); PM-KVQ in 89.5 % "
        "with 40.5 to 44.2 % of the bytes. No method of 4 bits for all tokens was compared at ThinKV's bytes.",
    ),
    Item(
        of="Table 4, §6.3: quantization alone loses nothing, nor does eviction alone with 2,048 tokens",
        verdict="contradicts here",
        code=("policies.thinkv:Tbq", "policies.thinkv:Tbe"),
        tests=(f"{TEST}:test_a_group_is_stored_as_its_thought_is", f"{TEST}:test_case_1_by_hand"),
        shown=(f"{EVIDENCE}#eviction-or-bits", f"{EVIDENCE}#a-step-at-the-steady-state"),
        runs=("thinkv-table4",),
        here="`tbq` is right in 48.3 %, `tbe` in 95.0 % with three quarters of the tokens. Steps of `tbe` are "
        "timed, those of `tbq` are not.",
    ),
    Item(
        of="Figure 10 (a), §6.3: recall of the ten most attended tokens is close to the full cache, above R-KV",
        verdict="contradicts here",
        code=("evaluate.recall:Recall",),
        tests=("evaluate/test_recall.py:test_the_share_that_is_held",),
        shown=(f"{EVIDENCE}#recall",),
        here="R-KV's recall is higher at each budget. At about equal bytes `tbe` is close to it.",
    ),
    Item(
        of="Figure 10 (b), §6.3: what the cache holds over time",
        verdict="partial",
        code=("trace.recorder:Recorder",),
        shown=("trace.md", "../tutorials/10_thinkv.py"),
        here="A trace shows it for one text, and a tutorial draws it. No page has the curve.",
    ),
    Item(
        of="Figure 10 (d), §6.3: quantization makes texts up to 5.1 × as long, eviction does not",
        verdict="partial",
        code=("bench.methods.thinkv:SWEEPS",),
        shown=(PAGE, f"{EVIDENCE}#each-family"),
        here="`tbq` writes longer texts in `search` only: 1,888 instead of 1,476 tokens. `tbe` with few tokens "
        "writes longer ones there.",
    ),
    Item(
        of="Figure 10 (f), §6.3: shares of the three types by dataset",
        verdict="partial",
        code=("calibrate.report:summary",),
        shown=("appendix/calibration.md#the-embedded-model",),
        here="Shares by keywords are of the calibration's problems together; those by sparsity are fixed, because "
        "the thresholds are quantiles. `evaluate` does not record types.",
    ),
    Item(
        of="Figure 17, §E.11: a front of accuracy against cache size",
        verdict="partial",
        code=("evaluate.plots:pareto_front",),
        shown=("sweep-main-search.svg",),
        here="`evaluate plot` draws the front of a run. The pages have a picture by bytes for each family, with "
        "some methods, and none of all.",
    ),
    Item(
        of="Table 13, §E.13: Qwen3-8B with and without thinking",
        verdict="cannot be tested here",
        tests=("evaluate/test_paper.py:test_every_row_of_every_table_is_a_policy_at_budgets_that_it_can_have",),
        shown=("models.md#the-chat-template",),
        runs=("thinkv-table13",),
        here="Qwen3 loads, and `--template enable_thinking=false` switches thinking off. Its dataset is code, "
        "which is not graded here.",
    ),
    Item(
        of="Tables 8 and 9, §E.6, §E.7: MobileLLM-R1 on GSM8K, GPT-OSS-120B at two efforts",
        verdict="cannot be tested here",
        runs=("thinkv-table8",),
        here="The first can be run; the project has not run it. GPT-OSS is a mixture of experts, which is refused.",
    ),
    Item(
        of="§6.1: R1-Llama, R1-Qwen, QwQ, AceReason-Nemotron, MobileLLM-R1, GPT-OSS",
        verdict="cannot be tested here",
        code=("config:ModelConfig",),
        tests=(
            "test_config.py:test_r1_distill_llama_8b",
            "test_config.py:test_what_is_not_supported_is_named",
        ),
        shown=("models.md",),
        here="Dense Llama, Qwen2 and Qwen3 models load; those weights are not at hand. GPT-OSS is refused.",
    ),
    Item(
        of="§6.1: MATH-500, AIME, GSM8K",
        verdict="agrees",
        code=("evaluate.datasets:load_dataset",),
        tests=("evaluate/test_datasets.py:test_every_entry_loads_its_fixture",),
        shown=("evaluate.md",),
        paper="AIME is a draw of 15 problems of 2024 and 15 of 2025, which it does not list.",
        here="Both years are run as a whole.",
    ),
    Item(
        of="§6.1: LiveCodeBench",
        verdict="missing",
        shown=("evaluate.md#tables-of-papers",),
        here="No grader runs code, and none is planned (README, *Not goals*).",
    ),
    Item(
        of="§6.1: pass@1 over 8 answers of at most 32K tokens",
        verdict="differs by choice",
        code=("evaluate.summary:accuracy_of",),
        tests=("evaluate/test_summary.py:test_a_row_by_hand",),
        shown=(PAGE,),
        paper="8 answers a problem.",
        here="`--num-samples` gives as many. The pages have one answer to each of more problems, of at most 4,096 "
        "tokens.",
    ),
    Item(
        of="§6.1: baselines H2O, RaaS, R-KV, LazyEviction, KIVI and PM-KVQ",
        verdict="agrees",
        code=(
            "policies.h2o:H2O",
            "policies.raas:RaaS",
            "policies.rkv:Rkv",
            "policies.lazy_eviction:LazyEviction",
            "policies.kivi:Kivi",
            "policies.pm_kvq:PMKVQ",
        ),
        tests=("policies/test_laws.py:test_every_policy_is_tried",),
        shown=("appendix/baselines.md",),
        here="[The baselines](#baselines) have rows of their own.",
    ),
)

PAPER = Paper(
    "ThinKV", TYPES + STORAGE + EVICTION + CACHE + ACCURACY, figures=18, tables=15, equations=4, algorithms=1
)
