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
# # 10. ThinKV: from an observation to the slot that is overwritten
#
# A model that reasons plans, computes and doubts. The idea of [ThinKV](https://openreview.net/forum?id=M3CeHnZKNC):
# find out *what kind of thought* the model is in, and spend memory accordingly. It needs only the attention weights
# to tell. Everything else follows from a thought's type:
#
#     sparsity of attention → type of thought → how many bits a token gets
#                                             → how many tokens a thought keeps
#                                             → in which page a token lies
#
# The picture shows what the cache holds, for a made-up list of thoughts of 128 tokens each. Each time a doubt (a
# *transition*, orange) has ended, every thought before it keeps fewer tokens. The first doubt leaves the two thoughts
# before it 64 tokens each, the second 32, the third 16.

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

import matplotlib.pyplot as plt
import torch
from torch.testing import assert_close

from minithink.kv.table import printed
from minithink.policies.thinkv import ThinKV
from minithink.quant import parse
from minithink.ref.anneal import anneal
from minithink.ref.kmeans import kmeans
from minithink.reread.attention import read, sparsity
from minithink.tasks import grade, load_problems
from minithink.text.thoughts import NAMES, kinds

torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
TYPES = "TER"  # transition, execution, reasoning: the library's numbers 0, 1 and 2
COLORS = {"T": ORANGE, "E": BLUE, "R": GREEN}
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})


def by_library(types: str, budget: int, retention: tuple[int, ...], tau: int) -> torch.Tensor:
    """How many tokens each thought holds, after every token: [tokens, thoughts]. Section 3 computes it by hand."""
    kind = torch.tensor([[TYPES.index(letter) for letter in types]])
    size, level = torch.zeros(2, 1, len(types), dtype=torch.int32)
    sizes, cases = [], torch.zeros(2, 1, dtype=torch.int32)
    for clock in range(1, tau * len(types) + 1):
        size[0, (clock - 1) // tau] += 1
        size = anneal(
            size=size[None, :, None],
            excess=(size.sum() - budget).view(1, 1, 1),
            kind=kind,
            level=level,
            cases=cases,
            at=torch.tensor([0]),
            clock=torch.tensor([clock]),
            active=torch.tensor([True]),
            tau=tau,
            retention=retention,
            hard=False,
            transitions=True,
        )
        sizes.append(size[0].tolist())
    return torch.tensor(sizes)


def stacked(axis, sizes: torch.Tensor, types: str, title: str, base: int = 0) -> None:
    """The sizes of thoughts over time, the oldest at the bottom, coloured by type."""
    clock = range(1, len(sizes) + 1)
    tops = base + sizes.cumsum(1)
    for i, letter in enumerate(types):
        top = tops[:, i]
        below = top - sizes[:, i]
        axis.fill_between(clock, below, top, step="post", color=COLORS[letter], alpha=0.75, linewidth=0)
        axis.plot(clock, top, color="white", linewidth=0.6, drawstyle="steps-post")
    axis.set(title=title, xlabel="generated tokens", ylabel="tokens held", xlim=(1, len(sizes)), ylim=(0, None))


figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
story = "RETRETETE"
sizes = by_library(story, budget=10**6, retention=(64, 32, 16, 8, 4), tau=128)
axis.plot([1, len(sizes)], [1, len(sizes)], color=GREY, linewidth=0.8)
stacked(axis, sizes, story, title="green: reasoning, blue: execution, orange: transition; grey line: a full cache")
plt.show()

# %% [markdown]
# ## 1. The observation
#
# How many of the cached tokens does a query really look at? ThinKV counts those that it does *not* look at: their
# weight is below 1 % of the largest weight. Their share is the **sparsity** of the query.
#
#     sparsity = |{t : p_t < 0.01 · max p}| / |{t}|
#
# Of query heads that share a KV head, the largest logit counts. The weights of the KV heads are averaged, and the
# sparsity of this mean row is that of the layer.
#
# The model solves a short problem and reads its own text again in one pass. `read` shows us every layer's logits, and
# we compute each generated token's sparsity.

# %%
engine = minithink.load("tiny", device="cpu", dtype="float32")
problem = min(load_problems("validation"), key=lambda p: p.thinking_tokens)
[full] = engine.generate(problem.question, temperature=0, max_new_tokens=500)
P = full.prompt_tokens
ids = engine.prompt_ids(problem.question) + full.token_ids
by_hand, weights, keys = [], [], []  # of every layer


def see(layer: int, logits: torch.Tensor, seen: torch.Tensor) -> None:
    """logits: [queries, KV heads, query heads of a KV head, tokens]; seen: the tokens that a query may look at."""
    largest = logits.amax(2).masked_fill(~seen, -math.inf)
    p = largest.softmax(-1).mean(1, keepdim=True)  # [queries, 1, tokens], over KV heads
    ignored = (p < 0.01 * p.amax(-1, keepdim=True)) & seen
    by_hand.append((ignored.sum(-1) / seen.sum(-1)).mean(-1))
    weights.append(p)


read(
    engine.loaded,
    ids,
    see,
    queries=torch.arange(P - 1, len(ids)),  # the prompt's last token, and all that were generated
    before_attention=lambda layer, q, k, v: keys.append(k.clone()),
)
found = sparsity(engine.loaded, ids, P - 1)  # the library's: [queries, layers]
assert_close(torch.stack(by_hand, 1), found, rtol=0, atol=0.02)  # a weight may lie on the edge
print("mean sparsity by layer:", [round(x, 2) for x in found.mean(0).tolist()])

# %% [markdown]
# The *calibration*, which lies beside the model's weights, says which layers tell thoughts apart (the paper's L\*),
# and where the thresholds θ1 and θ2 lie between the types. The policy takes the mean sparsity of these layers:
#
#     T, transition: sparsity ≥ θ2          R, reasoning: between          E, execution: sparsity < θ1
#
# Are these really kinds of thought? We also ask the *words*: "Wait" doubts, "Now back to …" plans, a calculation
# executes. On the left are the weights of two tokens, sorted: the least and the most sparse of the second half. On
# the right is the sparsity of every token, coloured by the type that its words give it.

# %%
measured = engine.calibration("thoughts.json")
layers, theta = measured["layers"], measured["thresholds"]
u = found[:, layers].mean(1)  # what the policy sees
words = torch.tensor(kinds(engine.tokenizer.pieces(full.token_ids)))

figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), width_ratios=(1, 2.2), layout="constrained")
late = len(u) // 2  # so that both rows are long
for at, color in ((late + int(u[late:].argmin()), BLUE), (late + int(u[late:].argmax()), ORANGE)):
    p = weights[layers[0]][at, 0, : P + at].sort(descending=True).values
    axes[0].semilogy(p / p[0], color=color, label=f"token {at}: {(p < 0.01 * p[0]).float().mean():.0%} below 1 %")
axes[0].axhline(0.01, color=GREY, linewidth=0.8)
axes[0].set(title=f"layer {layers[0]}, mean over KV heads", xlabel="cached tokens, sorted", ylabel="weight / largest")
axes[0].legend()
for kind, letter in enumerate(TYPES):
    here = (words == kind).nonzero()[:, 0]
    axes[1].plot(here + 1, u[here + 1], ".", markersize=4, color=COLORS[letter], label=NAMES[kind])
for x in theta:
    axes[1].axhline(x, color=GREY, linewidth=0.8)
axes[1].set(title="sparsity, mean over L* (lines: θ1 and θ2)", xlabel="generated tokens", ylim=(0, 1))
axes[1].legend(ncols=3, title="by words", loc="lower right")
plt.show()

# %% [markdown]
# The colours overlap. And most points lie below θ1: by sparsity they are execution. The calibration compared both
# answers for many more segments. κ is their agreement beyond chance: 1 is perfect, 0 is what two coins do.

# %%
m = measured["measurements"]
table = torch.tensor(m["keywords"]["confusion"]).double()  # rows: by sparsity, columns: by words
n = table.sum()
same, chance = table.trace() / n, table.sum(0) @ table.sum(1) / n**2
kappa = (same - chance) / (1 - chance)
assert abs(kappa - m["keywords"]["kappa"]) < 1e-3, "κ should follow from the table"
print(f"{n:.0f} segments: agreement {same:.0%}, by chance {chance:.0%}, κ = {kappa:.2f}")
print(f"sparsity and the number of the segment correlate: {m['correlation_with_position']:.2f}")
assert measured["fallback"], "no layer's sparsity should show three humps for most problems"

# %% [markdown]
# On this model types and words hardly agree. Types are here in part *early, middle and late*: a longer cache has a
# larger share of tokens without attention ([all measurements](../docs/appendix/calibration.md)). In the paper's
# models, a thousand times as large, the density of sparsity has three humps, one for each kind of thought, and the
# thresholds are the valleys between them. Here most problems show no such humps, in any layer.
#
# So we learn here how ThinKV *works*, and must not conclude that its types are thoughts. From now on a type is simply
# given.
#
# ## 2. A type decides on bits
#
# Reasoning and execution get 4 bits a number (NVFP4), transitions 2 (ternary). Tokens wait in a buffer until a group
# of g = 16 is there, and are quantized together. [Tutorial 4](04_number_formats.py) explains the formats. In the
# paper sixteen keys share a scale for each channel (`key_axis="channel"`, which is tutorial 4's `by=token`). By
# default the library gives each key its own scales ([why](../docs/thinkv.md)). How large is the error?

# %%
group = keys[layers[0]][0, P : P + 16]  # [16 tokens, D], the first that were generated
errors = {}
for name in ("nvfp4", "ternary"):
    fmt = parse(name)
    tensor_scale = fmt.tensor_scale(keys[layers[0]][:, :P].abs().max())  # from the prompt, with headroom
    codes, scales = fmt.quantize(group, tensor_scale)
    back = fmt.dequantize(codes, scales, tensor_scale, torch.float32)
    bits = 8 * (codes.numel() + scales.numel()) / group.numel()
    errors[name] = ((back - group).norm() / group.norm()).item()
    print(f"{name:8} {bits} bits a number with its share of the scales, relative error {errors[name]:.3f}")
    assert bits == fmt.bits + 8 / 16, "one byte of scale for 16 numbers"
assert errors["nvfp4"] < errors["ternary"]

# %% [markdown]
# ## 3. A type decides how many stay
#
# The tokens between two measurements are a **segment**: τ = 128 tokens in the paper. Segments are *annealed*: each
# time one has its turn, it goes down one step of the retention schedule, R = 64, 32, 16, 8, 4 in the paper.
#
#     case 1   a transition has ended: every segment before it takes one step
#     case 2   more than k tokens are held: the oldest segment of the least important type (T, then E, then R) takes
#              one step, again and again until it fits; the running one is left alone
#
# A transition means that the model has left a train of thought, so what came before is worth less. Here are both
# cases with lists, for segments of τ = 8 tokens and R = 4, 2, 1.

# %%
RETENTION, TAU = (4, 2, 1), 8


def annealed(types: str, budget: float) -> list[list[int]]:
    """The sizes of all segments after every token. types: of the segments to come."""
    size, level = [0] * len(types), [0] * len(types)
    sizes = []
    for clock in range(1, TAU * len(types) + 1):
        running = (clock - 1) // TAU
        size[running] += 1
        ended = clock % TAU == 0
        if ended and types[running] == "T":  # case 1
            for i in range(running):
                if level[i] < len(RETENTION):
                    size[i] = min(size[i], RETENTION[level[i]])
                    level[i] += 1
        past = range(running + ended)
        while sum(size) > budget:  # case 2
            can_give = [i for i in past if size[i] > RETENTION[-1]]
            if not can_give:
                break
            i = min(can_give, key=lambda i: (TYPES.index(types[i]), i))
            size[i] = min(size[i], RETENTION[level[i]])
            level[i] += 1
        sizes.append(size.copy())
    return sizes


figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
for axis, k in zip(axes, (math.inf, 24), strict=True):
    sizes = annealed("RETREETRER", k)
    stacked(axis, torch.tensor(sizes), "RETREETRER", f"RETREETRER, k = {k}")
    print(f"k = {k}: at the end {sizes[-1]}")
    assert max(map(sum, sizes)) <= k
axes[1].axhline(24, color="black", linewidth=0.8)
plt.show()

# %% [markdown]
# On the left nothing happens until the first orange segment is complete; then the two below it fall to 4 tokens. When
# the second one is complete, these two fall to 2, and the four above them to 4. On the right the budget of 24
# tokens (black) adds case 2: transitions go first, then executions, then reasoning.
#
# The library does this for all sequences at once (`ref/anneal.py`), and must agree with our lists.

# %%
draws = torch.Generator().manual_seed(0)
for _ in range(20):
    types = "".join(TYPES[i] for i in torch.randint(3, (8,), generator=draws))
    k = int(torch.randint(10, 40, (1,), generator=draws))
    assert by_library(types, k, RETENTION, TAU).tolist() == annealed(types, k), (types, k)
print("the library agrees on 20 random stories")

# %% [markdown]
# ## 4. Which tokens stay
#
# A segment has 32 tokens and may keep 4: those that *stand for the others*. K-means puts 4 centres among the keys; of
# each cluster the token whose key is nearest to the centre stays. Nothing is random: the first centre is the point
# nearest to the mean, each of the next ones the point farthest from all centres so far. Then ten times, points join
# the nearest centre, and centres move to the mean of their points.


# %%
def by_kmeans(x: torch.Tensor, k: int) -> tuple[list[int], torch.Tensor, list[int]]:
    """→ the first centres, the cluster of each point, and the points that stay."""
    seeds = [int((x - x.mean(0)).norm(dim=1).argmin())]
    while len(seeds) < k:
        seeds.append(int(torch.cdist(x, x[seeds]).amin(1).argmax()))
    centres = x[seeds]
    for _ in range(10):
        cluster = torch.cdist(x, centres).argmin(1)
        centres = torch.stack([x[cluster == i].mean(0) for i in range(k)])
    distance = torch.cdist(x, centres).round(decimals=4)  # of two that are equally near, the first stays
    stay = [int(distance[:, i].where(cluster == i, math.inf).argmin()) for i in range(k)]
    return seeds, cluster, sorted(stay)


def kept_by_library(x: torch.Tensor, k: int) -> list[int]:
    valid = torch.ones(1, len(x), dtype=torch.bool)
    return kmeans(x[None], valid, torch.tensor([k]))[0].nonzero()[:, 0].tolist()


draws = torch.Generator().manual_seed(2)
homes = torch.tensor([[0.0, 0.0], [4, 1], [1, 4], [5, 5]])
points = homes.repeat_interleave(8, 0) + 0.8 * torch.randn(32, 2, generator=draws)
seeds, cluster, stay = by_kmeans(points, 4)
figure, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
for i, color in enumerate((BLUE, GREEN, ORANGE, GREY)):
    axis.plot(*points[cluster == i].T, "o", color=color, markersize=4, alpha=0.5)
axis.plot(*points[seeds].T, "x", color="black", markersize=7)
axis.plot(*points[stay].T, "o", color="black", markersize=9, markerfacecolor="none")
axis.set(title="keys in a plane; crosses: the first centres, circles: the keys that stay")
plt.show()
assert kept_by_library(points, 4) == stay
for _ in range(20):  # clouds without clusters: here the start matters
    cloud = torch.randn(32, 2, generator=draws)
    assert kept_by_library(cloud, 4) == by_kmeans(cloud, 4)[2]

# %% [markdown]
# Are real keys like that? A segment of 32 tokens may keep 8. The keys of all heads of a layer are one long vector.
# How far is it from a key to the nearest one that is left, in units of the keys' spread? We compare with 8 by lot.

# %%
lots = [torch.randperm(32, generator=draws)[:8].tolist() for _ in range(20)]
distances = {"K-means": [], "by lot": []}
for of_heads in keys:
    x = of_heads[:, P + 96 : P + 128].transpose(0, 1).flatten(1)  # the fourth segment: [32, Hkv · D]
    spread = (x - x.mean(0)).norm(dim=1).mean()
    distances["K-means"].append(torch.cdist(x, x[kept_by_library(x, 8)]).amin(1).mean() / spread)
    distances["by lot"] += [torch.cdist(x, x[lot]).amin(1).mean() / spread for lot in lots]
ours, by_lot = (sum(found) / len(found) for found in distances.values())
print(f"distance to what is left, mean over layers: K-means {ours:.2f}, by lot {by_lot:.2f}")
assert ours < by_lot

# %% [markdown]
# The gain is small: in hundreds of dimensions nearly all keys are about equally far from each other.
#
# ## 5. The slot that is overwritten
#
# The tokens that stay are scattered over the *pages* of the cache ([tutorial 3](03_paged_cache.py)). Other methods
# move them together, which costs time. ThinKV leaves them where they are. A free slot waits until a new token **of
# the same type** is written into it.
#
# This is the example of the paper's figure 6: segments of 4 tokens, pages of 4 slots (8 where a number has 2 bits), R
# = 2. A to D are reasoning, E to H execution, I to L a transition, M to P reasoning again. The policy runs on our
# model; only the types are given. The picture shows the pages of layer 0. A grey letter is an evicted token whose
# slot is free.


# %%
class Given(ThinKV):
    """ThinKV whose types are given."""

    def classify(self, step):
        letter = "RETRR"[int(step.clock[0]) // 4]
        return torch.full_like(step.thought, TYPES.index(letter))


LETTERS = "ABCDEFGHIJKLMNOP"
half = minithink.load("tiny", device="cpu", dtype="bfloat16")
prompt = ids[: P + -P % 4]  # it fills its last page, so that A begins a new one


def follow(cache: str, look) -> tuple[list, list[int]]:
    """Generate until P is in the cache → what `look` saw in it after every token, and the text."""
    policy = Given(budget=100, tau=4, g=4, block=4, retention="2", layers="0", thresholds="0.5/0.5")
    stream = half.stream([prompt], policy=policy, cache=cache, temperature=0, max_new_tokens=17)
    seen = []
    stream.on_step = lambda _: seen.append(look(stream.cache))
    for _ in stream.steps():
        pass
    return seen, stream.result.token_ids


def held(cache) -> list[int]:
    return cache.positions(0)[0, 0].tolist()


def places(cache) -> tuple[dict, list]:
    """→ the page and the slot of every letter, and the table's lines."""
    slots = {}
    lists = cache.store.lists
    for place, position in zip(lists.place[0, 0, 0].tolist(), lists.pos[0, 0, 0].tolist(), strict=True):
        if position >= len(prompt) and place >= 0:  # others are the prompt's, or wait in the buffer
            slots[LETTERS[position - len(prompt)]] = divmod(place, cache.store.slots.table.stride)
    entries = cache.store.entries(layer=0, row=0, head=0)
    return slots, [entry for entry in entries if entry.starts[0] >= len(prompt)]


seen, _ = follow("paged", places)
states = [slots for slots, _ in seen]
table = seen[16][1]
figure, axis = plt.subplots(figsize=(9, 2.5), layout="constrained")
for line, step in enumerate((4, 8, 12, 16)):
    x = 0.0
    y = -1.3 * line
    axis.text(-0.4, y + 0.5, f"after {LETTERS[step - 1]}", ha="right", va="center")
    here = {place: letter for letter, place in states[step].items()}
    gone = {place: letter for letter, place in states[8].items()} if step > 8 else {}
    for page in table:
        for slot in range(len(page.evicted)):
            place = (page.page, slot)
            letter = here.get(place) or gone.get(place, "")
            color = "black" if place in here else "#a0aec0"
            face = COLORS[TYPES[page.thought]] + "90" if place in here else "white"
            axis.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=face, edgecolor=GREY, linewidth=0.7))
            axis.text(x + 0.5, y + 0.45, letter, ha="center", va="center", color=color)
            x += 1
        x += 0.8
axis.set(title="the pages of layer 0", xlim=(-2.5, x), ylim=(-4, 1.1))
axis.axis("off")
plt.show()

# %% [markdown]
# With L the transition ends. Case 1: the two segments before it shrink to 2 tokens each. M and N then take the free
# slots in the page of type R, and O and P open a new page. The free slots of type E wait for the next execution. No
# token moved, and an eviction only sets bits in the *block table*. Here it is after P, a line for each page (*block*
# in the paper): its number, the slots ever filled, its type, the positions at which its segments begin (A stands at
# 56), for each of them a mask of its tokens' slots, and a mask of the slots that evicted tokens left free.

# %%
print(printed(table, TYPES))
before, after = states[8], states[16]
evicted = [letter for letter in before if letter not in states[12]]
assert len(evicted) == 4
assert all(after[letter] == before[letter] for letter in before if letter not in evicted), "no token should move"
assert [after["M"], after["N"]] == [before[letter] for letter in evicted if letter in "ABCD"]
plain = follow("plain", held)  # the plain manager, which has no pages
assert plain == follow("paged", held), "pages should change neither the text nor what is held"

# %% [markdown]
# ## 6. All together
#
# Now the problem of section 1 again, with all of ThinKV, on the plain manager. The text is short, so τ = 32 and
# R = 16, 8, 4, and the budget is 80 tokens beside the prompt. The thresholds are quantiles of section 1's text, so
# that all types occur. (That is fine for showing, and for nothing else.)

# %%
tau = 32
low, high = u[::tau].quantile(torch.tensor([0.3, 0.6])).tolist()  # u where segments begin
policy = ThinKV(
    budget=P + 80,
    tau=tau,
    retention="16/8/4",
    layers="/".join(map(str, layers)),
    thresholds=f"{low:.5f}/{high:.5f}",
)
stream = engine.stream(problem.question, policy=policy, cache="plain", temperature=0, max_new_tokens=500)
lanes, bytes_held = [], []  # after every token: the positions that the first layer of L* holds, and all bytes


def look(_) -> None:
    positions = stream.cache.positions(0)[layers[0], 0]  # the heads of a layer hold the same tokens
    lanes.append(positions[positions >= 0].clone())
    bytes_held.append(stream.cache.account(0).held)


stream.on_step = look
for _ in stream.steps():
    pass
result, told = stream.result, stream.sequences[0].told
types = "".join(TYPES[NAMES.index(name)] for name in told.thoughts)
pieces = [piece.replace("\n", "⏎") for piece in engine.tokenizer.pieces(result.token_ids)]
last = set(lanes[-1].tolist())
for i, letter in enumerate(types):
    part = range(tau * i, min(tau * (i + 1), len(pieces)))
    print(letter, "".join(f"[{pieces[j]}]" if P + j in last else pieces[j] for j in part))
print(told.notes)
print(f"correct: full {grade(full.text, problem.answer)}, thinkv {grade(result.text, problem.answer)}")

# %% [markdown]
# A line is a segment: its type, its text, and in [brackets] what the cache still holds at the end. The left picture
# shows the segments over time. The saw at the top is the running one; below, old ones get thinner.

# %%
sizes = torch.stack([torch.bincount((lane[lane >= P] - P) // tau, minlength=len(types)) for lane in lanes])
full_bytes = [(P + step) * engine.config.kv_bytes_per_token(4) for step in range(len(lanes))]
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
axes[0].axhspan(0, P, color="#edf2f7")
stacked(axes[0], sizes, types, title="segments (green R, blue E, orange T; grey: the prompt)", base=P)
axes[0].axhline(policy.budget, color="black", linewidth=0.8)
axes[1].plot([b / 2**20 for b in full_bytes], color=GREY, label="full, float32")
axes[1].plot([b / 2**20 for b in bytes_held], color=BLUE, label="thinkv")
axes[1].set(xlabel="generated tokens", ylabel="MiB held", ylim=(0, None))
axes[1].legend()
plt.show()
assert P + int(sizes.sum(1).max()) <= policy.budget, "the budget should hold at every step"
assert set(range(P)) <= last, "the prompt should be there"
assert set(types) == set(TYPES)
print(f"{result.kv_tokens} of {P + len(pieces)} tokens in {told.bits:.1f} bits a number, scales included")
print(f"{bytes_held[-1]:,} bytes, {bytes_held[-1] / full_bytes[-1]:.1%} of a full cache's: {result.kv_ledger}")

# %% [markdown]
# Nearly half of the bytes are the buffers, which hold 16 tokens in full precision. With the paper's budget of 1024
# tokens they are a small part.
#
# Our model went on checking, with wrong numbers, until the limit of 500 tokens. That is no wonder: any number may be
# needed again, and ternary keys break look-ups (tutorial 4). How often it goes well is measured in
# [docs/thinkv.md](../docs/thinkv.md).
#
# ## Three things to remember
#
# 1. One number from attention, sparsity, stands for the type of a thought. Bits, the tokens that stay and the page
#    all follow from the type.
# 2. Thoughts shrink step by step: each transition that ends takes tokens from all thoughts before it.
# 3. The mechanism doesn't depend on the types being right. On this model sparsity and words hardly agree, so look at
#    the types before you trust what rests on them.
#
# ## Exercises
#
# 1. **By hand.** Before you run it: which sizes has `annealed("TERT", math.inf)` at the end? With k = 12, which
#    segment is the first to lose tokens?
# 2. **The next execution.** In section 5, let Q to T follow as an execution (four more letters and tokens, and one
#    more type). Assert that Q and R fill the free slots of type E, and that S and T open one more page.
# 3. **Better bits.** Run section 6 with `precision="R8E4T4"`. Assert that it has more `told.bits` than before. Then
#    lower the `budget`: what is missing first, bits or tokens?
