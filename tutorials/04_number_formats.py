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

# %%
import matplotlib.pyplot as plt
import torch

from minithink.quant import parse

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

# %%
import math

import torch.nn.functional as F
from torch.testing import assert_close

from minithink.kv.contract import Shape, Storage
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.kv.requantize import Moves
from minithink.kv.store import PagedStore
from minithink.policies import parse as parse_policy
from minithink.quant import e4m3, turboquant
from minithink.tasks import Problem, grade

torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)  # the model is so small that threads would wait for each other

engine = minithink.load("tiny", device="cpu", dtype="float32")
config, tokenizer, decoder = engine.config, engine.tokenizer, engine.decoder
problem = Problem(
    id="example",
    family="facts",
    answer="36, 21, 18",
    thinking_tokens=149,
    question="Facts (mod 100): kiz = 60; piz = 48; juv = ves - 26; mig = piz - 27; ves = piz * 3; mos = piz * 7. "
    "Find mos, mig and juv.",
)
L, Hq, Hkv, D = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim

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


nvfp4, codes = parse("nvfp4"), torch.arange(16, dtype=torch.uint8)
assert nvfp4.point(codes).tolist() == [e2m1(code) for code in range(16)]
print("  ".join(f"{code:04b} {e2m1(code):g}" for code in range(8)))

# %% [markdown]
# A second format has whole numbers from −7 to 7 (`int4s`; the s is for symmetric). Ternary, in 2 bits, has −1, 0 and
# 1. `int2s` uses its fourth code for −2. We draw all of them so that their reach is 1.

# %%
figure, axis = plt.subplots(figsize=(9, 2), layout="constrained")
for row, name in enumerate(("nvfp4", "int4s", "ternary", "int2s")):
    fmt = parse(name)
    points = fmt.point(torch.arange(2**fmt.bits, dtype=torch.uint8)).unique() / fmt.reach
    points = points[points >= -1]  # int4s has a code for −8 and does not use it
    axis.hlines(-row, -1, 1, color=GREY, linewidth=0.5)
    axis.plot(points, [-row] * len(points), "|", color=BLUE, markersize=14, markeredgewidth=2)
    axis.text(1.08, -row, f"{len(points)} numbers", va="center", color=GREY)
axis.set_yticks([0, -1, -2, -3], ["nvfp4", "int4s", "ternary", "int2s"])
axis.set(ylim=(-3.6, 0.6), xlim=(-1.08, 1.4), xlabel="in units of the largest magnitude of the group")
axis.set_xticks([-1, -0.5, 0, 0.5, 1])
plt.show()

# %% [markdown]
# NVFP4 is fine near zero and coarse at the ends. The whole numbers are equally fine everywhere. Which is better
# depends on where the data are.
#
# ## A group by hand
#
# We let the model solve a problem, and read problem and solution in one pass. `FullCache` keeps the keys and values,
# and our witness also the queries.


# %%
class Witness(FullCache):
    """A full cache that keeps the rotated queries, too."""

    queries: torch.Tensor

    def attend(self, layer, qk, v):
        self.queries[layer] = self.backend.rope(qk[:, :Hq], self._cos, self._sin)
        return super().attend(layer, qk, v)


[answer] = engine.generate(problem.question, temperature=0)
assert grade(answer.text, problem.answer)
prompt = engine.prompt_ids(problem.question)
tokens = prompt + answer.token_ids[:-1]
N = len(tokens)

witness = Witness(config, engine.rope)
witness.queries = torch.empty(L, N, Hq, D)
witness.join(0, capacity=N)
witness.begin_step([0], [N])
exact = decoder.logits(decoder(torch.tensor(tokens), witness))[len(prompt) - 1 :]  # of all generated tokens
witness.end_step()
K, V = witness.lanes[0].kv.unbind(1)  # [L, Hkv, N, D] each
print(f"{N} tokens, {len(prompt)} of them the prompt; K and V: {tuple(K.shape)} each")

# %% [markdown]
# Sixteen consecutive channels of one key form a *group*. They share one scale, so that the largest of them lands on
# the largest number of the grid, which is 6:
#
#     scale = amax / 6          code = nearest point to x / scale          x̂ = point · scale
#
# The scale itself is stored in 8 bits: E4M3, a small float with 3 bits of mantissa. NVFP4 has one more scale, in
# float32, for the whole tensor. It moves all group scales into the range where E4M3 is good.

# %%
x = K[0, 0, 100, :16]
tensor_scale = nvfp4.tensor_scale(K[0].abs().max())  # of a layer, with headroom for what comes later
stored = e4m3.encode(x.abs().max() / 6 / tensor_scale)  # one byte
scale = e4m3.decode(stored) * tensor_scale
grid = torch.tensor([e2m1(code) for code in range(16)])
code = (x[:, None] / scale - grid).abs().argmin(-1)  # [16], the nearest point
by_hand = grid[code] * scale

print("x     " + " ".join(f"{value:6.2f}" for value in x[:9].tolist()))
print("point " + " ".join(f"{value:6g}" for value in grid[code][:9].tolist()))
print("x̂     " + " ".join(f"{value:6.2f}" for value in by_hand[:9].tolist()))
data, params = nvfp4.quantize(x, tensor_scale)
assert_close(nvfp4.dequantize(data, params, tensor_scale, torch.float32), by_hand)
assert params.item() == stored.item()
assert len(data) == 8
print(f"\nstored: {len(data)} bytes of codes {bytes(data.tolist()).hex()}, 1 byte of scale {stored.item():02x}")
print(f"instead of {x.nbytes} bytes: {8 * (len(data) + 1) / 16} bits a number")

# %% [markdown]
# What does it cost to round the scale to 8 bits? E4M3 is off by 1/17 at most, until it runs out of small numbers. We
# round scales of all sizes, and quantize Gaussians of three widths with and without the scale for the tensor.


# %%
def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error: √(Σ(a − b)² / Σb²)."""
    return ((a - b).norm() / b.norm()).item()


scales = torch.logspace(-4, 3, 2000)
off = (e4m3.decode(e4m3.encode(scales)) / scales - 1).abs()
figure, axis = plt.subplots(figsize=(6.4, 2.2), layout="constrained")
axis.loglog(scales, off.clamp(min=1e-4), color=BLUE, linewidth=0.8)
axis.set(xlabel="scale", ylabel="rounded to E4M3: off by", ylim=(1e-3, 2))
plt.show()
assert off[(scales > 2**-6) & (scales < 448)].max() <= 1 / 17 + 1e-6
assert (off[scales < 2**-10.1] == 1).all()
assert off[scales > 900].min() > 0.5

noise = torch.Generator().manual_seed(0)
print("width of the Gaussian   error with the FP32 scale   without")
errors = {}
for width in (1, 0.01, 0.002):
    g = width * torch.randn(4096, 16, generator=noise)
    ts = nvfp4.tensor_scale(g.abs().max())
    fit = nvfp4.dequantize(*nvfp4.quantize(g, ts), ts, torch.float32)
    alone = e4m3.decode(e4m3.encode(g.abs().amax(-1, keepdim=True) / 6))
    points = grid[(g[..., None] / alone.where(alone > 0, math.inf)[..., None] - grid).abs().argmin(-1)]
    errors[width] = rel(fit, g), rel(points * alone, g)
    print(f"{width:21g} {errors[width][0]:27.3f} {errors[width][1]:9.3f}")
assert max(e for e, _ in errors.values()) < 0.1 < errors[0.01][1] < 0.15
assert errors[0.002][1] > 0.9

# %% [markdown]
# So 1/17 hardly matters, but underflow does: without the float32 scale, small tensors would be rounded to nothing.
#
# ## Error and bytes, measured
#
# We measure formats of the library on the keys and values of problem and solution.
#
# - `fp8`: E4M3 numbers, one scale for a tensor.
# - `nvfp4`, `int4s`, `ternary`: symmetric around zero, with an E4M3 scale for 16 numbers.
# - `int4`, `int2`: *asymmetric*. A group stores its scale *and* its minimum, each in 16 bits: `x̂ = code·scale +
#   min`.
#
# A group may run along the channels of one token (`by=channel`), or along 16 consecutive *tokens* of one channel
# (`by=token`), which only keys do. (The papers name the same two "per token" and "per channel": what has its own
# scale.)


# %%
def roundtrip(name: str, x: torch.Tensor) -> torch.Tensor:
    """Quantize and read back. x: [L, Hkv, N, D], one tensor scale for a layer, from the prompt."""
    fmt, n = parse(name).fit(D), x.shape[2]
    ts = fmt.tensor_scale(x[:, :, : len(prompt)].abs().amax((1, 2, 3)))  # [L]
    if fmt.by == "channel":
        return fmt.dequantize(*fmt.quantize(x, ts[:, None, None]), ts[:, None, None], torch.float32)
    groups = F.pad(x, (0, 0, 0, -n % fmt.group)).unflatten(2, (-1, fmt.group))  # [L, Hkv, groups, 16, D]
    valid = (torch.arange(groups.shape[2] * fmt.group) < n).view(-1, fmt.group).expand(groups.shape[:-1])
    data, params = fmt.quantize(groups, ts[:, None, None], valid)  # one row of scales for 16 tokens
    rows = params[..., None, :].expand(*data.shape[:-1], -1)
    return fmt.dequantize(data, rows, ts[:, None, None, None], torch.float32).flatten(2, 3)[:, :, :n]


table = {}
print("               bits of a     error of   error of keys   error of")
print("               number        values     by channel      keys by token")
for name in ("bf16", "fp8", "int4", "nvfp4", "int4s", "int2", "ternary"):
    bits = 8 * parse(name).fit(D).bytes_per_token(D) / D
    row = [bits, rel(roundtrip(name, V), V), rel(roundtrip(name, K), K)]
    if parse(name).group:
        row.append(rel(roundtrip(f"{name}:by=token", K), K))
        assert 8 * parse(f"{name}:by=token").bytes_per_token(D) / D == bits
    table[name] = row
    print(f"{name:10} {bits:9.1f}" + "".join(f"{error:14.4f}" for error in row[1:]))

figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
for column, (label, mark) in enumerate([("values", "s"), ("keys by channel", "o"), ("keys by token", "^")], 1):
    have = [row for row in table.values() if len(row) > column]
    axis.semilogy(
        [r[0] for r in have],
        [r[column] for r in have],
        mark,
        color=(GREY, BLUE, ORANGE)[column - 1],
        label=label,
        alpha=0.8,
    )
for name, row in table.items():
    left = name == "int4s"  # as many bits as nvfp4
    axis.annotate(name, (row[0], row[1]), (-32 if left else 7, -5 if left else -1), textcoords="offset points")
axis.set(xlabel="bits of a number, with its share of the scales", ylabel="relative error", xlim=(2, 17.8))
axis.legend()
plt.show()
assert table["int4s"][2] < table["nvfp4"][2]
assert table["int2"][0] == 4
assert table["int4"][0] == 6
assert table["ternary"][1] > 0.5

# %% [markdown]
# Read the first column: `int2` has 2 bits of code and 4 bits in all, for its 32 bits of scale and minimum are shared
# by 16 numbers only. KIVI, where the format comes from, takes larger groups. What does that buy?

# %%
print("group     int2: bits, error     nvfp4: bits, error")
for size in (16, 32, 64):
    cells = []
    for name in (f"int2:group={size},by=token", f"nvfp4:group={size}"):
        cells.append((8 * parse(name).bytes_per_token(D) / D, rel(roundtrip(name, K), K)))
    print(f"{size:5}" + "".join(f"{bits:15.3f} {error:7.3f}" for bits, error in cells))

# %% [markdown]
# ## Keys have loud channels
#
# Why group keys by token at all? Here are magnitudes of keys and values of the head with the loudest channel, and
# beside it the mean of each channel.

# %%
loud = K.abs().mean(2)  # [L, Hkv, D]
ratio = loud.amax(-1) / loud.median(-1).values  # [L, Hkv]
layer, head = divmod(ratio.argmax().item(), Hkv)
channel = loud[layer, head].argmax().item()
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), width_ratios=(1, 1, 1.1), layout="constrained")
for axis, x, title in zip(axes, (K, V), ("|keys|", "|values|"), strict=False):
    x = x[layer, head].abs()
    axis.imshow(x, cmap="Blues", vmin=0, vmax=3.5 * x.mean(), aspect="auto", interpolation="nearest")
    axis.set(title=f"{title}, layer {layer}, head {head}", xlabel="channel", ylabel="token")
axes[2].plot(loud[layer, head], color=ORANGE, label="keys")
axes[2].plot(V[layer, head].abs().mean(0), color=GREY, label="values")
axes[2].set(title="mean magnitude", xlabel="channel", ylim=(0, None))
axes[2].legend()
plt.show()
of_values = V.abs().mean(2).amax(-1) / V.abs().mean(2).median(-1).values
print(f"channel {channel} of these keys is {ratio.max():.1f} times as loud as the median channel of the head")
print(
    f"in the median head, the loudest channel of the keys: {ratio.median():.1f} times, of the values: "
    f"{of_values.median():.1f} times"
)
assert ratio.max() > 3, "one head should have a loud channel"
assert ratio.median() < 3, "most heads should have none"
assert of_values[layer, head] < ratio.max() / 2
assert table["int4"][3] < table["int4"][2]
assert table["nvfp4"][3] > table["nvfp4"][2]

# %% [markdown]
# These keys have vertical stripes: a channel that is loud for one token is loud for all. The values have hardly any.
# If a loud channel sits in a group with fifteen quiet ones, it sets the scale for them, and they are rounded
# coarsely. By token, a group holds one channel only, and its scale fits it.
#
# In most heads of our small model the stripes are mild, so `by=token` gains little in the table above. We imitate a
# large model: one channel of every head gets 16 times as loud. We look at the error of all the *others*.

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
# inner products stay the same, and attention may rotate one query instead of rotating all keys back.
#
# For each key we divide the largest magnitude by the root mean square (rms) of its channels. The top row of the
# picture is the key with the median ratio, the bottom row the most extreme one. The grey lines are the sixteen
# numbers of the format `tq4`, the best ones for a Gaussian. Bars beyond them are orange.


# %%
def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors in units of their own root mean square. x: [..., D] → [..., D]."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


def peak(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude / root mean square. x: [..., D] → [...]."""
    return unit(x).abs().amax(-1)


H = torch.ones(1, 1)
while len(H) < D:
    H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
R = H * turboquant.signs(D, K.device) / math.sqrt(D)
assert_close(R @ R.T, torch.eye(D))  # orthogonal
keys = K.flatten(0, 2)  # [L·Hkv·N, D]
rotated = keys @ R.T
assert_close(rotated, turboquant.rotate(keys))

before, after = peak(keys), peak(rotated)
typical = (before - before.median()).abs().argmin().item()
extreme = before.argmax().item()
levels = torch.tensor(turboquant.LEVELS[4])  # the positive half
figure, axes = plt.subplots(2, 2, figsize=(9, 4.4), sharex=True, sharey=True, layout="constrained")
for row, (name, key) in enumerate({"typical key": typical, "extreme key": extreme}.items()):
    for axis, title, x in zip(axes[row], ("as it is", "rotated"), (keys[key], rotated[key]), strict=True):
        axis.hlines(torch.cat((-levels, levels)), -1, D, color=GREY, linewidth=0.4)
        beyond = unit(x).abs() > levels[-1]
        axis.bar(range(D), unit(x), color=[ORANGE if far else BLUE for far in beyond])
        axis.set_title(f"{name}, {title}: largest |x| / rms = {peak(x):.1f}")
    axes[row, 0].set_ylabel("x / rms")
for axis in axes[1]:
    axis.set(xlabel="channel", xlim=(-1, D))
plt.show()

noise = torch.randn(4096, D, generator=torch.Generator().manual_seed(0))
print("largest |x| / rms          as it is   rotated")
print(f"typical key {before[typical]:24.2f} {after[typical]:9.2f}")
print(f"extreme key {before[extreme]:24.2f} {after[extreme]:9.2f}")
print(f"mean of all keys {before.mean():19.2f} {after.mean():9.2f}")
print(f"largest of all keys {before.max():16.2f} {after.max():9.2f}")
print(f"mean of all values {peak(V).mean():17.2f} {peak(turboquant.rotate(V)).mean():9.2f}")
print(f"mean of Gaussian noise {peak(noise).mean():13.2f} {peak(noise @ R.T).mean():9.2f}")
print(f"\nabove 4.5: {(before > 4.5).sum()} of {len(keys):,} keys, rotated {(after > 4.5).sum()}")
print(f"larger after the rotation than before: {100 * (after > before).float().mean():.0f} % of the keys")
assert before[extreme] > 5, "one key should have an outlier"
assert after[extreme] < before[extreme] / 2
assert abs(after.mean() - peak(noise).mean()) < 0.1, "rotated keys should be like Gaussian noise"
assert abs(peak(V).mean() - peak(noise).mean()) < 0.1, "and values should be like it without a rotation"

# %% [markdown]
# Some keys have outliers, and after the rotation they look like all the others. (A ratio of about 2.6 is what 64
# Gaussian numbers have on average.) Nothing was fitted to these keys. So one table of sixteen numbers can serve all
# models, layers and heads, and one scale a whole head: with 2 bytes for it, `tq4` has 4.25 bits a number ([how well
# it works](../docs/turboquant-triattention.md)).
#
# Does the rotation make the error smaller? We take four formats with and without it, on the values, on the keys, and
# on keys with a planted outlier: channel 5 is 16 times as loud.


# %%
def with_rotation(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "tq4":  # it rotates by itself
        return roundtrip(name, x)
    return turboquant.rotate_back(roundtrip(name, turboquant.rotate(x)))


def without_rotation(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "tq4":  # rotate back first, so that its own rotation only undoes ours
        return turboquant.rotate(roundtrip(name, turboquant.rotate_back(x)))
    return roundtrip(name, x)


print("relative error, without rotation → with it")
print("                 bits        values              keys         loud channel")
gain = {}
for name in ("tq4", "int4s:group=64", "int4s", "nvfp4"):
    bits = 8 * parse(name).fit(D).bytes_per_token(D) / D
    gain[name] = [(rel(without_rotation(name, x), x), rel(with_rotation(name, x), x)) for x in (V, K, louder)]
    print(f"{name:15} {bits:5.2f}" + "".join(f"   {plain:.4f} → {turned:.4f}" for plain, turned in gain[name]))
key = keys[extreme].view(1, 1, 1, D)
one = rel(without_rotation("tq4", key), key), rel(with_rotation("tq4", key), key)
print(f"\ntq4, the extreme key of the picture: {one[0]:.4f} → {one[1]:.4f}")
spread = rel(roundtrip("tq4", louder)[..., others], K[..., others])
alone = rel(roundtrip("tq4", K)[..., others], K[..., others])
print(f"tq4, error of the other channels: {alone:.4f}, with a loud channel {spread:.4f}")
assert one[1] < one[0] / 2
for name in ("tq4", "int4s:group=64"):
    for plain, turned in gain[name][1:]:
        assert turned < 0.9 * plain, "with one scale for a head, keys should gain"
for plain, turned in (gain["tq4"][0], gain["nvfp4"][0], gain["nvfp4"][1]):
    assert abs(turned / plain - 1) < 0.03, "values, and NVFP4, should gain nothing"
assert gain["nvfp4"][2][1] > gain["nvfp4"][2][0]
assert abs(gain["tq4"][1][1] / gain["nvfp4"][1][0] - 1) < 0.03, "at fewer bits"
assert spread > 1.5 * alone

# %% [markdown]
# With one scale for a head, the rotation is what makes four bits work: without it, planted outliers multiply the
# error of the first two formats. Where there are no outliers it buys nothing. NVFP4 even gets a bit worse: its groups
# of 16 already fence an outlier in, and its grid suits one.
#
# Nor does the outlier's energy go away: the rotation spreads the error over all channels, so the quiet ones get a
# larger one than before.

# %% [markdown]
# ## A row of scales outlives its tokens
#
# By token, sixteen keys share one row of scales: one byte for each channel. When a policy evicts fifteen of them, the
# row must stay, for the last one cannot be read without it.
#
#     bytes of a token = 128·4/8 + 128·4/8 + 128/16  +  128 · (rows that live) / (tokens that live)
#                        key       value     value's    the keys' scales
#                                            scales
#
# That is for a head of 128 dimensions at 4 bits. We let a real store do it: 128 tokens come, some are evicted, and
# the ledger says what is left. At first the survivors are spread evenly, which is the worst case.


# %%
def store_of(pair: str, dim: int = 128, count: int = 128) -> PagedStore:
    """One head that has read `count` tokens of noise."""
    shape = Shape(1, 1, 1, 1, head_dim=dim, hidden=1, scope="sequence", device=torch.device("cpu"))
    store = PagedStore(shape, Storage(thoughts=(pair,), buffer=16, block=16), pages=80)
    generator = torch.Generator().manual_seed(0)
    store.append([0], [count], [0]).write(0, *torch.randn(2, 1, count, 1, dim, generator=generator))
    Moves(store).settle(0, count)  # sixteen tokens at a time are quantized together
    return store


def bytes_left(pair: str, survivors: list[int]) -> tuple[float, int]:
    """→ bytes of codes and scales for each token that is left, living rows of key scales."""
    store = store_of(pair)
    drop = torch.ones(1, 1, 1, 128, dtype=torch.bool)
    drop[..., survivors] = False
    store.evict(drop)
    ledger, left = store.account([0]), len(survivors)
    fp32 = 2 * 4  # one for K and one for V, of the layer
    rows = store.slots.free_groups.count - store.slots.free_groups.free
    own = 64 + 64 + 8 + (0 if rows else 8)  # by channel a key has its own eight scales
    assert ledger.payload + ledger.scales == left * own + rows * 128 + fp32, "the formula should be the ledger's"
    return (ledger.payload + ledger.scales - fp32) / left, rows


by_token, by_channel = "nvfp4:by=token/nvfp4", "nvfp4"
print("tokens left   keys by token   rows alive   keys by channel")
spread = {}
for left in (128, 64, 32, 16, 8, 4):
    spread[left], rows = bytes_left(by_token, list(range(0, 128, 128 // left)))
    plain, _ = bytes_left(by_channel, list(range(0, 128, 128 // left)))
    print(f"{left:11} {spread[left]:15.0f} {rows:12} {plain:17.0f}")
    assert plain == 144
assert (spread[128], spread[64], spread[16], spread[4]) == (144, 152, 200, 264)
print("\nwith 2 bytes to remember the row, while 64, 16, 4 survive:", *(f"{spread[n] + 2:.0f}" for n in (64, 16, 4)))

# %% [markdown]
# All starts at 144 bytes, 4.5 bits a number. By channel a token carries its own scales. By token, with 4 of 128
# survivors, it has become 264 bytes: as much as 8 bits a number.
#
# Are real evictions so bad? ThinKV cuts a segment of 128 tokens down to 64, 32, 16, 8, 4, and keeps the keys that are
# closest to the centres of as many clusters (K-means). We do this with the real keys of a real thought.


# %%
def medoids(x: torch.Tensor, k: int) -> list[int]:
    """Of each of k clusters the member nearest to its centre. x: [n, d]."""
    chosen = [(x - x.mean(0)).norm(dim=1).argmin().item()]
    while len(chosen) < k:  # farthest point next
        chosen.append(torch.cdist(x, x[chosen]).amin(1).argmax().item())
    centres = x[chosen]
    for _ in range(10):  # Lloyd
        nearest = torch.cdist(x, centres).argmin(1)
        centres = torch.stack([x[nearest == i].mean(0) if (nearest == i).any() else centres[i] for i in range(k)])
    distance = torch.cdist(x, centres)
    members = [i for i in range(k) if (nearest == i).any()]
    return sorted(distance[:, i].masked_fill(nearest != i, math.inf).argmin().item() for i in members)


segment = K[:, :, len(prompt) : len(prompt) + 128].transpose(1, 2).flatten(2)  # [L, 128, Hkv·D]
assert segment.shape[1] == 128, "the thought should fill a segment"
real, packed = {128: 144.0}, {left: bytes_left(by_token, list(range(left)))[0] for left in spread}
for left in (64, 32, 16, 8, 4):
    kept = [medoids(x, left) for x in segment]
    assert all(len(set(tokens_kept)) == left for tokens_kept in kept)
    results = [bytes_left(by_token, tokens_kept) for tokens_kept in kept]
    real[left] = sum(size for size, _ in results) / L
    print(
        f"{left:3} left: {real[left]:5.0f} bytes a token on average over the layers, rows alive "
        f"{min(r for _, r in results)} to {max(r for _, r in results)} of 8"
    )

figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
axis.semilogx(list(spread), list(spread.values()), "o--", color=GREY, base=2, label="keys by token, spread evenly")
axis.semilogx(list(real), list(real.values()), "o-", color=ORANGE, base=2, label="keys by token, K-means")
axis.semilogx(list(packed), list(packed.values()), "o:", color=GREY, base=2, label="keys by token, all side by side")
axis.axhline(144, color=BLUE, label="keys by channel")
axis.set_xticks(list(spread), list(spread))
axis.set(xlabel="tokens left of 128", ylabel="bytes of a token", ylim=(100, 300))
axis.invert_xaxis()
axis.legend(loc="upper left")
plt.show()
assert all((packed[left] + spread[left]) / 2 <= real[left] <= spread[left] for left in real)

# %% [markdown]
# Clusters pick their survivors from everywhere, so real evictions are nearer to the worst case than to the best. This
# is why the library implements both axes, and why a comparison of methods at equal *bytes* can look different from
# one at equal tokens.
#
# ## What errors do to attention
#
# An error in a value is averaged with all others. An error in a key goes through an exponential. We compare attention
# weights with exact and with quantized keys: how much weight lands on wrong tokens (half the sum of all differences),
# and how many of the ten heaviest tokens are still among the ten. Then the error of the *output*, if only keys are
# quantized and if only values are.


# %%
mask = torch.ones(N, N, dtype=torch.bool).tril()[len(prompt) :]  # rows: generated tokens


def weights(keys: torch.Tensor) -> torch.Tensor:
    """keys: [L, Hkv, N, D] → [L, Hq, generated, N]."""
    q = witness.queries[:, len(prompt) :].transpose(1, 2)  # [L, Hq, generated, D]
    score = q @ keys.repeat_interleave(Hq // Hkv, 1).mT / math.sqrt(D)
    return score.masked_fill(~mask, -math.inf).softmax(-1)


def output(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return weight @ values.repeat_interleave(Hq // Hkv, 1)


true = weights(K)
top = true.topk(10).indices
best = output(true, V)
print("                    weight on     of the top 10   error of the output from")
print("                    wrong tokens  still there     keys alone   values alone")
effect = {}
for name in ("fp8", "int4", "nvfp4", "nvfp4:by=token", "int4s", "tq4", "int2", "tq2", "ternary", "ternary:by=token"):
    w = weights(roundtrip(name, K))
    moved = (w - true).abs().sum(-1).mean().item() / 2
    kept = (w.topk(10).indices[..., None] == top[..., None, :]).any(-1).float().mean().item()
    from_keys, from_values = rel(output(w, V), best), rel(output(true, roundtrip(name.split(":")[0], V)), best)
    effect[name] = moved, kept, from_keys, from_values
    print(f"{name:17} {moved:13.3f} {kept:15.2f} {from_keys:15.3f} {from_values:14.3f}")
assert effect["fp8"][0] < effect["nvfp4"][0] < effect["ternary"][0]
assert effect["ternary"][1] < effect["nvfp4"][1]
assert effect["tq4"][0] < effect["nvfp4"][0]
assert effect["tq2"][0] < effect["ternary"][0]

# %% [markdown]
# `tq4` and `nvfp4` have nearly the same error of keys, but with `tq4` less weight lands on wrong tokens. One reason
# is that NVFP4's errors are larger where keys are large, and there queries tend to be large, too.
#
# Averages hide the heads that look up *one* token. We count the moments at which a head gives more than 0.9 of its
# weight to one token. With quantized keys, in how many of them has that token lost more than half of it? The bars
# show the look-up into the prompt that suffers most from ternary keys.

# %%
back = true[..., 1:]  # without the first token: in many models heads look there when they look at nothing
sharp = (back > 0.9).nonzero(as_tuple=True)  # layer, head, row, column
looked = {"exact": true}
print(f"{len(sharp[0]):,} sharp look-ups")
missed = {}
for name in ("nvfp4", "tq4", "int2", "tq2", "ternary", "ternary:by=token"):
    looked[name] = weights(roundtrip(name, K))
    still = looked[name][..., 1:][sharp]
    missed[name] = (still < back[sharp] / 2).sum().item()
    print(f"{name:17} {missed[name]:4} lost")
    if name == "ternary":
        worst = still.where(sharp[3] < len(prompt) - 1, 1).argmin()  # of those into the prompt
        layer, head, row, target = (index[worst].item() for index in sharp)
assert missed["nvfp4"] < missed["ternary"] / 10
assert missed["int2"] < missed["ternary"] / 4

shown = sum(looked[name][layer, head, row] for name in ("exact", "ternary")).topk(8).indices.tolist()
labels = [tokenizer.decode([tokens[i]]).replace(" ", "·").replace("\n", "⏎") for i in shown]
figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
for shift, (name, color) in enumerate([("exact", GREY), ("nvfp4", BLUE), ("int2", GREEN), ("ternary", ORANGE)]):
    bars = looked[name][layer, head, row, shown]
    axis.bar([i + 0.2 * shift - 0.3 for i in range(8)], bars, 0.2, color=color, label=name)
axis.set_xticks(range(8), [f"{label}\n({i})" for label, i in zip(labels, shown, strict=True)])
axis.set(ylabel="attention weight", xlabel="token (position)", title=f"layer {layer}, head {head}")
axis.legend()
plt.show()
here = tokenizer.decode(tokens[len(prompt) + row - 5 : len(prompt) + row + 1])
print(
    f"the query stands after {here!r} and should look at {tokenizer.decode([tokens[target + 1]])!r}, position "
    f"{target + 1}"
)

# %% [markdown]
# ## What errors do to the next token
#
# Errors pass from layer to layer. To see the sum of all, the decoder reads the whole text once more, with an `attend`
# under which a generated token sees quantized keys and values. At each place we compare the probabilities of the next
# token with the exact ones, and ask whether the most probable one is still the same.


# %%
class Quantized:
    """Attention of a text over itself: whatever was generated sees quantized keys and values."""

    def __init__(self, keys: str, values: str) -> None:
        self.keys, self.values = keys, values

    def attend(self, layer, qk, v):  # qk: [N, Hq + Hkv, D], q's heads and then k's; v: [N, Hkv, D]
        n, P = len(qk), len(prompt)
        cos, sin = engine.rope.at(torch.arange(n))
        q, k = decoder.backend.rope(qk, cos, sin).split((Hq, Hkv), dim=1)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        reading = decoder.backend.attention(q[:P], k[:, :P], v[:, :P])
        k, v = roundtrip(self.keys, k[None])[0], roundtrip(self.values, v[None])[0]
        return torch.cat((reading, decoder.backend.attention(q[P:], k, v)))

    def tap(self, layer, hidden):
        return hidden


def reread(keys: str, values: str, text: list[int] = tokens) -> torch.Tensor:
    """→ logits of all generated tokens [n, V]."""
    return decoder.logits(decoder(torch.tensor(text), Quantized(keys, values)))[len(prompt) - 1 :]


assert_close(reread("fp32", "fp32"), exact, rtol=1e-3, atol=1e-2)
print("keys              values     bits   divergence   other tokens")
lost = {}
pairs = [
    "fp8",
    "int4:by=token/int4",
    "nvfp4",
    "nvfp4:by=token/nvfp4",
    "int4s",
    "tq4",
    "nvfp4/ternary",
    "ternary/nvfp4",
    "int2",
    "tq2",
    "ternary:by=token/ternary",
    "ternary",
]
for pair in pairs:
    keys, _, values = pair.partition("/")
    values = values or keys
    logits = reread(keys, values)
    p, q = exact.log_softmax(-1), logits.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1).mean().item()  # Kullback-Leibler, nats
    changed = (logits.argmax(-1) != exact.argmax(-1)).sum().item()
    lost[pair] = divergence, changed
    bits = sum(parse(name).fit(D).bytes_per_token(D) for name in (keys, values)) * 8 / (2 * D)
    print(f"{keys:17} {values:8} {bits:6.1f} {divergence:12.1e} {changed:7} of {len(exact)}")
assert lost["fp8"][0] < lost["nvfp4"][0] < lost["ternary"][0]
assert lost["ternary/nvfp4"][0] > 4 * lost["nvfp4/ternary"][0]
times = lost["ternary/nvfp4"][0] / lost["nvfp4/ternary"][0]
print(f"\nternary keys cost {times:.0f} times as much divergence as ternary values")
assert effect["ternary"][2] < effect["ternary"][3]
assert lost["tq2"][0] < lost["ternary"][0] / 4

# %% [markdown]
# Compare two lines with the same bits: nvfp4 keys with ternary values, and ternary keys with nvfp4 values. The second
# is far worse, although ternary *values* made the larger error of attention's output, on average. Where weights are
# spread over many tokens, errors of keys cancel. But a look-up hangs on one token, and if its weight goes elsewhere,
# another value is copied.
#
# The figures are for this text and this model. What they teach is to measure behind the softmax, not before it.
#
# Does the library's paged cache, which really holds nothing but codes and scales, say the same? A few tokens through
# `KVManager`, under the policy `quant`, which keeps everything in one format:

# %%
manager = KVManager(config, engine.rope, parse_policy("quant:fmt=nvfp4"), rows=1, tokens=N)
manager.join(0, capacity=N, prompt=len(prompt))
manager.begin_step([0], [len(prompt)], prompt)
decoder(torch.tensor(prompt), manager)
manager.end_step()
stepped = []
for token in tokens[len(prompt) : len(prompt) + 20]:
    manager.begin_step([0], [1], [token])
    stepped.append(decoder.logits(decoder(torch.tensor([token]), manager))[0])
    manager.end_step()
mine = reread("nvfp4", "nvfp4")[1:21]
gap, effect_of = rel(torch.stack(stepped), mine), rel(mine, exact[1:21])
print(f"the library against our arithmetic: {gap:.1e}; quantization itself: {effect_of:.1e}")
assert gap < effect_of / 10
ledger = manager.account(0)
print(f"held: {ledger.payload:,} bytes of codes and {ledger.scales:,} of scales for {manager.held(0)} tokens")

# %% [markdown]
# ## What errors do to the answer
#
# When the model writes by itself, one other token leads to another text. Is the answer still right?

# %%
print("format                  tokens   correct   bytes, of a full cache in float32")
results = {}
for policy in ("quant:fmt=nvfp4", "quant:fmt=ternary", "quant:fmt=tq2"):
    [result] = engine.generate(problem.question, temperature=0, policy=policy, max_new_tokens=400)
    correct = grade(result.text, problem.answer)
    results[policy] = correct
    share = 100 * result.kv_bytes / result.kv_full_bytes
    print(f"{policy:22} {result.generated_tokens:7} {correct!s:>9} {share:10.1f} %")
    print("    ..." + result.text[-60:].replace("\n", "⏎"))
assert results["quant:fmt=nvfp4"]
assert not results["quant:fmt=ternary"]

# %% [markdown]
# One problem is a story, not a measurement; [the table of methods](../docs/methods.md) has hundreds. But it shows the
# plan of ThinKV: four bits for thoughts that matter, two for those that do not, and none for those that may go.
#
# ## Three things to remember
#
# 1. Few bits name few numbers, and a scale says how large they are. The scale costs bytes, too.
# 2. One outlier in a group makes all others coarse. Group keys by channel, or rotate outliers away.
# 3. Measure what errors do to attention and to the answer, and not only how large they are.
#
# ## Exercises
#
# 1. **Draw asymmetric.** Add `int4` and `int2` to the drawing of grids, for a group of your choice. What happens to a
#    group of positive numbers in `int4s`, and what in `int4`?
# 2. **Keys or values.** Give only keys, then only values, each of the formats, and sort the pairs by divergence at
#    equal bits. Which of the two deserves more bits here?
# 3. **Loudness.** Vary the factor 16 of the loud channel from 1 to 64. From where on is `int4:by=token` better than
#    `int4` for the other channels? And what of the loud channel itself?
# 4. **Break-even.** At how many survivors of 128 does `nvfp4:by=token` cost as much as `fp8`, with K-means? Compute
#    it for heads of 64 and of 256 dimensions.
# 5. **Before RoPE.** Undo the rotation of the keys (rotate by minus the position) and measure the ratio of the
#    loudest channel again. Some methods quantize keys before RoPE. What would the store have to do at every read?
# 6. **A bad vector.** Find a vector without any outlier that R turns into a single one. (Its ratio is then √64 = 8.)
#    Why are real keys hardly ever like that?
