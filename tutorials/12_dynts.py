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
# # 12. DynTS: from attention maps to a predictor, and when it pays
#
# Which thinking tokens will the answer look at? After the answer one can count: the **importance** of a thinking
# token is the attention that the answer's tokens give it. A cache must decide earlier. DynTS trains a small network
# to predict importance from the token's own hidden state, at the moment when the token is written.
#
# The first cell draws importance along one text. The marks below are the tokens that later lines really need; rules
# read them from the text (`minithink/tasks/needs.py`).

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

from minithink.calibrate.quality import kendall, overlap
from minithink.kv.schedule import divided
from minithink.policies.dynts_cost import break_even, gain, length, predictor_flops, repaid, token_flops, triggers
from minithink.ref.predict import predict
from minithink.reread.importance import importance
from minithink.reread.later import thinking_of
from minithink.tasks import grade, load_problems

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # the model is so small that threads would wait for each other
GREY, ORANGE, BLUE = "#718096", "#dd6b20", "#2b6cb0"
plt.rcParams.update({"figure.facecolor": "white", "figure.dpi": 110, "font.size": 9, "axes.titlesize": 9})

engine = minithink.load("tiny", device="cpu", dtype="float32")
problems = [p for p in load_problems("validation", "search") if p.thinking_tokens < 800]
GREEDY = {"temperature": 0, "max_new_tokens": 1200}
for problem in problems:
    [full] = engine.generate(problem.question, **GREEDY)  # without a policy: the full cache
    if grade(full.text, problem.answer):
        break
prompt, tokens = engine.prompt_ids(problem.question), full.token_ids
M, N = len(prompt), len(thinking_of(engine.loaded, tokens))  # tokens of the question, of the thinking
hidden, scores = importance(engine.loaded, prompt, tokens)  # [N, d] and name → [N], each score divided by its mean
needed = scores["needs"].nonzero().flatten()

figure, axis = plt.subplots(figsize=(10, 2.8), layout="constrained")
axis.plot(scores["answer"], color=BLUE, linewidth=0.7, label="attention from the answer")
axis.plot(needed, torch.zeros(len(needed)), "|", color=ORANGE, label="a later line needs this token")
axis.axhline(1, color="black", linewidth=0.5, linestyle="--")
axis.set(xlabel="thinking token", ylabel="importance, × the mean")
axis.legend(loc="upper left")
plt.show()
share = (scores["answer"] > 1).float().mean()
last = scores["answer"][-N // 8 :].mean()
print(f"{share:.0%} of {N} thinking tokens are above the mean; the last eighth of them has {last:.1f} × the mean")
assert share < 0.5, "few tokens should carry much of the attention"

# %% [markdown]
# **Few tokens are important**, as the paper says. But here the important ones are mostly the *newest*: a window keeps
# these without any score. And a token that later lines need is often not important for the *answer*.
#
# ## The target by hand
#
# Three answer tokens look at five thinking tokens, in two layers of two heads. Numbers are tenths of a row's
# attention; the rest goes elsewhere. Importance sums over the answer's rows (eq. 6), averages over layers and heads,
# and is divided by its mean, so that a long answer changes nothing.

# %%
rows = torch.tensor([
    [[1, 0, 2, 1, 0], [0, 1, 3, 0, 1], [1, 0, 4, 0, 1]],
    [[1, 1, 2, 0, 1], [1, 0, 3, 1, 1], [0, 0, 3, 1, 2]],
    [[1, 0, 3, 0, 1], [0, 0, 2, 0, 2], [1, 1, 2, 1, 0]],
    [[0, 1, 2, 0, 1], [1, 0, 3, 0, 1], [1, 0, 3, 0, 1]],
]) / 10  # fmt: skip
summed = rows.sum(1).mean(0)  # over the answer, then over the four heads
target = summed / summed.mean()
print("importance", [f"{x:.1f}" for x in summed.tolist()], "target", [f"{x:.2f}" for x in target.tolist()])
assert torch.allclose(target, torch.tensor([2 / 3, 1 / 3, 8 / 3, 1 / 3, 1]))
guess = torch.tensor([0.5, 0.4, 2.0, 0.6, 0.9])
mse = (guess - target).square().mean()
print(f"a guess has MSE {mse:.4f} and Kendall's τ {kendall(guess, target):.4f}: 8 pairs agree, 1 does not, 1 is tied")
assert abs(mse - 0.11156) < 1e-5

# %% [markdown]
# ## The predictor
#
# Three layers, d → 2d → d/2 → 1, each followed by softplus, read the last hidden state. It is trained with the
# backbone frozen: `python -m minithink.calibrate predictor`. The embedded model ships with three: for the attention
# of the answer, for that of all later tokens (*hindsight*), and for what the rules say is needed. How well does each
# rank the tokens of this text, which it has never seen? τ is 1 for the true order, and 0 for chance. Beside it stands
# the order by position, the newest first.

# %%
newest = torch.arange(N, dtype=torch.float32)
figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
for axis, (name, truth) in zip(axes, scores.items(), strict=True):
    weights = engine.calibration(f"predictor-{name}.safetensors")["weights"]
    score = predict(hidden, [w.float() for w in weights])
    assert [tuple(w.shape) for w in weights] == [(256, 512), (512, 128), (128, 1)]
    axis.plot(truth, score, ".", color=BLUE, markersize=2)
    axis.set(title=name, xlabel="true score", ylabel="predicted" if name == "answer" else "")
    found, other = overlap(score, truth, 30), overlap(newest, truth, 30)
    tau, by_age = kendall(score, truth), kendall(newest, truth)
    print(
        f"{name}: τ {tau:.2f} (the newest first: {by_age:.2f}); of the true top 20 % {found:.0%} are in the "
        f"predicted top 30 % (newest first: {other:.0%})"
    )
plt.show()
print(f"{len(needed) / N:.0%} of the tokens are needed: the true top 20 % of needs also has tokens with the score 0")
assert len(needed) / N < 0.2

# %% [markdown]
# ## Three windows and a sawtooth
#
# A budget B is divided: the question's M tokens, the last W_l tokens, and between them a selection window of W_s
# tokens. When the cache holds B tokens, the k = int(r·W_s) tokens with the best scores stay in the selection window,
# and K = W_s − k go. The share r is an option of the policy (`ratio`), and so is W_l (`local`). A survivor competes
# again with the score that it has. First with scores by hand, in plain Python.


# %%
def select(held: list[int], score: dict[int, float], m: int, last: int, k: int) -> list[int]:
    """What stays of the tokens held, oldest first."""
    window = held[m : len(held) - last]
    best = sorted(sorted(window, key=lambda p: (-score[p], p))[:k])  # of equal scores the older token stays
    return held[:m] + best + held[len(held) - last :]


SCORE = dict(zip(range(3, 14), (0.9, 0.2, 0.6, 0.6, 0.3, 0.8, 0.6, 0.1, 0.7, 0.5, 0.4), strict=True))
W_s, k, W_l = divided(10, 3, 0.5, 3)  # B 10, M 3, r ½, W_l 3 → W_s 4, k 2
held = [0, 1, 2]
for position in range(3, 14):
    held.append(position)
    if len(held) == 10:
        held = select(held, SCORE, 3, W_l, k)
        print(f"after position {position}: {held}")
assert held == [0, 1, 2, 3, 8, 11, 12, 13]

# %% [markdown]
# Now the policy itself, on the plain manager (`cache="plain"`). There the sequence has one list of positions, which
# we copy after every step. Their lengths must be those of the paper's appendix A: S_i = M + i − n_i·K after i
# generated tokens, with n_i triggers so far. Right after a trigger, the list must consist of the three parts.

# %%
B = M + N // 2
W_s, k, W_l = divided(B, M, 0.3, 0.4)  # r 0.3; W_l is 0.4 of what the question leaves
K, lists = W_s - k, list[list[int]]()  # of the prompt, and after each generated token: the positions held
stream = engine.stream(problem.question, policy=f"dynts:budget={B}", cache="plain", **GREEDY)
stream.on_step = lambda _: lists.append(stream.cache.positions(0)[0, 0].tolist())
for _ in stream.steps():
    pass
own, lengths = stream.result, [len(held) for held in lists]
thought = own.thinking_tokens - 1  # after `</think>` nothing is selected
print(f"B {B}, W_s {W_s}, k {k}, K {K}; full cache {M + N}, right: {grade(own.text, problem.answer)}")
assert lengths[1 : thought + 1] == [length(i, M, B, K) for i in range(1, thought + 1)]
trigger = next(i for i in range(1, thought) if lengths[i] < lengths[i - 1])  # the first
question, selected, local = lists[trigger][:M], lists[trigger][M : M + k], lists[trigger][M + k :]
print(
    f"at the first trigger, after {trigger} tokens: the question's {M} tokens stay, the last {W_l}, and {k} of the "
    f"{W_s} between them, from position {selected[0]} to {selected[-1]}"
)
assert question == list(range(M)), "the question should stay"
assert local == list(range(M + trigger - W_l, M + trigger)), "the newest tokens should stay"
figure, axis = plt.subplots(figsize=(10, 2.4), layout="constrained")
axis.plot(lengths, color=BLUE, label="dynts")
axis.plot([M + i for i in range(len(lengths))], color=GREY, label="full cache")
axis.set(xlabel="generated token", ylabel="tokens in the cache")
axis.legend()
plt.show()

# %% [markdown]
# ## When it pays
#
# The predictor costs 6d² + d operations for each token, from the first one on. A trigger saves 4·L·d operations for
# each of K tokens, at every later step. So the first trigger pays if K > (6d² + d) / (4·L·d) ≈ 1.5·d / L. For a
# 7 B Qwen (d = 3,584, 28 layers) these are 192 tokens, and its setting evicts 1,740. But the steps before the first
# trigger have cost something, too.

# %%
d, layers, m, b, k_evicted = 3584, 28, 100, 5000, 1740
print(f"predictor {predictor_flops(d):,}, attention {token_flops(layers, d):,} operations a cached token")
print(
    f"break-even: K > {break_even(d, layers):.1f} at the first trigger, {break_even(d, layers, 4):.1f} at the fourth"
)
gains = torch.tensor([gain(i, m, b, k_evicted, d, layers) for i in range(1, 8001)], dtype=torch.float64)
paid = repaid(m, b, k_evicted, d, layers)
first = next(i for i in range(1, 8001) if triggers(i, m, b, k_evicted))
print(f"the first trigger comes at step {first}; all steps together have paid from step {paid} on")
assert int((gains.cumsum(0) > 0).nonzero()[0]) + 1 == paid == 5507
figure, axis = plt.subplots(figsize=(10, 2.4), layout="constrained")
axis.plot(gains.cumsum(0) / 1e9, color=BLUE)
axis.axhline(0, color="black", linewidth=0.5)
axis.set(xlabel="step", ylabel="saved so far, GFLOP")
plt.show()

# %% [markdown]
# A text that ends before the first trigger costs more than with a full cache, and saves nothing. On a GPU the bytes
# matter more than the operations: the predictor's weights are read once in a step for the whole batch, and the cache
# is read for each sequence.
#
# ## Three things to remember
#
# 1. Importance for the answer is known only after the answer; DynTS predicts it when the token is written, once.
# 2. One set of tokens for all layers and heads, three windows, and a cache length that is a sawtooth.
# 3. What the predictor learns matters more than how well it learns it. On the embedded model the best target is what
#    later lines read (*needs*). The answer's attention comes second. All later attention is predicted best (the
#    largest τ over 20 texts), and is no better than a window (`docs/dynts.md`).
#
# ## Exercises
#
# 1. **Another target.** Run the policy with `target=needs`. Which tokens does it hold that `dynts` has evicted?
# 2. **Without a predictor.** `ratio=0` keeps no old thinking at all. At which budget does the answer become wrong?
# 3. **A small K.** Choose `local` so large that the first trigger does not pay (eq. 10). Which
#    trigger is the first that pays? minithink warns only if all triggers of the longest text together never pay.
