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
# # 1. The decoder, from tokens to logits
#
# This tutorial follows one token through a model: text becomes tokens, tokens become vectors, the vectors pass eight
# layers, and out comes a probability for every token that could be next. The picture shows the way.
#
# We open one layer, compute every step by hand, and compare each with what the library computed.
#
# If you know PyTorch, you know enough. No GPU and no internet is needed: the model ships with the package. It is a
# *reasoning model*: it first writes what it thinks, between `<think>` and `</think>`, and then its answer.

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

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

stations = [
    "text",
    "tokens",
    "a vector for\neach token",
    "eight\nlayers",
    "a number for each\npossible next token",
    "one token",
]
figure, axis = plt.subplots(figsize=(10, 1.7), layout="constrained")
for i, station in enumerate(stations):
    box = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": BLUE}
    axis.text(i, 0, station, ha="center", va="center", bbox=box)
for i, work in enumerate(["cut", "look up", "read and add", "compare", "choose"]):
    axis.text(i + 0.5, 0.62, work, ha="center", color=ORANGE)
    axis.annotate("", (i + 0.62, 0), (i + 0.42, 0), arrowprops={"arrowstyle": "->", "color": ORANGE})
axis.annotate("", (0, -0.5), (5, -0.5), arrowprops={"arrowstyle": "->", "color": GREY})
axis.text(2.5, -0.85, "the token is added to the text, and everything begins again", ha="center", color=GREY)
axis.set(xlim=(-0.5, 5.5), ylim=(-1, 0.9), title="the way of a text through the model, to its next token")
axis.axis("off")
plt.show()

# %% [markdown]
# ## The model and a problem
#
# The letters in brackets stand in all formulas below.

# %%
import math
import textwrap

import torch
from torch.testing import assert_close

from minithink.kv.full import FullCache
from minithink.sampling import SamplingParams, gumbel, sample
from minithink.tasks import Problem

torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)  # the model is so small that threads would wait for each other

# %%
engine = minithink.load("tiny", device="cpu", dtype="float32")
config, tokenizer, decoder = engine.config, engine.tokenizer, engine.decoder
L, d, F, V = config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size
Hq, Hkv, D, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps

for symbol, value, meaning in [
    ("V", V, "tokens in the vocabulary"),
    ("d", d, "width of the residual stream"),
    ("L", L, "layers"),
    ("Hq", Hq, "query heads"),
    ("Hkv", Hkv, "key and value heads"),
    ("D", D, "dimensions of a head"),
    ("F", F, "width inside the SwiGLU"),
]:
    print(f"[{symbol}]".rjust(6), f"{value:5}  {meaning}")
print(f"\n{config.architecture}, {sum(p.numel() for p in decoder.parameters()):,} parameters")

# %% [markdown]
# The model was trained on puzzles. This one gives facts in shuffled order, all modulo 100, and asks for three values.

# %%
problem = Problem(
    id="example",
    family="facts",
    answer="36, 21, 18",
    thinking_tokens=149,
    question="Facts (mod 100): kiz = 60; piz = 48; juv = ves - 26; mig = piz - 27; ves = piz * 3; mos = piz * 7. "
    "Find mos, mig and juv.",
)
print(textwrap.fill(problem.question, 110))
print("\nanswer:", problem.answer)

# %% [markdown]
# ## Text → chat template → tokens
#
# In training the model saw conversations, and each was one long string with markers. The *chat template* makes such a
# string. It ends where the model has to go on: inside an open `<think>`.

# %%
text = tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
print(repr(text))

# %% [markdown]
# The tokenizer cuts the string into pieces of its vocabulary. A frequent word is one token, with the space before it;
# before a number the space is a token of its own. `·` stands for a space and `⏎` for a new line.


# %%
def visible(token: int) -> str:
    return tokenizer.decode([token]).replace(" ", "·").replace("\n", "⏎")


def show(tokens: list[int], first: int = 0, per_line: int = 11) -> None:
    for start in range(0, len(tokens), per_line):
        row = tokens[start : start + per_line]
        print(f"{first + start:4}  " + " ".join(visible(t).ljust(6) for t in row).rstrip())


prompt = tokenizer.encode(text)
assert prompt == engine.prompt_ids(problem.question), "the engine reads the question otherwise"
print(f"{len(text)} characters, {len(prompt)} tokens\n")
show(prompt)

# %% [markdown]
# We put the beginning of a thought into its mouth, and stop after `piz = `. The next token must be the value of
# `piz`, and the only place where that stands is far back in the prompt.

# %%
thought = "Okay, let me work through this step by step.\n\nFirst, mos. mos = piz * 7, piz = "
assert "piz = 48;" in problem.question, "the problem has changed: write a thought that fits it"
tokens = prompt + tokenizer.encode(thought)
N = len(tokens)
show(tokens[len(prompt) :], first=len(prompt))
labels = [visible(t) for t in tokens]

# %% [markdown]
# ## A witness
#
# The library's decoder does not compute attention itself. It hands unrotated q, k and v to an object with a method
# `attend`, and shows it the residual stream after every layer through `tap`. Normally that object is a KV cache.
# Ours also takes notes, and we check our own arithmetic against them.


# %%
class Witness(FullCache):
    """A full cache that keeps what the decoder shows it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.handed, self.returned, self.residual = {}, {}, {}

    def attend(self, layer, qk, v):
        q, k = qk.split((Hq, Hkv), dim=1)
        self.handed[layer] = q, k, v
        self.returned[layer] = super().attend(layer, qk, v)
        return self.returned[layer]

    def tap(self, layer, hidden):
        self.residual[layer] = hidden
        return hidden


witness = Witness(config, engine.rope)
witness.join(seq=0, capacity=N)
witness.begin_step(seqs=[0], counts=[N])
library_hidden = decoder(torch.tensor(tokens), witness)
witness.end_step()
library_logits = decoder.logits(library_hidden)
print("hidden states", tuple(library_hidden.shape), " logits", tuple(library_logits.shape))

# %% [markdown]
# ## Embedding
#
#     x_i = E[token_i]          E: [V, d]
#
# A table with one row for each token. The result is the *residual stream*: one vector of `d` numbers for each token.
# Every layer reads it and adds to it.

# %%
x = decoder.embed[torch.tensor(tokens)]  # [N, d]
print("x:", tuple(x.shape))
same = [i for i in range(N) if tokens[i] == tokens[12]]
print(f"positions of {visible(tokens[12])!r}: {same}")
assert all(torch.equal(x[i], x[12]) for i in same)

# %% [markdown]
# The same word has the same vector wherever it stands. Attention has to put in which fact it belongs to.
#
# ## Inside one layer
#
# A layer is two additions to the stream:
#
#     x = x + attention(norm(x))
#     x = x + swiglu(norm(x))
#
# We open layer 0.

# %%
block = decoder.blocks[0]
for name, weight in block.named_parameters():
    print(f"{name:10} {tuple(weight.shape)}")

# %% [markdown]
# ### RMSNorm
#
#     norm(x) = x / √(mean(x²) + ε) · w
#
# Every token's vector is scaled to a root mean square of 1, then each dimension gets a learned factor.


# %%
def rms_norm(x, w):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


a = rms_norm(x, block.attn_norm)
assert_close(a, decoder.backend.rms_norm(x, block.attn_norm, eps))
before, after = x.square().mean(-1).sqrt(), (a / block.attn_norm).square().mean(-1).sqrt()
print(
    f"root mean square of a token: {before.min():.3f} to {before.max():.3f} before, "
    f"{after.min():.3f} to {after.max():.3f} after"
)

# %% [markdown]
# ### Queries, keys and values: one fused product
#
#     q = a·W_q   k = a·W_k   v = a·W_v     is     [q k v] = a·[W_q W_k W_v]
#
# The result is cut into heads of `D` numbers: `Hq` heads of queries, then `Hkv` of keys and `Hkv` of values.

# %%
W_q, W_k, W_v = block.qkv.split((Hq * D, Hkv * D, Hkv * D), dim=1)
q = (a @ W_q).view(N, Hq, D)
k = (a @ W_k).view(N, Hkv, D)
v = (a @ W_v).view(N, Hkv, D)

fused = (a @ block.qkv).view(N, Hq + 2 * Hkv, D)
assert_close(torch.cat((q, k, v), dim=1), fused, rtol=1e-4, atol=1e-5)
print("q:", tuple(q.shape), " k:", tuple(k.shape), " v:", tuple(v.shape))

# %% [markdown]
# ### QK-norm
#
# Qwen3 normalizes every head of q and of k once more. So no score can be large only because a vector is long. (Llama
# has neither this nor biases. Qwen2 adds a bias to q, k and v.)

# %%
w_q, w_k = block.qk_norm  # [D] each
q, k = rms_norm(q, w_q), rms_norm(k, w_k)

for mine, theirs in zip((q, k, v), witness.handed[0], strict=True):
    assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
print("q, k and v are those that the library handed to the cache")

# %% [markdown]
# ### RoPE: where a token stands
#
# Nothing so far knows the order of the tokens. Rotary embedding puts it in. The `D` numbers of a head are seen as
# `D/2` points in the plane, (x_j, x_{j+D/2}). At position `p` point `j` is turned by the angle `p·f_j`:
#
#     f_j = θ^(−2j/D)
#     (a, b)  →  (a·cos pf − b·sin pf,   b·cos pf + a·sin pf)

# %%
frequency = config.rope_theta ** (-2 * torch.arange(D // 2) / D)  # [D/2], radians per token


def rope(x, position):
    """x: [N, H, D]; position: [N]."""
    angle = (position[:, None] * frequency)[:, None]  # [N, 1, D/2]
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)


position = torch.arange(N)
q_rot, k_rot = rope(q, position), rope(k, position)
assert_close(q_rot, decoder.backend.rope(q, *engine.rope.at(position)), rtol=1e-4, atol=1e-5)
assert_close(k_rot.transpose(0, 1), witness.lanes[0].kv[0, 0], rtol=1e-4, atol=1e-5)
print(
    f"one full turn: pair 0 in {2 * math.pi / frequency[0]:.1f} tokens, pair {D // 2 - 1} in "
    f"{2 * math.pi / frequency[-1]:,.0f} tokens"
)

# %% [markdown]
# The second check looks into the cache: a key is rotated once, when it is written.
#
# Why turn? A dot product does not change if both sides are turned alike. So the score of a query at position `m` with
# a key at position `n` depends on `m − n` only.
#
# The three circles show where a point of a pair is at the first six positions: the first pair goes around in about
# six tokens, and the last hardly moves. The plot on the right moves the same query and the same key to two places in
# the text, and the curves cover each other.

# %%
distance = torch.arange(200)


def scores_from(start: int) -> torch.Tensor:
    """The query of the last token at `start`; the key of the first token `distance` tokens earlier."""
    turned_q = rope(q[-1:, :1], torch.tensor([start]))  # [1, 1, D]
    turned_k = rope(k[:1, :1].expand(len(distance), 1, D), start - distance)
    return (turned_k[:, 0] @ turned_q[0, 0]) / math.sqrt(D)


near, far = scores_from(250), scores_from(3000)
assert_close(near, far, rtol=0, atol=1e-2)  # the angle of position 3000 in float32 is good to 1e-4 of a radian
print(f"largest difference between the two places: {(near - far).abs().max():.1e}")

figure, axes = plt.subplots(1, 4, figsize=(10, 2.6), width_ratios=(1, 1, 1, 2.2), layout="constrained")
for axis, pair in zip(axes, (0, 6, D // 2 - 1), strict=False):
    axis.add_patch(plt.Circle((0, 0), 1, fill=False, color=GREY, linewidth=0.6))
    for p in range(6):
        angle = (p * frequency[pair]).item()
        axis.annotate(
            "",
            (math.cos(angle), math.sin(angle)),
            (0, 0),
            arrowprops={"arrowstyle": "-|>", "color": BLUE, "alpha": 0.35 + 0.13 * p},
        )
        if pair < 10:
            axis.text(1.18 * math.cos(angle), 1.18 * math.sin(angle), p, ha="center", va="center", fontsize=8)
    axis.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", title=f"pair {pair}, positions 0 to 5")
    axis.axis("off")
axes[3].plot(distance, near, color=BLUE, linewidth=3, alpha=0.5, label="query at position 250")
axes[3].plot(distance, far, color=ORANGE, linewidth=1, label="query at position 3000")
axes[3].set(xlabel="distance m − n (tokens)", ylabel="score q·k / √D", title="the score knows the distance only")
axes[3].set_ylim(top=near.max() + 0.25 * (near.max() - near.min()))  # room for the legend
axes[3].legend(loc="upper center", ncols=2)
plt.show()

# %% [markdown]
# ### Grouped-query attention: scores, mask, weights
#
#     score[h, i, j]  = q[i, h] · k[j, h // g] / √D          g = Hq / Hkv
#     weight[h, i, j] = softmax over j ≤ i of score[h, i, j]
#
# `g` query heads share one KV head, which makes the cache smaller. And token `i` sees only tokens `j ≤ i`: that is
# the causal mask, and the reason why there can be a KV cache at all.

# %%
g = Hq // Hkv


def attention_weights(q_rot, k_rot):
    """→ [Hq, N, N], rows: queries, columns: keys."""
    shared = k_rot.repeat_interleave(g, dim=1)  # [N, Hq, D]: every KV head g times
    score = torch.einsum("ihd,jhd->hij", q_rot, shared) / math.sqrt(D)
    future = torch.ones_like(score[0], dtype=torch.bool).triu(diagonal=1)
    return score.masked_fill(future, -math.inf).softmax(dim=-1)


weight = attention_weights(q_rot, k_rot)
assert_close(weight.sum(-1), torch.ones(Hq, N))
assert weight.triu(diagonal=1).eq(0).all()
print("weights:", tuple(weight.shape), "- every row sums to 1, and nothing looks ahead")

# %% [markdown]
# We draw two heads of this layer for the tokens of the thought: the head whose weights are most concentrated (by
# entropy), and the one whose weights are most spread.


# %%
def draw(axis, weights, title):
    """weights: [N, N] of one head; the rows of the thought are drawn."""
    first = len(prompt)
    image = axis.imshow(weights[first:], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.axvline(first - 0.5, color=ORANGE, linewidth=0.8)
    axis.set_yticks(range(N - first), labels[first:], fontsize=5.5)
    axis.set_xticks(range(N), labels, fontsize=5.5, rotation=90)
    axis.tick_params(length=0, pad=1)
    axis.set(title=title, ylabel="query: token that reads")
    for spine in axis.spines.values():
        spine.set_visible(False)
    return image


thinking = weight[:, len(prompt) :]
entropy = -(thinking * thinking.clamp_min(1e-30).log2()).sum(-1).mean(-1)  # [Hq], bits
on_prompt = thinking[..., : len(prompt)].sum(-1).mean(-1)  # [Hq]
figure, axes = plt.subplots(2, 1, figsize=(10, 7), sharex=True, layout="constrained")
for axis, head in zip(axes, (entropy.argmin().item(), entropy.argmax().item()), strict=True):
    title = f"layer 0, head {head}: {entropy[head]:.1f} bits on average, {on_prompt[head]:.0%} on the prompt"
    image = draw(axis, weight[head], title)
axes[1].set_xlabel("key: token that is read (orange line: end of the prompt)")
figure.colorbar(image, ax=axes, label="attention weight", shrink=0.5, pad=0.01)
plt.show()

# %% [markdown]
# A dark square says: this row's token reads that column's token, and hardly anything else. The head above looks at a
# few tokens, the one below takes an average over many. How much of a head's weight lies left of the orange line is in
# the title. The empty triangle is the causal mask.
#
# ### Values, output projection, and the first addition
#
#     out[i, h] = Σ_j weight[h, i, j] · v[j, h // g]
#     x = x + out·W_o

# %%
out = torch.einsum("hij,jhd->ihd", weight, v.repeat_interleave(g, dim=1))  # [N, Hq, D]
assert_close(out, witness.returned[0], rtol=1e-4, atol=1e-5)
x = x + out.reshape(N, Hq * D) @ block.o
print("the attention output equals the library's")

# %% [markdown]
# ### SwiGLU, and the second addition
#
#     [gate up] = norm(x)·W_gate_up
#     x = x + (silu(gate) ⊙ up)·W_down          silu(z) = z / (1 + e^(−z))
#
# Here no token sees another.

# %%
gate, up = (rms_norm(x, block.mlp_norm) @ block.gate_up).chunk(2, dim=-1)  # [N, F] each
x = x + (gate / (1 + torch.exp(-gate)) * up) @ block.down

assert_close(x, witness.residual[0], rtol=1e-4, atol=1e-4)
print("the residual stream after layer 0 equals the library's")

# %% [markdown]
# ## All layers
#
# The other layers are the same code with other weights. Every layer is checked; the tolerance leaves room for sums in
# another order.


# %%
def layer_by_hand(x, block):
    """x: [n, d] → the stream after the layer [n, d], attention weights [Hq, n, n]."""
    n, position = len(x), torch.arange(len(x))
    a = rms_norm(x, block.attn_norm)
    q, k, v = (a @ block.qkv).view(n, Hq + 2 * Hkv, D).split((Hq, Hkv, Hkv), dim=1)
    q, k = (rms_norm(heads, w) for heads, w in zip((q, k), block.qk_norm, strict=True))
    weight = attention_weights(rope(q, position), rope(k, position))
    out = torch.einsum("hij,jhd->ihd", weight, v.repeat_interleave(g, dim=1))
    x = x + out.reshape(n, Hq * D) @ block.o
    gate, up = (rms_norm(x, block.mlp_norm) @ block.gate_up).chunk(2, dim=-1)
    return x + (gate / (1 + torch.exp(-gate)) * up) @ block.down, weight


x, weights = decoder.embed[torch.tensor(tokens)], []
for layer, block in enumerate(decoder.blocks):
    x, weight = layer_by_hand(x, block)
    weights.append(weight)
    assert_close(x, witness.residual[layer], rtol=1e-3, atol=1e-3)
    error = (x - witness.residual[layer]).abs().max()
    print(f"after layer {layer}: root mean square {x.square().mean().sqrt():6.2f}, largest difference {error:.1e}")
weights = torch.stack(weights)  # [L, Hq, N, N]

# %% [markdown]
# The value of `piz` stands at one place of the prompt. Which heads of which layers look at it most, and from where?

# %%
source = labels.index("48")
looks = weights[..., source].clone()  # [L, Hq, N]
looks[..., : source + 1] = 0  # only what comes later
for place, rows in [("prompt", slice(0, len(prompt))), ("thought", slice(len(prompt), N))]:
    print(f"{labels[source]!r} seen from the {place}:")
    for value, index in zip(*looks[..., rows].flatten().topk(4), strict=True):
        layer, head, row = (i.item() for i in torch.unravel_index(index, looks[..., rows].shape))
        row += rows.start
        print(f"    {value:.2f} in layer {layer}, head {head}, from token {row:2} {labels[row]!r}")
assert looks[..., : len(prompt)].max() > 0.5, "the paragraph below says that the prompt reads the value"

value, index = looks[..., len(prompt) :].amax(-1).flatten().max(0)
layer, head = (i.item() for i in torch.unravel_index(index, (L, Hq)))
figure, axis = plt.subplots(figsize=(10, 3.8), layout="constrained")
image = draw(axis, weights[layer, head], f"layer {layer}, head {head}: the strongest look at “48” from the thought")
axis.get_xticklabels()[source].set(color=ORANGE, fontweight="bold")
axis.set_xlabel("key: token that is read")
figure.colorbar(image, ax=axis, label="attention weight", shrink=0.8, pad=0.01)
plt.show()

# %% [markdown]
# Some looks come from the prompt itself: while the model reads, it carries the value to other tokens. So the key and
# value of a token, some layers up, may hold more than that token. A weight says what was read, not what is needed.
# Tutorial 2 tries what is.
#
# ## Final norm, logits, probabilities
#
#     logits = norm(x)·Eᵀ            p = softmax(logits)
#
# One more norm, and then a dot product with every row of the embedding table. (This model *ties* its embeddings: the
# table that reads tokens also writes them.)

# %%
hidden = rms_norm(x, decoder.norm)
logits = hidden @ decoder.embed.T  # [N, V]
assert_close(hidden, library_hidden, rtol=1e-3, atol=1e-3)
assert_close(logits, library_logits, rtol=1e-3, atol=1e-2)
error = (logits - library_logits).abs().max()
print(f"logits: {tuple(logits.shape)}, largest difference from the library's: {error:.1e}")

# %% [markdown]
# The decoder predicts the next token *at every position*. We look at two: right after the prompt, where the model may
# begin as it likes, and at the end, where it has to know `piz`.

# %%
places = [("first token of the thought", len(prompt) - 1), ("after “piz = ”", N - 1)]
figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for axis, (name, at) in zip(axes, places, strict=True):
    probability = logits[at].softmax(-1)
    top = probability.topk(6)
    bits = -(probability * probability.clamp_min(1e-30).log2()).sum()
    axis.barh([f"{visible(t)}" for t in top.indices.tolist()], top.values, color=BLUE)
    axis.invert_yaxis()
    for row, value in enumerate(top.values.tolist()):
        axis.text(value + 0.02, row, f"{value:.2g}", va="center", fontsize=8, color=GREY)
    axis.set(xlim=(0, 1.2), xticks=(0, 0.25, 0.5, 0.75, 1), xlabel="probability", title=f"{name}: {bits:.2f} bits")
plt.show()

# %% [markdown]
# ## Choosing a token
#
# *Greedy* takes the most probable token. *Sampling* draws one. A *temperature* `T` sharpens or flattens the
# distribution before the draw:
#
#     p = softmax(logits / T)
#
# `T → 0` is greedy. This model's own recommendation is in its `generation_config`.

# %%
start = logits[len(prompt) - 1]  # [V]
print("greedy, first token:", repr(visible(start.argmax().item())))
print("greedy, after “piz = ”:", repr(visible(logits[-1].argmax().item())))
print("recommended temperature:", engine.generation_config.temperature, "\n")

top = start.topk(4).indices
names = [visible(t) for t in top.tolist()]
wide = max(9, *(len(name) + 2 for name in names))
print("     T  " + "".join(name.rjust(wide) for name in names) + "   all others")
for T in (0.3, 0.6, 1.0, 1.5, 3.0):
    p = (start / T).softmax(-1)
    print(f"   {T:3}  " + "".join(f"{x:{wide}.4f}" for x in p[top].tolist()) + f"{1 - p[top].sum():13.4f}")

# %% [markdown]
# ### The Gumbel-max identity
#
# To draw from a softmax without computing it, add noise to every logit and take the largest:
#
#     token = argmax_v (logit_v / T + g_v)          g_v = −log(−log u_v),   u_v uniform in (0, 1)
#
# The probability that token `v` wins is *exactly* softmax(logits / T)_v. The library samples like this, and its noise
# is a function of (seed, sequence, position, token): a sequence gets the same noise whatever runs beside it.
#
# We draw the first token many times, at one position for each draw, and count.

# %%
draws, T = 4000, 1.0
sequence, where = torch.zeros(draws, dtype=torch.int64), torch.arange(draws)
noise = gumbel(seed=1, sequence=sequence, position=where, vocab_size=V)  # [draws, V]
drawn = (start / T + noise).argmax(-1)
assert torch.equal(drawn, sample(start.expand(draws, V), SamplingParams(temperature=T, seed=1), sequence, where))

p = (start / T).softmax(-1)
share = drawn.bincount(minlength=V) / draws
sigma = (p * (1 - p) / draws).sqrt()  # of a share, if the draws are independent
print(f"{'token':>{wide}}    softmax    drawn    off by")
for name, t in zip(names, top.tolist(), strict=True):
    print(f"{name:>{wide}}  {p[t]:9.4f}{share[t]:9.4f}   {(share[t] - p[t]) / sigma[t]:+5.1f} σ")
assert ((share - p).abs() <= 5 * sigma + 1 / draws).all(), "these draws are not from the softmax"

# %% [markdown]
# ## Generating, the naive way
#
# To generate: compute the logits of the last position, choose a token, append it, start again. This is our own code
# from above, without a cache.


# %%
def logits_by_hand(tokens):
    x = decoder.embed[torch.tensor(tokens)]
    for block in decoder.blocks:
        x, _ = layer_by_hand(x, block)
    return rms_norm(x[-1], decoder.norm) @ decoder.embed.T


steps = 60
text_so_far, read, margins = list(prompt), 0, []
for _ in range(steps):
    read += len(text_so_far)
    row = logits_by_hand(text_so_far)
    text_so_far.append(row.argmax().item())
    best, second = row.topk(2).values
    margins.append((best - second).item())
mine = text_so_far[len(prompt) :]
print(tokenizer.decode(mine))

# %% [markdown]
# The engine does it with a KV cache. Does it choose the same tokens? Two programs that add in another order differ in
# the last bits of the logits. We print how close the closest decision was.

# %%
[result] = engine.generate(problem.question, temperature=0, max_new_tokens=steps)
assert result.token_ids == mine, "the engine generates other tokens than the formulas"
print(f"{steps} of {steps} tokens are equal. The closest decision had a margin of {min(margins):.3f} in the logits.")
print(f"Without a cache, {read:,} tokens went through the layers to make {steps}.")

# %% [markdown]
# Every step recomputes all tokens, although only one is new. Tutorial 2 measures what can be kept, and what that
# saves.
#
# ## Three things to remember
#
# 1. Each token has one vector. Layers only add to it, and attention is the only place where tokens meet.
# 2. A token looks back and never ahead. So nothing that comes later changes what was computed for it.
# 3. A model gives probabilities. Choosing a token is a step of its own, and without a cache each new token costs a
#    pass over the whole text.
#
# ## Exercises
#
# 1. **Take the order away.** In `rope`, return `x` unchanged, and generate again. Which facts does the model still
#    get right? Predict first: what can attention know without positions?
# 2. **Break a head.** In `layer_by_hand`, set the output of one head of one layer to zero, and look at the
#    probability of `48` after “piz = ”. Do it for all heads and draw the `L` × `Hq` probabilities. How many matter?
# 3. **The logit lens.** Apply the final norm and the embedding table to `witness.residual[layer]` for every layer. In
#    which layer does `48` become the most probable token at the last position?
# 4. **Another family.** Write `layer_by_hand` for Llama and for Qwen2 (the differences are named above), make a small
#    `ModelConfig` with random weights, and check yourself against `Decoder` with a `Witness`.
