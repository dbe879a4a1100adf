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
# # 2. Why there is a KV cache, and what it costs
#
# Without a cache a model recomputes every token for every new one ([tutorial 1](01_decoder.py)). A *KV cache* ends
# that: it keeps the keys and values of the past. It trades arithmetic for memory, and in a reasoning model memory
# becomes the problem.
#
# The picture shows the trade for the shape of an 8-billion-parameter Llama. It is computed, not measured: on the left
# the tokens that pass the layers, on the right the memory that this takes.
#
# We measure both sides on the embedded model. Then we write the bill for two larger ones, and take one token away.

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

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

written = torch.arange(1, 32_769)
BYTES = 32 * 2 * 8 * 128 * 2  # layers, key and value, KV heads, dimensions, bytes of a bfloat16
figure, axes = plt.subplots(1, 2, figsize=(9, 2.4), layout="constrained")
axes[0].loglog(written, written * (written + 1) / 2, color=GREY, label="without a cache")
axes[0].loglog(written, written, color=BLUE, label="with a cache")
axes[0].set(xlabel="tokens written", ylabel="tokens through the layers, in all")
axes[0].legend()
axes[1].plot(written, written * 0, color=GREY)
axes[1].plot(written, written * BYTES / 2**30, color=BLUE)
axes[1].set(xlabel="tokens written", ylabel="GiB kept")
plt.show()

# %%
import math
import textwrap
import time

from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from minithink.bench.speed.steady import LLAMA
from minithink.config import ModelConfig
from minithink.kv.full import FullCache
from minithink.kv.plain import PlainCache
from minithink.model import Decoder
from minithink.policies.full import Full
from minithink.tasks import Problem, grade, load_problems

torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)  # one core: what we measure is then easy to explain

engine = minithink.load("tiny", device="cpu", dtype="float32")
config, tokenizer, decoder = engine.config, engine.tokenizer, engine.decoder
example = Problem(
    id="example",
    family="facts",
    answer="36, 21, 18",
    thinking_tokens=149,
    question="Facts (mod 100): kiz = 60; piz = 48; juv = ves - 26; mig = piz - 27; ves = piz * 3; mos = piz * 7. "
    "Find mos, mig and juv.",
)
problems = [example, *sorted(load_problems("validation"), key=lambda p: p.thinking_tokens)]
prompt = engine.prompt_ids(problems[0].question)
L, Hq, Hkv, D = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
print(f"{L} layers, {Hq} query heads, {Hkv} KV heads of {D} dimensions")

# %% [markdown]
# ## What can be kept
#
# Attention is the only place where tokens meet, and it looks back only: token `i` reads the keys and values of tokens
# `j ≤ i`. So a new token changes nothing before it. The keys and values of the past are final.
#
# We check that. The decoder hands q, k and v to an object with `attend`. The one below has no memory, and notes the
# keys and values on the way.


# %%
class NoCache:
    """Attention of a text over itself. Nothing is kept for the next call."""

    def __init__(self):
        self.keys, self.values = [], []

    def attend(self, layer, qk, v):  # qk: [N, Hq + Hkv, D], q's heads and then k's; v: [N, Hkv, D]
        cos, sin = engine.rope.at(torch.arange(len(qk)))
        q, k = decoder.backend.rope(qk, cos, sin).split((Hq, Hkv), dim=1)
        self.keys.append(k)
        self.values.append(v)
        return decoder.backend.attention(q, k.transpose(0, 1), v.transpose(0, 1))

    def tap(self, layer, hidden):
        return hidden


short, long = NoCache(), NoCache()
decoder(torch.tensor(prompt[:30]), short)
decoder(torch.tensor(prompt), long)
for layer in range(config.num_layers):
    assert_close(short.keys[layer], long.keys[layer][:30], rtol=1e-4, atol=1e-4)
    assert_close(short.values[layer], long.values[layer][:30], rtol=1e-4, atol=1e-4)
print(f"keys and values of the first 30 tokens are the same, with {len(prompt) - 30} tokens after them or without")

# %% [markdown]
# A query is used once, by its own token. Hence a *KV* cache, without Q.
#
# ## The same tokens, twice
#
# The naive loop gives the decoder the whole text at every step. The cached loop gives it the prompt once (*prefill*)
# and then one token at a time (*decode*). `FullCache` keeps everything: `join` reserves room for a sequence,
# `begin_step` says which sequence brings how many tokens, `end_step` closes the step.


# %%
def naive_step(tokens: list[int]) -> torch.Tensor:
    """→ logits [V] of the next token."""
    return decoder.logits(decoder(torch.tensor(tokens), NoCache())[-1:])[0]


def cached_step(cache: FullCache | PlainCache, new: list[int], seq: int = 0) -> torch.Tensor:
    """Read only the new tokens → logits [V] of the next one."""
    cache.begin_step([seq], [len(new)])
    hidden = decoder(torch.tensor(new), cache)
    cache.end_step()
    return decoder.logits(hidden[-1:])[0]


steps = 80
naive, cached = list(prompt), list(prompt)
began = time.perf_counter()
for _ in range(steps):
    naive.append(naive_step(naive).argmax().item())
naive_seconds = time.perf_counter() - began

cache = FullCache(config, engine.rope)
cache.join(0, capacity=len(prompt) + steps)
began = time.perf_counter()
new = prompt
for _ in range(steps):
    new = [cached_step(cache, new).argmax().item()]
    cached += new
cached_seconds = time.perf_counter() - began

assert naive == cached, "with and without a cache, the tokens differ"
print(tokenizer.decode(cached[len(prompt) :]), "...\n")
print(f"{steps} of {steps} tokens are equal")
fed = sum(range(len(prompt), len(prompt) + steps))
print(f"tokens that went through the decoder: {fed:,} without a cache, {len(prompt) + steps - 1:,} with one")
print(f"seconds: {naive_seconds:.2f} and {cached_seconds:.2f}")

# %% [markdown]
# ## Time per token
#
# Without a cache, token number `n` costs a pass over `n` tokens. With one, it costs a pass over a single token, and a
# look at `n` keys and values. We measure the cost of one more token at several lengths of a repeated text.


# %%
def fastest(step, repeats: int) -> float:
    """Seconds of the least disturbed of several runs."""
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - began)
    return best


def filled(length: int, room: int) -> FullCache:
    """A cache that holds `length` tokens of sequence 0 and has room for more."""
    cache = FullCache(config, engine.rope)
    cache.join(0, length + room)
    cached_step(cache, filler[:length])
    return cache


filler = cached * 20
lengths = [32, 64, 128, 256, 512, 1024, 1536]
without_cache, with_cache = [], []
for n in lengths:
    without_cache.append(fastest(lambda n=n: naive_step(filler[:n]), 3))
    cache = filled(n, room=20)
    with_cache.append(fastest(lambda cache=cache: cached_step(cache, [filler[0]]), 20))
    print(f"{n:5} tokens: {1e3 * without_cache[-1]:8.1f} ms without a cache, {1e3 * with_cache[-1]:6.1f} ms with")

figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
axis.loglog(lengths, [1e3 * s for s in without_cache], "o-", color=ORANGE, label="recomputing everything")
axis.loglog(lengths, [1e3 * s for s in with_cache], "o-", color=BLUE, label="with a KV cache")
axis.set_xticks(lengths, lengths)
axis.minorticks_off()
axis.set(xlabel="tokens before the new one", ylabel="time for one new token (ms)")
axis.legend()
plt.show()
assert without_cache[-1] > 5 * with_cache[-1], "the cache should win by far at this length"

# %% [markdown]
# ## Prefill and decode
#
# In prefill the decoder reads many tokens in one pass. In decode it reads one.

# %%
n = 512
prefill_seconds = fastest(lambda: filled(n, room=0), 3)
print(f"prefill: {n / prefill_seconds:8,.0f} tokens/s")
print(f"decode:  {1 / with_cache[lengths.index(n)]:8,.0f} tokens/s")

# %% [markdown]
# The same weights, the same arithmetic for each token, and yet another speed. To see why, we count two things for a
# pass: the arithmetic, and the bytes that have to come from memory. With `B` sequences of `n` new tokens each, the
# last of which sees `S` keys:
#
#     FLOPs = 2·P·B·n  +  2·V·d·B  +  4·L·Hq·D·B·n·(keys seen, on average)
#             weights     logits      q·k and weight·v
#
#     traffic = (P + V·d)·size  +  B·S·(bytes of keys and values of a token)
#               every weight once  every key and value once
#
# `P` is the number of weights in the layers' matrices, `V·d` those of the output layer, `size` the bytes of a number.
# A pass reads the weights once, *however many tokens it has*.


# %%
def matrix_weights(c: ModelConfig) -> int:
    """P: weights of all layers' matrices."""
    qkv = c.hidden_size * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    o = c.num_heads * c.head_dim * c.hidden_size
    mlp = 3 * c.hidden_size * c.intermediate_size
    return c.num_layers * (qkv + o + mlp)


def flops(c: ModelConfig, batch: int, new: int, keys: int) -> int:
    """Of a pass; of every sequence only the last token gets logits."""
    seen = keys - (new - 1) / 2  # keys that a token sees, on average
    products = 2 * matrix_weights(c) * batch * new + 2 * c.vocab_size * c.hidden_size * batch
    return products + round(4 * c.num_layers * c.num_heads * c.head_dim * batch * new * seen)


def bytes_read(c: ModelConfig, batch: int, keys: int, size: int) -> int:
    """Of a pass; `size`: bytes of a number."""
    return (matrix_weights(c) + c.vocab_size * c.hidden_size) * size + batch * keys * c.kv_bytes_per_token(size)


# torch can count, too: the matrix products of a decode step must be what we say.
cache = filled(100, room=1)
with FlopCounterMode(display=False) as counter:
    cached_step(cache, [filler[0]])
counts, aten = counter.get_flop_counts()["Global"], torch.ops.aten
products = sum(counts.get(operation, 0) for operation in (aten.mm, aten.addmm))  # addmm: with an addition
weights_used = matrix_weights(config) + config.vocab_size * config.hidden_size
assert products == 2 * weights_used, f"torch counts {products:,} FLOPs, the formula {2 * weights_used:,}"
print(f"matrix products of one token: {products:,} FLOPs, by torch's count and by ours\n")

size = 4  # float32
traffic = bytes_read(config, 1, n, size)
intensity = {"prefill": flops(config, 1, n, n) / traffic, "decode": flops(config, 1, 1, n) / traffic}
for name, each in intensity.items():
    print(f"{name:8} {each * traffic / 1e9:7.3f} GFLOP  {traffic / 1e6:6.1f} MB  {each:7.1f} FLOP/byte")

# %% [markdown]
# The last column is the *arithmetic intensity*: what is computed for each byte that is fetched. A processor has such
# a ratio, too: the FLOPs that it can compute in the time in which it fetches a byte. A pass with a higher intensity
# is bound by arithmetic. A pass with a lower one is bound by memory: the arithmetic units wait.
#
# We measure this machine's ratio with a large matrix product and a large sum.

# %%
square = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
peak_flops = 2 * 1024**3 / fastest(lambda: square @ square, 20)
big = torch.ones(64 * 2**20)  # 256 MiB, more than caches hold
peak_bytes = big.nbytes / fastest(lambda: big.sum(), 5)
ratio = peak_flops / peak_bytes
print(f"this core: {peak_flops / 1e9:.0f} GFLOP/s, {peak_bytes / 1e9:.1f} GB/s: {ratio:.1f} FLOP/byte")
assert intensity["decode"] < ratio < intensity["prefill"]

# %% [markdown]
# So prefill is bound by arithmetic, and decode by memory. (In a model this small the launch of each operation costs
# time, too.) A decode step does about one multiplication and one addition for each weight that it fetches, and no
# faster arithmetic unit helps it. A larger batch does: the weights are fetched once for all sequences.
#
# ## Bytes per token
#
# Now the cache's own price. For each token it keeps a key *and* a value, in each layer, in each KV head, with `D`
# numbers of `bytes` bytes:
#
#     bytes per token = 2 · L · Hkv · D · bytes
#
# Not in it are the number of query heads, the width of the model, the vocabulary. That is why models have fewer KV
# heads than query heads (grouped-query attention, GQA). We check the formula against a `FullCache` and its tensors.

# %%
per_token = 2 * L * Hkv * D * size
cache = filled(len(prompt), room=200)
buffer = cache.lanes[0].kv  # [L, 2, Hkv, capacity, D]

assert per_token == config.kv_bytes_per_token(size)
assert cache.held_bytes(0) == len(prompt) * per_token == buffer[:, :, :, : len(prompt)].numel() * buffer.itemsize
assert cache.reserved_bytes() == (len(prompt) + 200) * per_token == buffer.untyped_storage().nbytes()

print(f"2 · {L} · {Hkv} · {D} · {size} = {per_token:,} bytes a token")
print(f"held:     {len(prompt):4} tokens, {cache.held_bytes(0):9,} bytes")
print(f"reserved: {len(prompt) + 200:4} tokens, {cache.reserved_bytes():9,} bytes")


# %% [markdown]
# *Held* and *reserved* are not the same: a full cache promises room for the longest answer, and what is not used is
# lost to everybody else.
#
# ## The cache grows while the model thinks
#
# A problem of middling size, solved to the end:

# %%
problem = problems[len(problems) // 3]
stream = engine.stream(problem.question, temperature=0)
held, stages = [], []
for chunk in stream:
    stages.append(chunk.stage)
    if 0 in stream.cache.lanes:  # a finished sequence has left
        held.append(stream.cache.held_bytes(0))
        reserved = stream.cache.reserved_bytes()
result = stream.result
assert held == [(result.prompt_tokens + i) * per_token for i in range(len(held))]

print(textwrap.fill(problem.question, 110), "\n")
lines = result.text.splitlines()
print("\n".join([*lines[:6], f"   [{len(lines) - 9} lines more]", *lines[-3:]]))
print(f"\ncorrect: {grade(result.text, problem.answer)}")
print(f"prompt {result.prompt_tokens} tokens, thinking {result.thinking_tokens}, then the answer")

# %%
MiB = 2**20
begin, end = result.prompt_tokens, result.prompt_tokens + stages.count("think")
total = result.prompt_tokens + len(held)
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
for left, right, name, color in [
    (0, begin, "prompt", GREY),
    (begin, end, "thinking", BLUE),
    (end, total, "answer", GREEN),
]:
    part = torch.arange(left, right + 1)
    axis.fill_between(part, part * per_token / MiB, color=color, linewidth=0, label=name)
axis.axhline(reserved / MiB, color=ORANGE, linestyle="--", label="reserved: the whole context")
axis.set(xlabel="tokens of the sequence", ylabel="keys and values (MiB)", xlim=(0, total))
axis.legend()
plt.show()
print(
    f"at the end {result.kv_bytes / MiB:.1f} MiB are held and {reserved / MiB:.0f} MiB reserved: "
    f"{100 * result.kv_bytes / reserved:.0f} % in use"
)
print(f"of what is held, {100 * stages.count('think') / total:.0f} % are thoughts")
assert stages.count("think") > total / 2

# %% [markdown]
# A straight line, and most of it is thinking. While the answer is written, every step still reads all the thoughts.
#
# ## The bill for real models
#
# Two models that reason. `Decoder` on the device `meta` has shapes and no memory, so we can count its parameters.


# %%
def parameters(c: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(c).parameters())


assert parameters(config) == sum(p.numel() for p in decoder.parameters())

models = {
    "R1-Distill-Llama-8B": LLAMA,
    "R1-Distill-Qwen-7B": ModelConfig(
        "Qwen2ForCausalLM",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_position=131072,
        qkv_bias=True,
    ),
}

GiB, half, length = 2**30, 2, 32 * 1024  # half: bytes of a bfloat16
print(f"                       parameters   weights  a token  32 × {length:,} tokens  as large as the weights with")
for name, c in models.items():
    weights, token = parameters(c) * half, c.kv_bytes_per_token(half)
    print(
        f"{name:22} {parameters(c) / 1e9:8.2f} B {weights / GiB:5.1f} GiB {token / 1024:4.0f} KiB"
        f" {32 * length * token / GiB:12.0f} GiB {weights / token / 32:19,.0f} tokens in each of 32"
    )

# %% [markdown]
# A server runs many sequences, and then the cache is several times the model. The 7B model's cache is less than half
# of the other's: it has half the KV heads, and fewer layers.
#
# The cache of a model that summarizes documents is mostly prompt: known in size beforehand, and filled by fast
# prefill. A reasoning model turns this around. Over the shipped validation problems:

# %%
read = sum(len(engine.prompt_ids(p.question)) for p in problems)
thought = sum(p.thinking_tokens for p in problems)
print(
    f"average prompt {read / len(problems):.0f} tokens, average thinking {thought / len(problems):.0f}: "
    f"{thought / read:.1f} times as many"
)

# %% [markdown]
# Three things get worse at once:
#
# - **Room.** The cache grows with the thoughts, and how long they get shows only at the end.
# - **Time.** Every decode step reads all keys and values that are held. A batch shares the weights, but not the
#   cache. So batching stops helping: the first table.
# - **Throughput.** Fewer sequences fit beside the weights, so batches get smaller as thoughts get longer: the second
#   table. It takes an accelerator from its data sheet (H100 SXM) and gives limits that no software beats while it
#   keeps and reads everything. [docs/speed.md](../docs/speed.md) has what was measured.

# %%
name = "R1-Distill-Llama-8B"
c = models[name]
print(f"{name}, bfloat16: FLOP/byte of a decode step\n")
print("   tokens held" + "".join(f"batch {b:<3}".rjust(12) for b in (1, 8, 32, 128)))
table = {}
for keys in (128, 1024, 4096, 16384, 32768):
    table[keys] = [flops(c, b, 1, keys) / bytes_read(c, b, keys, half) for b in (1, 8, 32, 128)]
    print(f"{keys:14,}" + "".join(f"{x:12.1f}" for x in table[keys]))
assert table[128][-1] / table[128][0] > 50, "with short texts a batch should help"
assert 4 < table[32768][-1] / table[32768][0] < 5, "with long texts a batch of 128 should gain 4 times"

memory, bandwidth = 80e9, 3.35e12  # bytes, bytes a second
weights = parameters(c) * half
print("\n   tokens held   sequences that fit   tokens/s of all together, at most")
for keys in (1024, 4096, 16384, 32768):
    fit = int((memory - weights) / (keys * c.kv_bytes_per_token(half)))
    print(f"{keys:14,} {fit:20} {fit * bandwidth / bytes_read(c, fit, keys, half):35,.0f}")
assert fit < 128 / 2, "most of the longest batch should not fit"

# %% [markdown]
# ## What if we throw something away?
#
# The bill has two factors, tokens and bytes per token. Is it safe to throw out a token? We try it.
#
# `PlainCache` is the simplest cache that can lose one ([what it holds](../docs/kv-cache.md#the-plain-manager)). It
# holds each sequence in *lanes*, one for each KV head of each layer, which are ordinary tensors with a column for
# each token:
#
#     k, v   [L, Hkv, S, D]   keys, which are rotated, and values
#     pos    [1, 1, S]        the position of each token in the text; here all lanes hold the same tokens
#
# To evict a token is to drop its column. The columns behind it close ranks and keep their positions.

# %%
cache = PlainCache(config, engine.rope, Full(), rows=1, tokens=10)
cache.join(0, capacity=10, prompt=10)  # a prompt of 10 tokens, of which 6 come now
cached_step(cache, prompt[:6])
lanes = cache.sequences[0].lanes
keys = lanes.keys(layer=0).clone()  # [Hkv, 6, D]
lanes.evict(lanes.positions() == 2)
print("without token 2:         ", lanes.positions()[0, 0].tolist())
assert lanes.positions()[0, 0].tolist() == [0, 1, 3, 4, 5]
assert torch.equal(lanes.keys(layer=0), keys[:, [0, 1, 3, 4, 5]])
cached_step(cache, prompt[6:8])
print("and with two more tokens:", lanes.positions()[0, 0].tolist())
assert lanes.positions()[0, 0].tolist() == [0, 1, 3, 4, 5, 6, 7]

# %% [markdown]
# In the library a *policy* decides what to drop, between two steps. `Full` drops nothing, so that we can do it by
# hand.
#
# The model reads the first problem. As in tutorial 1 we put the beginning of a thought into its mouth, up to where it
# must write the value of `piz`, which the prompt gives. We take one token of the prompt out of the cache, and look
# whether the model still knows the value. Then we begin again with the next token.
#
# *Guess before you look: which tokens of the prompt are needed?*

# %%
thinking = tokenizer.encode("Okay, let me work through this step by step.\n\nFirst, mos. mos = piz * 7, piz = ")
[value] = tokenizer.encode("48")
assert "piz = 48;" in problems[0].question, "the problem has changed: write a thought that fits it"
room = len(prompt) + len(thinking)


def knows(evicted: int | None) -> float:
    """Probability of the right value when one token of the prompt is missing."""
    cache = PlainCache(config, engine.rope, Full(), rows=1, tokens=room)
    cache.join(0, capacity=room, prompt=room)  # the thought is given, too, so it counts as the end of the prompt
    cached_step(cache, prompt)
    if evicted is not None:
        lanes = cache.sequences[0].lanes
        lanes.evict(lanes.positions() == evicted)
    return cached_step(cache, thinking).softmax(-1)[value].item()


whole = knows(None)
probability = [knows(i) for i in range(len(prompt))]
labels = [tokenizer.decode([t]).replace(" ", "·").replace("\n", "⏎") for t in prompt]
stated = prompt.index(value)  # where a human reads the value

figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
axis.bar(range(len(prompt)), [whole - p for p in probability], color=ORANGE)
axis.set_xticks(range(len(prompt)), labels, rotation=90, fontsize=7)
axis.get_xticklabels()[stated].set(color=BLUE, fontweight="bold")
axis.set(ylabel="probability of “48” lost", xlabel="token of the prompt that is missing (blue: the value itself)")
axis.set(xlim=(-1, len(prompt)), ylim=(0, 1.02))
plt.show()

print(f"nothing missing: {whole:.4f}; without the value, token {stated}: {probability[stated]:.4f}")
needless = sum(p > whole - 0.01 for p in probability)
print(f"{needless} of {len(prompt)} tokens can be missing, one at a time, without a trace")
assert needless > len(prompt) / 2, "most tokens should be dispensable for one look-up"
assert probability[stated] < 0.03, "without its token the value should be a guess among 100 numbers"

# %% [markdown]
# Most tokens are not needed for this look-up. That is the hope behind every method of cache compression.
#
# Attention weights (tutorial 1) say who *was read*. This plot says who *was needed*. The two need not agree: other
# tokens may have copied a value while they read it. And a token that this look-up does not need may be the one that
# the next needs.
#
# From here on both factors of the bill shrink: policies ([tutorial 7](07_from_streamingllm_to_rkv.py)) the tokens,
# formats ([4](04_number_formats.py)) the bytes of a token. Paged storage ([3](03_paged_cache.py)) makes good use of
# what they free.
#
# ## Three things to remember
#
# 1. Keys and values of the past never change. So they are computed once and kept: that is the KV cache.
# 2. It saves arithmetic and costs memory: bytes = tokens × layers × 2 × KV heads × dimensions × bytes of a number.
# 3. A reasoning model writes thousands of tokens for one question. Most of them are not needed for the next step, but
#    nobody says which ones.
#
# ## Exercises
#
# 1. **Multi-head and multi-query.** Give the two real models as many KV heads as query heads, then a single one.
#    Recompute the bill. What did GQA save?
# 2. **Crossover.** At which length does attention (`4·L·Hq·D·keys`) cost a decoding token as many FLOPs as the
#    weights (`2·P`)? Compute it for the embedded and the two real models, and compare with the lengths at which the
#    *bytes* are equal.
# 3. **Evict more.** In the last experiment, remove *pairs* of neighbouring tokens. Then remove together all tokens
#    that could be removed alone. Does the model still know the value? What does that say about ranking tokens singly?
