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
# # 4. Number formats: what four bits can say
#
# A key or a value takes 16 bits in bfloat16. Methods like ThinKV store them in 4 bits, and unimportant ones in 2. How
# can that work?
#
# The picture shows the idea, for sixteen random numbers (blue). A format names few numbers (the lines), stretched so
# that the outermost reaches the largest of the sixteen. Each number moves to the nearest line; orange is the error.
#
# We quantize a group of real keys by hand, measure errors and bytes on the embedded model, and follow the errors to
# the attention weights and to the answer.

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

from minithink.kv.plain import PlainCache
from minithink.policies import parse as parse_policy
from minithink.quant import e4m3, parse, turboquant
from minithink.quant.rounding import rounded, rounded_by_token
from minithink.ref.kmeans import kmeans
from minithink.reread.attention import read
from minithink.tasks import Problem, grade

torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

numbers = torch.randn(16, generator=torch.Generator().manual_seed(0))
figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
titles = {"nvfp4": "nvfp4, four bits", "int4s": "whole numbers, four bits", "ternary": "ternary, two bits"}
for axis, (name, title) in zip(axes, titles.items(), strict=True):
    fmt = parse(name)
    named = fmt.point(torch.arange(2**fmt.bits, dtype=torch.uint8)).unique()
    lines = named[named >= -fmt.reach] * numbers.abs().max() / fmt.reach
    stored = lines[(numbers[:, None] - lines).abs().argmin(-1)]
    axis.hlines(lines, -0.5, 15.5, color=GREY, linewidth=0.5)
    axis.vlines(range(16), numbers, stored, color=ORANGE, linewidth=2)
    axis.plot(range(16), numbers, ".", color=BLUE)
    axis.set(title=title, xlabel="sixteen numbers")
plt.show()

# %% [markdown]
# ## Sixteen numbers
#
# Four bits name sixteen things. NVFP4 names these: a sign, two bits of exponent, one bit of mantissa (*E2M1*).
#
#     magnitude = m/2                    if the exponent e is 0
#                 2^(e − 1) · (1 + m/2)  otherwise


# %%
def e2m1(code: int) -> float:
    sign, e, m = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (m / 2 if e == 0 else 2 ** (e - 1) * (1 + m / 2))


nvfp4 = parse("nvfp4")
grid = torch.tensor([e2m1(code) for code in range(16)])
assert_close(nvfp4.point(torch.arange(16, dtype=torch.uint8)), grid)
print("  ".join(f"{code:04b} {e2m1(code):g}" for code in range(8)))

# %% [markdown]
# NVFP4 is fine near zero and coarse at the ends. A second format, `int4s`, has the whole numbers from −7 to 7, which
# are equally fine everywhere. Ternary, in 2 bits, has −1, 0 and 1. Which is better depends on where the data are.
#
# ## A group by hand
#
# The model solves a problem, and then reads problem and solution in one pass. `read` shows us the queries, keys and
# values of every layer.

# %%
engine = minithink.load("tiny", device="cpu", dtype="float32")
problem = Problem(
    id="example",
    family="facts",
    answer="36, 21, 18",
    thinking_tokens=149,
    question="Facts (mod 100): kiz = 60; piz = 48; juv = ves - 26; mig = piz - 27; ves = piz * 3; mos = piz * 7. "
    "Find mos, mig and juv.",
)
[answer] = engine.generate(problem.question, temperature=0)
assert grade(answer.text, problem.answer)
tokens = engine.prompt_ids(problem.question) + answer.token_ids
P = answer.prompt_tokens
queries, keys, values = [], [], []


def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    queries.append(q.transpose(0, 1).clone())
    keys.append(k.clone())
    values.append(v.clone())


read(engine.loaded, tokens, before_attention=see)
Q, K, V = torch.stack(queries), torch.stack(keys), torch.stack(values)  # [L, Hq or Hkv, N, D]
L, Hkv, N, D = K.shape
print(f"{N} tokens, {P} of them the prompt; K and V: {L} layers, {Hkv} heads, {D} channels")

# %% [markdown]
# Sixteen consecutive channels of one key form a *group*. They share one scale, so that the largest of them lands on
# the largest number of the grid, which is 6:
#
#     scale = amax / 6          code = nearest point to x / scale          x̂ = point · scale
#
# The scale itself is stored in 8 bits: E4M3, a small float with 3 bits of mantissa. It is off by 1/17 at most, but
# numbers below 2⁻¹⁰ become 0. So NVFP4 has one more scale, in float32, for the whole tensor, which moves all group
# scales into the range where E4M3 is good.

# %%
x = K[0, 0, 100, :16]
tensor_scale = nvfp4.tensor_scale(K[0].abs().max())  # of a layer, with headroom for what comes later
stored = e4m3.encode(x.abs().max() / 6 / tensor_scale)  # one byte
scale = e4m3.decode(stored) * tensor_scale
point = grid[(x[:, None] / scale - grid).abs().argmin(-1)]
print("x     " + " ".join(f"{number:6.2f}" for number in x[:9].tolist()))
print("point " + " ".join(f"{number:6g}" for number in point[:9].tolist()))
print("x̂     " + " ".join(f"{number:6.2f}" for number in (point * scale)[:9].tolist()))
codes, params = nvfp4.quantize(x, tensor_scale)  # the library's
assert_close(nvfp4.dequantize(codes, params, tensor_scale, torch.float32), point * scale)
assert params.item() == stored.item()
assert e4m3.decode(e4m3.encode(torch.tensor(2**-10.1))) == 0
print(f"{len(codes)} bytes of codes and 1 of scale: {8 * (len(codes) + 1) / 16} bits a number")

# %% [markdown]
# ## Error and bytes, measured
#
# Now formats of the library, on the keys and values of problem and solution.
#
# - `fp8`: E4M3 numbers, one scale for a tensor.
# - `nvfp4`, `int4s`, `ternary`: symmetric around zero, with an E4M3 scale for 16 numbers.
# - `int4`, `int2`: *asymmetric*. A group stores its scale *and* its minimum, each in 16 bits: `x̂ = code·scale +
#   min`.
#
# A group may run along the channels of one token, or along 16 consecutive *tokens* of one channel (`by=token`), which
# only keys do. (The papers name the same two "per token" and "per channel": what has its own scale.)


# %%
def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error: √(Σ(a − b)² / Σb²)."""
    return ((a - b).norm() / b.norm()).item()


def roundtrip(name: str, x: torch.Tensor) -> torch.Tensor:
    """Quantize and read back. x: [L, Hkv, N, D], one tensor scale for a layer, from the prompt."""
    fmt = parse(name).fit(D)
    tensor_scale = fmt.tensor_scale(x[:, :, :P].abs().amax((1, 2, 3)))[:, None, None]  # [L, 1, 1]
    if fmt.by == "channel":
        return rounded(fmt, x, tensor_scale)
    return rounded_by_token(fmt, x, tensor_scale, torch.ones(x.shape[:-1], dtype=torch.bool))


def bits_of(name: str) -> float:
    return 8 * parse(name).fit(D).bytes_per_token(D) / D


print("                   error of   error of keys   error of keys")
print("          bits     values     by channel      by token")
table = {}
for name in ("fp8", "int4", "nvfp4", "int4s", "int2", "ternary"):
    names = [name, f"{name}:by=token"] if parse(name).group else [name]
    table[name] = [rel(roundtrip(name, V), V)] + [rel(roundtrip(way, K), K) for way in names]
    print(f"{name:8} {bits_of(name):5.1f}" + "".join(f"{error:13.4f}" for error in table[name]))
assert table["int4s"][1] < table["nvfp4"][1]
assert bits_of("int2") == 4
assert table["ternary"][0] > 0.5

# %% [markdown]
# The more bits, the smaller the error. And scales cost bits: `int2` has 2 bits of code and 4 in all, because 16
# numbers share 32 bits of scale and minimum.
#
# ## Keys have loud channels
#
# Why group keys by token at all? Here are magnitudes of keys and values of the head with the loudest channel, and
# beside it the mean of each channel.

# %%
loud = K.abs().mean(2)  # [L, Hkv, D]
ratio = loud.amax(-1) / loud.median(-1).values  # [L, Hkv]
layer, head = divmod(int(ratio.argmax()), Hkv)
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), width_ratios=(1, 1, 1.1), layout="constrained")
for axis, x, title in ((axes[0], K, "|keys|"), (axes[1], V, "|values|")):
    x = x[layer, head].abs()
    axis.imshow(x, cmap="Blues", vmin=0, vmax=3.5 * x.mean(), aspect="auto", interpolation="nearest")
    axis.set(title=f"{title}, layer {layer}, head {head}", xlabel="channel", ylabel="token")
axes[2].plot(loud[layer, head], color=ORANGE, label="keys")
axes[2].plot(V[layer, head].abs().mean(0), color=GREY, label="values")
axes[2].set(title="mean magnitude", xlabel="channel", ylim=(0, None))
axes[2].legend()
plt.show()
print(
    f"the loudest channel is {ratio.max():.1f} times the head's median channel; typical: {ratio.median():.1f} times"
)
assert ratio.max() > 3 > ratio.median()

# %% [markdown]
# These keys have vertical stripes: a channel that is loud for one token is loud for all. The values have hardly any.
# If a loud channel sits in a group with fifteen quiet ones, it sets the scale for them, and they are rounded
# coarsely. By token, a group holds one channel only, and its scale fits it.
#
# In most heads of our small model the stripes are mild, so `by=token` gains little in the table above, and with
# `nvfp4` nothing. We imitate a large model: one channel of every head gets 16 times as loud. We look at the error of
# all the *others*.

# %%
louder = K.clone()
louder[..., 5] *= 16
others = torch.arange(D) != 5
print("error of the other channels    before   with a loud channel")
for name in ("int4", "int4:by=token", "nvfp4", "nvfp4:by=token"):
    before = rel(roundtrip(name, K)[..., others], K[..., others])
    after = rel(roundtrip(name, louder)[..., others], K[..., others])
    print(f"{name:25} {before:12.4f} {after:12.4f}")
    if "token" in name:
        assert abs(after / before - 1) < 0.01, "by token, a channel should not suffer from another"
    else:
        assert after > 1.3 * before, "by channel, the neighbours of a loud channel should suffer"

# %% [markdown]
# ## A rotation, and the outliers disappear
#
# TurboQuant treats loud channels differently. It rotates every key and every value before it is stored, always by the
# same matrix R, and rotates it back when it is read:
#
#     R = H · diag(σ) / √D        σ: a fixed sign for each channel        H: the Hadamard matrix, all 1 and −1
#
# So every rotated number is a sum over *all* channels, each with some sign, divided by √64 = 8. An outlier *a*
# contributes a/8 or −a/8 to each of the 64 sums, and such sums are nearly Gaussian. R is orthogonal, so lengths and
# inner products stay the same.
#
# The picture shows a typical key and the most extreme one, in units of their root mean square (rms). The grey lines
# are the sixteen numbers of the format `tq4`, the best ones for a Gaussian. Bars beyond them are orange.


# %%
def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors in units of their own root mean square. x: [..., D]."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


H = torch.ones(1, 1)
while len(H) < D:
    H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
R = H * turboquant.signs(D, K.device) / math.sqrt(D)
assert_close(R @ R.T, torch.eye(D))  # orthogonal
all_keys = K.flatten(0, 2)  # [L·Hkv·N, D]
rotated = all_keys @ R.T
assert_close(rotated, turboquant.rotate(all_keys))

before, after = unit(all_keys).abs().amax(-1), unit(rotated).abs().amax(-1)  # largest magnitude / rms
chosen = {"typical key": int((before - before.median()).abs().argmin()), "extreme key": int(before.argmax())}
levels = torch.tensor(turboquant.LEVELS[4])  # the positive half
figure, axes = plt.subplots(2, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
for row, (name, key) in zip(axes, chosen.items(), strict=True):
    for axis, title, x in zip(row, ("as it is", "rotated"), (unit(all_keys[key]), unit(rotated[key])), strict=True):
        axis.hlines(torch.cat((-levels, levels)), -1, D, color=GREY, linewidth=0.4)
        axis.bar(range(D), x, color=[ORANGE if far else BLUE for far in x.abs() > levels[-1]])
        axis.set(title=f"{name}, {title}: largest |x| / rms = {x.abs().max():.1f}", xlim=(-1, D))
plt.show()
print(f"largest |x| / rms, mean of all keys: {before.mean():.2f}, rotated {after.mean():.2f}")
print(f"above 4.5: {(before > 4.5).sum()} of {len(all_keys):,} keys, rotated {(after > 4.5).sum()}")
assert before.max() > 5, "one key should have an outlier"
assert after[chosen["extreme key"]] < before.max() / 2

# %% [markdown]
# Some keys have outliers, and after the rotation they look like all the others. Nothing was fitted to these keys. So
# one table of sixteen numbers can serve all models, layers and heads, and one scale a whole head: `tq4` has 4.25 bits
# a number ([how well it works](../docs/turboquant-triattention.md)).
#
# Does the rotation make the error smaller? We try it with one scale for a head of 64 channels, and with groups of 16.

# %%
print("relative error, without rotation → with it")
gain = {}
for name in ("int4s:group=64", "nvfp4"):
    for title, x in (("values", V), ("keys", K), ("keys with a loud channel", louder)):
        turned = turboquant.rotate_back(roundtrip(name, turboquant.rotate(x)))
        gain[name, title] = rel(roundtrip(name, x), x), rel(turned, x)
        print(f"{name:15} {title:25} {gain[name, title][0]:.4f} → {gain[name, title][1]:.4f}")
spread = rel(roundtrip("tq4", louder)[..., others], K[..., others])
alone = rel(roundtrip("tq4", K)[..., others], K[..., others])
print(f"tq4, error of the other channels: {alone:.4f}, with a loud channel {spread:.4f}")
plain, turned = gain["int4s:group=64", "keys with a loud channel"]
assert turned < plain / 2
plain, turned = gain["nvfp4", "keys with a loud channel"]
assert turned > plain
assert spread > 1.5 * alone

# %% [markdown]
# With one scale for a head, the rotation is what makes four bits work. Where there are no outliers it buys nothing.
# NVFP4 even gets a bit worse: its groups of 16 already fence an outlier in. Nor does the outlier's energy go away:
# the rotation spreads the error over all channels, so the quiet ones get a larger one than before.
#
# ## A row of scales outlives its tokens
#
# By token, sixteen keys share one row of scales: one byte for each channel. When a policy evicts fifteen of them, the
# row must stay, for the last one cannot be read without it.
#
#     bytes of a token = D/2 + D/2   + D/16      +  D · (rows that live) / (tokens that live)
#                        key   value   value's      the keys' scales
#                                      scales
#
# A `PlainCache` (tutorial 2) gets 128 tokens, most are evicted, and its ledger says how many bytes are left. First
# the survivors are spread evenly, which is the worst case. Then they are those that ThinKV would keep: the keys
# closest to the centres of as many clusters (K-means).


# %%
def bytes_left(by: str, survivors: list[int]) -> float:
    """Bytes of codes and scales for each token that is left, in each head."""
    cache = PlainCache(engine.config, engine.rope, parse_policy(f"quant:fmt=nvfp4,by={by}"), rows=1, tokens=128)
    cache.join(0, capacity=128, prompt=128)
    cache.begin_step([0], [128], tokens[:128])
    engine.decoder(torch.tensor(tokens[:128]), cache)
    cache.end_step()
    lanes = cache.sequences[0].lanes
    lanes.evict(~torch.isin(lanes.positions(), torch.tensor(survivors)))
    ledger = cache.account(0)
    of_layers = L * 2 * 4  # for each layer one float32 scale of keys and one of values
    return (ledger.payload + ledger.scales - of_layers) / (len(survivors) * L * Hkv)


print("tokens left   by token, evenly   by token, K-means   by channel")
vectors = K[:, :, :128].permute(2, 0, 1, 3).flatten(1)  # [128, L · Hkv · D]
everything = torch.ones(1, 128, dtype=torch.bool)
for left in (128, 32, 16, 8, 4):
    evenly = list(range(0, 128, 128 // left))
    clusters = kmeans(vectors[None], everything, torch.tensor([left]))[0].nonzero()[:, 0].tolist()
    sizes = []
    for survivors in (evenly, clusters):
        rows = len({token // 16 for token in survivors})
        sizes.append(bytes_left("token", survivors))
        assert sizes[-1] == D / 2 + D / 2 + D / 16 + D * rows / left, "the formula should be the ledger's"
    by_channel = bytes_left("channel", evenly)
    print(f"{left:11} {sizes[0]:18.0f} {sizes[1]:19.0f} {by_channel:12.0f}")
    assert by_channel == 72

# %% [markdown]
# All starts at 72 bytes, 4.5 bits a number. By channel a token carries its own scales. By token, with 4 of 128
# survivors spread evenly, it has become 132 bytes: more than 8 bits a number. Clusters pick from everywhere, so real
# evictions cost much more than 72 bytes, too.
#
# ## What errors do to attention
#
# An error in a value is averaged with all others. An error in a key goes through an exponential. We compare attention
# weights with exact and with quantized keys: how much weight lands on wrong tokens (half the sum of all differences)?
# Then the error of the *output*, if only keys are quantized and if only values are.
#
# Averages hide the heads that look up *one* token. The last column counts the moments at which a head gives more than
# 0.9 of its weight to one token, and with quantized keys this token has lost more than half of it. The bars show the
# look-up into the prompt that suffers most from ternary keys.

# %%
mask = torch.ones(N, N, dtype=torch.bool).tril()[P:]  # rows: generated tokens
shared = Q.shape[1] // Hkv  # query heads of a KV head


def weights(keys: torch.Tensor) -> torch.Tensor:
    """keys: [L, Hkv, N, D] → [L, Hq, generated, N]."""
    scores = Q[:, :, P:] @ keys.repeat_interleave(shared, 1).mT / math.sqrt(D)
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


def output(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return weight @ values.repeat_interleave(shared, 1)


true = weights(K)
best = output(true, V)
looked, lost = {"exact": true}, {}
sharp = true > 0.9
sharp[..., 0] = False  # in many models heads look at the first token when they look at nothing
print(f"          weight on       error of the output from    of {sharp.sum()} sharp")
print("          wrong tokens    keys alone   values alone   look-ups lost")
for name in ("fp8", "nvfp4", "tq4", "int2", "tq2", "ternary"):
    w = weights(roundtrip(name, K))
    looked[name] = w
    wrong = (w - true).abs().sum(-1).mean() / 2
    lost[name] = int((w < true / 2)[sharp].sum())
    from_keys = rel(output(w, V), best)
    from_values = rel(output(true, roundtrip(name, V)), best)
    print(f"{name:8} {wrong:13.3f} {from_keys:13.3f} {from_values:14.3f} {lost[name]:15}")
assert lost["nvfp4"] < lost["ternary"] / 10

suffered = (true - looked["ternary"]).where(sharp, 0)[..., :P]
layer, head, row, target = (int(i) for i in torch.unravel_index(suffered.argmax(), suffered.shape))
shown = sum(looked[name][layer, head, row] for name in ("exact", "ternary")).topk(8).indices.tolist()
pieces = engine.tokenizer.pieces(tokens)
figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
for shift, (name, color) in enumerate([("exact", GREY), ("nvfp4", BLUE), ("int2", GREEN), ("ternary", ORANGE)]):
    bars = looked[name][layer, head, row, shown]
    axis.bar([i + 0.2 * shift - 0.3 for i in range(8)], bars, 0.2, color=color, label=name)
axis.set_xticks(range(8), [f"{pieces[i].strip()}\n({i})" for i in shown])
axis.set(ylabel="attention weight", xlabel="token (position)", title=f"layer {layer}, head {head}")
axis.legend()
plt.show()
print(f"after {''.join(pieces[P + row - 5 : P + row + 1])!r} it should look at {pieces[target]!r}, position {target}")

# %% [markdown]
# Where weights are spread over many tokens, errors of keys cancel. But a look-up hangs on one token, and if its
# weight goes elsewhere, another value is copied.
#
# ## What errors do to the answer
#
# Errors pass from layer to layer. To see the sum of all, the model reads the problem and 200 tokens of the solution
# again, token by token, with the library's policy `quant`, which keeps everything in one format. The loss is −log p
# of the next token: how much does it grow? Then the model writes by itself. Is the answer still right?

# %%
text = tokens[: P + 200]
[exact] = engine.loss([text], prompt_tokens=P)
print("keys     values    bits      loss   answer   bytes, of a full cache in float32")
losses, right = {}, {}
for of_keys, of_values in (
    ("nvfp4", "nvfp4"),
    ("nvfp4", "ternary"),
    ("ternary", "nvfp4"),
    ("ternary", "ternary"),
    ("tq2", "tq2"),
):
    policy = f"quant:fmt={of_keys},v_fmt={of_values}"
    [reading] = engine.loss([text], policy=policy, prompt_tokens=P)
    [result] = engine.generate(problem.question, policy=policy, temperature=0, max_new_tokens=400)
    pair = (of_keys, of_values)
    losses[pair] = reading.mean - exact.mean
    right[pair] = "right" if grade(result.text, problem.answer) else "wrong"
    bits = (bits_of(of_keys) + bits_of(of_values)) / 2
    share = result.kv_bytes / result.kv_full_bytes
    print(f"{of_keys:8} {of_values:8} {bits:5.2f} {losses[pair]:+9.4f}   {right[pair]:6} {share:7.1%}")
assert losses["nvfp4", "nvfp4"] < losses["nvfp4", "ternary"] < losses["ternary", "nvfp4"]
assert right["nvfp4", "nvfp4"] == "right"
assert right["ternary", "ternary"] == "wrong"

# %% [markdown]
# Compare two lines with the same bits: nvfp4 keys with ternary values, and ternary keys with nvfp4 values. The second
# has the far larger loss, although ternary *values* made the larger error of attention's output. And a small loss
# promises no right answer: one other token leads to another text.
#
# One problem is a story, not a measurement; [the table of methods](../docs/methods.md) has hundreds. But it shows the
# plan of ThinKV: four bits for thoughts that matter, two for those that do not, and none for those that may go.
#
# ## Three things to remember
#
# 1. Few bits name few numbers, and a scale says how large they are. The scale costs bytes, too.
# 2. One outlier in a group makes all others coarse. Let the groups of keys run along tokens, or rotate outliers away.
# 3. Measure what errors do to attention and to the answer, and not only how large they are.
#
# ## Exercises
#
# 1. **Larger groups.** Give `int2` and `nvfp4` groups of 32 and 64 (`int2:group=64`). How many bits do they save, and
#    how much does the error of the keys grow?
# 2. **Loudness.** Vary the factor 16 of the loud channel from 1 to 64. From where on is `int4:by=token` better than
#    `int4` for the other channels? And what of the loud channel itself?
# 3. **Break-even.** At how many evenly spread survivors of 128 does `nvfp4` by token cost as much as `fp8`? Does that
#    depend on the dimensions of a head? And what does a token cost if all survivors lie side by side?
# 4. **A bad vector.** Find a vector without any outlier that R turns into a single one. (The largest |x| / rms is
#    then √64 = 8.) Why are real keys hardly ever like that?
