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
# # 6. Reading a trace and an accuracy curve
#
# A policy throws tokens out of the cache, and the model still answers, or it does not. Two questions follow. *What
# happened?* A **trace** tells: which token left which head, and when. *How often does it go well?* An **accuracy**
# tells, and it is less sure of itself than it looks.
#
# We run a small evaluation, look into one of its sequences, and then ask what an interval says: with three problems,
# with 200, and when two policies are compared. The evaluation here is far too small to judge a policy by. That is
# part of the lesson.
#
# The picture shows the other part. A policy that is right on 90 % of all problems is evaluated twelve times with each
# number of problems. Each dot is what one evaluation reports, and the bar is its interval.

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
import matplotlib.pyplot as plt
import numpy as np

from minithink.evaluate.intervals import wilson

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

draws = np.random.default_rng(1)
figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
for group, n in enumerate((3, 50, 200, 700)):
    for i, k in enumerate(draws.binomial(n, 0.9, size=12)):
        low, high = wilson(k / n, n)
        axis.plot([15 * group + i] * 2, [low, high], color=BLUE)
        axis.plot(15 * group + i, k / n, ".", color=BLUE)
axis.axhline(0.9, color=ORANGE, linewidth=0.8)
axis.set_xticks([5.5, 20.5, 35.5, 50.5], ["3 problems", "50 problems", "200 problems", "700 problems"])
axis.set(ylabel="right answers", title="the same policy, evaluated again and again (orange: the truth)")
plt.show()

# %%
import json
import re
import tempfile
from math import ceil, comb, log, log1p
from pathlib import Path
from statistics import NormalDist

import torch

from minithink.evaluate.__main__ import main as evaluate
from minithink.evaluate.intervals import bootstrap
from minithink.tasks import load_problems
from minithink.trace.__main__ import main as trace_command
from minithink.trace.format import NEVER, read

torch.set_num_threads(1)  # the model is so small that threads would wait for each other

# %% [markdown]
# ## A small evaluation
#
# Three short problems of the validation split (nothing is ever tried out on the test split), in a file of our own.
# Three policies: `full` keeps everything. `window` keeps the newest tokens. `rkv` keeps what is attended to and does
# not repeat something else, and decides once 32 tokens too many are there. The last two run with two budgets: 128 and
# 256 tokens a head, the prompt's too.
#
# This is the command line of `docs/evaluate.md`. `--trace` also records one sequence of each policy and budget: the
# first problem's. All that is written goes into a temporary folder.

# %%
problems = sorted(load_problems("validation", "facts"), key=lambda p: p.thinking_tokens)[:3]
lines = [json.dumps({"id": f"p{i}", "question": p.question, "answer": p.answer}) for i, p in enumerate(problems)]
temporary = tempfile.TemporaryDirectory()  # it goes when the tutorial ends
folder = Path(temporary.name)
(folder / "problems.jsonl").write_text("\n".join(lines) + "\n")
print(problems[0].question)

BUDGETS, BUFFER, NEW = (128, 256), 32, 400
RKV = f"rkv:buffer={BUFFER}"
words = f"""--device cpu --dtype float32 --policies full,window,{RKV} --batch-size 3
    --budgets {BUDGETS[0]},{BUDGETS[1]} --max-new-tokens {NEW} --seed 5 --keep-text""".split()
words += ["--dataset", f"{folder}/problems.jsonl"]
words += ["--output-dir", f"{folder}/run", "--trace", f"{folder}/run/a.trace"]
assert evaluate(words) == 0, "the evaluation should run to its end"

# %% [markdown]
# The table is the summary. It is computed from `results.jsonl`, where every sequence has a line. We do the first
# columns over again: pass@1 is the share of right answers, and a policy with a budget holds no more than that (R-KV:
# plus what it gathers between two decisions).

# %%
records = [json.loads(line) for line in (folder / "run/results.jsonl").read_text().splitlines()]
rows = json.loads((folder / "run/summary.json").read_text())["rows"]
for row in rows:
    own = [r for r in records if (r["policy"], r["budget"]) == (row["policy"], row["budget"])]
    right, most = [r["right"] for r in own], max(r["tokens_peak"] for r in own)
    print(
        f"{row['policy']:14} budget {row['budget'] or '–':>4}: {sum(right)} of {len(right)} right, "
        f"95 % interval {row['pass_at_1_low']:.0%} to {row['pass_at_1_high']:.0%}, at most {most:.0f} tokens a head"
    )
    assert abs(sum(right) / len(right) - row["pass_at_1"]) < 1e-4
    if row["budget"] is not None:
        assert most <= row["budget"] + (BUFFER if row["policy"] == RKV else 0), "more than the budget is held"
    assert row["pass_at_1_high"] - row["pass_at_1_low"] > 0.3, "three problems cannot say so much"
assert len(records) == 3 * 5
assert all(r["right"] for r in records if r["policy"] == "full"), "the model should solve these with a full cache"

# %% [markdown]
# Look at the intervals. Three right answers of three do not say "100 %": a policy that is right half of the time does
# that once in eight. And none of three does not say "0 %".
#
# Another thing that such a run can show: how long the policies say the same. The draws belong to the problem's number
# and the position and to nothing else, so two policies throw the same dice. A text changes only where a policy has
# changed the model's mind.

# %%
texts = {(r["policy"], r["budget"], r["id"]): r["text"] for r in records}


def common(a: str, b: str) -> int:
    """Characters from the beginning that are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


print("characters that are the same as with the full cache")
for policy in ("window", RKV):
    for budget in BUDGETS:
        same = [common(texts[policy, budget, f"p{i}"], texts["full", None, f"p{i}"]) for i in range(3)]
        print(f"{policy:14} {budget:4}: {same} of {[len(texts['full', None, f'p{i}']) for i in range(3)]}")
        assert min(same) > 0, "before the first eviction the texts should agree"

# %% [markdown]
# Keep that in mind: the policies meet the same problems *and* the same luck. It will pay at the end.
#
# ## A trace, in numbers
#
# A trace is a list of what happened. Reading it is a look at tables: `kept(t)` says which tokens each head holds
# after `t` generated tokens, as a mask of [heads, tokens]; `gone` is the step at which a token left. The embedded
# model has 32 such heads (8 layers with 4 KV heads each). Under `rkv` each keeps what it likes; under `window` all
# keep the same.

# %%
traces = {}
for policy, budget in (("window", BUDGETS[0]), (RKV, BUDGETS[0])):
    file = read(folder / "run" / f"a.{policy.replace(':', '-')}-{budget}.trace")
    [traces[policy]] = file.traces.values()
    trace = traces[policy]
    lost = (trace.gone != NEVER).sum(1)  # of each table
    print(
        f"{policy}: {trace.prompt} tokens of prompt, {trace.steps} generated, "
        f"{trace.head.units} {'tables; each' if trace.head.units > 1 else 'table for all heads; it'} lost "
        f"{lost.max()} tokens, at {len(np.unique(trace.evict_step))} different steps"
    )
    assert lost.min() == lost.max(), "every head has the same budget"

trace = traces[RKV]
held = np.array([trace.kept(t).sum(1) for t in range(trace.steps + 1)])  # [steps + 1, heads]
[record] = [r for r in records if (r["policy"], r["budget"], r["id"]) == (RKV, BUDGETS[0], "p0")]
assert held.max() <= BUDGETS[0] + BUFFER
assert abs(held[1:].mean() - record["tokens_mean"]) < 1e-6, "the trace and results.jsonl should tell the same"
assert len(np.unique(trace.evict_step)) == record["evicting_steps"] > 0

figure, axes = plt.subplots(1, 2, figsize=(10, 2.6), layout="constrained")
for policy, color in (("window", GREY), (RKV, BLUE)):
    t = traces[policy]
    axes[0].plot([t.kept(step).sum(1).mean() for step in range(t.steps + 1)], color=color, label=policy)
    age = t.evict_step - t.born[t.evict_pos]
    axes[1].hist(age, bins=40, range=(0, NEW), weights=np.full(len(age), 100 / len(age)), color=color, alpha=0.6)
axes[0].axhline(BUDGETS[0], color=ORANGE, linewidth=0.8)
axes[0].set(title="tokens that a head holds (orange: the budget)", xlabel="generated tokens")
axes[0].legend()
axes[1].set(title="age of tokens that are evicted, in steps", xlabel="steps since the token came", ylabel="%")
plt.show()

# %% [markdown]
# Left: the window stops growing; R-KV is a saw, for it lets 32 tokens come and then evicts 32 at once. Right: the
# window evicts what is oldest, and nothing else (the prompt's tokens all came at step 0, so they look younger than
# they are). R-KV evicts young tokens as well: those that resemble others.
#
# ## Who kept what the answer needed?
#
# A problem of this family gives values, and rules to compute others. Some of the values are needed, and some are
# there to distract. We read the question and find out which is which: start with the names that are asked for and
# follow the rules down.

# %%
question = problems[0].question
rules = dict(re.findall(r"(\w+) = ([^;.]+)[;.]", question))
needed, todo = set(), re.findall(r"\w+", question.partition("Find ")[2].replace(" and ", " "))
while todo:
    name = todo.pop()
    if name in rules and name not in needed:
        needed.add(name)
        todo += re.findall(r"[a-z]+", rules[name])
given = {name: value for name, value in rules.items() if value.strip().isdigit()}
print("given:", given, "– needed of them:", sorted(needed & given.keys()))
assert needed & given.keys(), "the problem should need something that it gives"


def place(name: str) -> int:
    """The token of the prompt that says the value of a name."""
    ends = np.cumsum([len(text) for text in trace.texts])
    start = "".join(trace.texts).index(f"{name} = {given[name]}") + len(f"{name} = {given[name]}") - 1
    return int(np.searchsorted(ends, start, side="right"))  # the token in which its last digit stands


figure, axis = plt.subplots(figsize=(10, 2.8), layout="constrained")
for name in given:
    at = place(name)
    assert trace.texts[at].strip() in given[name], "this should be the value's token"
    heads = [int(trace.kept(t)[:, at].sum()) for t in range(trace.steps + 1)]
    used = re.findall(rf"\b{name}\b", "".join(trace.texts[trace.prompt :]))
    copies = [i for i, text in enumerate(trace.texts) if text.strip() == trace.texts[at].strip()]
    some = int(trace.kept(trace.steps)[:, copies].any(1).sum())
    print(
        f"{name} = {given[name]}: named {len(used)} times in the thinking, kept at the end by {heads[-1]} of "
        f"{trace.head.units} heads, it or a later {given[name]} by {some}"
        + ("" if name in needed else " (a distraction)")
    )
    axis.plot(heads, color=BLUE if name in needed else GREY, label=f"{name} = {given[name]}")
moments = {int(step) for name in given for step in trace.gone[:, place(name)]}
assert len(moments) > 1, "the heads should not agree on when to let a value go"
axis.set(xlabel="generated tokens", ylabel="heads that keep it", ylim=(0, trace.head.units + 1))
axis.legend(title="blue: needed")
plt.show()

# %% [markdown]
# The steps of the curves are R-KV's decisions. A token is not simply kept or lost: some heads let it go and others do
# not, and nobody told them what the answer will need. Under the window the same token leaves everywhere in one step.
#
# Do not be surprised if more heads keep the distraction than the value that is needed. The thinking repeats what it
# uses, and for R-KV a value that stands there three times is redundant twice; what nobody repeats resembles nothing.
# That is why we also count the heads that have *some* token of the value.
#
# When a run ends wrong, this is the first picture to look at: was the value still there when it was needed, and in
# how many heads?
#
# Without a browser, the end of a trace is shown like this. What no head has kept is struck out, or stands in
# [brackets] where there are no colours: under the window that is all but the newest tokens. R-KV's heads keep
# different ones, so hardly anything is lost to all.

# %%
for name in (f"window-{BUDGETS[0]}", f"rkv-buffer={BUFFER}-{BUDGETS[0]}"):
    assert trace_command(["view", f"{folder}/run/a.{name}.trace", "--terminal"]) == 0
nobody = {policy: int((~t.kept(t.steps).any(0)).sum()) for policy, t in traces.items()}
print("tokens that no head has kept:", nobody)
assert nobody[RKV] < nobody["window"] / 4, "heads that choose for themselves should together keep more"

# %% [markdown]
# In a browser, `python -m minithink.trace view FILE --open` shows the same with a slider over time, and tells of
# every token who evicted it, when, and with which score (`docs/trace.md`). This tutorial's files go when it ends: try
# it before that, in a cell of your own, with the call above and `"--open"` instead of `"--terminal"`.
#
# ## An accuracy curve
#
# Now step back from one sequence to many. An accuracy curve has the budget on one axis and pass@1 on the other. Ours,
# with its intervals:

# %%
figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
for i, (policy, color) in enumerate((("window", GREY), (RKV, BLUE))):
    own = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["budget"])
    x, y = [r["budget"] + 3 * i for r in own], np.array([r["pass_at_1"] for r in own])
    ends = np.array([[r["pass_at_1_low"], r["pass_at_1_high"]] for r in own]).T
    axis.errorbar(x, y, yerr=abs(ends - y), color=color, marker="o", capsize=3, label=policy)
axis.set(xlabel="budget, tokens", ylabel="pass@1", ylim=(-0.05, 1.05), xticks=BUDGETS)
axis.legend()
plt.show()

# %% [markdown]
# The bars are what the curve is worth: nearly nothing. Read the bars before the dots.
#
# ## What an interval says
#
# Suppose a policy solves 90 % of *all* problems. Nobody can know this number; an evaluation draws 200 problems and
# counts. We play evaluation: throw the dice 200 times, compute the interval, and see whether the 90 % are inside. We
# do it a hundred times.


# %%
def interval(k: int, n: int) -> tuple[float, float]:
    """The one of the summary for k right answers of n: bootstrap over problems, and Wilson's where all are alike."""
    return bootstrap([1.0] * k + [0.0] * (n - k), resamples=2000) or wilson(k / n, n)


rng = np.random.default_rng(0)
p, n = 0.9, 200
counts = rng.binomial(n, p, size=100)
found = [wilson(k / n, n) for k in counts]
missed = [not low <= p <= high for low, high in found]
figure, axis = plt.subplots(figsize=(10, 2.4), layout="constrained")
for i, ((low, high), miss) in enumerate(zip(found, missed, strict=True)):
    axis.plot([i, i], [low, high], color=ORANGE if miss else BLUE, linewidth=2)
axis.axhline(p, color="black", linewidth=0.8)
axis.set(xlabel="evaluation", ylabel="interval", title=f"100 evaluations of {n} problems (orange: they miss {p:.0%})")
plt.show()
print(f"{sum(missed)} of 100 intervals miss the truth; observed were {min(counts) / n:.1%} to {max(counts) / n:.1%}")
assert 0 < sum(missed) < 14, "about five of a hundred should miss"

# %% [markdown]
# That is what 95 % means. It is a promise about the *method*: of many evaluations, 95 of 100 give an interval with
# the truth inside. Of the one interval in front of you it does not say where in it the truth is, nor whether this is
# one of the five.
#
# No dice are needed to check the promise. An interval depends only on how many answers are right, and the probability
# of each count is known. So the *coverage* is a sum:


# %%
def coverage(p: float, n: int, make) -> tuple[float, float]:
    """The probability that an interval holds p, and its mean width."""
    inside = width = 0.0
    for k in range(n + 1):
        chance = np.exp(log(comb(n, k)) + k * log(p) + (n - k) * log1p(-p))
        if chance > 1e-7:
            low, high = make(k, n)
            inside, width = inside + chance * (low <= p <= high), width + chance * (high - low)
    return inside, width


def alone(k: int, n: int) -> tuple[float, float]:
    """The bootstrap and nothing else: where all answers are right, so is every resample."""
    return bootstrap([1.0] * k + [0.0] * (n - k), resamples=2000) or (k / n, k / n)


methods = {"bootstrap alone": alone, "the summary's": interval, "Wilson's": lambda k, n: wilson(k / n, n)}
table = {(p, n, m): coverage(p, n, methods[m]) for p in (0.9, 0.97) for n in (50, 200, 700) for m in methods}
print("truth  problems  " + "  ".join(f"{name:>16}" for name in methods))
for p in (0.9, 0.97):
    for n in (50, 200, 700):
        cells = (f"{table[p, n, m][0]:8.1%} ± {50 * table[p, n, m][1]:4.1f} " for m in methods)
        print(f"{p:5.0%}  {n:8}  " + "  ".join(cells))
print("how often the truth is inside, and half of the mean width in percentage points")
assert table[0.97, 50, "bootstrap alone"][0] < 0.85, "few problems, and few of them wrong"
assert all(share > 0.93 for (_, _, m), (share, _) in table.items() if m != "bootstrap alone")
ratio = table[0.9, 50, "Wilson's"][1] / table[0.9, 200, "Wilson's"][1]
assert 1.8 < ratio < 2.1, "four times the problems should give half the width"

# %% [markdown]
# What the sums show:
#
# - With 200 problems and 90 % the interval is about ±4 points, with 700 about ±2. Four times the problems, half the
#   width: precision is bought with a square.
# - The bootstrap is what evaluations usually report, and it works for any number of samples a problem. But it can
#   only draw again what it has seen. At 97 % one of five evaluations with 50 problems has no wrong answer at all;
#   then every resample is alike, and the interval has no width and misses the truth. There the summary gives Wilson's
#   (marked w), and the promise holds.
# - The interval knows about the choice of problems only. Another seed, another prompt or another model are not in it.
#
# ## Two intervals overlap. And now?
#
# Policy A is right on 95 % of all problems, policy B on 90 %. With 200 problems each: 91 to 97 and 85 to 93, they
# overlap. Is there no difference, then? The question is put wrongly. Both met *the same* problems, and easy problems
# are easy for both. What counts is where they differ. So take the difference problem by problem (+1: only A is right,
# −1: only B, 0: both or none), and resample these. That is the *paired* comparison of the summary's column
# "difference".
#
# We let both policies depend on the same luck to different degrees. Only A is right on 5 % + c of the problems, only
# B on c. Had the policies nothing in common, c would be 4.5 %. With the same draws it is smaller.


# %%
def detected(n: int, only_a: float, only_b: float, trials: int = 400) -> tuple[float, float]:
    """How often A is found to be better: by intervals that are apart, and by the paired comparison."""
    apart = paired = 0
    both = 0.95 - only_a
    outcomes = rng.multinomial(n, [only_a, only_b, both, 1 - only_a - only_b - both], size=trials)
    for a, b, ab, _ in outcomes:
        apart += wilson((a + ab) / n, n)[0] > wilson((b + ab) / n, n)[1]
        found = bootstrap([1.0] * a + [-1.0] * b + [0.0] * (n - a - b), resamples=1000)
        paired += found is not None and found[0] > 0
    return apart / trials, paired / trials


print("200 problems, 95 % against 90 %           intervals apart   paired interval above 0")
power = {}
for name, only_b in (("nothing in common", 0.045), ("half of that", 0.0225), ("B never right alone", 0.002)):
    power[name] = detected(200, 0.05 + only_b, only_b)
    print(f"{name:21} (c = {only_b:5.2%})   {power[name][0]:22.0%} {power[name][1]:21.0%}")
false = detected(200, 0.03, 0.03)[1]
print(f"two policies that are equally good: {false:.1%} of the paired intervals are above 0 (2.5 % were promised)")
assert all(paired > apart + 0.15 for apart, paired in power.values()), "pairing should see more than two intervals"
assert power["B never right alone"][1] > power["nothing in common"][1] + 0.15, "what is shared should help"
assert false < 0.07

# %% [markdown]
# The same 200 problems, the same two policies: looking at whether two intervals overlap finds the difference rarely,
# the paired comparison often, and the more so, the more the policies have in common. That is why the evaluation gives
# a problem the same draws under every policy. (The other direction is safe: where two such intervals do *not*
# overlap, there is a difference.)
#
# ## How many problems tell 90 % from 95 %?
#
# Let d be the difference, here 0.05, and v the variance of one problem's share in it. The mean of n problems has the
# variance v / n. To find the difference in 80 % of the evaluations, at 95 % confidence,
#
#     d = (z(97.5 %) + z(80 %)) · √(v / n)      so      n = (1.96 + 0.84)² · v / d²
#
# Two independent sets of problems have v = pA(1 − pA) + pB(1 − pB). Pairs have v = (only A) + (only B) − d².

# %%
z = NormalDist().inv_cdf
factor, d = (z(0.975) + z(0.8)) ** 2, 0.05
apart = ceil(factor * (0.95 * 0.05 + 0.9 * 0.1) / d**2)
print(f"other problems for each policy: {apart} for A and {apart} for B")
for only_b in (0.0225, 0.01, 0.002):
    n = ceil(factor * (2 * only_b + d - d**2) / d**2)
    tried = detected(n, d + only_b, only_b)[1]
    print(f"the same, c = {only_b:5.2%}: {n} problems; tried out, {tried:.0%} of the evaluations find it")
    assert n < apart
    assert 0.7 < tried < 0.92, "the formula should hold roughly"
for d, n in ((d, ceil(factor * (0.02 + d - d**2) / d**2)) for d in (0.1, 0.05, 0.02, 0.01)):
    print(f"a difference of {100 * d:4.1f} points with c = 1 %: {n:6,} problems")
assert factor * (0.02 + 0.01) / 0.01**2 > 700, "a point is more than 700 problems can tell"

# %% [markdown]
# So with 200 problems, five points are within reach, if the comparison is paired. One point is not, whatever the
# table says to the last digit. A sentence such as "A keeps 99.1 % of the accuracy, B 98.7 %" from 200 problems says
# nothing about A and B.
#
# Reading an accuracy curve, then: look at the width of the intervals first; compare policies by the paired
# difference, not by eye; expect one of twenty intervals to be wrong, and in a figure with forty points about two. And
# when a dot surprises you, open a trace.
#
# ## Three things to remember
#
# 1. A trace says what happened in one text, an accuracy how often it goes well. You need both.
# 2. Look at the width of an interval first. Four times the problems give half the width.
# 3. Compare policies on the same problems, by the paired difference. Whether two intervals overlap is the wrong
#    question.
#
# ## Exercises
#
# 1. **The other trace.** Record `crystal_kv_lite` at 128 tokens. Draw the curve of the value that is needed, and
#    the ages of evicted tokens. In what do its evictions differ from R-KV's?
# 2. **Needed when?** Find the steps at which the thinking names a given value for the last time. How many of the
#    tokens that a head evicts are never looked at again? `--recall` measures something close to it: compare.
# 3. **Samples or problems?** You can afford 800 sequences: 800 problems once, or 200 problems with `--num-samples 4`.
#    Simulate both, with problems of different difficulty (a beta distribution), and compare the widths.
# 4. **Best of many.** Twenty policies are equally good, at 90 %. Evaluate each on 200 problems and report the best.
#    By how much is it overrated? This is why `tune` refuses the test split.
