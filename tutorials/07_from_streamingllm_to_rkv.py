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
# # 7. From StreamingLLM to R-KV: what each policy keeps
#
# A cache that is full must evict. Six policies read the same text and have the same budget: the prompt and a quarter
# of what is generated. When it is full, a *rule* gives each token a score, and the tokens with the lowest scores go.
#
# The picture shows three of these rules on made-up attention, in which every tenth token is liked most. Each row is a
# step, each column a token. Blue: the cache holds it. There is room for fifteen tokens; H2O reserves half of it for
# the newest.

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

plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})
STEPS, ROOM, token = 60, 15, torch.arange(60)
liking = torch.rand(STEPS, STEPS, generator=torch.Generator().manual_seed(0)) ** 3
liking[:, ::10] += 0.3
attention = liking.tril() / liking.tril().sum(-1, keepdim=True)  # row t: the attention of query t
rules = {
    "position: the newest stay (window)": lambda t: token / STEPS,
    "all attention so far (H2O)": lambda t: attention[: t + 1].sum(0).masked_fill(token > t - ROOM // 2, 9),
    "attention of the newest query (TOVA)": lambda t: attention[t],
}
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for axis, (title, rule) in zip(axes, rules.items(), strict=True):
    held = torch.zeros(STEPS, STEPS, dtype=torch.bool)
    for t in range(STEPS):
        held[t] = held[t - 1]
        held[t, t] = True
        if held[t].sum() > ROOM:
            held[t, rule(t).masked_fill(~held[t], torch.inf).argmin()] = False
    axis.imshow(held, cmap="Blues", interpolation="nearest")
    axis.set(title=title, xlabel="token")
axes[0].set(ylabel="step")
plt.show()

# %% [markdown]
# ## A text, and what the rules will score
#
# The model generates a text with a full cache. Its last token was never in the cache, so N tokens are left, P of them
# in the prompt. For each of them we store its query's logits, q·k/√D, with all earlier tokens. A *KV head* has one
# key for each token. Two query heads share it. We take the keys from `PlainCache`, the library's cache of ordinary
# tensors: it reads the finished text once, in one pass.

# %%
from minithink.evaluate.needed import HELD, needed_kept
from minithink.kv.plain import PlainCache
from minithink.policies.full import Full
from minithink.ref.redundancy import redundancy
from minithink.reread.attention import read
from minithink.tasks import grade, load_problems, needs

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
engine = minithink.load("tiny", device="cpu", dtype="float32")
L, H, G = engine.config.num_layers, engine.config.num_kv_heads, engine.config.num_heads // engine.config.num_kv_heads
[problem] = [p for p in load_problems("validation", "ledger") if p.id == "ledger-validation-12c5d02a9141"]
GREEDY = {"temperature": 0, "max_new_tokens": 700}

[full] = engine.generate(problem.question, **GREEDY)  # without a policy: the full cache
ids, P = engine.prompt_ids(problem.question) + full.token_ids, full.prompt_tokens
N = len(ids) - 1  # without the last token, which was never in the cache
reader = PlainCache(engine.config, engine.rope, Full(), rows=1, tokens=N)
reader.join(0, capacity=N, prompt=N)
reader.begin_step([0], [N])
engine.decoder(torch.tensor(ids[:N]), reader)
reader.end_step()
keys = torch.stack([reader.sequences[0].lanes.keys(layer) for layer in range(L)])  # [L, H, N, D]
logits = torch.empty(L, H, G, N, N)  # layer, KV head, query head, query, token
read(engine.loaded, ids[:N], lambda layer, x, _: logits[layer].copy_(x.permute(1, 2, 0, 3)))
B = P + (N - P) // 4  # the budget: tokens that a KV head may hold
print(problem.question, full.text[:200] + " …", sep="\n\n")
print(f"\n{P} tokens in the prompt, {N - P} generated, budget {B}")
assert G == 2, "two query heads share a KV head"
assert grade(full.text, problem.answer), "the model should solve this with a full cache"

# %% [markdown]
# ## Position: a window
#
# `simulate` lets the generated tokens come one by one. When a KV head holds too many, a rule scores them, and the
# lowest scores go. The prompt always stays. The first rule is the simplest: a token's score is its position, so the
# newest stay. In the picture each row is a KV head, each column a generated token. Blue: the head still holds it when
# the text ends. A window keeps the same tokens in all heads.


# %%
def simulate(rule, buffer=0):
    """The generated tokens come one by one. → the step at which each head loses each token: int32 [L·H, N].

    `HELD` stands for a token that is never lost. A head evicts down to B when it holds B + `buffer` tokens, or B + 1.
    """
    held, left = torch.zeros(L, H, N, dtype=torch.bool), torch.full((L, H, N), HELD, dtype=torch.int32)
    held[..., :P] = True
    for t in range(P, N):
        held[..., t] = True
        pos = held.nonzero()[:, -1].view(L, H, -1)  # tokens of each head, oldest first
        x = logits[:, :, :, t].gather(-1, pos.unsqueeze(2).expand(-1, -1, G, -1))
        score = rule(t, pos, x.softmax(-1))  # the attention of query t: [L, H, G, tokens]
        if pos.shape[-1] >= B + max(buffer, 1):
            score = score.double().masked_fill(pos < P, torch.inf)  # the prompt stays
            order = score.argsort(dim=-1, descending=True, stable=True)  # of equal scores the older token stays
            go = pos.gather(-1, order[..., B:])
            held.scatter_(-1, go, False)
            left.scatter_(-1, go, t - P + 1)
    return left.view(L * H, N)


def window(t, pos, p):
    return pos  # the newest stay


LEFT = {"window (StreamingLLM)": simulate(window)}


def draw(names, rows=1):
    figure = plt.figure(figsize=(10, 1 + 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, len(names) // rows, sharex=True, sharey=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=True):
        stays = LEFT[name][:, P:] == HELD
        axis.imshow(stays, aspect="auto", cmap="Blues", interpolation="nearest", extent=(0, N - P, L * H, 0))
        axis.set(title=f"{name}: {stays.any(0).float().mean():.0%} of the tokens are in some head")
    for axis in axes[-1]:
        axis.set(xlabel="generated tokens, the newest on the right")
    for axis in axes[:, 0]:
        axis.set(ylabel="KV head")
    plt.show()


draw(["window (StreamingLLM)"])

# %% [markdown]
# StreamingLLM keeps the newest tokens and the first four. The reason: a softmax has to put its weight somewhere, and
# many heads put it on the first token, whatever that is. Such a token is an *attention sink*. Here the whole prompt
# is protected, so StreamingLLM and a window are the same. Is there a sink in this model?

# %%
sink = torch.stack([logits[:, :, :, t, : t + 1].softmax(-1)[..., :4].sum(-1).mean(-1) for t in range(P, N)]).mean(0)
print(f"the first four tokens get {sink.mean():.1%} of the attention on average, {sink.max():.1%} in one head")
stays = LEFT["window (StreamingLLM)"][:, P:] == HELD
assert stays[:, -(B - P) :].all(), "a window keeps the newest tokens"
assert not stays[:, : -(B - P)].any(), "and no others"
assert sink.max() < 0.1, "no head uses the first tokens as a sink"

# %% [markdown]
# No head of this small model has a sink: large models do, and StreamingLLM was made for them.
#
# ## All attention so far: H2O
#
# H2O's score is the sum of all attention that a token has received. A sum only grows. Of two tokens that every query
# likes equally, the older one has been seen by more queries, so its sum is larger. By hand: three tokens, each gets
# 0.2 of every query's attention once it is there.

# %%
born, now = [0, 4, 8], 10
sums = [round(0.2 * (now - b), 1) for b in born]
print("equal tokens, unequal sums:", sums)
assert sums == sorted(sums, reverse=True), "the older of equal tokens wins"

# %% [markdown]
# Each KV head has its own sums. They begin with the attention that the prompt's queries gave. Half of the room is
# reserved for the newest tokens, whatever their sums. The cell prints the mean age of the other tokens that stay: 0 %
# is the end of the text, 100 % its beginning.


# %%
def by_position(tensor, pos):
    return tensor.gather(-1, pos.expand(L, H, -1))


def h2o():
    rows = logits[..., :P, :].masked_fill(torch.ones(P, N).triu(1).bool(), -torch.inf)
    total = rows.softmax(-1).sum((2, 3))  # the attention that the prompt's queries gave: [L, H, N]

    def rule(t, pos, p):
        total.scatter_add_(-1, pos, p.sum(2))
        return by_position(total, pos).masked_fill(pos > t - (B - P) // 2, torch.inf)  # half of the room is recent

    return rule


def age(left):
    """Of the generated tokens that stay, without the newest half of the room: how old they are, 0 to 1."""
    stays = (left[:, P:] == HELD)[:, : -((B - P) // 2)]
    return 1 - (stays.nonzero()[:, 1].float().mean() / (N - P)).item()


LEFT["h2o"] = simulate(h2o())
draw(["window (StreamingLLM)", "h2o"])
ages = {name: age(left) for name, left in LEFT.items()}
print({name: f"{value:.0%}" for name, value in ages.items()})
assert ages["h2o"] > ages["window (StreamingLLM)"], "H2O should keep older tokens"

# %% [markdown]
# ## The newest query: TOVA. The last time: RaaS
#
# TOVA's score is the attention of the newest query alone. It remembers nothing: a token that this query does not need
# goes, even if the last query needed it. RaaS's score is a time (a *stamp*): the last step at which the token was in
# the half of the tokens with the most attention. By hand: four tokens and five queries. Each list names the two
# tokens to which one query attends most. Token 0 is old but was used lately. Token 1 goes first.

# %%
stamps = [0, 0, 0, 0]
for step, better in enumerate(([0, 1], [2, 3], [2, 0], [3, 2], [0, 3]), start=1):
    for token in better:
        stamps[token] = step
print("stamps:", stamps, "the first to go:", stamps.index(min(stamps)))
assert stamps == [5, 1, 4, 5]

# %% [markdown]
# Both decide for a layer: they take the mean over its heads, which then keep the same tokens. In the picture the four
# rows of a layer are equal.


# %%
def tova(t, pos, p):
    return p.mean((1, 2)).unsqueeze(1).expand(L, H, -1)  # one decision for all heads of a layer


def raas():
    stamp = torch.zeros(L, H, N)

    def rule(t, pos, p):
        mean = p.mean((1, 2)).unsqueeze(1).expand(L, H, -1)
        half = mean.topk((pos.shape[-1] + 1) // 2).indices
        stamp.scatter_(-1, pos.gather(-1, half), t - P + 1)
        stamp[..., t] = t - P + 1  # it came just now
        return by_position(stamp, pos).double() * N + pos  # of equal stamps the older token goes

    return rule


LEFT |= {"tova": simulate(tova), "raas": simulate(raas())}
draw(["tova", "raas"])
of_layer = torch.stack([LEFT[name].view(L, H, N) for name in ("tova", "raas")])
assert (of_layer == of_layer[:, :, :1]).all(), "the heads of a layer keep the same tokens"

# %% [markdown]
# ## Several queries, and redundancy: SnapKV and R-KV
#
# One query says little; eight say more. SnapKV's *importance* is the mean attention of the newest eight queries. Then
# each token takes the largest value among itself and three neighbours on each side: a number is of no use if the name
# in front of it is gone. The eight newest tokens always stay. Here SnapKV runs again and again while the model
# generates, so the library calls it `snapkv_decode`; the paper's SnapKV compresses only the prompt.
#
# R-KV subtracts the *redundancy*: how much a key resembles the other keys, as shares that sum to 1 in a head. Its
# score is 0.1 · importance − 0.9 · redundancy. By hand: the keys of tokens 1 and 2 are nearly equal. The key of
# token 0 is different, so its share is the least.

# %%
key = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.1]])[None, None]
again = redundancy(key, torch.ones(1, 1, 3, dtype=torch.bool), threshold=2.0)[0, 0]  # 2: no copy is spared
importance = torch.tensor([0.25, 0.40, 0.35])
score = 0.1 * importance - 0.9 * again
print("redundancy:", again)
print("importance alone drops", importance.argmin().item(), "and R-KV drops", score.argmin().item())
assert importance.argmin() == 0
assert score.argmin() != 0

# %% [markdown]
# Both wait until a head holds 16 tokens too many. Then they evict 16 at once.


# %%
def snapkv(t, pos, p, lam=1.0):  # amax: of the query heads the largest logit counts
    older = pos[..., :-8]  # the newest 8 tokens stay
    x = logits[:, :, :, t - 7 : t + 1].amax(2).gather(-1, older.unsqueeze(2).expand(-1, -1, 8, -1))
    score = lam * torch.nn.functional.max_pool1d(x.softmax(-1).mean(2), 7, 1, 3)
    if lam < 1:
        k = keys.gather(2, pos[..., None].expand(-1, -1, -1, engine.config.head_dim))
        score = score - (1 - lam) * redundancy(k, torch.ones_like(pos, dtype=torch.bool))[..., :-8]
    return torch.nn.functional.pad(score, (0, 8), value=torch.inf)


def rkv(t, pos, p):
    return snapkv(t, pos, p, 0.1) if pos.shape[-1] >= B + 16 else pos


LEFT["snapkv_decode"] = simulate(lambda t, pos, p: snapkv(t, pos, p) if pos.shape[-1] >= B + 16 else pos, 16)
LEFT["rkv"] = simulate(rkv, 16)
draw(["snapkv_decode", "rkv"])

# %% [markdown]
# ## All six
#
# All policies saw the same queries and keys, those of the undisturbed text. So the panels differ by the rules alone.
# A real run differs in one point: an eviction changes the hidden states of later tokens, and in the end the text.
# The last cell checks the rules against the library.
#
# | | score of a token | who decides |
# | --- | --- | --- |
# | `window` | its position | all heads alike |
# | `h2o` | all attention so far; half of the room is for new tokens | each KV head |
# | `tova` | attention of the newest query | each layer |
# | `raas` | the last time at which it was in the better half | each layer |
# | `snapkv_decode` | attention of the last 8 queries, smoothed over neighbours | each KV head |
# | `rkv` | the same, less how much its key resembles other keys | each KV head |

# %%
draw(list(LEFT), rows=3)
ages = {name: age(left) for name, left in LEFT.items()}
some = {name: (left[:, P:] == HELD).any(0).float().mean() for name, left in LEFT.items()}
assert all(((left == HELD).sum(-1) <= B + 16).all() for left in LEFT.values())
assert min(some["h2o"], some["snapkv_decode"], some["rkv"]) > max(some["tova"], some["raas"])
assert max(ages, key=ages.get) == "h2o", "H2O should keep the oldest tokens"

# %% [markdown]
# ## Who keeps what is needed?
#
# Rules can read these simple texts: they know which earlier tokens each line needs (`minithink/tasks/needs.py`). How
# often did a head still hold them? We leave out what stands in the prompt, for it stays.

# %%
reading = needs.read(problem.question, engine.tokenizer.pieces(ids[:N]), P)
kept = {name: needed_kept(reading, left, P, beyond_prompt=True) for name, left in LEFT.items()}
figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
axis.barh(list(kept), [100 * x.kept for x in kept.values()], color="#2b6cb0")
axis.invert_yaxis()
axis.set(xlabel=f"of {kept['rkv'].pairs} needs, % that a head still met (mean over heads)", xlim=(0, 100))
plt.show()
print({name: f"{x.kept:.0%}, by some head {x.somewhere:.0%}" for name, x in kept.items()})
assert all(x.kept <= x.somewhere for x in kept.values())
assert kept["window (StreamingLLM)"].kept > 0.9
assert kept["rkv"].pairs > 20

# %% [markdown]
# In this short text most needs are recent, so the window meets them. One text proves nothing: [every
# baseline](../docs/appendix/baselines.md) was measured on 600 texts. On the embedded model, at a quarter of the
# tokens, R-KV, RaaS and `snapkv_decode` have more right answers than random eviction, TOVA and H2O have fewer. On [a
# pretrained model](../docs/transfer.md) TOVA and H2O have more, too. The share of needs that is met, a mean over
# heads, explains right answers only in part.
#
# ## The same as the library?
#
# Now the real policies, until some tokens are evicted. They run on the plain manager, `cache="plain"`. There the
# list of a KV head is a row of a tensor: `positions(0)` of a sequence is [layers, KV heads, tokens], the oldest token
# first, with −1 where a head holds fewer tokens than another. Where all heads of a layer hold the same tokens, they
# share one row. We copy the rows of layer 0 after every step.
#
# In layer 0 queries and keys depend only on the tokens and their positions, not on what the cache holds. So there our
# rules must keep exactly what the library keeps, as long as the text is the same.

# %%
NAMES = {
    "window (StreamingLLM)": "window:",
    "h2o": "h2o:",
    "tova": "tova:",
    "raas": "raas:",
    "snapkv_decode": "snapkv_decode:buffer=16,",
    "rkv": "rkv:buffer=16,",
}
for name, words in NAMES.items():
    policy = f"{words}budget={B},protect_prompt=true"
    stream = engine.stream(problem.question, policy=policy, cache="plain", temperature=0, max_new_tokens=B - P + 36)
    lists = []  # what layer 0 holds when the prompt was read, and after each generated token: [1 or H, tokens]
    stream.on_step = lambda _, cache=stream.cache, lists=lists: lists.append(cache.positions(0)[0].clone())
    for _ in stream.steps():
        pass
    pairs = zip(stream.result.token_ids, full.token_ids, strict=False)
    same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(stream.result.token_ids))
    step = min(same, len(lists) - 1)
    theirs = torch.stack([torch.isin(torch.arange(P + step), held) for held in lists[step]])
    ours = LEFT[name][: len(theirs), : P + step] > step
    agree = (theirs == ours).float().mean().item()
    gone = int((~ours[0]).sum())
    print(f"{name:22} the same text for {step} tokens, {gone} are evicted; layer 0 agrees on {agree:.1%}")
    assert gone > 0
    assert agree == 1, "our rule should be the library's"

# %% [markdown]
# Three things to remember:
#
# - **A score has a memory.** None (TOVA), eight queries (SnapKV, R-KV), the last use (RaaS), everything (H2O).
# - **A sum prefers old tokens, a window new ones.** A text may need both.
# - **Heads that decide for themselves keep more different tokens** than heads of a layer that decide together.
#
# ## Exercises
#
# 1. Divide H2O's sum by the number of queries that saw the token. How old are the tokens that it keeps now?
# 2. Let TOVA decide for each head. Does it keep more of what is needed?
# 3. Replace RaaS's half by an eighth of the tokens. Which rule does it approach, and why?
# 4. Give the rules half of the tokens instead of a quarter. Which of them gains the most needs?
