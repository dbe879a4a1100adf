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
# In a decode step attention has one query for each sequence and must read all keys and values. So its time is the
# time of reading, if nothing else is in the way. Usually something is. We go from PyTorch to a Triton kernel in five
# steps, 0 to 4. Before each step we predict what limits it, and afterwards we look at what was measured.
#
# No GPU is needed: Triton's interpreter runs kernels on the CPU, and its compiler works without a GPU. Speeds come
# from `docs/results/steps.json`, which `python -m minithink.bench steps` writes on a GPU. (Triton is published for
# Linux. On other systems this tutorial can be read, not run.)
#
# The picture shows where we are going: the share of a GPU's bandwidth that each step reached. The kernels are in
# `minithink/bench/speed/steps.py`, in order. Have that file open beside this one.

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
import difflib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import torch
from matplotlib.patches import Patch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"  # read when triton is imported, below
import triton
import triton.language as tl

from minithink.bench.speed import steps
from minithink.bench.speed.steps import Cut
from minithink.kernels.paged_attention import paged_attention
from minithink.kv.contract import Shape, Storage
from minithink.kv.reading import Reading
from minithink.kv.requantize import Moves
from minithink.kv.store import PagedStore
from minithink.ref.merge import merge, partial_attention
from minithink.ref.paged_attention import paged_attention as reference
from minithink.results import record

numpy_is, triton_is = (tuple(map(int, m.__version__.split(".")[:2])) for m in (numpy, triton))
if os.environ["TRITON_INTERPRET"] == "1" and triton_is < (3, 7) and numpy_is >= (2, 4):
    versions = f"Triton {triton.__version__} cannot interpret with numpy {numpy.__version__}"
    raise RuntimeError(f"{versions}: pip install 'numpy<2.4'")
torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
print("kernels run", "on the GPU" if device.type == "cuda" else "in Triton's interpreter, on the CPU")

if record.default_path("steps").is_file():
    batch, length = steps.SHAPES[0]
    reached = {}
    for m in record.read(record.default_path("steps"))["measurements"]:
        if m["step"] in steps.STEPS and (m["batch"], m["length"]) == (batch, length):
            reached[steps.STEPS[m["step"]].title] = m["share"]
    figure, axis = plt.subplots(figsize=(7, 1.7), layout="constrained")
    axis.barh(list(reached), list(reached.values()), color=BLUE)
    axis.axvline(1, color=GREY, linewidth=0.7)
    axis.invert_yaxis()
    axis.set(title=f"{batch} sequences of {length:,} tokens", xlabel="share of the bandwidth", xlim=(0, 1.05))
    plt.show()

# %% [markdown]
# ## The task
#
# A *lane* is what one KV head of one sequence holds. It is a list of places, oldest token first. A place is a row of
# the cache, page · slots + slot, and holds the token's key and its value side by side:
#
#     q      [B, Hq, D]          one query for each head
#     cache  [places, 2, D]      keys and values of all lanes, wherever there was room
#     place  int32 [B, Hkv, S]   the list of each lane
#     count  int32 [B, Hkv]      how long it is; what follows in `place` means nothing
#     out    [B, Hq, D]          softmax(q·kᵀ/√D)·v; g = Hq / Hkv query heads share each lane
#
# The two shapes that we care about have the heads of an 8-billion-parameter Llama, in bfloat16: many sequences of
# medium length, and a single long one. What do they cost at the least?

# %%
Hq, Hkv, D = steps.HEADS, steps.KV_HEADS, steps.DIM
g = Hq // Hkv
BANDWIDTH = 4.8e12  # bytes a second of an H200, by its data sheet
ARITHMETIC = 989e12  # bfloat16 operations a second of its tensor cores, likewise
TOKEN = 2 * D * 2 + 4  # bytes: key, value, place


def least(b: int, t: int) -> float:
    """Seconds, if every lane is read once, at full speed."""
    return b * Hkv * t * TOKEN / BANDWIDTH


print(f"{Hq} query heads, {Hkv} KV heads, D = {D}: {TOKEN} bytes for a token of a lane")
for b, t in steps.SHAPES:
    operations = b * Hq * t * 4 * D  # a multiplication and an addition for each number of the key and of the value
    size, busy = b * Hkv * t * TOKEN, operations / ARITHMETIC
    print(
        f"{b:3} × {t:6,} tokens: {size / 1e6:7,.0f} MB, at least {least(b, t) * 1e6:6.1f} µs; "
        f"{operations / size:.1f} operations a byte: {busy * 1e6:.1f} µs of arithmetic"
    )
    assert busy < least(b, t) / 20
print(f"for each byte read the tensor cores could do {ARITHMETIC / BANDWIDTH:.0f} operations")

# %% [markdown]
# Arithmetic is no concern: this is a task of reading. The goal is a share of the bandwidth near 100 %.
#
# ## Waiting
#
# A load that misses the caches takes about half a microsecond to come back: its *latency*. To get 4.8 TB/s, bandwidth
# × latency bytes must be *on their way* all the time. This is Little's law, the same as for queues in shops.

# %%
LATENCY = 0.5e-6  # seconds, round; a measurement of step 1 shows where it comes from
SMS = 132  # multiprocessors, each runs several programs side by side
flight = BANDWIDTH * LATENCY
print(f"{flight / 1e6:.1f} MB on their way, {flight / SMS / 1024:.0f} KiB for each of {SMS} multiprocessors")
assert 15 < flight / SMS / 1024 < 20


def predict(programs: int, ask: float, waits: float, again: float = 1, more: float = 1) -> float:
    """The share of the bandwidth that a kernel reaches at most.

    Args:
        programs: that run at one time; each asks for `ask` bytes and waits this many latencies for them.
        again: how often every byte is asked for.
        more: extra traffic, as a factor.
    """
    rate = programs * ask / (waits * LATENCY)
    return min(1, rate / BANDWIDTH) / (again * more)


# %% [markdown]
# `predict` is a bound, not a forecast: it does not know what a program does between two questions. Where a
# measurement is far *below* the bound, there is something to find.
#
# This is what we compare with. The file also says how fast a kernel is that only reads. From here on this speed, and
# not the data sheet's, is 100 %.

# %%
shapes = many, long = steps.SHAPES  # many sequences, and the long one
path = record.default_path("steps")
measured = {}
if path.is_file():
    result = record.read(path)
    for m in result["measurements"]:
        measured[m["step"], m["batch"], m["length"]] = m
    where = f"{result['machine']['gpu']}, {result['date'][:10]}, commit {result['commit'][:10]}"
    print(f"speeds below were measured on {where}: {result['command']}")
    BANDWIDTH = result["read_bytes_per_second"]
    print(f"reading alone reached {BANDWIDTH / 1e12:.2f} TB/s there: this is 100 %, of bounds and of measurements")
else:
    result = {"sweep": []}
    print("There is no docs/results/steps.json: no speeds are shown below. On a machine with an NVIDIA GPU,")
    print("python -m minithink.bench steps    writes it.")
complete = all((name, *shape) in measured for name in (*steps.STEPS, "kernel", "sdpa") for shape in shapes)
bounds = {}


def took(name: str, shape: tuple[int, int]) -> float:
    """Microseconds that a step was measured to take."""
    return measured[(name, *shape)]["microseconds"]


def compare(name: str, *shares: float) -> None:
    """Print what was predicted for the two shapes, and what was measured."""
    print(f"{steps.STEPS[name].title}")
    for (b, t), share in zip(shapes, shares, strict=True):
        bounds[name, b, t] = share
        m = measured.get((name, b, t))
        said = f"measured: {m['share']:6.1%}, {m['microseconds']:,.0f} µs" if m else "not measured yet"
        print(f"  {b:3} × {t:6,}: at most {share:6.1%} of the bandwidth; {said}")


# %% [markdown]
# ## Step 0: the reference, and its test
#
# In PyTorch it takes three operations: gather the keys and values that the lists name, put zeros where no token is,
# attend. The gather reads and writes, the masking reads and writes, attention reads: each byte moves five times.

# %%
print(inspect.getsource(steps.gather))
compare("gather", *[1 / 5] * 2)

# %% [markdown]
# PyTorch stays far below even this bound. We leave it at that, because this step has to be right, not fast: all later
# steps must agree with it. On what inputs? On those that break kernels: lanes that are empty, have one token, end
# within a *tile* (the tokens that a program handles at one time) or fill it exactly; heads that share a lane and
# heads that do not; large logits; lists whose ends are garbage; and NaN in every free slot, so that reading one is
# found out.
#
# A *property test* draws many such inputs. The library's tests use hypothesis for that. Here a loop will do.


# %%
def draw(number: int) -> tuple:
    """Example `number`: q, cache, place, count. Lanes have up to 4 + 3 · number tokens; some 16, 17, 24 or 48."""
    noise = torch.Generator().manual_seed(number)

    def pick(*of):
        return of[torch.randint(len(of), (), generator=noise).item()]

    rows, (kv_heads, group), dim = pick(1, 2), pick((1, 1), (2, 2), (1, 5)), pick(16, 32)
    count = torch.randint(0, 5 + 3 * number, (rows, kv_heads), generator=noise, dtype=torch.int32)
    if pick(False, True):
        count[0, 0] = pick(0, 1, 16, 17, 24, 48)
    lanes, width = rows * kv_heads, int(count.max()) + 1
    slots, pages = 4, -(-width // 4) + 1  # of a lane
    cache = torch.full((lanes * pages * slots, 2, dim), math.nan)
    owner = torch.randperm(lanes * pages, generator=noise).view(lanes, pages)  # pages lie anywhere
    place = torch.zeros(lanes, width, dtype=torch.int32)
    for lane, n in enumerate(count.flatten().tolist()):
        rows_of_lane = (owner[lane, :, None] * slots + torch.arange(slots)).flatten()
        rows_of_lane = rows_of_lane[torch.randperm(len(rows_of_lane), generator=noise)][:width]  # reused slots
        place[lane, : len(rows_of_lane)] = rows_of_lane  # also behind the end: those rows stay NaN
        cache[rows_of_lane[:n]] = torch.randn(n, 2, dim, generator=noise) * pick(0.1, 1.0, 5.0)
    q = torch.randn(rows, kv_heads * group, dim, generator=noise) * pick(1.0, 10.0)
    return tuple(x.to(device) for x in (q, cache, place.view(rows, kv_heads, width), count))


EXAMPLES = 25


def first_failure(attend, examples: int = EXAMPLES) -> str | None:
    """None if `attend` equals the reference on all examples."""
    for number in range(examples):
        q, cache, place, count = draw(number)
        want, got = steps.gather(q, cache, place, count), attend(q, cache, place, count)
        error = (got - want).abs().max().item() / max(1e-3, want.abs().max().item())
        if not error < 1e-5:  # NaN is not less
            return (
                f"example {number}, {list(q.shape)} queries, lanes of {count.flatten().tolist()}: error {error:.1e}"
            )
    return None


q, cache, place, count = draw(9)
print(
    f"example 9: q {list(q.shape)}, lanes of {count.flatten().tolist()} tokens, "
    f"{cache.isnan().all(-1).all(-1).sum().item()} of {len(cache)} slots are free and hold NaN"
)
assert first_failure(steps.gather) is None
lengths = torch.cat([draw(number)[3].flatten() for number in range(EXAMPLES)])
print(
    f"lanes of {lengths.min()} to {lengths.max()} tokens in {EXAMPLES} examples, {(lengths > 32).sum()} of "
    f"{len(lengths)} longer than 32"
)
assert lengths.min() == 0
assert lengths.max() > 2 * 32, "no lane would have three parts"

# %% [markdown]
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


x = torch.tensor([[1, 2, 3, 4, 5, 6], [10, math.nan, 0, 0, 0, 0], [7, 8, math.nan, 0, 0, 0]], device=device)
count, out = torch.tensor([6, 1, 2], dtype=torch.int32, device=device), torch.empty(3, device=device)
_row_sum[(3,)](x, count, out, x.shape[1], BLOCK=4)
print(out.tolist())
assert out.tolist() == [21, 10, 15]

# %% [markdown]
# * **Launch.** `kernel[(3,)](...)` runs three *programs*. The tuple is the *grid*. `tl.program_id(0)` is the
#   program's number, here 0, 1 or 2; programs differ in nothing else.
# * **Pointers.** A tensor arrives as the address of its first number. `p_x + 5` is the address of the sixth.
# * **`tl.arange(0, BLOCK)`** is a vector, whose elements the threads of the program share. So `p_x + i_row * width +
#   t` is a vector of addresses.
# * **`tl.load(addresses, mask, other=0)`** loads where the mask is true and takes 0 elsewhere. So the NaN in rows 1
#   and 2 does no harm.
# * **`tl.constexpr`** marks what is known when the kernel is compiled. Lengths of vectors must be, and must be powers
#   of two.
# * **`[:, None]` and `[None, :]`** make a column and a row of a vector, as in numpy. A column of token addresses plus
#   a row of channels is a table of addresses.
#
# Names: `p_` is a pointer, `i_` an index, `o_` an offset, `m_` a mask; capitals are compile-time constants.
#
# ## Step 1: a program for each query head
#
# A program takes one query head. It goes through its lane in tiles of BLOCK_T tokens and keeps a *running softmax*:
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
print(inspect.getsource(steps._query_head.fn))
assert "acc = acc * rescale + tl.sum(p[:, None] * v, 0)" in inspect.getsource(steps._query_head.fn)
print(inspect.getsource(steps.query_heads))

# %% [markdown]
# The second function launches the first. `cut` says how a program goes through its tokens: tokens of a tile, warps,
# and stages (which are for step 4).
#
# A *warp* is 32 threads that run in step. They keep their elements in *registers*, the fastest memory there is:
# 65,536 of 32 bits for all that runs on a multiprocessor. For a sum over a tile, warps pass numbers on through shared
# memory and wait for each other at a *barrier*.
#
# Does it do what the reference does? With tiles of one token, and with tiles of eight, so that our small lanes have
# several:

# %%
one_by_one = partial(steps.query_heads, cut=Cut(tokens=1, warps=1, stages=1))
by_tile = partial(steps.query_heads, cut=Cut(tokens=8, warps=1, stages=1))
assert first_failure(one_by_one, 8) is None
assert first_failure(by_tile) is None
print("both equal the reference")

# %% [markdown]
# Prediction. Token by token, a program asks for one key and one value and waits until they come. With 32 tokens in a
# tile it first waits for the places and then for what lies there: two latencies. In both cases the g query heads of a
# KV head ask for the same bytes.

# %%
kv = TOKEN - 4
compare("token", *(predict(b * Hq, kv, waits=1, again=g) for b, t in shapes))
tile = steps.TILE.tokens
compare("tile", *(predict(b * Hq, tile * kv, waits=2, again=g) for b, t in shapes))
assert bounds["tile", 64, 4096] == 1 / g
if complete:
    for name, tokens in ("token", 1), ("tile", tile):
        turn = took(name, long) * tokens / long[1]
        print(f"the single sequence, a turn of the loop, {tokens:2} tokens: {turn:.2f} µs")

# %% [markdown]
# The first of these times is where `LATENCY` comes from: in the single sequence each program does little but wait.
# With this latency the first kernel is close to its bound for both shapes.
#
# A turn with 32 tokens should take two latencies, and it takes several times as long. The rest is spent between the
# loads: products and sums of a tile are done without tensor cores, with barriers. `predict` knows nothing of that.
#
# The bound for 64 sequences, one g-th, holds if every question goes to memory. The cache on the chip may answer some
# of them. The single sequence has only as many programs as query heads, and 100 of the 132 multiprocessors have
# nothing to do.
#
# ## A kernel that is wrong
#
# Can the test fail? A test that cannot is worth nothing. We break the kernel, one line at a time, and look.

# %%
HEADER = "import triton\nimport triton.language as tl\nfrom minithink.bench.speed.steps import WIDEN\n\n\n"
folder = tempfile.TemporaryDirectory()  # it goes when the tutorial ends


def mutant(kernel, old: str, new: str):
    """A kernel with one piece of its source replaced."""
    source = inspect.getsource(kernel.fn)
    assert source.count(old) == 1, f"{old!r} should occur once"
    mutant.number += 1
    file = Path(folder.name, f"mutant_{mutant.number}.py")
    file.write_text(HEADER + source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.fn.__name__)


mutant.number = 0
broken = partial(by_tile, kernel=mutant(steps._query_head, "acc * rescale", "acc"))  # the old sum does not shrink
q, cache, place, count = next(example for example in map(draw, range(EXAMPLES)) if 1 < example[3].max() <= 8)
error = (broken(q, cache, place, count) - steps.gather(q, cache, place, count)).abs().max().item()
print(f"a test with lanes of {count.flatten().tolist()} tokens: error {error:.1e}, nothing to see")
assert error < 1e-5
print("the property test:", first_failure(broken))
assert first_failure(broken) is not None

# %% [markdown]
# In a single tile nothing has to shrink, so a test with short lanes sees nothing. Examples must cross the borders of
# tiles. Some other mistakes that people make:

# %%
mistakes = {
    "the end of the last tile is not masked": (
        'tl.where(m_t, tl.sum(k * q[None, :], 1) * scale, float("-inf"))',
        "tl.sum(k * q[None, :], 1) * scale",
    ),
    "the largest logit is not taken off": (
        "new = tl.maximum(top, tl.max(s, 0))",
        "new = tl.full([], 0.0, tl.float32)",
    ),
    "values are read where keys are": ("p_token + DIM, m_t", "p_token, m_t"),
    "the neighbour's lane": ("i_lane = i_head // GROUP", "i_lane = i_head // (GROUP + 1)"),
    "an empty lane divides by zero": ("tl.where(total > 0, total, 1.0)", "total"),
    "addresses have 32 bits": (".to(tl.int64)\n        p_token", "\n        p_token"),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # numpy's, about the infinities that we provoke
    found = {}
    for name, (old, new) in mistakes.items():
        found[name] = first_failure(partial(by_tile, kernel=mutant(steps._query_head, old, new)))
for name, failure in found.items():
    print(f"{name:40} {failure or 'NOT FOUND'}")
assert [name for name, failure in found.items() if failure is None] == ["addresses have 32 bits"]

# %% [markdown]
# One survives. It needs a cache of more than 2³¹ numbers, which no small test has. Such things must be known. The
# kernels widen the place to 64 bits at once.
#
# ## Step 2: query heads that share a lane share the read
#
# A program now takes a KV head, and its g query heads are the rows of a matrix. Two sums over tiles become two matrix
# products:
#
#     s   [rows, tokens] = q [rows, D] · kᵀ [D, tokens]
#     acc [rows, D]     += p [rows, tokens] · v [tokens, D]
#
# Tensor cores multiply blocks of at least 16 rows. We have g = 4, so the others are zeros. That wastes arithmetic,
# which costs nothing here. Keys, values and the weights p go into the products in bfloat16, and sums are float32.
# `WIDEN` is true in the interpreter, which has no bfloat16.
#
# This is the difference to step 1, lines that went (-) and lines that came (+).


# %%
def show_difference(before, after) -> None:
    """Print the lines in which two kernels differ."""
    old, new = (inspect.getsource(kernel.fn).splitlines() for kernel in (before, after))
    for line in difflib.unified_diff(old, new, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            print(line)


show_difference(steps._query_head, steps._kv_head)
by_group = partial(steps.kv_heads, cut=Cut(tokens=16, warps=1, stages=1))
assert first_failure(by_group) is None
print("\nequals the reference")
compare("group", *(predict(b * Hkv, steps.GROUP.tokens * kv, waits=2) for b, t in shapes))
print(f"programs: {', '.join(f'{b * Hkv} for {b} × {t:,}' for b, t in shapes)}; multiprocessors: {SMS}")
assert bounds["group", 64, 4096] == 1
assert bounds["group", 1, 16384] < bounds["group", 64, 4096] / 5
if complete:
    for b, t in shapes:
        turn = took("group", (b, t)) * steps.GROUP.tokens / t
        print(f"{b:2} × {t:6,}, a turn of the loop, {steps.GROUP.tokens} tokens: {turn:.1f} µs")

# %% [markdown]
# For 64 sequences this is a great step, but not all of the bandwidth: a turn of the loop takes several times what it
# waits for memory at the least.
#
# The single sequence is stuck: 8 programs, where there were 32, and 132 multiprocessors.
#
# ## Step 3: parts
#
# The lane must be cut. Each part is an attention of its own, and leaves two things: its output, and the logarithm of
# its sum of exponentials, `lse`. A softmax over everything is a weighted mean of softmaxes over parts, and the weight
# of a part is its share of the sum:
#
#     out = Σ_i 2^(lse_i − lse) · out_i      lse = log₂ Σ_i 2^lse_i
#
# This is the identity behind flash-decoding. `ref/merge.py` has it in a few lines of PyTorch (with e instead of 2):

# %%
noise = torch.Generator().manual_seed(0)
q = torch.randn(1, 4, 16, generator=noise)
k, v = torch.randn(2, 1, 2, 100, 16, generator=noise)  # [1, Hkv, 100, D] each
everywhere = torch.ones(1, 2, 100, dtype=torch.bool)
whole, _ = partial_attention(q, k, v, everywhere)
pieces = []
for i in range(0, 100, 30):
    part = slice(i, i + 30)
    pieces.append(partial_attention(q, k[:, :, part], v[:, :, part], everywhere[:, :, part]))
merged, _ = merge(pieces)
plain_mean = sum(out for out, _ in pieces) / len(pieces)
print(
    f"four parts, merged: error {(merged - whole).abs().max():.1e}; their plain mean: error "
    f"{(plain_mean - whole).abs().max():.2f}"
)
assert (merged - whole).abs().max() < 1e-6
assert (plain_mean - whole).abs().max() > 0.1

# %% [markdown]
# In the kernel a second number says which part, the loop runs from `start` to `end`, and the result goes to a scratch
# tensor. A second, tiny kernel merges. This is the difference to step 2:

# %%
show_difference(steps._kv_head, steps._part)
print()
print(inspect.getsource(steps._merge.fn))
by_part = partial(steps.parts, cut=Cut(tokens=16, warps=1, stages=1), split=24)
assert first_failure(by_part) is None
print("equals the reference, with parts of 24 tokens: one tile and a half")

# %% [markdown]
# Can this test fail? Three mutants:

# %%
mistakes = {
    "a part tells its largest logit only": ("top + tl.log2(total)", "top"),
    "a part goes on to the end of its last tile": ("m_t = t < end", "m_t = t < count"),
    "every part begins at token 0": ("start = i_part * split", "start = i_part * 0"),
}
for name, (old, new) in mistakes.items():
    failure = first_failure(partial(by_part, kernel=mutant(steps._part, old, new)))
    print(f"{name:43} {failure or 'NOT FOUND'}")
    assert failure is not None

# %% [markdown]
# How long should a part be? Short ones give work to all multiprocessors, but every part's output is written and read
# again. `part_length` takes 128 tokens for short lanes up to 1,024 for long ones.

# %%
for b, t in shapes:
    split = steps.part_length(t)
    parts = math.ceil(t / split)
    again = b * Hq * parts * 2 * (D + 1) * 4
    share = again / (b * Hkv * t * TOKEN)
    print(
        f"{b:3} × {t:6,}: parts of {split}, {b * Hkv * parts:,} programs; scratch {again / 1e6:5.1f} MB, "
        f"{share:.1%} more"
    )
    assert 0.01 < share < 0.04


def scratch(split: int) -> float:
    """Extra traffic of parts of so many tokens, as a factor."""
    return 1 + g * 2 * (D + 1) * 4 / (split * TOKEN)


def running(b: int, t: int, split: int, fit: int) -> int:
    """Programs that run at one time: as many as there are, or as fit on all multiprocessors, `fit` on each."""
    return min(b * Hkv * math.ceil(t / split), SMS * fit)


# %% [markdown]
# ## What the compiler made of it
#
# How many programs fit on a multiprocessor depends on what each takes: shared memory, and registers for its threads.
# The compiler knows, without a GPU. We ask it for code for an H200 (sm_90), in another process, because this one
# interprets. NVIDIA's `ptxas`, which comes with Triton, makes machine code of it and counts registers.
#
# We also count two kinds of instructions. `cp.async` is a load that goes to shared memory while the program does
# something else. `mma` is a product on the tensor cores.

# %%
code = """
import itertools, json, re, subprocess, tempfile
from pathlib import Path
from triton.backends.nvidia.compiler import get_ptxas
from minithink.bench.speed.compile import compiled
from minithink.bench.speed.steps import variants
ptxas = get_ptxas(90).path  # Triton brings several; this one compiles for sm_90
for variant in itertools.islice(variants(), 9):
    made = compiled(variant, 90)
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        said = subprocess.run([ptxas, "-v", "--gpu-name", "sm_90a", "kernel.ptx", "-o", "kernel.cubin"],
                              cwd=folder, capture_output=True, text=True, check=True)
    print(json.dumps({
        "kernel": variant.kernel.fn.__name__, "tokens": variant.constexprs["BLOCK_T"], **variant.options,
        "shared": made.metadata.shared, "registers": int(re.search(r"Used (\\d+) registers", said.stderr)[1]),
        "async": ptx.count("cp.async.cg"), "mma": ptx.count("mma.sync"),
    }))
"""
done = subprocess.run(
    [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
)
assert done.returncode == 0, done.stderr
facts = [json.loads(line) for line in done.stdout.splitlines()]


def fit(fact: dict) -> tuple[int, int]:
    """Programs that one multiprocessor has room for: by shared memory, by registers; by anything else 32."""
    by_shared = 228 * 1024 // (fact["shared"] + 1024)  # of each program's, 1 KiB is the system's
    of_thread = math.ceil(fact["registers"] / 8) * 8  # they are given out by eights
    return min(32, by_shared), min(32, 65536 // (of_thread * 32 * fact["num_warps"]))


print("                                    bytes of    registers      programs that fit        instructions")
print("kernel       tokens  warps  stages  shared mem.  a thread   by shared, by registers   cp.async    mma")
for fact in facts:
    by_shared, by_registers = fit(fact)
    print(
        f"{fact['kernel']:12} {fact['tokens']:6} {fact['num_warps']:6} {fact['num_stages']:7} {fact['shared']:12,} "
        f"{fact['registers']:9} {by_shared:11} {by_registers:13} {fact['async']:10} {fact['mma']:6}"
    )
made = {(fact["kernel"], fact["tokens"], fact["num_warps"], fact["num_stages"]): fact for fact in facts}
split, flying = made[("_part", *steps.SPLIT)], made[("_part", *steps.FLIGHT)]
assert split["async"] == 0 < flying["async"]
assert made[("_query_head", *steps.TILE)]["mma"] == 0 < split["mma"]
assert min(fit(split)) == 4, "registers are what is short"

# %% [markdown]
# Registers are the limit of step 3: four programs of a multiprocessor. With 64 sequences there are more programs than
# fit, and the others wait for their turn.

# %%
length = {shape: steps.part_length(shape[1]) for shape in shapes}
limits = []
for shape in shapes:
    programs = running(*shape, length[shape], min(fit(split)))
    limits.append(predict(programs, steps.SPLIT.tokens * kv, waits=2, more=scratch(length[shape])))
compare("split", *limits)
if complete:
    print(
        f"{many[0]} × {many[1]:,}: {took('group', many):.0f} µs in step 2, {took('split', many):.0f} µs now; "
        f"{long[0]} × {long[1]:,}: {took('group', long):,.0f} µs and {took('split', long):.0f} µs"
    )
    turns = length[long] // steps.SPLIT.tokens
    turn = took("group", long) * steps.GROUP.tokens / long[1]
    print(
        f"a part of {length[long]} tokens has {turns} turns; if one takes {turn:.1f} µs, as in step 2, "
        f"that is {turns * turn:.0f} µs"
    )

# %% [markdown]
# For many sequences step 3 is no gain and costs a little. There were programs enough before, and now there are more
# bytes and a second launch.
#
# For the single one it gains a great deal, but the measurement stays far below the bound. The last line explains most
# of that: all programs run at one time, so the whole takes as long as one of them, turn after turn. So in both cases
# it is the turn of the loop that takes too long. Look at the column of `cp.async`: step 3 has none.
#
# ## Step 4: never stop asking
#
# A program of step 3 asks for a tile, waits, computes, asks again. While it computes, none of its bytes are on their
# way. Triton closes this gap with one number, `num_stages`. With more than one stage, the compiler starts the loads
# of the next tiles, as asynchronous copies to shared memory, before the present tile is worked on. Source and results
# stay the same.
#
# A key's address comes from a load, that of its place. So each tile goes through two loads, and the stages are shared
# between them. With 5 stages:
#
#     turn of the loop                     0   1   2   3   4   5
#     places are asked for, of tile        4   5   6   7   8   9
#     keys and values are asked for        2   3   4   5   6   7
#     products are computed                0   1   2   3   4   5
#
# So two tiles of keys and values lie in shared memory or are on their way to it. With 2 and 3 stages there is room
# for one tile, with 7 for three.

# %%
tile = 64 * kv
print("stages   tiles in shared memory   programs of a multiprocessor   KiB on their way, at most")
tiles = {}
for stages in (1, 2, 3, 5, 7):
    fact = made["_part", 64, 2, stages]
    tiles[stages] = fact["shared"] // tile
    if fact["async"]:
        on_the_way = min(fit(fact)) * tiles[stages] * tile
        print(f"{stages:6} {tiles[stages]:24} {min(fit(fact)):30} {on_the_way / 1024:27.0f}")
    else:
        print(f"{stages:6}                        – {min(fit(fact)):30}     while it waits, not otherwise")
assert [tiles[stages] for stages in (2, 3, 5, 7)] == [1, 1, 2, 3]
limits = []
for shape in shapes:
    programs = running(*shape, length[shape], min(fit(flying)))
    limits.append(predict(programs, tiles[steps.FLIGHT.stages] * tile, waits=2, more=scratch(length[shape])))
compare("flight", *limits)
in_flight = partial(steps.parts, cut=Cut(tokens=16, warps=2, stages=5), split=32)
assert first_failure(in_flight) is None
print("equals the reference")

# %% [markdown]
# Here `predict` ends: any of these cuts has more on its way than Little's law wants. From here on one tries. The
# benchmark times some neighbours of the cut we chose:

# %%
for b, t in shapes:
    rows = [m for m in result["sweep"] if (m["batch"], m["length"]) == (b, t)]
    print(f"{b} × {t:,} tokens" + ("" if rows else ": not measured yet"))
    for m in sorted(rows, key=lambda m: -m["share"]):
        cut = Cut(**m["cut"])
        print(
            f"  {m['share']:6.1%}  tiles of {cut.tokens:3}, {cut.warps} warps, {cut.stages} stages"
            + ("   <- ours" if cut == steps.FLIGHT else "")
        )

# %% [markdown]
# ## All steps

# %%
titles = {name: step.title for name, step in steps.STEPS.items()}
titles |= {"kernel": "kernels/paged_attention.py", "sdpa": "torch, contiguous"}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.1), sharey=True, layout="constrained")
for axis, (b, t) in zip(axes, shapes, strict=True):
    for i, name in enumerate(titles):
        if (name, b, t) in bounds:
            axis.barh(i, bounds[name, b, t], 0.75, color="#e2e8f0")
        if m := measured.get((name, b, t)):
            axis.barh(i, m["share"], 0.4, color=BLUE if name in steps.STEPS else GREEN)
            said = f"{m['share']:.{0 if m['share'] >= 0.1 else 1}%}, {m['microseconds']:,.0f} µs"
            axis.text(m["share"] + 0.01, i, said, va="center", fontsize=7)
    axis.axvline(1, color=GREY, linewidth=0.7)
    axis.set(title=f"{b} × {t:,} tokens", xlabel="share of the bandwidth", xlim=(0, 1.3))
axes[0].set_yticks(range(len(titles)), titles.values())
axes[0].invert_yaxis()
legend = {"bound": "#e2e8f0", "measured, steps": BLUE, "measured, beside them": GREEN}
figure.legend(
    handles=[Patch(color=color, label=label) for label, color in legend.items()],
    loc="outside lower center",
    ncols=3,
    fontsize=7,
)
if not measured:
    figure.suptitle("bounds only: nothing has been measured yet", fontsize=9, color=ORANGE)
plt.show()
if complete:
    for shape in shapes:
        reached = {name: measured[(name, *shape)]["share"] for name in ("flight", "kernel", "sdpa")}
        print(
            f"{shape[0]:2} × {shape[1]:6,}: step 4 {reached['flight']:.0%}, kernels/paged_attention.py "
            f"{reached['kernel']:.0%}, torch on contiguous memory {reached['sdpa']:.0%}"
        )

# %% [markdown]
# We wanted a share near 100 %, and have not reached it. For many sequences it can be had, at least on contiguous
# memory: torch's attention comes close. For the single one torch does not get there either.
# [docs/kernels.md](../docs/kernels.md#how-fast-they-are) says what the hardware counters show.
#
# ## What the real kernel adds
#
# `kernels/paged_attention.py` is step 4 with another cut, and about as fast: a little faster for many sequences, a
# little slower for the single one. It also reads [lanes in several
# formats](../kernels/README.md#from-four-bits-to-a-tensor-core), the buffer of tokens that wait to be quantized,
# heads of any size and tables that several heads share, and it returns the attention that each token got.
#
# One difference can be seen. Our `part_length` looks at the longest lane of the batch. So a sequence is cut
# differently beside a long one than alone, and its sums are rounded differently. In the real kernel each lane's own
# length decides. A store as in tutorial 3, with one sequence of 200 tokens, once alone and once beside a sequence of
# 1,100:


# %%
def store_of(lengths: list[int], formats: tuple[str, ...] = ()) -> PagedStore:
    """A store in which sequences of these lengths were read; row 0 holds the same whatever stands beside it."""
    shape = Shape(1, len(lengths), 1, 2, head_dim=32, hidden=64, scope="head", device=device)
    store = PagedStore(shape, Storage(formats) if formats else Storage(), pages=128, dtype=torch.float32)
    k, v = torch.zeros(2, len(lengths), max(lengths), 1, 32)
    for row, n in enumerate(lengths):
        k[row, :n], v[row, :n] = torch.randn(2, n, 1, 32, generator=torch.Generator().manual_seed(row))
    rows = list(range(len(lengths)))
    store.append(rows, lengths, [0] * len(rows)).write(0, k.to(device), v.to(device))
    for row in rows:
        Moves(store).measure(row)
        Moves(store).settle(row, lengths[row])
    return store


q = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(5)).to(device)
alone, beside = store_of([200]), store_of([200, 1100])
ours = [
    steps.parts(q[:n], *steps.inputs(s, 0), longest=most)[0] for n, s, most in ((1, alone, 200), (2, beside, 1100))
]
real = [paged_attention(q[:n], Reading(s), 0)[0][0] for n, s in ((1, alone), (2, beside))]
print(
    f"step 4:  parts of {steps.part_length(200)} alone, of {steps.part_length(1100)} beside; "
    f"difference {(ours[0] - ours[1]).abs().max():.1e}"
)
print(f"real:    difference {(real[0] - real[1]).abs().max():.1e}")
assert torch.equal(real[0], real[1]), "a batch should never be worse than its parts"
assert 0 < (ours[0] - ours[1]).abs().max() < 1e-6

# %% [markdown]
# And the same store in four bits, against the reference, with the attention that each token got:

# %%
packed = store_of([70, 9], ("nvfp4",))
want, want_mass = reference(q, Reading(packed), 0, "mean")
got, mass = paged_attention(q, Reading(packed), 0, "mean")
print(
    f"NVFP4: output differs by {(got - want).abs().max():.1e}, mass by {(mass - want_mass).abs().max():.1e}; "
    f"the masses of a lane sum to {mass[0, 0].sum():.6f}"
)
assert (got - want).abs().max() < 1e-5
assert (mass - want_mass).abs().max() < 1e-5
four, sixteen = D // 2 * 2 + 2 * D // 16 + 4, TOKEN
print(
    f"bytes of a token of a lane at D = {D}: {sixteen} in bfloat16, {four} in NVFP4: "
    f"at the same bandwidth {sixteen / four:.1f} times as fast"
)
assert 3.3 < sixteen / four < 3.6

# %% [markdown]
# That factor is what four bits are worth at the most, if decoding hides behind reading. [The
# appendix](../docs/appendix/kernel-times.md) has the kernel's speed in every format.
#
# ## Three things to remember
#
# 1. Ask four questions, in this order: how many bytes, how often do they move, who is idle, what is on its way? Each
#    step answered one of them.
# 2. Predict before you measure. Where the two differ, you learn something.
# 3. A kernel has its test before it has its speed, and the test must fail for kernels that are wrong.
#
# ## Exercises
#
# 1. **A survivor.** Write a mutant of step 3 (`mutant(steps._part, ...)`) that no example finds, and then the example
#    that finds it. For one mutant there is no such example: `start > count` instead of `start >= count`. Why?
# 2. **Shared lists.** Let all KV heads of a sequence share one list of places. How many bytes does that save, in
#    percent, in bfloat16 and in NVFP4? Is it worth a kernel?
# 3. **Rows.** How many query heads of a group fit into the 16 rows before arithmetic doubles? From how many queries
#    of a sequence at a time (drafts of a speculative decoder, say) is the task no longer one of reading?
# 4. **Short lanes.** Compute the bound of step 4 for 256 sequences of 1,024 tokens, and for 1 of 512. What limits the
#    second one, and would parts of 64 tokens help? (`running` and `scratch` take the length of a part.)
# 5. **Measurements.** Look for the largest gaps between bound and measurement, in the figure or in
#    `docs/results/steps.json`. What does `predict` not know?
