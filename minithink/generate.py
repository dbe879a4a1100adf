"""The command line: `python -m minithink.generate [PROMPT]`.

Without a prompt, the embedded model gets one of its test problems; the prompt `-` is standard input, which is read
only then. Thinking is shown dimmed, or in the colour of its thought where a policy knows types, the answer normally.
In a pipe there is neither colour nor progress; `--json` prints one object a sequence and nothing else.

Exit codes: 0 done, 1 failed, 2 asked for something that makes no sense, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from minithink import __version__
from minithink.commands import CONTROL, INTERRUPTED, location, positive
from minithink.errors import MinithinkError, UsageError, reason

if TYPE_CHECKING:  # torch is imported late, so that --help and --version are quick
    from minithink.engine import Engine
    from minithink.stream import Chunk, Result, Stream
    from minithink.trace.recorder import Recorder

PROMPT_FIELDS = ("prompt", "question", "problem")


class Task(NamedTuple):
    """One prompt, and the answer if it is known."""

    prompt: str
    answer: str | None = None


THOUGHTS = {"reasoning": "green", "execution": "cyan", "transition": "yellow"}  # styles, by thought type


class Screen:
    """Standard output: dimmed and normal text on a terminal, plain text elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows ? for what it lacks
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        # NO_COLOR takes every style here, not only colours.
        self.styled = self.console.is_terminal and not os.environ.get("NO_COLOR")
        self.begun = False  # a line that has not ended

    def write(self, text: str, style: str = "") -> None:
        """Show text as it is, now. On a terminal, control characters become U+FFFD."""
        if text:
            self.begun = not text.endswith("\n")
        if not self.console.is_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        from rich.text import Text

        self.console.print(Text(CONTROL.sub("\ufffd", text), style=style if self.styled else ""), end="")

    def line(self, text: str = "", style: str = "") -> None:
        """Show text and end the line."""
        self.write(text + "\n", style)

    def end_line(self) -> None:
        """End the line, if one has begun."""
        if self.begun:
            self.line()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        try:
            args = _parser().parse_args(argv)
            if args.list_policies:
                from minithink.policies import POLICIES, describe

                for policy in POLICIES.values():
                    print(f"{policy.name:16} {policy.summary}\n{'':16}   {describe(policy)}")
                return 0
            return run(args)
        finally:
            sys.stdout.flush()  # here, where what fails is caught
    except MinithinkError as error:
        print(f"minithink: {CONTROL.sub(' ', ' '.join(str(error).split()))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # before there was anything to show
        print("minithink: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        if error.errno == errno.EPIPE:  # whoever read the output has had enough
            return 0
        print(f"minithink: the output could not be written ({error.strerror}): make room for it.", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Load the model, generate, show."""
    tasks = _tasks(args)
    from minithink.engine import load

    names = ("revision", "device", "dtype", "backend", "calibration")
    engine = load(args.model, **{name: getattr(args, name) for name in names})
    if ignored := engine.generation_config.ignored:
        print(
            f"minithink: generation_config.json asks for {', '.join(ignored)}, which is not supported and is left "
            "out.",
            file=sys.stderr,
        )
    if args.interactive:
        return _converse(engine, args, tasks)
    tasks = tasks or [_test_problem(args.seed)]
    begin = time.perf_counter()
    recorder = _recorder(engine, args)
    try:
        stream = engine.stream(
            [task.prompt for task in tasks], chat=args.chat, system=args.system, recorder=recorder, **_options(args)
        )
        _warn_of_nonsense(args, [task.prompt for task in tasks])
        _caution(engine)
        return _generate(args, tasks, stream)
    finally:
        if recorder is not None:
            recorder.close()
            print(
                f"minithink: traced {recorder.steps:,} steps in {args.trace}, {recorder.size:,} bytes; recording "
                f"took {recorder.seconds:.2f} of {time.perf_counter() - begin:.2f} s. To look at it: "
                f"python -m minithink.trace view {args.trace}",
                file=sys.stderr,
            )


def _caution(engine: Engine) -> None:
    """Say what is doubtful about what policies know of the model."""
    for line in sorted(engine.cautions):
        print(f"minithink: {line}.", file=sys.stderr)


def _warn_of_nonsense(args: argparse.Namespace, prompts: list[str]) -> bool:
    """Say so where nobody chose the embedded model and it is asked what it cannot know → whether there was need."""
    if args.model is not None:
        return False
    from minithink.tasks import families, holds_question
    from minithink.tasks.writing import listing

    if not (strange := sum(not holds_question(prompt) for prompt in prompts)):
        return False
    which = "the prompt" if len(prompts) == 1 else f"{strange} of {len(prompts)} prompts"
    print(
        f"minithink: the embedded model knows its tasks only, {listing(families())}, and {which} "
        f"{'is' if strange == 1 else 'are'} of none of them: expect nonsense. Without a prompt, "
        "python -m minithink.generate shows an example (--seed 1, 2, …: of the other tasks); for other questions, "
        "name a model with --model.",
        file=sys.stderr,
    )
    return True


def _recorder(engine: Engine, args: argparse.Namespace) -> Recorder | None:
    """What --trace asks for."""
    if args.trace is None:
        return None
    from minithink.trace.recorder import Recorder

    names = ("model", "policy", "budget", "schedule", "seed", "temperature")
    about = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return Recorder(args.trace, engine.tokenizer, about={"model": "tiny", **about})


def _generate(args: argparse.Namespace, tasks: list[Task], stream: Stream) -> int:
    """Generate and show → the exit code."""
    if args.json:
        code = _until_interrupted(lambda: _run_with_progress(stream))
        for result in _begun(stream):
            verdict = _verdict(result, tasks[result.prompt].answer)
            print(json.dumps({**asdict(result), "verdict": verdict}), flush=True)
        return code
    screen, pieces = Screen(), defaultdict[tuple[int, int], list[tuple[str, str]]](list)
    begin = time.perf_counter()
    if len(stream.sequences) == 1:
        if not (args.prompt or args.prompt_text or args.prompt_file):
            screen.line(tasks[0].prompt + "\n")
        code = _until_interrupted(lambda: _show_live(screen, stream))
    else:  # colours of thoughts are known while they are thought
        code = _until_interrupted(lambda: _collect(stream, pieces) if screen.styled else _run_with_progress(stream))
    seconds = time.perf_counter() - begin
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
    return code


def thoughts(results: list[Result]) -> list[str]:
    """What the policy knows of thoughts, a line for each sequence: segments by type, bits, what was done."""
    lines = []
    for r in results:
        if r.kv_thoughts:
            segments = ", ".join(f"{r.kv_thoughts[name]} {name}" for name in THOUGHTS if name in r.kv_thoughts)
            bits = f"{r.kv_bits:.1f} bits a number with its scales" if r.kv_bits is not None else ""
            who = f"[prompt {r.prompt}, sample {r.sample}] " if len(results) > 1 else ""
            held = f"{r.kv_tokens:,} of {r.prompt_tokens + r.generated_tokens:,} tokens held a lane"
            parts = (f"segments: {segments}", r.kv_notes, held, bits)
            lines.append(who + "; ".join(part for part in parts if part))
    return lines


def summary(results: list[Result], seconds: float) -> str:
    """One line: tokens, speed, memory."""
    tokens, thought = sum(r.generated_tokens for r in results), sum(r.thinking_tokens for r in results)
    held, full = sum(r.kv_bytes for r in results), sum(r.kv_full_bytes for r in results)
    when = " at the end, in all" if len(results) > 1 else ""  # they need not have been held together
    kinds = Counter[str]()
    for r in results:
        kinds.update(r.kv_ledger)
    parts = ", ".join(f"{kind} {size / 2**20:,.2f}" for kind, size in kinds.items() if size)
    against = f", {held / full:.1%} of a full cache's {full / 2**20:,.1f} MiB ({parts})" if held != full else ""
    reasons = ", ".join(sorted({r.finish_reason for r in results})) or "interrupted"
    return (
        f"{sum(r.prompt_tokens for r in results):,} prompt tokens, {tokens:,} generated ({thought:,} thinking) in "
        f"{seconds:.1f} s: {tokens / max(seconds, 1e-9):,.0f} tokens/s; "
        f"KV cache {held:,} bytes ({held / 2**20:,.1f} MiB) held{when}{against}; {reasons}"
    )


def _show_live(screen: Screen, stream: Stream) -> None:
    for chunk in stream:
        if chunk.text:
            screen.write(chunk.text, _style(chunk))


def _style(chunk: Chunk) -> str:
    return THOUGHTS.get(chunk.thought, "dim") if chunk.stage == "think" else ""


def _collect(stream: Stream, pieces: dict[tuple[int, int], list[tuple[str, str]]]) -> None:
    """Run to the end; what would have been shown live, and how, is put into `pieces`, by prompt and sample."""
    with _progress() as advance:
        for chunk in stream:
            pieces[chunk.prompt, chunk.sample].append((chunk.text, _style(chunk)))
            advance(1)


def _show(screen: Screen, text: str, pieces: list[tuple[str, str]]) -> None:
    """A sequence's text; `pieces` of it have styles, and what an interrupt took from these is shown as the last."""
    style = ""
    for style, group in groupby(pieces, lambda piece: piece[1]):
        screen.write("".join(piece for piece, _ in group), style)
    screen.write(text[sum(len(piece) for piece, _ in pieces) :], style)


def _run_with_progress(stream: Stream) -> None:
    with _progress() as advance:
        for count in stream.steps():
            advance(count)


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Counts tokens in a line if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.completed:,} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)


def _until_interrupted(work: Callable[[], None]) -> int:
    """Do the work; the exit code that says whether Ctrl-C ended it. What is done by then remains."""
    try:
        work()
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _begun(stream: Stream) -> list[Result]:
    return [result for result in stream.results if result.token_ids]


def _verdict(result: Result, answer: str | None) -> str | None:
    """right or wrong; None where no answer is known, or the sequence was interrupted. A box in the
    thinking does not count, whether or not the thinking came to an end."""
    from minithink.tasks import grade

    if answer is None or result.finish_reason == "interrupted":
        return None
    return "right" if grade(result.answer, answer) else "wrong"


def _what_was_right(result: Result, answer: str | None) -> str:
    """The end of the verdict `wrong`: the answer, and whether there was room for one."""
    if result.finish_reason == "stop":
        return f"the answer is {answer}"
    where = "within its" if result.answer else "before an"
    return f"cut off after {result.generated_tokens:,} tokens, {where} answer (it is {answer})"


def _converse(engine: Engine, args: argparse.Namespace, tasks: list[Task]) -> int:
    """Turn after turn, until the input ends. Earlier turns are in the prompt, earlier thinking is not."""
    if engine.tokenizer.chat_template is None:
        raise UsageError("--interactive needs a chat template, and the model has none: drop --interactive.")
    screen, asking = Screen(), sys.stdin.isatty()
    if asking:
        print("minithink: every line is a turn of the conversation; Ctrl-D ends it.", file=sys.stderr)
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    said = [task.prompt for task in tasks]
    warned = False
    while True:
        try:
            text = said.pop() if said else input("> " if asking else "")
        except EOFError:
            return 0
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        ids = engine.chat_ids(messages)
        if len(ids) >= engine.config.max_position:
            print(
                f"minithink: the conversation would have {len(ids):,} tokens and the context holds "
                f"{engine.config.max_position:,}: say something shorter, or start anew.",
                file=sys.stderr,
            )
            messages.pop()
            continue
        warned = warned or _warn_of_nonsense(args, [text])
        stream = engine.stream([ids], **_options(args))
        if len(messages) == 1 + (args.system is not None):  # the first turn
            _caution(engine)
        begin = time.perf_counter()
        code = _until_interrupted(lambda stream=stream: _show_live(screen, stream))  # type: ignore[misc]
        screen.end_line()
        screen.line(summary(_begun(stream), time.perf_counter() - begin), "dim")
        if code:
            return code
        messages.append({"role": "assistant", "content": stream.result.answer})


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = "max_new_tokens temperature top_k top_p min_p seed num_samples batch_size policy budget schedule"
    return {name: getattr(args, name) for name in names.split()}


def _test_problem(seed: int) -> Task:
    """The families take turns: facts, ledger, search, facts, …"""
    from minithink.tasks import families, load_problems

    number, turn = divmod(seed, len(names := families()))
    problems = load_problems("test", names[turn])
    problem = problems[number % len(problems)]
    return Task(problem.question, problem.answer)


def _tasks(args: argparse.Namespace) -> list[Task]:
    """The prompts that were given, after a look at what contradicts itself."""
    given = [text for text in (args.prompt_text, args.prompt) if text is not None]
    if len(given) + (args.prompt_file is not None) > 1:
        raise UsageError("There are two prompts: give PROMPT, --prompt or --prompt-file, only one of them.")
    if args.system is not None and args.chat is False:
        raise UsageError("--system needs the chat template that --no-chat turns off: drop one of them.")
    if args.interactive:
        for flag in ("json", "prompt_file", "trace"):
            if getattr(args, flag):
                raise UsageError(f"--interactive does not go with --{flag.replace('_', '-')}: drop one of them.")
        if args.num_samples != 1 or args.chat is False:
            raise UsageError("--interactive is one chat: drop --num-samples or --no-chat.")
        if "-" in given:
            raise UsageError("--interactive reads its turns from standard input: drop the prompt `-`.")
    if "-" in (*given, args.prompt_file):
        given = [_standard_input()]
    elif args.prompt_file is not None:
        return read_prompts(Path(args.prompt_file))
    if given and not given[0].strip():
        raise UsageError("The prompt is empty: give at least one word.")
    return [Task(text) for text in given]


def _standard_input() -> str:
    """All of it, without the ends of its last line."""
    try:
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # with or without a byte order mark
        return sys.stdin.read().rstrip("\n") if sys.stdin is not None else ""
    except (OSError, ValueError) as error:
        raise UsageError(f"Standard input cannot be read as text: {reason(error)}.") from None


def read_prompts(path: Path) -> list[Task]:
    """A .jsonl file holds one object a line, with `prompt`, `question` or `problem`, and `answer` where it is known;
    any other file is one prompt, without the ends of its last line.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, ValueError) as error:
        raise UsageError(f"The prompt file {path} cannot be read as text: {reason(error)}.") from None
    tasks = []
    if path.suffix.lower() != ".jsonl":
        tasks = [Task(text.rstrip("\n"))] if text.strip() else []
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                tasks.append(_task(line, f"{path}, line {number}"))
    if not tasks:
        raise UsageError(f"The prompt file {path} is empty: put at least one prompt into it.")
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}.") from None
    found = [row[name] for name in PROMPT_FIELDS if name in row] if isinstance(row, dict) else []
    if not found or not isinstance(found[0], str) or not found[0].strip():
        raise UsageError(
            f"{where} has no text in a field named {', '.join(PROMPT_FIELDS[:-1])} or {PROMPT_FIELDS[-1]}."
        )
    answer = row.get("answer")
    return Task(found[0], None if answer is None else str(answer))


class _Parser(argparse.ArgumentParser):
    """One line about what is wrong, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help).")


def _parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m minithink.generate", description="Generate with a reasoning model.", allow_abbrev=False
    )
    add = p.add_argument
    add("prompt_text", nargs="?", metavar="PROMPT", help="- is standard input, which is read only then (default: a "
        "test problem of the embedded model, by --seed)")  # fmt: skip
    add("--version", action="version", version=f"minithink {__version__}")
    add("--list-policies", action="store_true", help="print the policies and exit")
    add("--model", help="folder or Hugging Face id (default: the embedded model, tiny)")
    add("--revision", help="branch, tag or commit of the Hugging Face id")
    add("--prompt", help="the same as PROMPT")
    add("--prompt-file", metavar="FILE", help=".jsonl: an object a line, with prompt, question or problem, perhaps "
        "answer; any other file, and - for standard input, is one prompt")  # fmt: skip
    add("--system", help="system message of the chat")
    add("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if there is one)")
    add("--interactive", action="store_true", help="a conversation: one turn a line of the input")
    add("--policy", help="what stays in the KV cache, as in window:budget=256 (default: all of it; --list-policies)")
    add("--budget", type=positive, metavar="TOKENS", help="what a policy keeps to")
    add("--schedule", help="when a policy evicts: every, interval:n or sawtooth:B/k")
    add("--calibration", metavar="FOLDER", help="where minithink.calibrate wrote its files (default: beside the "
        "model)")  # fmt: skip
    add("--max-new-tokens", type=positive, metavar="N", help="default: the model's own, or what fits")
    add("--temperature", type=float, help="0 is greedy (this and the next three default to the model's own)")
    add("--top-k", type=int, help="0 is off")
    add("--top-p", type=float, help="1 is off")
    add("--min-p", type=float, help="0 is off")
    add("--seed", type=int, default=0, help="of the draws, and of the test problem (default: 0)")
    add("--num-samples", type=positive, default=1, metavar="N", help="sequences for each prompt (default: 1)")
    add("--batch-size", type=positive, metavar="N", help="sequences at once (default: up to 32 that fit)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    add("--backend", default="auto", help="auto, reference, triton")
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
