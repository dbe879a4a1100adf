"""What a trace costs: recording it, its bytes, and how long its page takes in a browser.

Recording: the embedded model decodes the same problem with and without a recorder, in pairs, one after the other, on
one thread; the ratio of their CPU seconds is the median of the pairs'. The page: a made-up trace of 16,384 tokens, 8
layers of 4 KV heads, every head with a budget and evictions of its own, opened in a fresh headless Chromium; times
are the browser's own, each until the frame is on the screen. Pictures for the documents are taken on request.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minithink import results
from minithink.bench.browser import chromium
from minithink.commands import positive
from minithink.engine import Engine, load
from minithink.policies import split
from minithink.tasks import load_problems
from minithink.trace.format import ARRAYS, KINDS, VERSION, Head, Writer, as_json, pack, read
from minithink.trace.page import render
from minithink.trace.recorder import Recorder

POLICIES = "full,rkv:budget=512,buffer=32,crystal_kv_lite:budget=512"
GOAL = 1.0  # seconds until a long trace is open, and again until the first scrub is shown
PICTURES = (  # name, dark, width, height, colour, share of the steps, share of the tokens that is pointed at
    ("trace-heads", False, 1180, 860, "heads", 0.8, 0.45),
    ("trace-score", True, 1180, 860, "score", 0.6, 0.42),
    ("trace-narrow", False, 500, 820, "sentence", 1.0, 0.5),
)
COLOURS = 160  # of a picture, which must be small
SCRUB = """
const done = arguments[1], time = document.getElementById("time"), began = performance.now();
time.value = arguments[0];
time.dispatchEvent(new Event("input"));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench trace`."""
    add = parser.add_argument
    add("--policies", default=POLICIES, metavar="A:X=1,B", help=f"default: {POLICIES}")
    add("--new-tokens", type=positive, default=256, metavar="N", help="default 256")
    add("--repeats", type=positive, default=3, metavar="N", help="pairs, and openings of the page (default 3)")
    add("--page-tokens", type=positive, default=16_384, metavar="N", help="default 16,384")
    add("--output", metavar="FILE", help="default: docs/results/trace.json")
    add("--pictures", nargs=2, metavar=("TRACE", "FOLDER"), help="only take pictures of this trace's page")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write, print; or take pictures."""
    if args.pictures:
        take_pictures(*map(Path, args.pictures))
        return 0
    torch.set_num_threads(1)  # two threads on busy cores wait for each other: the pairs would compare that
    result = results.new("trace", argv)
    result["settings"] = {"device": "cpu", "dtype": "float32", "threads": 1, "new_tokens": args.new_tokens}
    return results.collect(results.output(args, "trace"), result, measurements(args), line)


def measurements(args: argparse.Namespace) -> Iterator[results.Measurement]:
    """Recording under every policy, then a page."""
    engine = load(None, device="cpu", dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        for policy in split(args.policies):
            yield recording(engine, policy, args.new_tokens, args.repeats, Path(folder) / "trace")
        yield page(args.page_tokens, args.repeats, Path(folder))


def line(m: results.Measurement) -> str:
    """For people."""
    if m["what"] == "recording":
        said = f"× {m['ratio']:.3f}, {m['bytes_per_step']:,.0f} bytes and {m['events']:,} events"
        return f"{m['policy']:32} {said}"
    return f"page: open {m['open_seconds']:.2f} s, scrub {m['first_scrub_seconds']:.3f} s, {m['page_bytes']:,} bytes"


def recording(engine: Engine, policy: str, count: int, repeats: int, path: Path) -> dict[str, Any]:
    """Decode with and without a recorder, in pairs."""
    question = max(load_problems("validation"), key=lambda p: p.thinking_tokens).question

    def seconds(recorder: Recorder | None) -> tuple[float, float]:
        stream = engine.stream(question, policy=policy, max_new_tokens=count, seed=1, recorder=recorder)
        begin, cpu = time.perf_counter(), time.process_time()  # what else runs here delays, but takes no CPU time
        for _ in stream.steps():
            pass
        if recorder is not None:
            recorder.close()
        return time.process_time() - cpu, time.perf_counter() - begin

    seconds(None)  # warm
    pairs = []
    for _ in range(repeats):
        recorder = Recorder(path, engine.tokenizer)
        pairs.append((seconds(None), seconds(recorder)))
    ratios = [traced / plain for (plain, _), (traced, _) in pairs]
    return {
        "what": "recording",
        "policy": policy,
        "steps": recorder.steps,
        "cpu_seconds": statistics.median(traced for _, (traced, _) in pairs),
        "seconds": pairs[-1][1][1],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "recorder_seconds": recorder.seconds,  # that it counted itself, in the last pair
        "events": recorder.events,
        "bytes": recorder.size,
        "bytes_per_step": recorder.size / recorder.steps,
    }


def page(tokens: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Open the page of a made-up trace, and move its slider."""
    trace, html = folder / "long.trace", folder / "long.html"
    made_up(trace, tokens)
    begin = time.perf_counter()
    file = read(trace)
    html.write_text(render(file, 0), encoding="utf-8")
    rendered = time.perf_counter() - begin
    opened, first, later = list[float](), list[float](), list[float]()
    steps = file.traces[0].steps
    for _ in range(repeats):
        with chromium() as driver:
            version = driver.capabilities["browserVersion"]
            driver.get(html.as_uri())
            opened.append(_shown(driver) / 1e3)
            times = [
                driver.execute_async_script(SCRUB, int(share * steps)) / 1e3 for share in np.linspace(0.5, 1, 12)
            ]
            first.append(times[0])
            later += times[1:]
    worst = max(max(opened), max(first))
    return {
        "what": "page",
        "tokens": tokens,
        "layers": 8,
        "kv_heads": 4,
        "events": len(file.traces[0].evict_pos),
        "trace_bytes": trace.stat().st_size,
        "page_bytes": html.stat().st_size,
        "render_seconds": rendered,
        "browser": f"Chromium {version}",
        "open_seconds": statistics.median(opened),
        "first_scrub_seconds": statistics.median(first),
        "later_scrub_seconds": statistics.median(later),
        "worst_seconds": worst,
        "target": GOAL,
        "target_reached": worst < GOAL,
    }


def _shown(driver: Any) -> float:
    """Milliseconds from navigation until the page was on the screen."""
    from selenium.webdriver.support.ui import WebDriverWait

    mark = "return performance.getEntriesByName('shown')[0]?.startTime"
    return float(WebDriverWait(driver, 60, 0.05).until(lambda d: d.execute_script(mark)))


def made_up(path: Path, tokens: int, layers: int = 8, heads: int = 4, budget: int = 1024, prompt: int = 200) -> None:
    """Write a trace in which every head keeps a budget by evicting tokens by lot, and every token has a score."""
    rng = np.random.default_rng(0)
    units, steps, lines = layers * heads, tokens - prompt, rng.integers(12, 30)
    words = [rng.choice([" so", " x", " =", " 42", " then", " +", " need", " value"]) for _ in range(tokens)]
    coded = [(".\n" if i % lines == lines - 1 else str(word)).encode() for i, word in enumerate(words)]
    events = []
    for unit in range(units):
        held = list(range(prompt))
        for step in range(1, steps + 1):
            held.append(prompt + step - 1)
            if len(held) > budget:
                at = int(rng.integers(len(held)))
                events.append((step, unit, held[at]))
                held[at] = held[-1]
                held.pop()
    events.sort()
    at_step, of_unit, at_pos = (np.array(column) for column in zip(*events, strict=True))
    every = np.arange(0, steps + 1, 32)
    counts = prompt + every
    kept = np.minimum(prompt + np.arange(steps + 1), budget) * units * 512
    ledger = np.zeros((steps + 1, len(KINDS)), dtype=np.int64)
    ledger[:, 0], ledger[:, 2] = kept, kept // 64
    values: dict[str, Any] = {
        "ids": rng.integers(0, 1600, tokens), "pieces": [len(c) for c in coded],
        "text": np.frombuffer(b"".join(coded), dtype=np.uint8), "thinks": np.arange(steps + 1) < 0.9 * steps,
        "thought": np.zeros(steps + 1), "bytes": ledger.ravel(),
        "evict_step": at_step, "evict_unit": of_unit, "evict_pos": at_pos, "evict_by": np.zeros(len(at_step)),
        "evict_score": rng.normal(size=len(at_step)),
        "move_step": [], "move_unit": [], "move_pos": [], "move_to": [],
        "budget_step": [0], "budget": np.full(units, budget),
        "score_step": every, "score_by": np.zeros(len(every)), "score_count": counts,
        "score_pos": np.concatenate([np.arange(n) for n in counts]), "rank": rng.integers(0, 256, counts.sum()),
    }  # fmt: skip
    head = Head(
        layers=layers, kv_heads=heads, scope="head", policies=["by lot"], formats=["plain"], thoughts=[0],
        thought_names=[], prompt_thought=0, buffer=0, full_bytes=512 * units, about={"model": "made up"},
    )  # fmt: skip
    writer = Writer(path)
    writer.chunk(b"HEAD", as_json({"version": VERSION, **vars(head)}))
    arrays = {name: np.asarray(values[name]).astype(dtype) for name, (dtype, _) in ARRAYS.items()}
    writer.chunk(b"PART", pack({"sequence": 0, "prompt": prompt}, arrays))
    writer.chunk(b"DONE", as_json({"seconds": 0.0, "steps": steps + 1, "events": len(at_step)}))
    writer.close()


def take_pictures(trace: Path, folder: Path) -> None:
    """Screenshots of a trace's page, as PICTURES says."""
    from PIL import Image
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import Select

    file = read(trace)
    sequence = min(file.traces)
    with tempfile.TemporaryDirectory() as temporary:
        html = Path(temporary) / "trace.html"
        html.write_text(render(file, sequence), encoding="utf-8")
        for name, dark, width, height, colour, step, token in PICTURES:
            with chromium(width, height, dark) as driver:
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                driver.get(html.as_uri())
                _shown(driver)
                Select(driver.find_element("id", "mode")).select_by_value(colour)
                driver.execute_async_script(SCRUB, int(step * file.traces[sequence].steps))
                find = "const e = document.querySelectorAll('#text span')[arguments[0]]; "
                find += "e.scrollIntoView({ block: 'center' }); scrollTo(0, 0); return e"
                span = driver.execute_script(find, int(token * file.traces[sequence].tokens))
                ActionChains(driver).move_to_element(span).perform()
                driver.execute_script("scrollTo(0, 0)")
                time.sleep(0.3)
                picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
                picture = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                picture.save(folder / f"{name}.png", optimize=True)
                print(f"taken: {folder / name}.png")
