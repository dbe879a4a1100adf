"""The policies that the papers compare with, and others, each beside the code of its authors."""

from __future__ import annotations

from minithink.bench.fidelity.item import Item, Paper

EVIDENCE = "appendix/baselines.md"
ALL = f"{EVIDENCE}#all-budgets"
KEYS = f"{EVIDENCE}#scores-of-keys-alone"
PRETRAINED = "transfer.md#right-answers"

OF_PAPERS = (
    Item(
        of="R-KV (`rkv`), Zefan-Cai/R-KV@d15c976: attention of the newest queries, less similarity of keys",
        verdict="differs by choice",
        code=("policies.rkv:Rkv", "ref.redundancy:redundancy", "ref.window_importance:window_importance"),
        tests=(
            "policies/test_rkv.py:test_decisions_are_the_codes",
            "policies/test_rkv.py:test_the_global_clock_is_the_codes",
        ),
        shown=(ALL,),
        authors="Survivors are stored in the order of their scores, so the next eviction pools over neighbours in "
        "score. Compared: equal if survivors are sorted by position.",
        here="Survivors stay in the order of their positions, as in the authors' later serving code. No option "
        "stores them by score. A head evicts when its buffer of `buffer=128` is full; `global_clock=true` is the "
        "code's rule.",
    ),
    Item(
        of="SnapKV while decoding (`snapkv_decode`), Zefan-Cai/R-KV@d15c976: attention of the newest queries",
        verdict="differs by choice",
        code=("policies.snapkv_decode:SnapKVDecode",),
        tests=(
            "policies/test_snapkv_decode.py:test_worked_example",
            "policies/test_snapkv_decode.py:test_decisions_follow_the_formulas",
        ),
        shown=(ALL,),
        authors="Survivors are stored in the order of their scores. Compared: equal if they are sorted by "
        "position. DynTS's and kvpress's codes have other forms.",
        here="Survivors stay in the order of their positions.",
    ),
    Item(
        of="SnapKV for the prompt (`snapkv`), FasterDecoding/SnapKV@e216ddc: the prompt is cut once",
        verdict="differs by choice",
        code=("policies.snapkv:SnapKV",),
        tests=("policies/test_snapkv.py:test_a_prompt_is_cut_once_as_the_code_does",),
        shown=("appendix/thinkv.md#a-cut-prompt",),
        authors="Each query head has a cache and chooses for itself. Not compared on tensors.",
        here="The query heads of a KV head share one choice.",
    ),
    Item(
        of="H2O (`h2o`), FMInference/H2O@ac75c2a: attention summed over all steps",
        verdict="agrees",
        code=("policies.h2o:H2O", "ref.accumulate:accumulate"),
        tests=("policies/test_h2o.py:test_worked_example", "policies/test_h2o.py:test_plain_sums"),
        shown=(ALL,),
        authors="It does not work where query heads share keys. Compared: equal, with the sums of a group added. "
        "Under this name R-KV's, SkipKV's and DynTS's codes go by the last query alone.",
        here="Scores stay in float32, and each sequence has its own. Positions stay original.",
    ),
    Item(
        of="RaaS (`raas`), DerekHJH/RaaS: stamps of the step at which a page last mattered",
        verdict="differs by choice",
        code=("policies.raas:RaaS", "ref.stamp:stamp"),
        tests=(
            "policies/test_raas.py:test_it_is_lru",
            "policies/test_raas.py:test_loops_over_the_rules_of_the_code_see_the_same_pages",
            "policies/test_raas.py:test_the_page_that_grows_is_beside_the_budget",
        ),
        shown=(ALL,),
        authors="Stamps of each query head; the page that grows is held beside the budget; a new page has no "
        "stamp until it matters; the prompt is not protected; attention reads only some of the pages. Which of its "
        "commits was read was not noted.",
        here="By default the paper's form, as others describe it. `form=official` has the code's rules, but for "
        "query heads that share a KV head, and for what attention reads. It has fewer right answers in all "
        "families, at the one budget that was tried.",
    ),
    Item(
        of="LazyEviction (`lazy_eviction`), Halo-949/LazyEviction, read in the copy of "
        "WeianMao/triattention@e7a0eb18: attention that comes back",
        verdict="differs by choice",
        code=("policies.lazy_eviction:LazyEviction",),
        tests=(
            "policies/test_lazy_eviction.py:test_the_score",
            "policies/test_lazy_eviction.py:test_against_plain_histories",
        ),
        shown=(ALL, f"{EVIDENCE}#settings"),
        paper="Its formulas differ from its code, and sources quote two forms of them.",
        authors="A cache for each query head; the window is chosen from samples of the model. Compared: equal if "
        "survivors are sorted by position, but for ties.",
        here="The code's formulas, for KV heads. The window is an option, `window=32`.",
    ),
    Item(
        of="StreamingLLM (`streaming_llm`), mit-han-lab/streaming-llm@2e50426: first tokens and newest tokens",
        verdict="differs by choice",
        code=("policies.streaming_llm:StreamingLLM",),
        tests=(
            "policies/test_streaming_llm.py:test_sinks_and_the_last_tokens_stay",
            "policies/test_streaming_llm.py:test_rerotated_logits_are_those_of_slots",
        ),
        shown=(ALL, "backbone.md"),
        paper="Positions are counted within the cache.",
        authors="So they are. Not compared on tensors.",
        here="Positions stay original, as in R-KV's and DynTS's comparisons; `rerotate=true` is the paper's way.",
    ),
    Item(
        of="Window (`window`): the newest tokens",
        verdict="agrees",
        code=("policies.window:Window",),
        tests=("policies/test_window.py:test_the_last_tokens_stay",),
        shown=(ALL,),
    ),
    Item(
        of="SepLLM (`sepllm`), HKUDS/SepLLM@f250f59: separators, first tokens and newest tokens",
        verdict="differs by choice",
        code=("policies.sepllm:SepLLM",),
        tests=("policies/test_sepllm.py:test_worked_example", "policies/test_sepllm.py:test_what_stays"),
        shown=(ALL,),
        authors="In its streaming form positions are counted within the cache, and all rows keep as many "
        "separators as the row with the fewest. Compared: equal.",
        here="Positions stay original, and each row has its own separators. `fill=true` is the form of DynTS's "
        "paper.",
    ),
    Item(
        of="Ada-SnapKV (`ada_snapkv`), FFY0/AdaKV@efe4e2e: heads of a layer share a budget",
        verdict="differs by choice",
        code=("policies.ada_snapkv:AdaSnapKV", "ref.keep_shared:keep_shared"),
        tests=(
            "policies/test_ada_snapkv.py:test_heads_that_share_a_budget_by_hand",
            "policies/test_ada_snapkv.py:test_the_sums_of_heads_are_exact",
        ),
        shown=(ALL, f"{EVIDENCE}#unequal-budgets"),
        authors="Budgets of heads are rounded, so that their sum may differ from the layer's. It compresses a "
        "prompt once. Compared: equal to NVIDIA/kvpress@8bb29b9; AdaKV's totals are off by a few tokens.",
        here="The budget is filled exactly, as in kvpress, and heads evict while decoding.",
    ),
    Item(
        of="PyramidKV (`pyramidkv`), Zefan-Cai/KVCache-Factory@c97f9d7: lower layers have larger budgets",
        verdict="differs by choice",
        code=("policies.pyramidkv:PyramidKV",),
        tests=(
            "policies/test_pyramidkv.py:test_layers_by_hand",
            "policies/test_pyramidkv.py:test_a_ladder_falls_and_its_sum_is_exact",
        ),
        shown=(ALL, f"{EVIDENCE}#unequal-budgets"),
        authors="Steps are rounded down, so layers keep more than their budget together. Budgets are equal while "
        "a prompt is short. Compared: the budgets are equal where no step is rounded.",
        here="The sum is exact. `uniform=true` is the code's rule for short texts.",
    ),
    Item(
        of="KIVI (`kivi`), jy-yuan/KIVI@876b4d2: integers of 2 bits, keys per channel, values per token",
        verdict="differs by choice",
        code=("policies.kivi:Kivi", "quant.int_asymmetric:IntAsymmetric"),
        tests=(
            "policies/test_kivi.py:test_the_official_schedule_of_values",
            "policies/test_kivi.py:test_the_numbers_of_the_example",
            "quant/test_int_asymmetric.py:test_kivi_keys",
        ),
        shown=("appendix/thinkv.md#each-family",),
        authors="The newest values stay exact, and the oldest of them is quantized in every step. Compared, "
        "before that date: equal, but for one value of the window, which was mended since.",
        here="Values are quantized in blocks, with their keys; `flush=official` is the code's way. Codes are "
        "computed in float32.",
    ),
    Item(
        of="PM-KVQ (`pm_kvq`), thu-nics/PM-KVQ@c8a2bff: integers whose bits halve as the text grows",
        verdict="partial",
        code=("policies.pm_kvq:PMKVQ", "ref.shrink:shrink"),
        tests=(
            "policies/test_pm_kvq.py:test_the_schedule_of_the_example",
            "policies/test_pm_kvq.py:test_the_rule_halves_once_and_stops_at_two_bits",
            "quant/test_int_asymmetric.py:test_shrink_equals_the_formula_for_every_code",
        ),
        shown=("appendix/thinkv.md#each-family",),
        paper="Bits of each layer by gradients, and smoothed weights.",
        authors="Parameters have the model's type. Compared, before that date: formats and shrinking are equal.",
        here="All layers have the same bits, and weights are not changed. Parameters are FP32.",
    ),
    Item(
        of="SEAL (`seal`), read in the copy Zemelee/SEAL@5c20c69: a vector is added at blank lines",
        verdict="agrees",
        code=("policies.seal:Seal", "calibrate.steering:fit"),
        tests=(
            "policies/test_seal.py:test_it_steers_at_blank_lines_of_the_thinking",
            "policies/test_seal.py:test_seals_example",
            "calibrate/test_steering.py:test_seals_example",
        ),
        shown=("appendix/skipkv.md#steering", "appendix/skipkv.md#vectors"),
        authors="An empty last step counts as execution. Compared: equal vectors, but for rounding, and equal steps.",
        here="A thought has text, so an empty last step is none.",
    ),
)

OTHERS = (
    Item(
        of="TOVA (`tova`), schwartz-lab-NLP/TOVA@9c7d09b: attention of the newest query, over the heads of a layer",
        verdict="agrees",
        code=("policies.tova:Tova",),
        tests=(
            "policies/test_tova.py:test_worked_example",
            "policies/test_tova.py:test_heads_of_a_layer_hold_the_same_tokens",
        ),
        shown=(ALL,),
        authors="Compared: equal.",
        here="`newest=true` keeps the newest token, as kvpress does.",
    ),
    Item(
        of="Scissorhands (`scissorhands`), no authors' code found: how often a token mattered to the last queries",
        verdict="differs by choice",
        code=("policies.scissorhands:Scissorhands",),
        tests=(
            "policies/test_scissorhands.py:test_counts_by_loops",
            "policies/test_scissorhands.py:test_history_and_r_are_the_papers",
        ),
        shown=(ALL,),
        authors="Of others, AnswerDotAI/cold-compress@15bb300: what mattered is stored when a query comes. "
        "Compared: the selection is equal.",
        here="The last queries are kept, and their attention to the tokens held now is computed when tokens go.",
    ),
    Item(
        of="MorphKV (`morphkv`), ghadiaravi13/MorphKV@8903d2a: the most attention of any of the newest queries",
        verdict="differs by choice",
        code=("policies.morphkv:MorphKV",),
        tests=(
            "policies/test_morphkv.py:test_it_chooses_as_the_code_does",
            "policies/test_morphkv.py:test_the_code_attends_to_the_same_tokens",
        ),
        shown=(ALL,),
        authors="It chooses within a step, and masks attention for each query head. Compared: equal. Another "
        "version averages what it evicts into one token.",
        here="It evicts when a step has ended, which leaves the same tokens; all query heads of a KV head see them.",
    ),
    Item(
        of="Random Attention (`random_attention`), SalesforceAIResearch/Random-Attention@066c520: lots in rounds",
        verdict="differs by choice",
        code=("policies.random_attention:RandomAttention", "ref.draw:draw"),
        tests=(
            "policies/test_random_attention.py:test_survival",
            "policies/test_random_attention.py:test_draws_do_not_depend_on_the_batch",
        ),
        shown=(ALL, f"{EVIDENCE}#random-eviction-with-a-window"),
        authors="It draws from the device's generator, and evicts a whole batch at once. Compared: equal, with "
        "the same lots.",
        here="A lot depends on the seed, the round, the layer, the head and the position alone, and each row "
        "evicts when it is full.",
    ),
    Item(
        of="VaSE (`vase`), terarachang/VaSE@bfa2692: values of a large range, others by weighted lots",
        verdict="differs by choice",
        code=("policies.vase:VaSE",),
        tests=("policies/test_vase.py:test_worked_example", "policies/test_vase.py:test_worked_example_of_dkv"),
        shown=(ALL,),
        paper="Only its abstract was at hand.",
        authors="It pools over neighbours in the order of the last draw; another version sorts them by position. "
        "Compared: the variant `dkv` is equal, and the weights of the other are, but for rounding.",
        here="It pools over neighbours in the text.",
    ),
    Item(
        of="KeyDiff (`keydiff`), its paper and NVIDIA/kvpress@08a43bf: keys that differ from the mean key",
        verdict="agrees",
        code=("policies.keydiff:KeyDiff",),
        tests=("policies/test_keydiff.py:test_worked_example",),
        shown=(KEYS, PRETRAINED),
        authors="Of kvpress: a prompt is compressed, or, in a later version (0dc3358), 512 generated tokens at once. "
        "Not compared on tensors.",
        here="One token goes in every step, unless `schedule` says otherwise. At a quarter of the tokens 24.3 % are "
        "right on a pretrained model, 68.8 % on the embedded one.",
    ),
    Item(
        of="Knorm (`knorm`), alessiodevoto/l2compress@6d84d6e and NVIDIA/kvpress@08a43bf: short keys",
        verdict="agrees",
        code=("policies.knorm:Knorm",),
        tests=("policies/test_knorm.py:test_worked_example",),
        shown=(KEYS, PRETRAINED),
        authors="The authors' code can leave out layers, kvpress does not. Not compared on tensors.",
        here="All layers evict. At a quarter of the tokens 4.8 % are right on a pretrained model, 11.5 % on the "
        "embedded one.",
    ),
    Item(
        of="TriAttention (`triattention`), WeianMao/triattention@c3744ee: keys against the centre of a head's "
        "queries",
        verdict="differs by choice",
        code=("policies.triattention:TriAttention", "ref.tri_score:tri_score"),
        tests=(
            "policies/test_triattention.py:test_worked_example",
            "policies/test_triattention.py:test_scores_are_those_of_unrotated_keys",
            "policies/test_triattention.py:test_all_lanes_keep_the_union_of_each_heads_best",
        ),
        shown=(KEYS, PRETRAINED, "backbone.md#do-queries-lie-around-a-centre"),
        paper="Its equations were read through others' notes.",
        authors="By default its scripts keep the same tokens in all layers; other scripts choose in each layer. "
        "Not compared on tensors.",
        here="`share=head` is what the equations say, and `share=layers` what the scripts run by default. With "
        "it 17.5 % are right at a quarter of the tokens on a pretrained model, 51.0 % on the embedded one.",
    ),
    Item(
        of="TurboQuant (formats `tq1` to `tq4`): a rotation, and a codebook for Gaussian numbers",
        verdict="differs by choice",
        code=("quant.turboquant:TurboQuant", "ref.rotated_attention:rotated_attention"),
        tests=(
            "quant/test_turboquant.py:test_worked_numbers",
            "quant/test_turboquant.py:test_the_codebook_is_optimal",
            "quant/test_turboquant.py:test_the_unbiased_scale_beats_algorithm_2",
        ),
        paper="The scale is the vector's length, and algorithm 2 repairs inner products with further bits. A "
        "rotation is drawn at random.",
        authors="Not read.",
        here="By default the scale itself makes inner products right on average; `scale=none` is the paper's "
        "letter. The rotation is a Hadamard matrix with fixed signs.",
    ),
)

PAPER = Paper("Baselines", OF_PAPERS + OTHERS, heading="policy, code of its authors")
