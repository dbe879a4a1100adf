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
# # 5. One kernel
#
# In a decode step attention has one query for each sequence, and reads all keys and values. So it should take as long
# as reading them takes. In PyTorch it takes many times as long. We go from there to a Triton kernel in five steps.
# Before each step we predict what limits it, and then look at what a GPU did.
#
# The picture shows where this leads: the share of an H200's bandwidth that each step reaches. The kernels are in
# `minithink/bench/speed/steps.py`, in this order. Keep that file open beside this one.
#
# You need no GPU: Triton's interpreter runs kernels on the CPU, and its compiler works without a GPU. Speeds come
# from `docs/results/steps.json`, which `python -m minithink.bench steps` writes. (Triton is published for Linux. On
# other systems you can read this tutorial, but not run it.)

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
import inspect
import os
import warnings
from functools import partial

import matplotlib.pyplot as plt
import numpy
import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"  # read when triton is imported, below
import triton
import triton.language as tl

from minithink.bench.speed import steps
from minithink.bench.speed.step_checks import compiled_steps, difference, first_failure, mutant, table
from minithink.bench.speed.steps import Cut
from minithink.quant.nvfp4 import Nvfp4
from minithink.results import record

versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy)]
if not torch.cuda.is_available() and versions[0] < (3, 7) and versions[1] >= (2, 4):
    raise RuntimeError(f"Triton {triton.__version__} cannot interpret with this numpy: pip install 'numpy<2.4'")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

result = record.read(record.default_path("steps"))
measured = {(m["step"], m["batch"], m["length"]): m for m in result["measurements"]}
shapes = steps.SHAPES  # (sequences, tokens of each): many sequences, and a single long one
titles = {}
for number, name in zip((0, 1, 1, 2, 3, 4, 5), steps.STEPS, strict=True):
    titles[name] = f"{number}: {steps.STEPS[name].title}"
titles |= {"kernel": "kernels/paged_attention.py", "sdpa": "torch, contiguous memory"}

figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
for axis, shape in zip(axes, shapes, strict=True):
    for i, name in enumerate(titles):
        share = measured[(name, *shape)]["share"]
        axis.barh(i, share, color="#2b6cb0" if name in steps.STEPS else "#2f855a")
        axis.text(share + 0.02, i, f"{share:.1%}", va="center", fontsize=7)
    axis.set(title=f"{shape[0]} × {shape[1]:,} tokens", xlabel="share of the bandwidth", xlim=(0, 1.15))
axes[0].set_yticks(range(len(titles)), titles.values(), fontsize=8)
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# Blue bars are steps.
#
# ## The task
#
# A *lane* is what one KV head of one sequence holds: a list of places, oldest token first. A place is a row of the
# cache, with the token's key and value side by side:
#
#     q      [B, Hq, D]          one query for each head
#     cache  [places, 2, D]      keys and values of all lanes, wherever there was room
#     place  int32 [B, Hkv, S]   the list of each lane
#     count  int32 [B, Hkv]      how long it is; what follows in `place` means nothing
#     out    [B, Hq, D]          softmax(q·kᵀ/√D)·v; g = Hq / Hkv query heads share each lane
#
# Both shapes in the picture have the heads of an 8-billion-parameter Llama, in bfloat16. What is the least that they
# cost?

# %%
Hq, Hkv, D = steps.HEADS, steps.KV_HEADS, steps.DIM
g = Hq // Hkv
KV = 2 * D * 2  # bytes of a token's key and value
BANDWIDTH = result["read_bytes_per_second"]  # of a kernel that only reads: this is 100 %
ARITHMETIC = 989e12  # bfloat16 operations a second of the tensor cores, by the data sheet

print(f"measured on {result['machine']['gpu']}, {result['date'][:10]}: reading alone {BANDWIDTH / 1e12:.2f} TB/s")
for b, t in shapes:
    reading = b * Hkv * t * (KV + 4) / BANDWIDTH  # a place has 4 bytes
    arithmetic = b * Hq * t * 4 * D / ARITHMETIC
    print(f"{b:2} × {t:6,} tokens: {reading * 1e6:5.1f} µs to read, {arithmetic * 1e6:4.1f} µs to compute")
    assert arithmetic < reading / 20

# %% [markdown]
# So this is a task of reading. Can a kernel read at full speed? A load that misses the caches comes back after its
# *latency*. Our simplest kernel, the second bar, asks for one token, waits, and asks for the next. So its time for
# one token of the long sequence is the latency. For the full bandwidth, bandwidth × latency bytes must be *on their
# way* all the time. This is Little's law, as in queues.

# %%
LATENCY = measured[("token", *shapes[1])]["microseconds"] * 1e-6 / shapes[1][1]  # seconds
SMS = 132  # multiprocessors; each runs several programs side by side
each = BANDWIDTH * LATENCY / SMS / 1024
print(f"latency {LATENCY * 1e6:.2f} µs: {each:.0f} KiB must be on their way to each of {SMS} multiprocessors\n")
assert 0.4e-6 < LATENCY < 0.6e-6


def predict(programs: int, ask: float, waits: int = 2, again: int = 1) -> float:
    """The share of the bandwidth that a kernel reaches at most.

    Args:
        programs: that run at one time; each asks for `ask` bytes and waits `waits` latencies for them.
        again: how often every byte is asked for.
    """
    rate = programs * ask / (waits * LATENCY)
    return min(1, rate / BANDWIDTH) / again


def compare(name: str, *bounds: float) -> None:
    """Print the predicted bound of a step and its measurement, for both shapes."""
    print(titles[name])
    for shape, bound in zip(shapes, bounds, strict=True):
        m = measured[(name, *shape)]
        said = f"measured {m['share']:6.1%}, {m['microseconds']:,.0f} µs"
        print(f"  {shape[0]:2} × {shape[1]:6,}: at most {bound:6.1%} of the bandwidth; {said}")


compare("token", *(predict(b * Hq, KV, waits=1, again=g) for b, t in shapes))

# %% [markdown]
# The latency of the long sequence explains the many sequences, too. But `predict` is a bound, not a forecast: it
# doesn't know what a program does between two loads. Where a measurement is far *below* the bound, there is something
# to find.
#
# ## Step 0: the reference, and its test
#
# PyTorch gathers the keys and values, puts zeros where no token is, and attends. The gather reads and writes, the
# zeros read and write, attention reads: each byte moves five times.

# %%
print(inspect.getsource(steps.gather))
compare("gather", 1 / 5, 1 / 5)
assert first_failure(steps.gather) is None

# %% [markdown]
# PyTorch stays far below even this bound. But it has to be right, not fast: all later steps must agree with it. On
# which inputs? On those that break kernels: lanes that are empty, have one token, end within a *tile* (the tokens
# that a program handles at one time) or fill it exactly; heads that share a lane or don't; large logits; lists whose
# ends are garbage; and NaN in every free slot, so that reading one shows. `draw` makes such an example from a number,
# and `first_failure` compares a kernel with the reference on 25 of them.
#
# ## A first kernel
#
# If you know Triton, go on to step 1. This kernel sums the first `count` numbers of each row of a matrix.


# %%
@triton.jit
def _row_sum(p_x, p_count, p_out, width, BLOCK: tl.constexpr):
    i_row = tl.program_id(0)
    count = tl.load(p_count + i_row)
    total = tl.full([], 0.0, tl.float32)
    for t0 in range(0, count, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        x = tl.load(p_x + i_row * width + t, t < count, other=0)
        total += tl.sum(x, 0)
    tl.store(p_out + i_row, total)


x = torch.tensor([[1, 2, 3, 4, 5, 6], [10, torch.nan, 0, 0, 0, 0], [7, 8, torch.nan, 0, 0, 0]], device=device)
count, out = torch.tensor([6, 1, 2], dtype=torch.int32, device=device), torch.empty(3, device=device)
_row_sum[(3,)](x, count, out, x.shape[1], BLOCK=4)
print(out.tolist())
assert out.tolist() == [21, 10, 15]

# %% [markdown]
# * **Launch.** `kernel[(3,)](...)` runs three *programs*, which differ in `tl.program_id(0)`: 0, 1 or 2.
# * **Pointers.** A tensor arrives as the address of its first number, and `p_x + 5` is the address of the sixth. With
#   `tl.arange(0, BLOCK)` it becomes a vector of addresses, shared among the threads of the program.
# * **`tl.load(addresses, mask, other=0)`** loads where the mask is true and takes 0 elsewhere. So the NaN does no
#   harm.
# * **`tl.constexpr`** marks what is known when the kernel is compiled, such as the length of a vector (a power of
#   two).
# * **`[:, None]` and `[None, :]`** make a column and a row of a vector, as in numpy.
#
# Names: `p_` is a pointer, `i_` an index, `o_` an offset, `m_` a mask.
#
# ## Step 1: a program for each query head
#
# A program takes one query head and goes through its lane in tiles of BLOCK_T tokens. It keeps a *running softmax*:
# the largest logit so far, the sum of exponentials relative to it, and the sum of values with those weights. When a
# tile brings a larger logit, what was summed before shrinks:
#
#     new   = max(top, max_j s_j)
#     p_j   = 2^(s_j − new)
#     total = total · 2^(top − new) + Σ_j p_j
#     acc   = acc   · 2^(top − new) + Σ_j p_j·v_j
#
# At the end acc / total is the output. (The hardware has powers of two instead of e. The factor log₂ e goes into the
# scale.)

# %%
by_tile = partial(steps.query_heads, cut=Cut(tokens=8, warps=1, stages=1))  # small tiles, so that lanes have several
assert first_failure(by_tile) is None
print(inspect.getsource(steps._query_head.fn) + "\nequals the reference\n")
compare("tile", *(predict(b * Hq, steps.TILE.tokens * KV, again=g) for b, t in shapes))

# %% [markdown]
# A `Cut` says how a program goes through its lane: the tokens of a tile, the *warps* (32 threads each that run in
# step), and the stages, which are for step 4. A program waits twice for a tile: for the places, and for what lies
# there.
#
# The bound for many sequences is one g-th, because each of the g query heads of a KV head asks for the same bytes.
# (The cache on the chip may answer some of them.) The long sequence has only 32 programs, so 100 of the 132
# multiprocessors have nothing to do. And both measurements stay below their bounds, because sums over a tile are slow
# without tensor cores.
#
# ## A kernel that is wrong
#
# A test that cannot fail is worth nothing. We break one piece of the kernel at a time, and look.

# %%
mistakes = {
    "the old sum does not shrink": ("acc * rescale", "acc"),
    "the last tile is not masked": ("s = tl.where(m_t, ", "s = tl.where(t >= 0, "),
    "the largest logit stays": ("new = tl.maximum(top, tl.max(s, 0))", "new = tl.full([], 0.0, tl.float32)"),
    "an empty lane divides by zero": ("tl.where(total > 0, total, 1.0)", "total"),
    "addresses have 32 bits": (".to(tl.int64)\n        p_token", "\n        p_token"),
}
found = {}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # numpy's, about the infinities that we provoke
    for name, (old, new) in mistakes.items():
        found[name] = first_failure(partial(by_tile, kernel=mutant(steps._query_head, old, new)))
        print(f"{name:30} {found[name] or 'NOT FOUND'}")
assert [name for name, failure in found.items() if failure is None] == ["addresses have 32 bits"]

# %% [markdown]
# In a single tile nothing has to shrink, so the first mistake shows only in examples that cross a tile's border. The
# last one survives: it needs a cache of more than 2³¹ numbers, which no small test has. Such things must be known.
#
# ## Step 2: query heads that share a lane share the read
#
# A program now takes a KV head, and its g query heads are the rows of a matrix. Two sums over a tile become two
# matrix products, which run on tensor cores:
#
#     s   [rows, tokens] = q [rows, D] · kᵀ [D, tokens]
#     acc [rows, D]     += p [rows, tokens] · v [tokens, D]
#
# Tensor cores multiply blocks of at least 16 rows. We have g = 4, so the others are zeros. These lines of the loop go
# (-) and come (+). `WIDEN` is true in the interpreter, which has no bfloat16.

# %%
assert first_failure(partial(steps.kv_heads, cut=Cut(tokens=16, warps=1, stages=1))) is None
print(difference(steps._query_head, steps._kv_head) + "\n\nequals the reference\n")
compare("group", *(predict(b * Hkv, steps.GROUP.tokens * KV) for b, t in shapes))
print(f"programs: {', '.join(f'{b * Hkv} for {b} × {t:,}' for b, t in shapes)}; multiprocessors: {SMS}")

# %% [markdown]
# For many sequences this is a great step. The long sequence is stuck: its 8 programs leave most of the GPU idle.
#
# ## Step 3: parts
#
# So lanes must be cut. Each part is an attention of its own, and leaves its output and the logarithm of its sum of
# exponentials, `lse`. A softmax over everything is a weighted mean of softmaxes over parts, and the weight of a part
# is its share of the sum:
#
#     out = Σ_i 2^(lse_i − lse) · out_i      lse = log₂ Σ_i 2^lse_i
#
# This identity is behind flash-decoding. In the kernel a second number says which part, and the loop runs from
# `start` to `end`. A second, tiny kernel, `_merge`, computes the mean.

# %%
by_part = partial(steps.parts, cut=Cut(tokens=16, warps=1, stages=1), split=24)  # a part: one tile and a half
assert first_failure(by_part) is None
print("equals the reference")
forgets = mutant(steps._part, "top + tl.log2(total)", "top")
print("a part tells its largest logit only:", failure := first_failure(partial(by_part, kernel=forgets)))
assert failure is not None

# %% [markdown]
# How many programs run at one time depends on what each takes: bytes of shared memory, and registers for its threads.
# The compiler knows. We let it compile for an H200, and count some instructions of a warp, too. (With half as many
# warps, each has twice as many.)

# %%
made = compiled_steps()
length = {shape: steps.part_length(shape[1]) for shape in shapes}  # tokens of a part


def running(shape: tuple[int, int], name: str) -> int:
    """Programs that run at one time: all of them, or as many as fit on all multiprocessors."""
    b, t = shape
    return min(b * Hkv * -(-t // length[shape]), SMS * made[name].at_a_time)


print(table(made, "split") + "\n")
compare("split", *(predict(running(shape, "split"), steps.SPLIT.tokens * KV) for shape in shapes))

# %% [markdown]
# Four programs fit on a multiprocessor. The long sequence gains a great deal. Many sequences had programs enough
# before and gain nothing. Both stay below the bound, so something happens between the loads: a program asks for a
# tile, waits, computes, asks again. While it computes, none of its bytes are on their way. The column *loads ahead*
# says 0.
#
# ## Step 4: never stop asking
#
# Triton closes this gap with one number, `num_stages`. With more than one stage the compiler starts the loads of the
# next tiles, as asynchronous copies to shared memory, before the present tile is worked on. The source stays the
# same. A key's address comes from a load, too, so five stages keep two tiles of keys and values on their way.

# %%
tile = steps.FLIGHT.tokens * KV
tiles = made["flight"].shared // tile
print(f"{tiles} tiles of {tile / 1024:.0f} KiB in shared memory\n")
print(table(made, "split", "flight") + "\n")
compare("flight", *(predict(running(shape, "flight"), tiles * tile) for shape in shapes))
assert made["split"].loads_ahead == 0 < made["flight"].loads_ahead
assert tiles == 2
assert first_failure(partial(steps.parts, cut=Cut(tokens=16, warps=2, stages=5), split=32)) is None

# %% [markdown]
# Here `predict` ends: by Little's law enough is on its way. From here on one tries other cuts, and the benchmark did
# (`sweep` in its JSON). We wanted a share near 100 %. For many sequences torch's attention on contiguous memory comes
# close to that; for the single one it doesn't either.
#
# ## Step 5: fewer instructions, for four bits
#
# Tutorial 4 stores a key or value in four bits (NVFP4). A token then has 148 bytes instead of 516, but the products
# are the same, and decoding comes on top. So the limit moves from bytes to instructions: with NVFP4 the real kernel
# issued one in 63 % of the cycles, with bfloat16 in 17 %, when [hardware
# counters](../docs/appendix/kernel-times.md#hardware-counters) last looked. Since then it saves instructions in two
# ways.
#
# **Queries as columns.** An instruction of the tensor cores multiplies 16 rows by 8 columns. Compare, for g = 4:
#
#     queries as rows       q · kᵀ: 16 queries, 8 tokens    4 of 16 rows are used
#     queries as columns    k · qᵀ: 16 tokens, 8 queries    4 of 8 columns are used
#
# So the operands are swapped. There are half as many products, and half as many exponentials, because zeros that fill
# up a block take part in the softmax, too. In the loop everything is transposed:

# %%
swapped = partial(
    steps.parts, cut=Cut(tokens=16, warps=1, stages=1), split=24, kernel=steps._part_swapped, heads_at_least=8
)
assert first_failure(swapped) is None
print(difference(steps._part, steps._part_swapped) + "\n\nequals the reference\n")
print(table(made, "flight", "swap") + "\n")
compare("swap", *(predict(running(shape, "swap"), tiles * tile) for shape in shapes))
assert made["flight"].products == 2 * made["swap"].products
assert made["flight"].loads_ahead == made["swap"].loads_ahead
for shape in shapes:
    assert 0.98 < measured[("swap", *shape)]["share"] / measured[("flight", *shape)]["share"] < 1.02

# %% [markdown]
# The bytes stay the same. So our kernel, which reads bfloat16 and waits for memory, gains nothing: the times of steps
# 4 and 5 differ by less than 2 %. The real kernel swaps for formats of few bits, mostly from 64 lanes on.
#
# **Eight codes in eleven instructions.** A code of NVFP4 is a float of four bits: sign, two bits of exponent, one of
# mantissa. An fp16 number has the same fields in the same order. Moved there, a code is its number times 2⁻¹⁴, for
# the exponents' biases are 1 and 15. (It holds for the code of 0.5, too, which becomes a denormal number.)
#
#     code      s . . . e e m
#     fp16      s 0 0 0 e e m 0 | 0 0 0 0 0 0 0 0
#
# All that fp16 needs of a code lies in its high byte. So a 32-bit register with two words of four codes is treated as
# four bytes, and one shift or mask serves four codes at once. A byte holds two codes: first the low ones, then the
# high. Channel i of both words comes out as one register of two fp16 numbers, *plane* i. It is multiplied with
# channel i of the queries, so no number has to move to another thread.


# %%
def eight_codes(c: numpy.ndarray) -> list[numpy.ndarray]:
    """Registers of eight codes → four planes, each with two fp16 numbers. A comment counts the instructions."""
    m = (c << 1) & 0x0E0E0E0E  # 2: exponent and mantissa of the low codes
    h = ((c << 4) & 0x80808080) | m  # 2: a shift, and "and, or" in one instruction (lop3): the signs
    plane_0 = (h & 0x00FF00FF) << 8  # 1: bytes 0 and 2 become high bytes (prmt moves bytes)
    plane_2 = h & 0xFF00FF00  # 1: bytes 1 and 3 are high bytes already
    m = (c >> 3) & 0x0E0E0E0E  # 2: the same for the high codes
    h = (c & 0x80808080) | m  # 1: their signs are in place
    plane_1 = (h & 0x00FF00FF) << 8  # 1
    plane_3 = h & 0xFF00FF00  # 1: eleven
    return [plane_0, plane_1, plane_2, plane_3]


words = numpy.arange(2**16, dtype=numpy.uint32)  # all words of four codes
register = words | words[::-1] << 16  # two words each
for i, plane in enumerate(eight_codes(register)):
    numbers = plane.view(numpy.float16).reshape(-1, 2) * numpy.float32(2**14)
    for half, word in enumerate((words, words[::-1])):
        codes = torch.from_numpy((word >> (4 * i) & 15).astype(numpy.uint8))
        assert torch.equal(torch.from_numpy(numbers[:, half].copy()), Nvfp4().point(codes))
print("all codes in all places are decoded as by minithink.quant")

# %% [markdown]
# In the kernel the eleven instructions are [inline PTX](../kernels/README.md#from-four-bits-to-a-tensor-core). And
# four bits, with both ways together? `python -m minithink.bench attention` timed the real kernel on an H200, too:

# %%
attention = record.read(record.default_path("attention"))
times = {m["format"]: m["microseconds"] for m in attention["measurements"] if (m["batch"], m["length"]) == shapes[0]}
faster = times["bf16"] / times["nvfp4"]
print(f"{shapes[0][0]} × {shapes[0][1]:,} tokens: bfloat16 {times['bf16']:.0f} µs, NVFP4 {times['nvfp4']:.0f} µs")
print(f"{faster:.2f} × as fast, with {516 / 148:.2f} × fewer bytes")
assert faster > 2

# %% [markdown]
# That is two thirds of what the bytes would allow. It was less [before both
# ways](../kernels/README.md#from-four-bits-to-a-tensor-core). What each of them gains by itself was not measured.
#
# ## What the real kernel adds
#
# `kernels/paged_attention.py` is step 4 with another cut, and step 5 where it pays. It also reads lanes in several
# formats, heads of any size, and tables that heads share, and it returns the attention that each token got. A lane's
# own length decides how it's cut, so a sequence gets the same sums alone as in a batch.
# [docs/kernels.md](../docs/kernels.md#how-fast-they-are) has its speed.
#
# ## Three things to remember
#
# 1. Ask in this order: how many bytes, how often do they move, who is idle, what is on its way, how many
#    instructions? Each step answered one of these questions.
# 2. Predict before you measure. Where the two differ, you learn something.
# 3. A kernel has its test before it has its speed, and the test must fail for kernels that are wrong.
#
# ## Exercises
#
# 1. **A survivor.** Write a mutant of step 3 (`mutant(steps._part, ...)`) that no example finds, and then the example
#    that finds it. For one mutant there is no such example: `start > count` instead of `start >= count`. Why?
# 2. **Shared lists.** Let all KV heads of a sequence share one list of places. How many bytes does that save, in
#    percent, in bfloat16 and in NVFP4? Is it worth a kernel?
# 3. **Rows or columns.** For which g does swapping halve the products, and from which g on does it gain nothing?
