"""The reference that is verified is the one that runs: a short generation calls every twin of `minithink/ref/`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from minithink.backend import REFERENCE, Backend
from minithink.loop import DecodeLoop
from minithink.model import Decoder
from minithink.policies import parse
from minithink.sampling import SamplingParams
from tests.kv.run import feed, manager_for, text_of
from tests.strategies import example_config, random_decoder

# Between them they do all that there is to do.
POLICIES = (
    "rkv:budget=12,buffer=4,alpha=3,compaction=gather",
    "crystal_kv:budget=18,realloc_every=4,min_budget=2",
    "thinkv:budget=20,tau=4,retention=2/1,g=4,block=2,layers=0/1,thresholds=0.21/0.31",
    "pm_kvq:bits=4,max_len=16,sink=1,window=4,group=16,block=2",
    "dynts:budget=18,local=3",
    "kivi:bits=4,group=16,residual=16,flush=official",
    "skipkv:budget=14,schedule=interval:4,alpha=3",
    "ada_snapkv:budget=12,buffer=4,alpha=3",
    "raas:budget=14",
    "raas:budget=16,page=4,form=official",
    "h2o:budget=14",
    "random_attention:budget=18,buffer=3",
    "morphkv:budget=14",
    "triattention:budget=14,buffer=3",
)
# `survivors` is made of K-means, which no policy asks for by itself.
INSIDE = {"kmeans": "survivors"}
FUNCTIONS = [f.name for f in fields(Backend) if callable(getattr(REFERENCE, f.name))]


def counting(calls: Counter[str]) -> Backend:
    """The reference, whose functions are counted."""

    def counted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return of(*args, **named)

        return call

    return replace(REFERENCE, **{name: counted(name, getattr(REFERENCE, name)) for name in FUNCTIONS})


def test_every_twin_runs() -> None:
    config, calls = example_config(head_dim=16, hidden_size=32), Counter[str]()
    backend, plain = counting(calls), random_decoder(example_config(head_dim=16, hidden_size=32), 1)
    decoder = Decoder(config, backend).requires_grad_(False)
    decoder.load_state_dict(plain.state_dict())
    for text in POLICIES:
        manager = manager_for(decoder, parse(text), backend=backend, rows=2, tokens=60, poison=False)
        loop, last = DecodeLoop(decoder, manager, SamplingParams(temperature=0.8, seed=1)), [1, 2]
        for seq, n in ((0, 9), (1, 5)):
            manager.join(seq, 60, n)
            feed(decoder, manager, {seq: text_of(config, n, seq)})
        for _ in range(30):
            last = loop.step([0, 1], last)
        assert manager.length(0) == 39
    assert set(FUNCTIONS) - set(calls) == set(INSIDE)
    assert all(calls[outer] for outer in INSIDE.values())
