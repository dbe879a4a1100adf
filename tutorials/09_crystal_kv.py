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
# # 9. Crystal-KV: from an attention map to an eviction rule
#
# A user reads the answer, not the thinking. So a cache should keep the thinking tokens that the *answer* looks at.
# This is the **answer-first principle** of Crystal-KV. The first cell draws it: rows are the tokens of an answer,
# columns the thinking tokens before it. Triangles, in a number's row, are the tokens that carry this number. The
# query that asks for it is the row above.

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
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch

from minithink.evaluate.needed import HELD, needed_kept
from minithink.ref.decode_attention import group_reduce
from minithink.ref.lrfu import Decay, Scaled, decayed, hit_set, lrfu
from minithink.ref.reallocate import reallocate
from minithink.ref.retain import worst
from minithink.reread.attention import read
from minithink.tasks import grade, load_problems, needs

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
COLORS = GREY, ORANGE, BLUE, GREEN = "#718096", "#dd6b20", "#2b6cb0", "#2f855a"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})

engine = minithink.load("tiny", device="cpu", dtype="float32")
L, H = engine.config.num_layers, engine.config.num_kv_heads
[problem] = [p for p in load_problems("validation", "search") if p.id == "search-validation-1e5de4813a85"]
GREEDY = {"temperature": 0, "max_new_tokens": 1000}
[full] = engine.generate(problem.question, **GREEDY)  # without a policy: the full cache
ids, P = engine.prompt_ids(problem.question) + full.token_ids, full.prompt_tokens
T, N = P + full.thinking_tokens, len(ids)  # prompt: 0 … P − 1, thinking: P … T − 1, answer: T … N − 1
pieces = engine.tokenizer.pieces(ids)

# The attention of every query (row) to every token, by KV head: of its query heads the largest probability counts.
mass = torch.zeros(L, H, N, N)
read(engine.loaded, ids, lambda layer, *seen: mass[layer].copy_(group_reduce(*seen, "max").transpose(0, 1)))
mass /= mass.sum(-1, keepdim=True)
reading = needs.read(problem.question, pieces, P)  # which earlier tokens each line reads, by the rules of the text
last = len(reading.statements) - 1
carriers = {n.key[1]: n.places for n in reading.needs if n.statement == last and n.key[0] == "value"}
spoken = [i for i in range(T, N - 1) if "boxed" not in "".join(pieces[T : i + 1])]
asks = dict(zip(carriers, (i for i in spoken if pieces[i + 1].isdigit()), strict=True))  # queries before the numbers
found = sum(mass[:, :, asks[name], list(places)].sum(-1) for name, places in carriers.items())  # [L, H]
looker = divmod(found.argmax().item(), H)  # the head that looks at the triangles most

figure, axes = plt.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
for axis, rows, title in (
    (axes[0], mass.mean((0, 1)), "mean of all 32 heads"),
    (axes[1], mass[looker], f"layer {looker[0]}, KV head {looker[1]}"),
):
    axis.imshow(
        rows[spoken, P:T],
        aspect="auto",
        cmap="magma_r",
        vmin=0,
        vmax=0.05,
        interpolation="nearest",
        extent=(0, T - P, len(spoken), 0),
    )
    for name, places in carriers.items():
        axis.plot([x - P + 0.5 for x in places], [asks[name] - T + 1.4] * len(places), "^", color=BLUE, markersize=5)
    axis.set(title=f"which thinking tokens the answer looks at: {title} (dark: at least 5 % of the attention)")
    axis.set_yticks(np.arange(len(spoken)) + 0.5, [pieces[i].replace("\n", "⏎") for i in spoken], fontsize=6)
axes[1].set(xlabel="thinking tokens, the newest on the right")
plt.show()
assert grade(full.text, problem.answer), "the model should solve this with a full cache"
assert reading.parsed == 1, "the rules should understand every line"
print(problem.question, "\n…", "".join(pieces[T - 45 :]).strip())
for name, places in carriers.items():
    given = mass[:, :, asks[name], list(places)].sum(-1)
    print(
        f"{name}: at {[i - P for i in places]}; layer {looker[0]}, head {looker[1]} gives them {given[looker]:.0%} "
        f"of its attention, all heads on average {given.mean():.1%}"
    )
    assert given[looker] > 10 * len(places) / T, "far more than even attention would give"

# %% [markdown]
# **Few tokens matter**: in the lower map the query before each number looks at the triangles, hundreds of tokens
# back. **The average head does not show it**: in the upper map the answer looks at the newest tokens. We know what is
# *needed* without asking attention: rules can read these simple texts (`minithink/tasks/needs.py`).
#
# The answer's attention comes too late: the cache must decide during the thinking. The paper observes an earlier
# sign. Tokens that serve the answer, **CrystalKV**, are attended *on and off* until the thinking ends. The others,
# **SlipKV**, are attended when they are new, and then fade. So evict what was attended neither often nor lately.
#
# ## From the map to hits
#
# Is a token attended at this step, yes or no? A **hit set** is the smallest set of tokens that holds the share p of
# the attention (a nucleus, as in sampling; p = 0.9). First six tokens with masses in sixteenths, then the trace. A
# row of the picture is a token that carries a number of the answer, and a dot is a hit by the query at that step:
# left in the head from above, right in the head with the largest hit sets. The line below compares tokens of the
# first half: the third that the answer looks at most with the third that it looks at least.

# %%
six = torch.tensor([5.0, 1, 3, 3, 2, 2]) / 16
for p, expected in ((0.9, {0, 2, 3, 4, 5}), (0.75, {0, 2, 3, 4}), (0.5, {0, 2})):
    order = sorted(range(6), key=lambda i: (-six[i], i))  # of equal masses the older token comes first
    size = next(n for n in range(1, 7) if six[order[:n]].sum() >= p)
    by_library = set(hit_set(six, torch.ones(6, dtype=torch.bool), p).nonzero()[:, 0].tolist())
    print(f"p = {p}: {sorted(order[:size])}")
    assert set(order[:size]) == by_library == expected
hits = hit_set(mass, torch.ones(N, N, dtype=torch.bool).tril().expand_as(mass), 0.9)  # [L, H, query, token]
assert (mass * hits).sum(-1).min() > 0.9 - 1e-4, "a hit set should hold 90 %"
size = hits[:, :, P:T].sum(-1).float().mean(-1)  # mean over the thinking: [L, H]
wide = divmod(size.argmax().item(), H)
places = sorted({i for at in carriers.values() for i in at})
figure, axes = plt.subplots(1, 2, figsize=(10, 2.4), sharey=True, layout="constrained")
for axis, (layer, head) in zip(axes, (looker, wide), strict=True):
    for y, i in enumerate(places):
        axis.plot([i - P, T - P], [y, y], color="#e2e8f0", linewidth=1, zorder=0)
        when = hits[layer, head, i + 1 : T, i].nonzero()[:, 0] + i + 1 - P
        axis.plot(when, np.full(len(when), y), ".", color=BLUE, markersize=3)
    axis.set(title=f"layer {layer}, head {head}: {size[layer, head]:.0f} hits a step", xlabel="step of the thinking")
axes[0].set_yticks(range(len(places)), [f"{pieces[i]} at {i - P}" for i in places], fontsize=7)
plt.show()
order = mass[:, :, T:, P : (P + T) // 2].sum((0, 1, 2)).argsort(descending=True) + P  # by the answer's attention
top, _, bottom = (hits[:, :, T - 100 : T, tokens].float().mean() for tokens in order.chunk(3))
print(f"in the last 100 steps a head hits {top:.0%} of the answer's top third, and {bottom:.0%} of its bottom third")
assert top > bottom, "what the answer looks at should be hit more often"

# %% [markdown]
# On the right these tokens are hit at nearly every step, but so are many others: such hits say little. On the left
# hits are rare, with gaps of a hundred steps and more. Over all heads, tokens that the answer looks at are hit more
# than others, as the paper says. Here the difference is one of degree.
#
# ## Recency and frequency in one number
#
# LRU (least recently used) forgets how often, LFU (least frequently used) forgets when. **LRFU** counts every hit and
# lets it decay: CRF, combined recency and frequency. The incremental form stores CRF and the last hit τ.
#
#     CRF_i(t) = Σ λ^(t − t_j) over the hits t_j  =  λ^(t − τ)·CRF_i(τ) + [i is hit at t]
#
# For λ ≤ ½ one newer hit outweighs all older hits together, for ½ + ¼ + ⅛ + … never exceeds 1. So LRFU is LRU there;
# frequency counts only among equal last hits. In general a token that was hit k steps *more recently* can lose only
# if λ^k > 1 − λ. The paper recommends λ from 0.5 to 0.7. How long a lead can frequency make up for there? A trap: a
# decayed value is soon 0 in float32, and old tokens look alike. The library compares numbers with an exponent beside
# them (`Scaled`), whose logarithms are printed below.

# %%
HITS = {"a": [1, 2, 3, 4, 5], "b": [1, 6], "c": [1, 2, 4]}


def incremental(times, lam, t):
    crf, tau = 0.0, 0
    for now in range(1, t + 1):
        if now in times:
            crf, tau = lam ** (now - tau) * crf + 1, now
    return lam ** (t - tau) * crf, tau


def leaving(times, lam, t):
    """The order of eviction: by CRF; among equals by the last hit, then by age."""
    return sorted(times, key=lambda i: (*incremental(times[i], lam, t), i))


for token, times in HITS.items():
    print(token, [round(incremental(times, 0.6, t)[0], 4) for t in range(1, 7)])
for lam, expected in ((0.0, "cab"), (0.5, "cab"), (0.6, "cba"), (1.0, "bca")):
    print(f"λ = {lam}: evicted in the order {leaving(HITS, lam, 6)}")
    for times in HITS.values():
        assert math.isclose(sum(lam ** (6 - x) for x in times), incremental(times, lam, 6)[0]), "definition"
    assert "".join(leaving(HITS, lam, 6)) == expected
assert leaving(HITS, 0, 6) == sorted(HITS, key=lambda i: HITS[i][-1]), "λ = 0 is LRU"
assert leaving(HITS, 1, 6) == sorted(HITS, key=lambda i: len(HITS[i])), "λ = 1 is LFU"

lead = {lam: max(k for k in range(1000) if k == 0 or lam**k > 1 - lam) for lam in (0.5, 0.6, 0.7, 0.9, 0.99)}
print("the longest lead that frequency can outvote, in steps:", lead)
assert list(lead.values()) == [0, 1, 3, 21, 458]
plain = torch.tensor(0.6) ** torch.tensor([300.0, 250.0])
score = decayed(torch.ones(2).double(), torch.tensor([0, 50]), torch.tensor(300), Decay(0.6)).log2()
print("hit 300 and 250 steps ago: λ^age =", plain.tolist(), " log₂ =", score.tolist())
assert plain.sum() == 0 < score[1] - score[0], "the older one should go"

# %% [markdown]
# ## Evict
#
# Remember: **at λ = 0.6, frequency can make up for a lead of one step, and no more.** Now evict with it. At every
# thinking step: append the token (it enters with CRF 1), update hits, and evict the smallest CRF while the head holds
# more than its budget B. The prompt stays; the answer is appended beside the budget. First by hand: at t = 9 a head
# holds tokens 10 to 14 beside two of the prompt. B = 5, so two must leave. Then by the real policy,
# `crystal_kv_lite`, where every head has the same budget: here the prompt and half of the thinking. It runs on the
# plain manager (`cache="plain"`), where the tokens of all heads are one tensor of positions. After every step we look
# at it, and the picture shows what is left when the thinking ends.

# %%
rewards = {10: [3, 9], 11: [4, 6], 12: [5], 13: [7, 9], 14: [9]}  # birth and hits of each token
for lam, expected in ((1.0, [12, 14]), (0.6, [12, 11])):
    print(f"λ = {lam}: evict {leaving(rewards, lam, 9)[:2]}")
    assert leaving(rewards, lam, 9)[:2] == expected, "LFU evicts the newborn token, LRFU does not"
B = P + (T - P) // 2


def run(policy):
    """→ the result, what each head holds after the last thinking step [heads, positions], and the changes of budgets:
    pairs of a step and the budgets from then on [heads]."""
    stream = engine.stream(problem.question, policy=policy, budget=B, cache="plain", **GREEDY)
    held, budgets = [], []

    def look(_):  # after every step
        [running] = stream.cache.sequences.values()
        [budget] = running.budgets.values()  # of the only policy: [L, 1, H]
        if running.thinking:
            held[:] = [running.lanes.positions().flatten(0, 1).clone()]  # [L·H, S], −1 behind a head's last token
        if not budgets or not torch.equal(budget.flatten(), budgets[-1][1]):
            budgets.append((running.clock, budget.flatten().clone()))

    stream.on_step = look
    for _ in stream.steps():
        pass
    positions = torch.arange(held[0].max() + 1)
    return stream.result, torch.stack([torch.isin(positions, head) for head in held[0]]), budgets


lite, kept, _ = run("crystal_kv_lite")
end = lite.thinking_tokens - 1  # the last step before </think>
assert (kept.sum(1) <= B).all()
assert kept[:, :P].all(), "the prompt should stay"
newest = kept[:, P + end - (B - P) : P + end].float().mean()
print(f"right: {grade(lite.text, problem.answer)}; {end} thinking tokens, with the full cache {T - P - 1}")
print(f"of the {B - P} newest tokens, which a window keeps, a head holds {newest:.0%}")
figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
axis.imshow(kept[:, P : P + end], aspect="auto", cmap="Blues", interpolation="nearest", extent=(0, end, L * H, 0))
axis.axvline(end - (B - P), color=ORANGE)
axis.set(title="what each of the 32 heads holds when the thinking ends; a window: what is to the right of the line")
plt.show()

# %% [markdown]
# Most of it is a window: tokens that are not hit again leave in the order in which they came. Left of the line are
# the tokens that attention came back to; each head has its own. The text is longer than with the full cache.
#
# ## Budgets that move
#
# Hit sets differ in size. So the full method, `crystal_kv`, moves budgets (algorithm 2): each layer gets a share in
# proportion to η = ΣCRF / ΣB, and then each head of a layer. To the letter this swings: a head that just got more has
# a smaller η, and gives it back. The library damps: B^(1−a)·η^a, with a = ½, which settles at B ∝ √CRF. First two
# layers with two heads, then the same problem (budgets move every 128 tokens):

# %%
crf = torch.tensor([[[9.0, 16]], [[25, 144]]], dtype=torch.float64)  # [layers, 1 sequence, heads], constant
for damping, expected in ((1.0, [[4, 4, 5, 27], [5, 10, 12, 13], [4, 4, 5, 27]]), (0.5, [[5, 6, 9, 20]] * 3)):
    budget, history = torch.full((2, 1, 2), 10, dtype=torch.int32), []
    for _ in range(3):  # each head keeps 4 tokens, and gets at most 32 more than it has
        budget = reallocate(crf, budget, torch.full_like(budget, 4), budget + 32, torch.tensor([True]), damping)
        history.append(budget.flatten().tolist())
    print(f"damping {damping}: {history}")
    assert history == expected, "40 slots in all, as at the beginning"
moving, _, changes = run("crystal_kv")
moved = torch.stack([budget for _, budget in changes])  # [changes, heads]
print(f"right: {grade(moving.text, problem.answer)}; {moving.kv_notes}")
figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
figure.colorbar(axis.imshow(moved, aspect="auto", cmap="viridis", interpolation="nearest"))
axis.set_yticks(range(len(moved)), [f"from step {t}" for t, _ in changes], fontsize=7)
axis.set_xticks(range(0, L * H, H), [f"layer {i}" for i in range(L)], fontsize=7)
axis.set(title="budgets of the 32 heads, tokens")
plt.show()
assert (moved.sum(1) == L * H * B).all(), "the total should stay"
final = moved[-1].view(L, H)
print(f"at the end {final.min()} to {final.max()} tokens; layer {looker[0]}, head {looker[1]}: {final[looker]}")
assert final[looker] < B, "the head that looks sharply should give slots away"

# %% [markdown]
# The head that finds the answer's numbers gives slots away: small hit sets need few. The answer is wrong now; with
# equal budgets it was right. (One answer says nothing yet.)
#
# ## Does it find what is needed?
#
# To compare rules and nothing else, we hold the text and its full attention fixed, and let each rule choose what to
# keep. The budget is the prompt and a quarter of the thinking. Then we ask for every line: is one carrier of each
# content that it reads still there? Contents that stand in the prompt do not count.


# %%
def kept_until(rule, budget):
    """Each token's eviction: the first generated token at whose writing a head no longer holds it. [L·H, N]"""
    left, held = torch.full((L, H, N), HELD, dtype=torch.int32), (torch.arange(N) < P).repeat(L, H, 1)
    crf, tau = torch.ones(L, H, N).double(), (torch.arange(N, dtype=torch.int32) - P + 1).clamp(min=0).repeat(L, H, 1)
    generator = torch.Generator().manual_seed(0)
    for i in range(P, T):
        held[..., i] = True
        now, t = slice(0, i + 1), torch.tensor(i - P + 1, dtype=torch.int32)
        score = torch.rand(L, H, i + 1, generator=generator) * (rule == "random")  # window: all 0, so the oldest goes
        value = Scaled(score, torch.zeros_like(tau[..., now]))
        if isinstance(rule, float):  # LRFU, λ = rule; the attention that a new token pays to itself is no hit
            counted = held[..., now] & (torch.arange(i + 1) < i)
            state = mass[:, :, i, now], held[..., now], counted, crf[..., now], tau[..., now]
            crf[..., now], tau[..., now], value = lrfu(*state, t, Decay(rule), 0.9)
        if i + 1 > budget:
            free = held[..., now] & (torch.arange(i + 1) >= P)
            gone = worst(value, tau[..., now], free, torch.full((L, H), budget - P))  # by CRF, last hit, age
            held[..., now] &= ~gone
            left[..., now].masked_fill_(gone, i - P + 1)
    assert (held.sum(-1) == min(T, budget)).all()
    return left.flatten(0, 1)


quarter = P + (T - P) // 4
rules = {"window": "window", "random": "random", "λ = 0 (LRU)": 0.0, "λ = 0.6": 0.6, "λ = 1 (LFU)": 1.0}
asked = [n for n in reading.needs if min(n.places) >= P]
start = [reading.statements[n.statement].start for n in asked]
gap = np.array([s - max(n.places) for n, s in zip(asked, start, strict=True)])  # from the newest carrier
numbers = [i for i, n in enumerate(asked) if n.statement == last and n.key[0] == "value"]
met, stays = {}, {}
for name, rule in rules.items():
    left = kept_until(rule, quarter)
    yes = torch.stack([left[:, list(n.places)].amax(1) > s - P for n, s in zip(asked, start, strict=True)], 1)
    assert abs(yes.double().mean() - needed_kept(reading, left, P, beyond_prompt=True).kept) < 1e-9
    met[name], stays[name] = yes.double().mean(0).numpy(), left[:, P:T] == HELD
    print(
        f"{name:12} keeps {met[name].mean():6.1%} of {len(asked)} needs (mean over heads), "
        f"{met[name][numbers].mean():6.1%} of the answer's three numbers"
    )
edges, far = [0, 16, 64, quarter - P, T], {}
figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
for k, (name, color) in enumerate(zip(("window", "random", "λ = 0.6", "λ = 1 (LFU)"), COLORS, strict=True)):
    bins = [met[name][(gap > low) & (gap <= high)].mean() for low, high in pairwise(edges)]
    axis.bar(np.arange(4) + 0.2 * k, bins, 0.2, color=color, label=name)
    far[name] = bins[-1]
ticks = [f"{a + 1} to {b} tokens back\n{((gap > a) & (gap <= b)).sum()} needs" for a, b in pairwise(edges)]
axis.set_xticks(np.arange(4) + 0.3, ticks)
axis.set(title="share of the needs that are kept, by the distance to the newest carrier")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
both = (stays["λ = 0.6"] & stays["λ = 0 (LRU)"]).sum() / stays["λ = 0.6"].sum()
fresh = stays["λ = 0.6"][:, T - P - (quarter - P) :].sum() / stays["λ = 0.6"].sum()
print(f"of the tokens that λ = 0.6 holds at the end, LRU holds {both:.0%}, and the window {fresh:.0%}")
assert both > 0.85, "λ = 0.6 should be close to LRU"
assert met["λ = 0.6"].mean() < met["window"].mean(), "LRFU should keep less than a window on this text"
assert far["window"] == 0 < far["λ = 0.6"] < far["random"]

# %% [markdown]
# On this text LRFU keeps fewer needs than a window, and even than random eviction. The picture shows where:
#
# - **λ = 0.6 is nearly LRU**, as the lead of one step promised.
# - **It pays near.** Many slots hold tokens older than the window, so needs are lost that the window meets.
# - **It gains little far back.** There, needed tokens rest longer than the memory of λ = 0.6 lasts. Random eviction
#   keeps more of them. LFU keeps most, but it evicts newborn tokens, whose count is 1, and so loses what is near.
#
# The right half of the picture is eight needs of one text, with attention held fixed. The answer's numbers are not
# far back: the thinking repeats them shortly before it ends. On 200 problems of each family, LRFU keeps fewer needs
# and is right less often than both; beside the window, intervals are apart in `search` only
# (`docs/appendix/embedded-model.md`, 25 %). It is not shown that lost needs are why. And the paper's models are much
# larger.
#
# ## Three things to remember
#
# 1. The answer looks at few thinking tokens, and few heads show it.
# 2. A hit set turns attention into hits; CRF turns hits into an order. λ goes from LRU to LFU, and 0.6 is near LRU.
# 3. Past attention tells what is needed only if needed tokens are hit again before they are forgotten.
#
# The policy is `minithink/policies/crystal_kv.py`. Next: [ThinKV](10_thinkv.py), which asks for the kind of thought.
#
# ## Exercises
#
# 1. **A longer memory.** Add λ = 0.9 and 0.99 to `rules`. Which keeps most of the far needs? Which of the near ones?
# 2. **A smaller hit set.** Let `kept_until` take p, and compare p = 0.5 and 0.9 at λ = 0.6. Do more needs survive?
# 3. **One half.** Assert for random lists of hits that `leaving` gives the same order with λ = 0.3 and 0.5.
