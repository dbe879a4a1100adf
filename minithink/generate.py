"""The command line: `python -m minithink.generate [PROMPT]`.

Without a prompt, the embedded model gets one of its test problems. The prompt `-` is standard input, which is read
only then. On a terminal, thinking is dimmed, or has the colour of its thought type if the policy knows types; the
answer is shown normally. In a pipe there is neither colour nor progress. `--json` prints one object a sequence and
nothing else.

Exit codes: 0 done, 1 failed, 2 asked for something that makes no sense, 130 interrupted by Ctrl-C, 143 by SIGTERM,
129 by SIGHUP.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from minithink.cli.commands import (
    SCHEDULES,
    Parser,
    exit_code,
    finite,
    integer,
    location,
    natural,
    positive,
    tokens_or_bytes,
)
from minithink.cli.cores import MANY, Interruptions
from minithink.cli.models import add_model_arguments, model_name, model_options, model_settings
from minithink.cli.process import INTERRUPTED
from minithink.cli.prompts import Task, embedded_problem, nonsense_expected, read_prompts, standard_input
from minithink.cli.terminal import Screen, counter, until_interrupted
from minithink.errors import NON_FINITE, UsageError, counted, escaped, quoted
from minithink.text.looped import looped

if TYPE_CHECKING:  # torch is imported late, so that --help and --version are quick
    from minithink.engine import Engine
    from minithink.sequence import Chunk, Result
    from minithink.stream import Stream
    from minithink.trace.recorder import Recorder

SURROGATE = re.compile("[\ud800-\udfff]")
THOUGHTS = {"reasoning": "green", "execution": "cyan", "transition": "yellow"}  # thought type → style
CUT_OFF = ("length", "context", "interrupted")  # finish_reasons of sequences that did not end by themselves
Pieces = dict[tuple[int, int], list[tuple[str, str]]]  # prompt and sample → texts with their styles


def main(argv: list[str] | None = None) -> int:
    """Run the command line → the exit code. argv: None: what the program was called with."""
    return exit_code("minithink", lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    out = sys.stdout
    if not args.json:
        return _load_and_run(args, out)
    with redirect_stdout(sys.stderr):  # what a policy's code prints stays apart from the objects
        return _load_and_run(args, out)


def _load_and_run(args: argparse.Namespace, out: TextIO) -> int:
    if args.policy is not None:
        from minithink.policies import load

        load(args.policy)
    if args.list_policies:
        from minithink.policies import POLICIES, describe, summary_of

        for name, policy in POLICIES.items():
            print(f"{name:16} {summary_of(policy)}", file=out)
            for option, meaning in describe(policy).items():
                print(f"    {option:42} {meaning}".rstrip(), file=out)
        return 0
    return run(args, out)


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Load the model, generate, show. out: where the objects of --json go."""
    tasks = _tasks(args)
    from minithink.engine import load

    names = ("revision", "device", "dtype", "backend", "calibration")
    engine = load(args.model, **model_options(args), **{name: getattr(args, name) for name in names})
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    caution = engine.generation_config.caution
    if caution:
        _say(f"{caution}.")
    if args.interactive:
        return _converse(engine, args, tasks)
    tasks = tasks or [embedded_problem(args.seed)]
    begin = time.perf_counter()
    recorder = _recorder(engine, args)
    try:
        stream = engine.stream(
            [task.prompt for task in tasks], chat=args.chat, system=args.system, recorder=recorder, **_options(args)
        )
        _warn_of_nonsense(args, [task.prompt for task in tasks])
        _warn_of_eviction(args, stream)
        _caution(engine)
        return _generate(args, tasks, stream, out)
    finally:
        if recorder is not None:
            recorder.close()
            _say(
                f"traced {counted(recorder.steps, 'step')} in {args.trace}, {recorder.size:,} bytes; recording took "
                f"{recorder.seconds:.2f} of {time.perf_counter() - begin:.2f} s. To look at it: "
                f"python -m minithink.trace view {args.trace}"
            )


def _say(message: str) -> None:
    """A line on standard error, beside the output."""
    print(f"minithink: {escaped(message)}", file=sys.stderr)


def _caution(engine: Engine) -> None:
    """Say what is doubtful about the model's files and about the calibration that a policy uses."""
    for line in sorted(engine.cautions):
        _say(f"{line}.")


def _warn_of_nonsense(args: argparse.Namespace, prompts: list[str]) -> bool:
    """Warn if the user named no model and asks the embedded one what it cannot know → whether it was necessary."""
    warning = nonsense_expected(prompts) if args.model is None else ""
    if warning:
        _say(warning)
    return bool(warning)


def _warn_of_eviction(args: argparse.Namespace, stream: Stream) -> None:
    """Warn if the policy keeps fewer tokens than a prompt has, and may evict a part of it. Say how many tokens a
    budget in bytes is."""
    from minithink.kv.byte_size import ByteSize
    from minithink.kv.sizes import least_kept
    from minithink.policies import read

    if args.policy is None:
        return
    written = read(args.policy)
    policy = written.make(budget=args.budget, schedule=args.schedule, tokens_of=stream.loaded.tokens_of)
    size = args.budget if isinstance(args.budget, ByteSize) else written.size
    if size is not None:
        _say(f"{stream.loaded.said_of_bytes(policy, size)}.")
    least = least_kept(policy)
    longest = max(len(sequence.prompt) for sequence in stream.sequences)
    if least is not None and least < longest:
        _say(
            f"the prompt has {counted(longest, 'token')}, and {args.policy} keeps {least:,}: parts of the question "
            "may be evicted; give a larger budget, or protect_prompt=true."
        )


def _recorder(engine: Engine, args: argparse.Namespace) -> Recorder | None:
    """The recorder that --trace asks for; None: there is no --trace."""
    if args.trace is None:
        return None
    from minithink.trace.recorder import Recorder

    about = {"model": model_name(args.model or "tiny", args.adapter), **model_settings(args)}
    for name in ("policy", "budget", "schedule", "seed", "temperature"):
        value = getattr(args, name)
        if value is not None:
            about[name] = value
    return Recorder(args.trace, engine.tokenizer, about=about)


def _generate(args: argparse.Namespace, tasks: list[Task], stream: Stream, out: TextIO) -> int:
    """Generate and show → the exit code. out: where the objects of --json go."""
    if args.json:
        code = until_interrupted(lambda: _run_with_progress(stream))
        for result in _begun(stream):
            verdict = _verdict(result, tasks[result.prompt].answer)
            print(json.dumps({**asdict(result), "verdict": verdict}), file=out, flush=True)
        _say_what_never_applied(args, stream)
        _say_what_never_thought(args, stream)
        return code or _say_why_not_finite(stream)
    screen = Screen()
    pieces = defaultdict[tuple[int, int], list[tuple[str, str]]](list)
    interruptions = Interruptions()
    begin = time.perf_counter()
    if len(stream.sequences) == 1:
        if not (args.prompt or args.prompt_text or args.prompt_file):
            screen.line(tasks[0].prompt + "\n")
        code = until_interrupted(lambda: _show_live(screen, stream))
    else:  # a token's thought type is known only in the step that generates it
        code = until_interrupted(lambda: _collect(stream, pieces) if screen.styled else _run_with_progress(stream))
    seconds = time.perf_counter() - begin
    interrupted = interruptions.a_second()
    results = _begun(stream)
    for result in results:
        if len(stream.sequences) > 1:
            screen.line(f"[prompt {result.prompt}, sample {result.sample}]")
            _show(screen, result.text, pieces[result.prompt, result.sample])
        screen.end_line()
        answer = tasks[result.prompt].answer
        if verdict := _verdict(result, answer):
            screen.line(verdict if verdict == "right" else f"wrong: {_what_was_right(result, answer)}")
    screen.line(summary(results, seconds), "dim")
    for line in thoughts(results):
        for part in re.split(rf"\b({'|'.join(THOUGHTS)})\b", line):  # each type's name in its colour: the legend
            screen.write(part, THOUGHTS.get(part, "dim"))
        screen.line()
    _say_what_never_applied(args, stream)
    _say_what_never_thought(args, stream)
    _hint_at_threads(stream, interrupted)
    return code or _say_why_not_finite(stream)


def _hint_at_threads(stream: Stream, interrupted: float) -> None:
    """Say that one thread may be faster, if other programs kept the cores busy. interrupted: how often a second."""
    import torch

    alone = len(stream.sequences) == 1 and stream.loaded.device.type == "cpu"
    if alone and interrupted >= MANY and torch.get_num_threads() > 1:
        _say("other programs kept the cores busy; --threads 1 may be faster.")


def _say_what_never_applied(args: argparse.Namespace, stream: Stream) -> None:
    """Say if the policy should evict and no token was evicted: then the texts are those of the full cache."""
    results = _begun(stream)
    if not results or any(r.kv_evicted for r in results):
        return
    longest = max(r.prompt_tokens + r.generated_tokens for r in results)
    if stream.budget is None:
        if stream.decides_on_plain_tokens:
            _say(
                f"nothing was evicted: {args.policy} has no budget, and its `decide` dropped none of up to "
                f"{longest:,} tokens."
            )
        return
    thought = None
    if stream.exempts_answers:
        # A text that never opens the thinking counts as thinking.
        thought = max(r.prompt_tokens + (r.thinking_tokens or r.generated_tokens) for r in results)
    _say(f"nothing was evicted: {never_applied(args.policy, stream.budget, longest, thought)}")


def never_applied(policy: str, budget: int, longest: int, thought: int | None = None) -> str:
    """Why a budget never applied.

    Args:
        longest: tokens of the longest text, with its prompt.
        thought: of a policy that evicts only while the model thinks, the tokens at the end of the longest thinking.
    """
    if longest <= budget:
        return f"{policy} keeps {budget:,} tokens, and no text has more than {longest:,}."
    if thought is not None and thought <= budget:
        return (
            f"{policy} keeps {budget:,} tokens while the model thinks, and with its prompt no thinking has more than "
            f"{thought:,}; answers stay beside the budget."
        )
    return f"{policy} keeps {budget:,} tokens and texts have up to {longest:,}, but it was never due to evict."


def _say_what_never_thought(args: argparse.Namespace, stream: Stream) -> None:
    """Say if the policy evicts only while the model thinks, and texts never opened the thinking."""
    from minithink.text.thinking import never_opened

    tokenizer = stream.loaded.tokenizer
    if not stream.exempts_answers or None in tokenizer.think_ids:
        return
    results = _begun(stream)
    never = sum(not r.thinking_tokens for r in results)
    said = never_opened(args.policy, never, len(results), tokenizer.tags)
    if said:
        _say(f"{said}.")


def _say_why_not_finite(stream: Stream) -> int:
    """If some sequence's logits were not finite, say why → the exit code."""
    why = stream.diagnose()
    if why:
        _say(why)
    return int(bool(why))


def thoughts(results: list[Result]) -> list[str]:
    """A line for each sequence whose policy knows thought types: segments by type, notes, tokens held, bits. Of other
    policies the notes, if there are any."""
    lines = []
    for r in results:
        who = f"[prompt {r.prompt}, sample {r.sample}] " if len(results) > 1 else ""
        if r.kv_thoughts:
            segments = ", ".join(f"{r.kv_thoughts[name]} {name}" for name in THOUGHTS if name in r.kv_thoughts)
            bits = f"{r.kv_bits:.1f} bits a number with its scales" if r.kv_bits is not None else ""
            held = f"{r.kv_tokens:,} of {r.prompt_tokens + r.generated_tokens:,} tokens held a lane"
            parts = (f"segments: {segments}", r.kv_notes, held, bits)
            lines.append(who + "; ".join(part for part in parts if part))
        elif r.kv_notes:
            lines.append(who + r.kv_notes)
    return lines


def summary(results: list[Result], seconds: float) -> str:
    """One line: tokens, speed, memory. seconds: that generating took."""
    tokens, thought = sum(r.generated_tokens for r in results), sum(r.thinking_tokens for r in results)
    held, full = sum(r.kv_bytes for r in results), sum(r.kv_full_bytes for r in results)
    when = " at the end, in all" if len(results) > 1 else ""  # sequences need not have run at the same time
    kinds = Counter[str]()
    for r in results:
        kinds.update(r.kv_ledger)
    parts = ", ".join(f"{kind} {size / 2**20:,.2f}" for kind, size in kinds.items() if size)
    free = sum(r.kv_free_bytes for r in results)
    beside = f"; {free / 2**20:,.2f} MiB more are free slots in its pages" if free else ""
    against = f", {held / full:.1%} of a full cache's {full / 2**20:,.1f} MiB ({parts} MiB)" if held != full else ""
    reasons = ", ".join(sorted({r.finish_reason for r in results})) or "interrupted"
    prompts = counted(sum(r.prompt_tokens for r in results), "prompt token")
    return (
        f"{prompts}, {tokens:,} generated ({thought:,} thinking) in "
        f"{seconds:.1f} s: {tokens / max(seconds, 1e-9):,.0f} tokens/s; "
        f"KV cache {held:,} bytes ({held / 2**20:,.1f} MiB) held{when}{against}{beside}; {reasons}"
        f"{_hint_at_loops(results)}"
    )


def _hint_at_loops(results: list[Result]) -> str:
    """What the summary says of texts that would go on forever; "": there are none."""
    cut_off = [r for r in results if r.finish_reason in CUT_OFF]
    loops = sum(looped(r.token_ids) for r in cut_off)
    if not loops:
        return ""
    who = "the text" if len(results) == 1 else f"{loops} of {len(results)} texts"
    verb = "repeats" if loops == 1 else "repeat"
    return f"; at the end {who} {verb} the same again and again: more tokens do not help, --stop-loops ends it"


def _show_live(screen: Screen, stream: Stream) -> None:
    for chunk in stream:
        if chunk.text:
            screen.write(chunk.text, _style(chunk))


def _style(chunk: Chunk) -> str:
    return THOUGHTS.get(chunk.thought, "dim") if chunk.stage == "think" else ""


def _collect(stream: Stream, pieces: Pieces) -> None:
    """Run to the end, and put into `pieces` the texts that would have been shown live, with their styles."""
    with counter() as advance:
        for chunk in stream:
            pieces[chunk.prompt, chunk.sample].append((chunk.text, _style(chunk)))
            advance(1)


def _show(screen: Screen, text: str, pieces: list[tuple[str, str]]) -> None:
    """Show a sequence's text with the styles of its pieces. After an interrupt the text may be longer than they are:
    the rest has the style of the last piece."""
    style = ""
    for style, group in groupby(pieces, lambda piece: piece[1]):
        screen.write("".join(piece for piece, _ in group), style)
    screen.write(text[sum(len(piece) for piece, _ in pieces) :], style)


def _run_with_progress(stream: Stream) -> None:
    with counter() as advance:
        for count in stream.steps():
            advance(count)


def _begun(stream: Stream) -> list[Result]:
    return [result for result in stream.results if result.token_ids or result.finish_reason == NON_FINITE]


def _verdict(result: Result, answer: str | None) -> str | None:
    """ "right" or "wrong"; None: no answer is known, or the sequence broke off. A \\boxed{} in the thinking does not
    count, even if the thinking did not end."""
    from minithink.tasks import grade

    if answer is None or result.finish_reason in ("interrupted", NON_FINITE):
        return None
    return "right" if grade(result.answer, answer) else "wrong"


def _what_was_right(result: Result, answer: str | None) -> str:
    """The end of the verdict "wrong": the right answer, and whether the sequence was cut off."""
    if result.finish_reason == "stop":
        return f"the answer is {answer}"
    where = "within its" if result.answer else "before an"
    return f"cut off after {counted(result.generated_tokens, 'token')}, {where} answer (it is {answer})"


def _converse(engine: Engine, args: argparse.Namespace, tasks: list[Task]) -> int:
    """A conversation, until the input ends → the exit code. A prompt holds the earlier turns without the thinking.

    Ctrl-C ends a turn of a user at a terminal, and its answer so far stays in the conversation. A question that has
    no answer yet is asked again together with the next line. A second Ctrl-C, at the prompt, ends the program.
    """
    if engine.tokenizer.chat_template is None:
        raise UsageError("--interactive needs a chat template, and the model has none: drop --interactive.")
    screen = Screen()
    asking = sys.stdin.isatty()
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no text become surrogates, and are refused line by line
        sys.stdin.reconfigure(encoding=None if asking else "utf-8-sig", errors="surrogateescape")
    if asking:
        _say("every line is a turn of the conversation; Ctrl-C ends a turn, Ctrl-D the conversation.")
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    said = [task.prompt for task in tasks]
    warned = False
    first = True
    while True:
        try:
            text = said.pop() if said else input("> " if asking else "")
        except EOFError:
            return 0
        if not text.strip():
            continue
        if SURROGATE.search(text):
            _say(f"the line {quoted(text)} holds bytes that are no text: it is left out.")
            continue
        asked = _with_turn(messages, text)
        ids = engine.chat_ids(asked)
        if len(ids) >= engine.config.max_position:
            _say(
                f"the conversation would have {len(ids):,} tokens and the context holds "
                f"{engine.config.max_position:,}: say something shorter, or start anew."
            )
            continue
        messages = asked
        warned = warned or _warn_of_nonsense(args, [text])
        stream = engine.stream([ids], **_options(args))
        if first:
            _caution(engine)
        first = False
        begin = time.perf_counter()
        code = until_interrupted(lambda stream=stream: _show_live(screen, stream))  # type: ignore[misc]
        screen.end_line()
        screen.line(summary(_begun(stream), time.perf_counter() - begin), "dim")
        code = code or _say_why_not_finite(stream)
        answer = stream.result.answer
        if answer or not code:
            messages.append({"role": "assistant", "content": answer})
        if code == INTERRUPTED and asking:
            _say("the turn is ended; Ctrl-C again ends the program.")
        elif code:
            return code


def _with_turn(messages: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    """The messages and a line of the user. If the last question has no answer, the line is added to it: templates
    want users and assistants to take turns."""
    if messages and messages[-1]["role"] == "user":
        text = f"{messages[-1]['content']}\n\n{text}"
        messages = messages[:-1]
    return [*messages, {"role": "user", "content": text}]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    drawing = "temperature top_k top_p min_p seed num_samples batch_size"
    names = f"max_new_tokens stop_loops {drawing} policy budget schedule cache"
    return {name: getattr(args, name) for name in names.split()}


def _tasks(args: argparse.Namespace) -> list[Task]:
    """The prompts that were given. UsageError: two options contradict each other."""
    given = [text for text in (args.prompt_text, args.prompt) if text is not None]
    if len(given) + (args.prompt_file is not None) > 1:
        raise UsageError("There are two prompts: give PROMPT, --prompt or --prompt-file, only one of them.")
    if args.system is not None and args.chat is False:
        raise UsageError("--system needs the chat template that --no-chat turns off: drop one of them.")
    if args.template and args.chat is False:
        raise UsageError("--template needs the chat template that --no-chat turns off: drop one of them.")
    if args.trace is not None and args.cache == "plain":
        raise UsageError("--trace listens to pages: drop it, or --cache plain.")
    if args.interactive:
        for flag in ("json", "prompt_file", "trace"):
            if getattr(args, flag):
                raise UsageError(f"--interactive does not go with --{flag.replace('_', '-')}: drop one of them.")
        if args.num_samples != 1 or args.chat is False:
            raise UsageError("--interactive is one chat: drop --num-samples or --no-chat.")
        if "-" in given:
            raise UsageError("--interactive reads its turns from standard input: drop the prompt `-`.")
    if "-" in (*given, args.prompt_file):
        given = [standard_input()]
    elif args.prompt_file is not None:
        return read_prompts(Path(args.prompt_file))
    if given and not given[0].strip():
        raise UsageError("The prompt is empty: give at least one word.")
    return [Task(text) for text in given]


def _parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m minithink.generate", description="Generate with a reasoning model.")
    add = p.add_argument
    add(
        "prompt_text",
        nargs="?",
        metavar="PROMPT",
        help="- is standard input, which is read only then "
        "(default: a test problem of the embedded model, by --seed)",
    )
    add("--list-policies", action="store_true", help="print the policies and exit")
    add_model_arguments(p, default=None)
    add("--revision", help="branch, tag or commit of the Hugging Face id")
    add("--prompt", help="the same as PROMPT")
    add(
        "--prompt-file",
        metavar="FILE",
        help=".jsonl: an object a line, with prompt, question or problem, perhaps answer; "
        "any other file, and - for standard input, is one prompt",
    )
    add("--system", help="system message of the chat")
    add("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if there is one)")
    add("--interactive", action="store_true", help="a conversation: one turn a line of the input")
    add(
        "--policy",
        metavar="P",
        help="what stays in the KV cache, as in window:budget=256, or FILE.py:Class of your own (default: all of it; "
        "--list-policies)",
    )
    add(
        "--budget",
        type=tokens_or_bytes,
        metavar="TOKENS",
        help="how many tokens each KV head may keep under the policy, those of the prompt included; or the bytes of "
        "keys and values that a sequence may have, as in 2MiB, which are made tokens",
    )
    add("--schedule", help=f"when a policy evicts: {SCHEDULES}")
    add(
        "--calibration",
        type=location,
        metavar="FOLDER",
        help="where minithink.calibrate wrote its files (default: beside the model)",
    )
    add("--max-new-tokens", type=positive, metavar="N", help="default: the model's own, or what fits")
    add("--temperature", type=finite, help="0 is greedy (this and the next three default to the model's own)")
    add("--top-k", type=integer, help="0 is off")
    add("--top-p", type=finite, help="1 is off")
    add("--min-p", type=finite, help="0 is off")
    add("--stop-loops", action="store_true", help="end a sequence that only repeats itself")
    add("--seed", type=natural, default=0, help="of the draws, and of the test problem (default: 0)")
    add("--num-samples", type=positive, default=1, metavar="N", help="sequences for each prompt (default: 1)")
    add("--batch-size", type=positive, metavar="N", help="sequences at once (default: up to 32 that fit)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    add(
        "--cache",
        default="auto",
        help="what holds keys and values: auto, paged, or plain (the same tokens, in code that is easier to read)",
    )
    add("--backend", default="auto", help="auto, reference, triton")
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="of torch, on a CPU (default: its own choice); 1 is best for "
        "one sequence where other programs keep the cores busy",
    )
    add(
        "--trace",
        type=location,
        metavar="FILE",
        help="record what happens in the cache; python -m minithink.trace view FILE shows it",
    )
    add("--json", action="store_true", help="print one JSON object a sequence and nothing else")
    return p


if __name__ == "__main__":
    sys.exit(main())
