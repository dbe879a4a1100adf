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
# # 11. SkipKV: redundancy by token, by sentence, and before it is generated
#
# A model that thinks repeats itself. SkipKV removes a sentence from the cache if a later sentence says nearly the
# same. It also steers the model, so that it repeats itself less. The first cell draws what there is to save. Each
# row is a sentence of one text, each column a later sentence. Where a field is dark, the two are similar. A box
# marks a pair that is so similar that the earlier sentence may leave the cache.

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
import torch

from minithink.policies.skipkv import SkipKV
from minithink.reread.attention import read
from minithink.tasks import grade, load_problems

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
ORANGE, BLUE = "#dd6b20", "#2b6cb0"
TAU = 0.9  # τ; the paper chooses from 0.95 to 0.99
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})

engine = minithink.load("tiny", device="cpu", dtype="float32")
[problem] = [p for p in load_problems("validation", "facts") if p.id == "facts-validation-16147dd73cf5"]
GREEDY = {"temperature": 0, "max_new_tokens": 700}
[full] = engine.generate(problem.question, **GREEDY)  # without a policy: the full cache
P, pieces = full.prompt_tokens, engine.tokenizer.pieces(full.token_ids)

# A sentence ends with a token that contains a line break. Its vector is the mean of its hidden states after the
# final norm, normalised (eq. 2).
states = {}
ids, nobody = engine.prompt_ids(problem.question) + full.token_ids, torch.zeros(0, dtype=torch.long)
read(engine.loaded, ids, lambda *_: None, queries=nobody, tap=states.__setitem__)
hidden = states[-1][P:]  # of the generated tokens
ends = [i for i, piece in enumerate(pieces) if "\n" in piece]
sentences = list(zip([0, *(e + 1 for e in ends)], ends, strict=False))  # first and last token
texts = ["".join(pieces[b : e + 1]).strip() for b, e in sentences]
vectors = torch.stack([hidden[b : e + 1].mean(0) for b, e in sentences])
vectors /= vectors.norm(dim=-1, keepdim=True)
similar = (vectors @ vectors.T).triu(1)  # λ of i (row) and a later j (column)

figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
axis.imshow(similar, cmap="Blues", vmin=0.4, vmax=1)
pairs = (similar > TAU).nonzero().tolist()
for i, j in pairs:
    axis.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, color=ORANGE, linewidth=1.5))
labels = [f"{text if len(text) <= 60 else text[:59] + '…'}  {i}" for i, text in enumerate(texts)]
axis.set_yticks(range(len(texts)), labels, fontsize=6)
axis.set(title=f"similarity of sentences; boxes: above τ = {TAU}", xlabel="a later sentence")
plt.show()
assert grade(full.text, problem.answer), "the model should solve this with a full cache"
assert pairs, "some sentences should be similar"
for i, j in sorted(pairs, key=lambda pair: -similar[tuple(pair)])[:3]:
    print(f"{similar[i, j]:.3f}  {texts[i]!r} and {texts[j]!r}")

# %% [markdown]
# **Whole sentences come again**, with other numbers or with none. Of two similar sentences only the earlier one goes:
# the later one is nearer to what comes next. If a still later one resembles that one, it may go, too.
#
# ## Redundancy by token
#
# R-KV, on which SkipKV builds ([tutorial 7](07_from_streamingllm_to_rkv.py)), looks at single keys. Each token has an
# importance I (attention of the newest queries) and a redundancy R (how much its key resembles other keys). With a
# weight σ of 0.1, the tokens with the lowest σ·I − (1 − σ)·R go. The class `Telling` is the policy `skipkv`, but it
# stores I and R whenever it evicts. We look at its first eviction. Its budget is the prompt and a third of the text.

# %%
SEEN = []
B = P + len(pieces) // 3


class Telling(SkipKV):
    """SkipKV that remembers importance and redundancy."""

    def parts(self, step, layer, choice):
        importance, redundancy = super().parts(step, layer, choice)
        SEEN.append((importance[0], redundancy[0], step.pos(layer)[0].clone()))  # each [heads, tokens]
        return importance, redundancy


options = {"budget": B, "schedule": "interval:16", "tau": TAU, "steering": False}
engine.generate(problem.question, policy=Telling(**options), **GREEDY)
first = SEEN[: engine.config.num_layers]  # of the first eviction, layer by layer
spread = torch.stack([0.1 * i.amax(-1) + 0.9 * (r.amax(-1) - r[r > 0].min()) for i, r, _ in first])
print(f"the scores of two tokens of a head differ by at most {spread.max():.3f}, on average {spread.mean():.3f}")
_, redundancy, pos = first[4]
most = redundancy[0].topk(12).indices
print("the most redundant tokens of a head:", engine.tokenizer.pieces([ids[i] for i in pos[0, most].tolist()]))
assert spread.max() < TAU, "a penalty should be larger than all that tokens can differ by"

# %% [markdown]
# The scores of tokens differ by little, and they know nothing of sentences: a word goes here, a comma there. (The
# prompt's own tokens are on the list, too, but they are protected.) Fragments of sentences are left. SkipKV's authors
# show a model that reads fragments of its own answer, and therefore checks the answer again.
#
# ## Redundancy by sentence
#
# SkipKV subtracts a penalty λ_i from all tokens of sentence i: its largest similarity to a later sentence, if that is
# above τ, else 0. It is larger than the differences between tokens. So a penalised sentence goes as a whole, before
# any other token:
#
#     Z = σ·I − (1 − σ)·R − λ_i
#
# First by hand: six tokens, of which tokens 1 and 2 are a penalised sentence and the last one is protected. Then the
# table of penalties, filled sentence by sentence as the text is generated. The policy's own count must agree; its
# budget is so large that nothing is evicted, and the text is the same. (It also counts `other_thoughts`, sentences
# with `Wait`, `Alternatively` or `again`. The last section needs these.)

# %%
importance = torch.tensor([0.30, 0.05, 0.20, 0.10, 0.25, 0.10])
redundant = torch.tensor([0.10, 0.20, 0.15, 0.25, 0.15, 0.15])
plain = 0.1 * importance - 0.9 * redundant
for name, z, expected in (
    ("tokens alone", plain, [3, 1]),
    ("with the penalty", plain - torch.tensor([0, 0.97, 0.97, 0, 0, 0]), [1, 2]),
):
    order = [i for i in z.argsort().tolist() if i != 5]
    print(f"{name}: Z = {[round(x, 3) for x in z.tolist()]}, the first two to go: {order[:2]}")
    assert order[:2] == expected

penalty = {}
for j in range(len(vectors)):  # sentence j has just ended
    for i in range(j):
        if (value := float(vectors[i] @ vectors[j])) > TAU:
            penalty[i] = max(penalty.get(i, 0), value)
stream = engine.stream(problem.question, policy=SkipKV(**options | {"budget": 2000}), **GREEDY)
for _ in stream.steps():
    pass
counted = stream.sequences[0].counts
print(f"{len(penalty)} of {len(vectors)} sentences are penalised; the policy counts {counted}")
assert stream.result.token_ids == full.token_ids, "nothing was evicted, so the text is the same"
assert counted["similar_sentences"] == len(penalty)

# %% [markdown]
# ## Two caches, one above the other
#
# Now both methods evict every 16 tokens, down to the same budget. They run on the plain manager (`cache="plain"`),
# where the tokens of all heads are one tensor of positions. Each row of the picture is a KV head, each column
# a token of the policy's own text; blue: the head holds the token when the thinking ends. Orange bars mark
# sentences that a later one resembles. To find them, the model reads the finished text once more, with all tokens.
# Some of these sentences are still held: the policy has not evicted since, or it saw other hidden states than this
# second reading, because its cache had lost tokens.


# %%
def run(policy):
    """→ the result, and which thinking tokens each head holds when the thinking ends: bool [heads, tokens]."""
    stream = engine.stream(problem.question, policy=policy, cache="plain", **GREEDY)
    lists = []  # the positions that each head holds when the prompt was read, and after each generated token
    stream.on_step = lambda _: lists.append(stream.cache.positions(0).flatten(0, 1).clone())
    for _ in stream.steps():
        pass
    end = stream.result.thinking_tokens
    return stream.result, torch.stack([torch.isin(torch.arange(P, P + end), head) for head in lists[end]])


figure, axes = plt.subplots(2, 1, figsize=(10, 5), layout="constrained")
held = {}
for axis, (name, policy) in zip(
    axes, (("rkv", f"rkv:budget={B},buffer=16,protect_prompt=true"), ("skipkv", SkipKV(**options))), strict=True
):
    result, kept = run(policy)
    words, end = engine.tokenizer.pieces(result.token_ids), result.thinking_tokens
    kept = kept.float()
    tap = {}
    own = engine.prompt_ids(problem.question) + result.token_ids[:-1]  # the last token is never read
    read(engine.loaded, own, lambda *_: None, queries=nobody, tap=tap.__setitem__)
    stops = [i for i, word in enumerate(words[:end]) if "\n" in word]
    spans = list(zip([0, *(e + 1 for e in stops)], stops, strict=False))
    v = torch.stack([tap[-1][P + b : P + e + 1].mean(0) for b, e in spans])
    v /= v.norm(dim=-1, keepdim=True)
    flagged = (v @ v.T).triu(1).amax(1) > TAU
    inside = torch.zeros(end, dtype=torch.bool)
    for (b, e), marked in zip(spans, flagged, strict=True):
        if marked:
            inside[b : e + 1] = True
            axis.plot([b, e + 1], [-1, -1], color=ORANGE, linewidth=4, solid_capstyle="butt")
    held[name] = (float(kept[:, inside].mean()), float(kept[:, ~inside].mean()))
    axis.imshow(kept, aspect="auto", cmap="Blues", interpolation="nearest", extent=(0, end, len(kept), 0))
    axis.set(
        title=f"{name}: {'right' if grade(result.text, problem.answer) else 'wrong'}, {end} thinking tokens",
        ylabel="KV head",
        ylim=(len(kept), -2),
    )
    print(
        f"{name}: a head holds {held[name][0]:.0%} of the tokens of repeated sentences, {held[name][1]:.0%} of the "
        f"others. {result.kv_notes}"
    )
axes[1].set(xlabel="thinking tokens, the newest on the right")
plt.show()
assert held["skipkv"][0] < held["rkv"][0], "SkipKV should drop more of what was said again"

# %% [markdown]
# ## Before it is generated
#
# What is not generated needs no cache. At a blank line the model decides what kind of thought comes next: it goes
# on (*execution*), or it doubts ("Wait, …"). The method SEAL takes the mean hidden state at the blank lines before
# execution, less the mean before doubts. It adds this vector V, with strength α, to one layer while the model
# thinks. The vectors of the embedded model ship with it. SkipKV raises the strength by γ with every doubt. N_o is
# the number of doubts so far:
#
#     H ← H + α_t·V,    α_t = α_0 + γ·N_o
#
# First the paper's counter for five sentences, of which O are doubts. Then the same problem with SEAL at several
# strengths. One problem says nothing about accuracy. Of 600 test problems SEAL with α = 1 answers 599, with 8 % fewer
# tokens than the full cache ([SkipKV and SEAL, measured](../docs/skipkv.md)).

# %%
strength = [1 + 0.02 * "OEOOE"[: i + 1].count("O") for i in range(5)]
print("α after each sentence:", [round(x, 2) for x in strength])
assert [round(x, 2) for x in strength] == [1.02, 1.02, 1.04, 1.06, 1.06]

found = {}
for alpha in (0, 0.5, 1, 2):
    [result] = engine.generate(problem.question, policy=f"seal:alpha_0={alpha}", **GREEDY)
    found[alpha] = result.generated_tokens, result.text.count("Wait")
    right = "right" if grade(result.text, problem.answer) else "wrong"
    print(f"α = {alpha}: {found[alpha][0]} tokens, {found[alpha][1]} times Wait, {right}")
    assert alpha or result.token_ids == full.token_ids, "strength 0 should change nothing"
figure, axis = plt.subplots(figsize=(5, 2.2), layout="constrained")
axis.bar([f"α = {alpha:g}" for alpha in found], [tokens for tokens, _ in found.values()], color=BLUE, width=0.6)
axis.set(ylabel="generated tokens")
plt.show()
assert min(waits for _, waits in found.values()) < found[0][1], "some strength should lessen the doubts"

# %% [markdown]
# Three things to remember:
#
# - **Sentences, not keys.** Keys that resemble each other are everywhere. Sentences that resemble each other are
#   few, and can go as a whole.
# - **The penalty decides the order, the budget how many go.** A penalised sentence stays while there is room.
# - **The cheapest token is the one that is never generated.** Steering acts before the cache.
#
# ## Exercises
#
# 1. Let τ go from 0.8 to 0.99 in the first cell. Which pairs appear first, and are they repetitions?
# 2. A problem of `search` repeats lines such as "Still … from 9 down." Load one, and compare the two caches again.
# 3. Use `form="paper"` in `Telling`. How large is the largest importance now, and why does it hardly count?
# 4. `seal:at=every` adds the vector at every token. From which strength on does the text fall apart, and from which
#    with `vector=matched`?
