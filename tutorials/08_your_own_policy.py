# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Your own policy in thirty lines, and its curve among the others
#
# A **policy** decides which tokens stay in the KV cache. Most policies work in the same way: they give each token a
# **score**, keep the best ones, and evict the others. You write such a policy here. Then you look at what it keeps,
# check what must hold for every policy, and compare it with three others.
#
# The idea of ours: a head reads Σ_j a_j·v_j from its cache, where a_j is the attention to token j and v_j its value.
# So a token adds a vector of length
#
#     s_j = a_j·‖v_j‖
#
# where a_j is the mean over the last w queries and over the query heads that share this KV head. Tokens that add
# little may go. We call the policy `loud`: it keeps what a head hears most. First the score by hand, for three
# tokens of which two may stay. Attention alone would evict the last one, our score evicts the first.

# %%
try:
    import minithink
except ImportError:  # a new machine: install the checkout around this notebook
    import os
    import subprocess
    import sys

    root = next((path for path in (".", "..") if os.path.isfile(f"{path}/minithink/engine.py")), None)
    assert root, "Clone minithink's repository first, and open this notebook in its folder tutorials."
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "-e", f"{root}[tutorials]"])
    sys.path.insert(0, os.path.abspath(root))  # pip tells only processes that start later

# %%
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from math import comb
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from minithink.bench.methods import Sweep
from minithink.evaluate.intervals import wilson
from minithink.kv.contract import Demand, Evict, Policy, See, keep_best
from minithink.policies import POLICIES, register
from minithink.tasks import grade, load_problems
from minithink.trace import format as traces
from minithink.trace.recorder import Recorder

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
COLORS = GREY, ORANGE, GREEN, BLUE = "#718096", "#dd6b20", "#2f855a", "#2b6cb0"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})

attention, values = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([[0.6, 0.8], [2.0, 0.0], [0.0, 4.0]])
score = attention * values.norm(dim=-1)
figure, axes = plt.subplots(1, 2, figsize=(7, 1.7), layout="constrained")
for axis, numbers, title in zip(axes, (attention, score), ("attention a", "score a·‖v‖"), strict=True):
    colors = [ORANGE if x == numbers.min() else BLUE for x in numbers]
    axis.bar(["token 0", "token 1", "token 2"], numbers, color=colors)
    axis.set(title=f"{title} (orange: goes)")
plt.show()
print("attention", *(f"{x:.1f}" for x in attention), " score", *(f"{x:.1f}" for x in score))
assert torch.allclose(score, torch.tensor([0.5, 0.6, 0.8]))
two = torch.tensor(2)  # tokens that may stay
assert keep_best(attention, torch.ones(3, dtype=torch.bool), two).tolist() == [True, True, False]
assert keep_best(score, torch.ones(3, dtype=torch.bool), two).tolist() == [False, True, True]

# %% [markdown]
# ## The policy
#
# A policy is a dataclass. Its fields are its options. Three things make it a policy:
#
# - `demands` says what it needs to see: here the attention rows of the last w queries.
# - `due` and `room` are inherited. `due` says which lanes hold more than their budget, `room` how many tokens they
#   may keep beside protected ones. (A *lane* is what one KV head of one layer holds of one sequence.)
# - `decide` is called between two steps, and answers with edits. Ours is one `Evict`.
#
# Columns of a step's tensors are the tokens that a lane holds now, oldest first. Lanes that hold fewer tokens have
# position −1 in their last columns. `minithink/kv/contract.py` says what else a step shows.


# %%
@dataclass
class Loud(Policy):
    """Keep the tokens that add most to what a head reads."""

    budget: int | None = None  # tokens of a lane
    window: int = 8  # w: the last queries, which score, and the newest tokens, which stay
    schedule: str = "every"
    protect_prompt: bool = False

    name = "loud"
    summary = "keep the tokens that add most to what a head reads"

    def __post_init__(self):
        self.demands = (Demand(See.ROWS, rows=self.window),)

    def decide(self, step):
        due, _ = self.due(step)  # bool [L, B, Hkv]: layers, sequences, KV heads
        if not step.any(due):
            return
        pos, room = step.pos(), self.room(step)  # [L, B, Hkv, S] and [L, B, Hkv]
        score = torch.stack([self.score(step, layer) for layer in range(step.shape.layers)])
        column = torch.arange(pos.shape[-1], device=pos.device)
        newest = column >= (step.held() - self.window)[..., None]
        score = score.masked_fill(newest, torch.inf)
        may_go = (pos >= 0) & ~step.protected()
        step.note(score, may_go)  # for a trace
        yield Evict(due[..., None] & may_go & ~step.ops.keep_best(score, may_go, room))

    def score(self, step, layer):
        """s = a·‖v‖: [B, Hkv, S]."""
        a = step.rows(layer).mean(2)  # of [B, Hkv, w, S]: the mean over the last queries
        return a * step.values(layer).float().norm(dim=-1)


# %% [markdown]
# That is all. The policy knows nothing of pages, slots, number formats or the model. A line gives it a name: now it
# can be written `loud:budget=128,window=4`, as every other policy.
#
# The picture shows one decision, in two heads: every dot is a token, blue ones stay. The prompt stays, and so do
# the newest tokens, whatever their score. To see it we need a policy that tells its scores. We run it on the plain
# manager (`cache="plain"`), which holds ordinary tensors and shows a policy one sequence at a time: B is 1. What
# happens before and after `decide`, you can read there, in `minithink/kv/plain.py`. All policies of this
# tutorial keep the prompt and decide every 16 tokens (`schedule`). So a lane holds up to 16 tokens more than its
# budget.

# %%
register(Loud)  # for this session; in a file, `--policy loud.py:Loud` names it on every command line
SAME = {"schedule": "interval:16", "protect_prompt": True}
engine = minithink.load("tiny", device="cpu", dtype="float32")
problems = sorted(load_problems("validation", "ledger"), key=lambda p: p.thinking_tokens)[:6]
questions = [p.question for p in problems]
GREEDY = {"temperature": 0, "max_new_tokens": 300}
BUDGETS = 112, 160  # tokens of a lane, those of the prompt included
SEEN = []


class Telling(Loud):
    """Loud that remembers what it decided for the first of all sequences."""

    def decide(self, step):
        for edit in super().decide(step):
            if step.row[0] == 0:
                scores = [self.score(step, layer)[0] for layer in range(step.shape.layers)]
                SEEN.append((step.pos()[:, 0].clone(), torch.stack(scores), edit.drop[:, 0].clone()))
            yield edit


P = len(engine.prompt_ids(questions[0]))
[told] = engine.generate(questions[0], policy=Telling(budget=BUDGETS[0], **SAME), cache="plain", **GREEDY)
pos, scores, drop = SEEN[len(SEEN) // 2]  # [L, Hkv, S], a decision in the middle of the text
figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), sharey=True, layout="constrained")
for axis, layer in zip(axes, (1, engine.config.num_layers - 1), strict=True):
    x, y, gone = pos[layer, 0], scores[layer, 0].clamp(min=1e-6), drop[layer, 0]
    axis.plot(x[~gone], y[~gone], ".", color=BLUE, label="stays")
    axis.plot(x[gone], y[gone], ".", color=ORANGE, label="is evicted")
    axis.axvline(P - 0.5, color=GREY, linewidth=0.8)
    axis.set(title=f"layer {layer}, KV head 0", xlabel="position (grey: the prompt ends)", yscale="log")
axes[0].set(ylabel="score")
axes[1].legend(loc="lower right")
plt.show()
print(f"{len(SEEN)} decisions; in this one each lane drops {drop.sum(-1).unique().tolist()} tokens")
assert not drop[pos < P].any(), "the prompt is protected"
inside = (pos >= P) & (pos <= pos.amax(-1, keepdim=True) - 8)  # neither of the prompt nor newest
for layer in range(len(pos)):
    for head in range(pos.shape[1]):
        mine, gone = inside[layer, head], drop[layer, head]
        assert scores[layer, head][gone].max() <= scores[layer, head][mine & ~gone].min(), "the best should stay"

# %% [markdown]
# ## Laws
#
# Some sentences must hold for every policy. In minithink they are called laws, and `tests/policies/test_laws.py`
# tests them. Before any accuracy counts, check them. Four are easy to try on the embedded model:
#
# 1. **The budget is kept.** A lane never holds more than budget + 16 tokens.
# 2. **Companions change nothing.** A sequence loses the same tokens, whatever runs beside it in the batch.
# 3. **Each byte has a name.** The ledger lists what each byte is for. Its entries add up to the bytes held.
# 4. **Both managers agree.** The paged manager, which runs many sequences at once, generates what the plain one does.
#
# A check that cannot fail says nothing. So we break law 2: `Leaky` averages scores over the wrong axis, that of the
# sequences. It would pass every run with one sequence. It also passes beside others on the plain manager, which never
# shows a policy two sequences together. Only the paged manager finds the mistake.

# %%
temporary = tempfile.TemporaryDirectory()


def recorded(policy, budget):
    """One problem under a policy: its result, and the trace of what happened."""
    path = Path(temporary.name) / f"{policy.partition(':')[0]}-{budget}.trace"
    recorder = Recorder(path, engine.tokenizer)
    [result] = engine.generate(
        questions[0], policy=policy, budget=budget, recorder=recorder, schedule=SAME["schedule"], **GREEDY
    )
    recorder.close()
    return result, traces.read(path).traces[0]


def evicted(kind, companions, cache):
    """The positions that the first problem's lanes lose, one by one, with other problems beside it."""
    SEEN.clear()
    short = {"temperature": 0, "max_new_tokens": 100, "batch_size": 3}
    engine.generate([questions[0], *companions], policy=kind(budget=BUDGETS[0], **SAME), cache=cache, **short)
    return [pos[drop].tolist() for pos, _, drop in SEEN]


class Leaky(Telling):
    """The policy with a mistake."""

    def score(self, step, layer):
        score = super().score(step, layer)
        return score.mean(0, keepdim=True).expand_as(score)


runs = {name: recorded(f"{name}:protect_prompt=true", BUDGETS[0]) for name in ("loud", "rkv")}
ours, trace = runs["loud"]
most = max(int(trace.kept(t).sum(1).max()) for t in range(trace.steps + 1))
print(f"budget {BUDGETS[0]}: a lane holds at most {most} tokens")
assert BUDGETS[0] <= most <= BUDGETS[0] + 16
ledger = {kind: size for kind, size in ours.kv_ledger.items() if size}
print(f"{ours.kv_bytes:,} bytes, {ours.kv_bytes / ours.kv_full_bytes:.0%} of a full cache: {ledger}")
assert sum(ours.kv_ledger.values()) == ours.kv_bytes
for kind, cache, holds in ((Telling, "paged", True), (Leaky, "paged", False), (Leaky, "plain", True)):
    first, second = (evicted(kind, companions, cache) for companions in (questions[1:3], questions[3:5]))
    assert any(first), "something should be evicted"
    changed = "nothing" if first == second else "what is evicted"
    print(f"{kind.__name__} on the {cache} manager: companions change {changed}")
    assert (first == second) == holds, "the law should hold for our policy, and pages should find the mistake"
assert ours.token_ids == told.token_ids, "pages should change no token"
assert ours.kv_ledger["payload"] == told.kv_ledger["payload"]
print(f"both managers generate the same {len(ours.token_ids)} tokens, and count the same bytes of keys and values")

# %% [markdown]
# The tests try more: rows that a new sequence takes over, prompts that come in pieces, many settings. They run on
# small random models, and take a policy's text. They need the packages of the extra `test`, which
# `pip install -e '.[test]'` installs; without them the next cell says so and goes on.

# %%
root = Path(find_spec("minithink").origin).parents[1]  # of the checkout
if find_spec("pytest") and find_spec("hypothesis") and (root / "tests").is_dir():
    sys.path.insert(0, str(root))
    from tests.kv import test_plain as managers
    from tests.policies import test_laws as laws

    texts = "loud:budget=18,window=4", "loud:budget=20,window=3,protect_prompt=true,schedule=interval:4"
    for known in (laws.TEXTS, managers.TEXTS):
        known.extend(texts)  # for this session; a line in `SMALL` does it for good
    for text in texts:
        laws.test_budget_and_bytes(text)
        laws.test_the_pool_suffices(text)
        laws.test_companions_change_not_a_bit(text)
        laws.test_a_batch_is_never_worse_than_its_parts(text, 0)
        managers.test_a_sequence_alone_is_equal_bit_for_bit(text)
        print(f"{text}: the laws hold")
else:
    print("The tests' packages are not installed, or this is no checkout: the laws were not run.")

# %% [markdown]
# ## What it keeps
#
# A trace tells which token left which head, and when. Rows of the pictures are the 32 KV heads, columns the thinking
# tokens. Blue: the head holds the token when the thinking ends. `rkv` has the same budget and the same schedule. It
# also goes by attention, and prefers tokens whose keys do not resemble others.

# %%
figure, axes = plt.subplots(2, 1, figsize=(10, 4.6), layout="constrained")
for axis, (name, (result, trace)) in zip(axes, runs.items(), strict=True):
    end = trace.think_end
    kept = trace.kept(end)[:, trace.prompt : trace.prompt + end]  # [heads, thinking tokens]
    axis.imshow(kept, aspect="auto", cmap="Blues", interpolation="nearest", extent=(0, end, len(kept), 0))
    right = "right" if grade(result.text, problems[0].answer) else "wrong"
    axis.set(title=f"{name}: {right}, {end} thinking tokens", ylabel="KV head")
    fresh = kept[:, -int(kept.sum(1).max()) :].mean()  # of as many tokens as a head holds
    print(
        f"{name}: a window of the same size shares {fresh:.0%} of a head's tokens; no head holds "
        f"{(~kept.any(0)).sum()} of {end} tokens"
    )
    assert kept[:, -8:].all(), "the newest tokens should stay"
axes[1].set(xlabel="thinking tokens, the newest on the right")
plt.show()

# %% [markdown]
# A column that is blue from top to bottom is a token that all heads hold. A single dot is held by one head alone.
# In a browser, `python -m minithink.trace view FILE FILE` shows two traces side by side, with a slider over time
# and the score of each evicted token.
#
# ## Its curve among the others
#
# Now all four policies, at two budgets, on six short validation problems. (Nothing is tried out on the test split.)
# `window` keeps the newest tokens. `random` draws lots: a method that chooses well must be above it. Bars are 95 %
# intervals; points of one budget stand side by side.

# %%
names, right = ("window", "random", "rkv", "loud"), {}
full = engine.generate(questions, **GREEDY)
assert all(grade(r.text, p.answer) for r, p in zip(full, problems, strict=True)), "the full cache should solve all"
need = sum(r.prompt_tokens + r.generated_tokens for r in full) / len(full)
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for k, (name, color) in enumerate(zip(names, COLORS, strict=True)):
    for budget in BUDGETS:
        policy = f"{name}:protect_prompt=true"
        results = engine.generate(questions, policy=policy, budget=budget, schedule=SAME["schedule"], **GREEDY)
        right[name, budget] = [grade(r.text, p.answer) for r, p in zip(results, problems, strict=True)]
    share = [sum(right[name, b]) / len(problems) for b in BUDGETS]
    low, high = zip(*(wilson(s, len(problems)) for s in share), strict=True)
    print(f"{name:7}", end="")
    for b, lo, hi in zip(BUDGETS, low, high, strict=True):
        print(f" {b} tokens: {sum(right[name, b])} of {len(problems)}, {lo:.0%} to {hi:.0%}   ", end="")
    print()
    bars = [[s - lo for s, lo in zip(share, low, strict=True)], [hi - s for s, hi in zip(share, high, strict=True)]]
    axis.errorbar([b + 1.5 * k for b in BUDGETS], share, bars, color=color, marker="o", capsize=3, label=name)
axis.set(
    xlabel=f"budget, tokens (the full cache ends with {need:.0f} on average)", ylabel="right answers", ylim=(0, 1.05)
)
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## What six problems say
#
# Hardly anything. The intervals say so, and so does the comparison problem by problem. All policies met the same six
# problems, so only problems count on which two policies *differ*. If two policies are equally good, a coin could
# decide who is right on such a problem. Then k problems all go the same way with probability 2·½^k. How many are
# needed to be below 5 %? And what can `loud` claim?


# %%
def toss(a, b):
    """The probability that a fair coin is at least as one-sided as a problems for one policy and b for the other."""
    n = a + b
    return min(1.0, 2 * sum(comb(n, i) for i in range(max(a, b), n + 1)) / 2**n)


least = next(k for k in range(1, 100) if toss(k, 0) < 0.05)
print(f"{least} problems must all go the same way; there are {len(problems)}")
assert toss(least, 0) < 0.05 <= toss(least - 1, 0)
for budget in BUDGETS:
    for name in names[:-1]:
        pairs = list(zip(right["loud", budget], right[name, budget], strict=True))
        a, b = pairs.count((True, False)), pairs.count((False, True))
        verdict = "a difference" if toss(a, b) < 0.05 else "no verdict"
        print(
            f"budget {budget}: only loud right {a}, only {name} right {b}: a coin does that with "
            f"{toss(a, b):.0%}: {verdict}"
        )
low, high = wilson(1.0, len(problems))
print(f"even {len(problems)} of {len(problems)} leaves {low:.0%} to {high:.0%}")
assert low < 0.7, "few problems leave much open"

# %% [markdown]
# Such a run finds gross mistakes, and no more. Tutorial 6 shows what 200 problems can tell. The choice of problems
# also matters: these are the shortest problems of one family, answered by one model.
#
# ## On a model of transformers
#
# The same class decides inside transformers' `generate`, on any Llama, Qwen2 or Qwen3 model (`docs/hf.md`). Here it
# is the embedded model, read by transformers. Its 120 tokens are those that minithink's own decoder gives.

# %%
if find_spec("transformers"):
    from transformers import AutoModelForCausalLM

    from minithink.engine import TINY

    text = f"loud:protect_prompt=true,budget={BUDGETS[0]}"
    prompt = engine.prompt_ids(questions[0])
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    cache = minithink.hf.cache(model, text)
    ids = torch.tensor([prompt])
    out = model.generate(ids, past_key_values=cache, max_new_tokens=120, do_sample=False)
    [sequence] = cache.report().sequences
    print(f"{sequence.tokens} tokens were fed, a head holds at most {sequence.held}")
    [own] = engine.generate(questions[0], policy=text, temperature=0, max_new_tokens=120)
    assert out[0, len(prompt) :].tolist() == own.token_ids
    assert sequence.held <= BUDGETS[0] < sequence.tokens
else:
    print("This cell was skipped, because transformers is not installed: pip install -e '.[hf]'")

# %% [markdown]
# ## Where its files would go
#
# `CONTRIBUTING.md` ("Add a policy") has the steps. The policy moves to `minithink/policies/loud.py`, and its
# comparison is *data*, the module `minithink/bench/methods/loud.py`: below is all that it holds. One command then
# runs it on 200 problems of each family, on a GPU: `python -m minithink.bench sweep loud --device cuda`.

# %%
sweep = Sweep(
    "what adds most to what a head reads, beside the newest tokens, lots and R-KV",
    tuple(f"{name}:protect_prompt=true" for name in ("loud", "window", "random", "rkv")),
)
print(sweep.what, sweep.policies, sweep.budgets, sweep.problems, sep="\n")
assert all(text.partition(":")[0] in POLICIES for text in sweep.policies)

# %% [markdown]
# On a GPU a second question comes: what does a decision cost? Most operations of this score compute the attention of
# the last queries once more. So look first whether there is such a kernel: `minithink/ref/window_importance.py`
# computes nearly this for R-KV (the maximum over query heads, where ours takes the mean). A policy that demands
# `See.QUERY` and calls it pays little.
#
# If a measurement then says that a kernel of your own would pay, it is two files with the same name and signature:
# `minithink/ref/loudness.py`, written to be read, and `kernels/loudness.py` in Triton. A test compares the two.
# Tutorial 5 builds a kernel in five steps.
#
# Also on a GPU, `capturable = True` lets `decide` be a part of a CUDA graph. `docs/appendix/policy-state.md`
# says what a policy must obey for it.
#
# ## Three things to remember
#
# 1. A policy is a score and a rule when to evict; `due`, `room` and `keep_best` are given.
# 2. Laws first: a policy that looks at its neighbours in the batch can look good in every run with one sequence.
# 3. Six problems find mistakes. They do not rank policies.
#
# ## Exercises
#
# 1. **Attention alone.** Let `score` return only `a`. Does a lane keep other tokens than `loud` does?
# 2. **No window.** Set `window=1`. Which tokens are then judged by one query, and which laws still hold?
# 3. **A memory.** Let the score be the *largest* that a token ever had. What must the policy remember, and what
#    must it do when a new sequence takes the row?
#
# ### Answers
#
# 1. It does as soon as values differ in length: then the orders by a_j and by a_j·‖v_j‖ differ, as for the three
#    tokens at the beginning. Compare `trace.kept` of both at the first decision; later on the texts may differ.
# 2. All but the newest token, which always stays. The laws hold all the same: they do not say which tokens are good.
# 3. A score for each token that is held, by *position*, because columns shift when tokens leave. It goes into
#    `setup`, is named in `state` (else law 3 fails in the tests), and is cleared for the row in `reset`.
#    `docs/appendix/policy-state.md` shows three ways; `h2o.py` is one of them, for sums.
