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
# # 3. The paged cache
#
# A cache grows with every thought, and most tokens are not needed for the next look-up (tutorial 2). To profit from
# that, a token must be able to leave, and its memory must be good for something afterwards. `PlainCache` lets tokens
# go, but it moves all that lie behind them. *Pages* move nothing.
#
# The picture is the whole idea. B and D leave, and the next two tokens, I and J, take their places.
#
# We build a tiny paged store, run a policy of ten lines on the real one and on `PlainCache`, and ask the ledger what
# every byte is for.

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
PALE = {BLUE: "#bee3f8", ORANGE: "#feebc8", GREEN: "#c6f6d5", GREY: "#edf2f7"}
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

figure, axis = plt.subplots(figsize=(7, 1.8), layout="constrained")
for line, (title, letters) in enumerate((("full", "ABCDEFGH"), ("evicted", "A C EFGH"), ("used again", "AICJEFGH"))):
    axis.text(-0.4, -1.3 * line + 0.5, title, ha="right", va="center")
    for slot, letter in enumerate(letters):
        color = "white" if letter == " " else PALE[ORANGE] if letter in "IJ" else PALE[BLUE]
        x = slot + 0.5 * (slot // 4)  # a page has four slots
        axis.add_patch(plt.Rectangle((x, -1.3 * line), 1, 1, facecolor=color, edgecolor=GREY))
        axis.text(x + 0.5, -1.3 * line + 0.5, letter, ha="center", va="center")
axis.set(xlim=(-2.2, 9), ylim=(-2.7, 1.1), title="two pages of four slots")
axis.axis("off")
plt.show()

# %%
import textwrap
from dataclasses import dataclass, field

import torch
from torch.testing import assert_close

from minithink.kv.contract import Evict, Policy, Shape, Storage, keep_best
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore
from minithink.kv.table import Exhausted
from minithink.policies import parse
from minithink.tasks import Problem, grade, load_problems

torch.set_grad_enabled(False)  # we only read
torch.set_num_threads(1)  # the model is so small that threads would wait for each other

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
L, Hkv, D = config.num_layers, config.num_kv_heads, config.head_dim

# %% [markdown]
# ## One buffer for each sequence
#
# `FullCache` must promise every sequence room for the longest answer, in one piece. Three problems of different
# sizes, each allowed to grow to 1,000 tokens:

# %%
prompts = [engine.prompt_ids(problems[i].question) for i in (0, 61, 51)]
buffers = FullCache(config, engine.rope)
for seq, ids in enumerate(prompts):
    buffers.join(seq, capacity=1000)
    buffers.begin_step([seq], [len(ids)])
    decoder(torch.tensor(ids), buffers)
    buffers.end_step()
held, reserved = sum(buffers.held_bytes(seq) for seq in range(3)), buffers.reserved_bytes()
print(f"prompts of {[len(ids) for ids in prompts]} tokens")
print(f"held {held / 2**20:.1f} MiB, reserved {reserved / 2**20:.1f} MiB: {100 * held / reserved:.0f} % in use")
assert held < reserved / 10

# %% [markdown]
# A second weakness: suppose that token 7 of a sequence is not needed any more. To use the room, everything behind it
# must move up, in every layer and head. `PlainCache` (tutorial 2) does this. We count what one token moves.

# %%
cache = PlainCache(config, engine.rope, parse("full"), rows=1, tokens=len(prompt))
cache.join(0, capacity=len(prompt), prompt=len(prompt))
cache.begin_step([0], [len(prompt)])
decoder(torch.tensor(prompt), cache)
lanes = cache.sequences[0].lanes  # k and v: [L, Hkv, columns, D]
before = lanes.k.clone()
lanes.evict(lanes.positions() == 7)
moved = (lanes.k != before).any(-1).all(0).all(0)[: lanes.width]  # columns that now hold another token, everywhere
print(
    f"without token 7, {moved.sum()} of {len(moved)} columns hold another token: "
    f"{moved.sum() * config.kv_bytes_per_token(4):,} bytes of keys and values moved"
)
assert moved.nonzero()[:, 0].tolist() == list(range(7, len(prompt) - 1)), "all behind it should move"
assert torch.equal(lanes.k[:, :, 7 : len(prompt) - 1], before[:, :, 8 : len(prompt)])

# %% [markdown]
# ## Pages
#
# As in an operating system, the memory is cut into *pages* of one size, and a *table* says which pages a sequence
# has. A page is taken when it is needed, and given back when it is empty.
#
# Our toy has one layer, one head and 8 dimensions, two sequences, and 6 pages of 4 slots. A *slot* holds the key and
# the value of one token. Tokens are capital letters in the first sequence, small ones in the second.


# %%
class Toy:
    """A PagedStore of one layer and one head, whose tokens have letters."""

    def __init__(self, rows: int = 2, pages: int = 6) -> None:
        shape = Shape(1, rows, 1, 1, head_dim=8, hidden=8, scope="sequence", device=torch.device("cpu"))
        self.store = PagedStore(shape, Storage(block=4), pages=pages)
        self.length, self.noise = [0] * rows, torch.Generator().manual_seed(0)

    def append(self, row: int, count: int = 1) -> None:
        for _ in range(count):
            k, v = torch.randn(2, 1, 1, 1, 8, generator=self.noise)  # [rows, tokens, heads, D] each
            writer = self.store.append([row], [1], [self.length[row]])
            writer.write(layer=0, k=k, v=v)
            self.length[row] += 1

    def evict(self, row: int, letters: str) -> None:
        drop = torch.zeros_like(self.store.lists.positions(), dtype=torch.bool)  # [1, rows, 1, tokens]
        for column, position in enumerate(self.store.lists.positions()[0, row, 0].tolist()):
            drop[0, row, 0, column] = position >= 0 and self.letter(row, position) in letters
        self.store.evict(drop)

    def letter(self, row: int, position: int) -> str:
        return chr(ord("Aa"[row]) + position)

    def slots(self) -> dict[tuple[int, int], str]:
        """(page, slot) → the letter of the token that lives there, read from the store's lists."""
        found = {}
        for row in range(len(self.length)):
            places, positions = self.store.lists.place[0, row, 0].tolist(), self.store.lists.pos[0, row, 0].tolist()
            for place, position in zip(places, positions, strict=True):
                if position >= 0:
                    found[divmod(place, self.store.slots.table.stride)] = self.letter(row, position)
        return found


# %% [markdown]
# Blue slots are the first sequence's, green ones the second's. A white slot is empty. A grey letter is an evicted
# token whose slot no other token has taken yet.


# %%
def draw(panels: list[tuple[str, dict]], pages: int = 6, per_page: int = 4) -> None:
    """One row of pages for each panel: (title, slots). Letters that vanish from one panel to the next turn grey."""
    size = (9, 0.78 * len(panels))
    _, axes = plt.subplots(len(panels), 1, figsize=size, layout="constrained", squeeze=False)
    ghosts = {}
    for axis, (title, slots) in zip(axes[:, 0], panels, strict=True):
        for page in range(pages):
            for slot in range(per_page):
                letter = slots.get((page, slot))
                color = GREY if letter is None else BLUE if letter.isupper() else GREEN
                face = "white" if letter is None else PALE[color]
                x = page * (per_page + 0.6) + slot
                axis.add_patch(plt.Rectangle((x, 0), 1, 1, facecolor=face, edgecolor=GREY, linewidth=0.7))
                text = letter or ghosts.get((page, slot), "")
                axis.text(x + 0.5, 0.46, text, ha="center", va="center", color="black" if letter else "#a0aec0")
        ghosts |= slots
        axis.set(xlim=(-6.5, pages * (per_page + 0.6)), ylim=(-0.05, 1.05))
        axis.text(-0.3, 0.5, title, ha="right", va="center")
        axis.axis("off")
    for page in range(pages):
        axes[0, 0].text(page * (per_page + 0.6) + per_page / 2, 1.12, f"page {page}", ha="center", color=GREY)
    plt.show()


toy = Toy()
free = [toy.store.slots.table.free_pages.free]
panels = []
toy.append(0, 6)
panels.append(("A to F arrive", toy.slots()))
toy.append(1, 3)
panels.append(("another sequence: a to c", toy.slots()))
toy.append(0, 4)
panels.append(("G to J", toy.slots()))
draw(panels)
print("free pages:", toy.store.slots.table.free_pages.free, "of", toy.store.slots.table.free_pages.count)
assert toy.store.slots.table.free_pages.free == 2

# %% [markdown]
# The first sequence has pages 0, 1 and 3, the second has page 2. What is wasted is at most the end of each sequence's
# last page: here 2 slots and 1.
#
# Every row of the *table* is one page: how many slots were ever filled, and which of them are free again, as a mask
# with one bit for each slot.


# %%
def table(store: PagedStore, row: int = 0) -> None:
    print("page  filled  evicted")
    for entry in store.entries(layer=0, row=row, head=0):
        print(f"{entry.page:4}  {entry.filled:6}  {entry.evicted:>7}")


table(toy.store)

# %% [markdown]
# ## Eviction is a bit
#
# Now B, C and H are evicted. Watch the memory itself, the tensor `pool`.

# %%
before = toy.store.pages.pool.clone()
panels = [("before", toy.slots())]
toy.evict(0, "BCH")
panels.append(("without B, C and H", toy.slots()))
assert torch.equal(toy.store.pages.pool, before), "an eviction should not touch keys and values"
table(toy.store)

# %% [markdown]
# No byte of the pool has changed. The keys and values of B are still there, but no list names them any more, so
# attention does not read them. And nothing has moved.
#
# ## The slot is used again, in place
#
# The next token of the sequence looks for a free slot in the pages that the sequence has already, oldest page first.
# Only if there is none, a new page is opened.

# %%
toy.append(0, 2)
panels.append(("K and L", toy.slots()))
toy.append(0, 3)
panels.append(("M to O", toy.slots()))
draw(panels)
table(toy.store)
where = {letter: place for place, letter in toy.slots().items()}
assert (where["K"], where["L"], where["M"]) == ((0, 1), (0, 2), (1, 3)), "the holes should be filled first"
assert (where["N"], where["O"]) == ((3, 2), (3, 3))
assert toy.store.slots.table.free_pages.free == 2

# %% [markdown]
# Five tokens came, three had gone, and no page was opened: K and L took the slots of B and C, M that of H.
#
# Now the tokens lie out of order: A K L D. Must they be sorted before attention?
#
#     out = Σ_j exp(q·k_j) · v_j / Σ_j exp(q·k_j)
#
# A sum has no order. *Where* a token stood in the text is in its key already, by RoPE. We check that: attention over
# the slots as they lie in memory, and over the tokens as they stood in the text.

# %%
k, v = (x[0, 0] for x in Reading(toy.store)(0))  # [tokens, 8] each, oldest token first
position = toy.store.lists.positions()[0, 0, 0]
physical = toy.store.lists.place[0, 0, 0, : len(k)].argsort()  # the order of the slots
q = torch.randn(8, generator=toy.noise)


def attention(q, k, v):
    return (k @ q / 8**0.5).softmax(-1) @ v


order = "".join(toy.letter(0, p) for p in position[physical].tolist())
assert order == "AKLDEFGMIJNO"
assert_close(attention(q, k[physical], v[physical]), attention(q, k, v))
print(f"in memory {order}, in the text {''.join(sorted(order))}: the same output")

# %% [markdown]
# When the last token of a page goes, the whole page goes back to the pool, and any sequence may take it.

# %%
panels = [("before", toy.slots())]
toy.evict(0, "EFGM")
panels.append(("without E, F, G and M", toy.slots()))
toy.append(1, 5)
panels.append(("d to h", toy.slots()))
draw(panels)
pages_of = {row: [entry.page for entry in toy.store.entries(0, row, 0)] for row in (0, 1)}
print("pages of the first sequence", pages_of[0], "and of the second", pages_of[1])
assert pages_of == {0: [0, 3], 1: [2, 1]}, "the second sequence should have taken page 1"

# %% [markdown]
# ## Who shares a table
#
# Our model has 32 *lanes*: 8 layers with 4 KV heads each. Must they all keep the same tokens? The policy says so by
# its `scope`:
#
#     "head"       every lane has a table of its own and keeps what it likes
#     "layer"      the heads of a layer keep the same tokens
#     "sequence"   all lanes keep the same tokens
#
# The policy `random` evicts by lot and can do all three. We let it read a prompt with a budget of 20 tokens, and draw
# which token is left in which lane.


# %%
def prefill(cache: KVManager | PlainCache, ids: list[int], seq: int = 0, room: int = 400) -> torch.Tensor:
    """A new sequence reads its prompt → logits [V] of its first token."""
    cache.join(seq, capacity=len(ids) + room, prompt=len(ids))
    cache.begin_step([seq], [len(ids)], ids)
    hidden = decoder(torch.tensor(ids), cache)
    cache.end_step()
    return decoder.logits(hidden[-1:])[0]


figure, axes = plt.subplots(1, 3, figsize=(10, 2.7), sharey=True, layout="constrained")
tables = {}
print("             tables   lanes of a page   bytes of a page   bytes of tables")
for axis, scope in zip(axes, ("head", "layer", "sequence"), strict=True):
    manager = KVManager(config, engine.rope, parse(f"random:budget=20,scope={scope}"), rows=1, tokens=len(prompt))
    prefill(manager, prompt, room=0)
    store, lanes = manager.store, torch.zeros(L, Hkv, len(prompt))
    positions = manager.positions(0).expand(L, Hkv, -1)  # [Lt, Ht, S], shared by all lanes that share a table
    lanes.scatter_(2, positions.clamp(min=0).long(), (positions >= 0).float())
    tables[scope] = manager.account(0).tables
    print(
        f"{scope:10} {store.lists.count.numel():8} {store.shape.sharing:17} "
        f"{store.pages.page_bytes * store.shape.sharing:17,} {tables[scope]:17,}"
    )
    assert (lanes.sum(-1) == 20).all(), "every lane should hold its budget"
    axis.imshow(lanes.flatten(0, 1), cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    axis.set(title=f'scope "{scope}"', xlabel="token of the prompt")
    axis.set_yticks([Hkv * layer - 0.5 for layer in range(L)], [f"layer {layer}" for layer in range(L)], fontsize=7)
    axis.grid(axis="y", linewidth=0.6)
plt.show()
assert tables["head"] == 32 * tables["sequence"] == 4 * tables["layer"]

# %% [markdown]
# Freedom has its price: 32 tables instead of one.
#
# ## A policy in ten lines
#
# Between two steps the `KVManager` shows a *policy* the cache, and it answers with edits. This one thins out what is
# old: it keeps everything of the last moments, of the time before that every second token, then every fourth, and so
# on.


# %%
@dataclass
class Sieve(Policy):
    """The older the past, the fewer of its tokens are left."""

    budget: int | None = None  # tokens
    protect_prompt: bool = False
    name, scope = "sieve", "sequence"

    def decide(self, step):
        due, _ = self.due(step)  # which tables hold too much: [Lt, B, Ht]
        number = step.pos() + 1  # [Lt, B, Ht, S], 0 where there is no token
        power = number & -number  # the largest power of two that divides it
        age = number.amax(-1, keepdim=True) - number + 1
        kept = keep_best(power / age, (number > 0) & ~step.protected(), self.room(step))
        yield Evict(due[..., None] & ~kept)


# %% [markdown]
# `due` tells which tables exceed the budget, `keep_best` marks the best of each, and `Evict` says what to drop. The
# policy does not know about pages, formats, layers or the model ([how a step
# goes](../docs/kv-cache.md#how-a-step-goes)).
#
# The loop that drives it is the one of tutorial 2, with two more arguments: how long the prompt is, and which tokens
# are read. Both managers have the same calls.


# %%
@dataclass
class Run:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)  # after each step: the positions that are held
    held: list[int] = field(default_factory=list)  # … and bytes: keys, values, tables
    paged: list[int] = field(default_factory=list)  # … and bytes of the pages that the sequence has, if there are any
    manager: KVManager | PlainCache | None = None


def generate(policy: Policy, kind: type[KVManager | PlainCache] = KVManager, most: int = 400) -> Run:
    manager = kind(config, engine.rope, policy, rows=1, tokens=len(prompt) + most)
    run = Run(manager=manager)
    logits = prefill(manager, prompt, room=most)
    while len(run.tokens) < most:
        positions = manager.positions(0)[0, 0]  # all lanes hold the same
        run.seen.append(positions[positions >= 0].clone())
        run.held.append(manager.account(0).held)
        if kind is KVManager:
            store = manager.store
            pages = store.slots.table.free_pages.count - store.slots.table.free_pages.free
            run.paged.append(pages * store.pages.page_bytes * store.shape.sharing)
        run.tokens.append(logits.argmax().item())  # greedy
        if run.tokens[-1] in engine.generation_config.stop_ids:
            break
        manager.begin_step([0], [1], [run.tokens[-1]])
        hidden = decoder(torch.tensor(run.tokens[-1:]), manager)
        manager.end_step()
        logits = decoder.logits(hidden)[0]
    run.text = tokenizer.decode(run.tokens)
    return run


full, window, sieve = (generate(policy) for policy in (parse("full"), parse("window:budget=128"), Sieve(budget=128)))
[expected] = engine.generate(problems[0].question, temperature=0)
assert full.tokens == expected.token_ids, "the paged cache should give the tokens of a full cache"
print(f"the paged cache, nothing evicted: the same {len(full.tokens)} tokens as FullCache")
plain = generate(Sieve(budget=128), PlainCache)
assert plain.tokens == sieve.tokens, "pages should change no token"
assert all(torch.equal(a, b) for a, b in zip(plain.seen, sieve.seen, strict=True)), "nor which tokens are held"
assert plain.manager.account(0).payload == sieve.manager.account(0).payload, "nor what their numbers take"
print(f"Sieve, in pages and on the plain manager: the same {len(plain.tokens)} tokens, the same tokens held")

# %% [markdown]
# The policy `full` evicts nothing, and the tokens are those of `FullCache`. When `Sieve` holds 128 tokens, it evicts
# one in every step, and both managers hold the same tokens after each of them. What do the policies keep? Each line
# of the pictures is one step. Dark is a token in the cache.


# %%
def draw_past(axis, run: Run, title: str) -> None:
    picture = torch.zeros(len(run.seen), len(prompt) + len(run.seen))
    for step, positions in enumerate(run.seen):
        picture[step, positions.long()] = 1
    axis.imshow(picture, cmap="Blues", vmax=1.3, aspect="auto", interpolation="nearest")
    axis.axvline(len(prompt) - 0.5, color=ORANGE, linewidth=0.8)
    axis.set(title=title, xlabel="position (orange: the prompt ends)", ylabel="generated tokens")


figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
draw_past(axes[0], window, "window, 128 tokens")
draw_past(axes[1], sieve, "sieve, 128 tokens")
plt.show()
for run in (window, sieve):
    assert all(len(positions) <= 128 for positions in run.seen), "a lane holds more than its budget"
last = sieve.seen[-1]
recent, older = ((last > last.max() - 32).sum().item(), (last <= last.max() - 128).sum().item())
print(
    f"sieve ends with {recent} of the last 32 tokens, of the {last.max().item() - 127} before the last 128: {older}"
)
assert recent > 16, "the sieve should be fine at its fine end"
assert older > 10
assert (window.seen[-1] > window.seen[-1].max() - 128).all()

for name, run in (("full", full), ("window", window), ("sieve", sieve)):
    facts = (run.seen[-1] < len(prompt)).sum()
    print(
        f"{name:7} {len(run.tokens):4} tokens, of the prompt {facts:2} of {len(prompt)} are left, "
        f"correct: {grade(run.text, problems[0].answer)}"
    )
assert [grade(run.text, problems[0].answer) for run in (full, window, sieve)] == [True, False, False]

# %% [markdown]
# Both hold 128 tokens at every step, and the memory of one reaches back to the beginning. That is not enough to
# reason: the window has lost the facts, and the sieve has holes in them.
#
# ## The bytes of a whole generation
#
# Here are the bytes over time, for the full cache and the window. The dashed lines are the pages that the sequence
# has; the solid ones are what its tokens need, with their tables.

# %%
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, run, color in (("full", full, BLUE), ("window, 128 tokens", window, ORANGE)):
    axis.plot([b / 2**20 for b in run.held], color=color, label=name)
    axis.plot([b / 2**20 for b in run.paged], color=color, linestyle="--", linewidth=0.8)
axis.plot([], [], color=GREY, linestyle="--", linewidth=0.8, label="pages taken")
axis.set(xlabel="generated tokens", ylabel="bytes (MiB)", xlim=(0, None), ylim=(0, None))
axis.legend()
plt.show()
print(f"at the end: full {full.held[-1] / 2**20:.2f} MiB, window {window.held[-1] / 2**20:.2f} MiB")
page = full.manager.store.pages.page_bytes * full.manager.store.shape.sharing
waste = max(pages - held for pages, held in zip(full.paged, full.held, strict=True))
print(
    f"a page of 16 tokens for all lanes has {page / 2**10:.0f} KiB; the full cache never wasted more than "
    f"{waste / 2**10:.0f} KiB"
)
assert waste < page
assert max(window.paged) <= (128 // 16 + 1) * page
since = window.held[129 - len(prompt) :]  # since the first token had to go
assert len(since) > 16
assert max(since) == since[0], "a full window's bytes should not grow"

# %% [markdown]
# The line of the window bends and stays flat: each token that comes takes the slot of one that went.
#
# ## The ledger
#
# A byte is either accounted for or counted as reserve. The ledger's total is the size of all tensors that the manager
# owns, which we count ourselves.

# %%
manager = window.manager
ledger = manager.ledger()
for kind, size in ledger.as_dict().items():
    print(f"{kind:13}{size:11,}")
print(f"{'total':13}{ledger.total:11,}")

owned = [*manager.store.tensors(), *manager.budgets.values(), *manager.policy.state()]
assert ledger.total == sum(tensor.nbytes for tensor in owned)
assert ledger.payload == 128 * config.kv_bytes_per_token(4), "payload should be the budget, to the byte"
assert ledger.held == window.held[-1]  # of the only row
print(f"\nreserve: {100 * ledger.reserve / ledger.total:.0f} % of all, for {manager.store.pages.count} pages")

# %% [markdown]
# - `payload`: keys and values of the tokens that are held. `scales`: theirs, in formats of few bits (tutorial 4).
# - `tables`: page numbers, masks of slots, and for each token its place and its original position.
# - `buffers`: tokens that wait in full precision until a group of them is quantized.
# - `state`, `observations`: what a policy remembers, and what it asked to see.
# - `reserve`: the pool's free pages and slots.
#
# The pool was made for the worst that this sequence might become. But unlike `FullCache`'s, this reserve belongs to
# no sequence: it can be *shared*. Here are the three problems again, plus a fourth, in a pool of 20 pages of 16
# tokens. Each of them may still grow to 1,000 tokens, only not all at once.

# %%
manager = KVManager(config, engine.rope, parse("full"), rows=4, tokens=1000, pages=20)
pool = manager.store.slots.table.free_pages
for seq, ids in enumerate(prompts):
    prefill(manager, ids, seq)
    print(f"{len(ids):4} tokens join; {pool.free:2} pages are free")
ledger = manager.ledger()
print(
    f"held {ledger.held / 2**20:.1f} MiB, all {ledger.total / 2**20:.1f} MiB: "
    f"{100 * ledger.held / ledger.total:.0f} % in use"
)
assert ledger.held > 0.7 * ledger.total

extra = prompts[2][:97]
manager.join(3, capacity=200, prompt=len(extra))
try:
    manager.begin_step([3], [len(extra)], extra)
    raise AssertionError("the pool should be full")
except Exhausted as error:
    print("\n" + textwrap.fill(str(error), 110))
manager.leave(1)  # the second problem is done: its pages are free at once
manager.begin_step([3], [len(extra)], extra)
print(f"\nafter one sequence left, the next fits; {pool.free} page is free")
assert pool.free == 1

# %% [markdown]
# The pool was full, the manager said so in a sentence and changed nothing. When a sequence had left, its pages served
# the next.
#
# ## What comes next
#
# ThinKV gives the table more columns: a page holds thoughts of one type, and a slot that a thought has lost waits for
# the next one of its type. [Tutorial 10](10_thinkv.py) follows the paper's example slot by slot. What pages add to
# the plain manager is in [docs/kv-cache.md](../docs/kv-cache.md#what-paging-adds), and [its
# appendix](../docs/appendix/kv-cache.md#which-file-to-read-for-what) names the file to read for what.
#
# One thing is left for tutorial 4. Formats of few bits quantize tokens in groups that share scales. When most tokens
# of a group have gone, what happens to the scales?
#
# ## Three things to remember
#
# 1. Pages change where a token lies. They don't change what a policy keeps, or what attention reads.
# 2. Eviction clears a bit. The next token takes the slot in place, and nothing is moved.
# 3. Tables, free slots and half-empty pages cost bytes, too. The ledger says what each byte is for.
#
# ## Exercises
#
# 1. **Block size.** Make the pages of `generate` larger and smaller: `storage = Storage(block=...)` in a subclass of
#    `Full`. Plot the largest waste and the bytes of the tables against the block size. Which would you choose?
# 2. **Holes.** Run `random:budget=128,scope=sequence` through `generate`. How many of the slots in its pages does it
#    use? Why does the window do better?
# 3. **Protect the prompt.** Run `Sieve(budget=96, protect_prompt=True)`, and larger budgets. From which budget on is
#    the answer correct, and how many bytes does that save? Compare with the window.
# 4. **Per head.** Write a policy of scope "head" that keeps the tokens whose values are longest: `step.values(layer)`
#    is [B, Hkv, S, D]. Draw its lanes as in the section on scopes. Do the heads agree?
