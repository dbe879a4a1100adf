"""Compile every kernel for the GPUs that it claims, without one: what the interpreter lets pass may not compile.

A thread that needs more registers than it may have *spills*: it keeps numbers in memory and reads them again, which
can take longer than everything else that the kernel does. `cuobjdump`, which comes with Triton, says how many bytes
of memory each thread has. For sm_90, which the kernels are tuned for, more than ALLOWED are an error, except for the
kernels of SPILLING. Other versions of Triton spill more or less: with them the bytes are printed, and are no error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from minithink.cli.commands import natural, positive
from minithink.errors import UsageError, alternatives, counted, quoted
from minithink.results.origin import cores

ARCHITECTURES = (80, 90)
TUNED = 90  # spills are an error here
ALLOWED = 32  # bytes that a thread may spill
TRITON = "3.8."  # the version that SPILLING is of

# Known exceptions by `title`: the most bytes that a thread spills, and why.
_LIMITED = "the limit was measured on an H200 with Triton 3.6, with which a thread spills at most 48 bytes"
_LARGE = "a thread would need more than the 255 registers that it can have"
_PLAIN = "the path for tq1, and for words that are misaligned, decodes each code by itself, all planes at once"
SPILLING = {
    "append._append": (40, "ptxas stops at 64 registers by itself; only with D = 96 and 6 query heads"),
    "linear._few_rows": (104, _LARGE),
    "paged_attention._attend, fp8 8, maxnreg 128": (160, _LIMITED),
    "paged_attention._attend, int 4, maxnreg 128": (80, _LIMITED),
    "paged_attention._attend, nvfp4 4, by token, maxnreg 168": (128, _LIMITED),
    "paged_attention._attend, tq-unbiased 4, maxnreg 168": (40, _LIMITED),
    "paged_attention._attend, tq-unbiased 1, slow": (208, _PLAIN),
    "paged_attention._attend, tq-unbiased 3, slow": (1488, _PLAIN),
    "paged_attention._attend, tq-unbiased 4, slow": (4272, _PLAIN + "; ptxas takes only 32 registers"),
    "running_redundancy._match": (216, _LARGE),
    "survivors._survive, fp8 8, slow": (88, _LARGE),
    "survivors._survive, plain 16, slow": (40, _LARGE),
    "survivors._survive, ternary 2, by token, slow": (80, _LARGE),
    "survivors._survive, tq-unbiased 2, slow": (56, _LARGE),
    "survivors._survive, tq-unbiased 4, slow": (288, _LARGE),
    "window_importance._logits": (584, _LARGE),
    "window_peak._logits": (208, _LARGE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="modules of kernels/ (default: all)")
    parser.add_argument("--arch", type=natural, action="append", metavar="SM", help="80 or 90 (default: both)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: one for each core)")


def modules() -> list[str]:
    """Names of the modules that hold kernels."""
    import minithink.kernels as package

    folder = next(Path(path) for path in package.__path__ if Path(path, "README.md").exists())
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit code 1 if anything did not compile, or spills more than it may."""
    try:
        import triton  # its own version: a package of another name may bring it
    except ImportError:
        raise UsageError("Kernels need Triton, which is not installed (it exists for Linux only).") from None

    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise UsageError("TRITON_INTERPRET=1 interprets the kernels: unset it to compile them.")
    unknown = [name for name in args.names if name not in modules()]
    if unknown:
        raise UsageError(f"There is no kernel named {quoted(unknown[0])}; {alternatives(unknown[0], modules())}.")
    pairs = [(name, arch) for name in args.names or modules() for arch in args.arch or ARCHITECTURES]
    failed = 0
    limited = triton.__version__.startswith(TRITON)
    jobs = min(len(pairs), args.jobs or cores() or 1)
    # Processes that begin anew: what this one has loaded need not survive a fork.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        try:
            with _signals_later():  # and not before the pool is made: its tracker of resources lets signals through
                results = pool.map(check, *zip(*pairs, strict=True))  # starts them
            for said, errors, spills in results:
                print(said, flush=True)
                errors = errors + spills if limited else errors
                print("".join(f"{error}\n" for error in errors), end="", file=sys.stderr)
                failed += len(errors)
        except BaseException:  # a signal came, or standard output is closed
            for process in active_children():  # the pool would wait until they have compiled what they began
                process.terminate()
            raise
    if failed:
        print(f"{counted(failed, 'variant')} did not compile, or spilled too many registers.", file=sys.stderr)
    return int(failed > 0)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Answer signals that end the program afterwards: a process that is half started would be left behind.

    A process that is started meanwhile never gets SIGINT, not even while it loads its modules: Ctrl-C is for this
    one.
    """
    came = list[int]()
    handlers = dict[int, Any]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # else processes inherit that it is ignored
            handlers[number] = signal.signal(number, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for changed, handler in handlers.items():
            signal.signal(changed, handler)
        for arrived in came:
            signal.raise_signal(arrived)


def check(name: str, arch: int) -> tuple[str, list[str], list[str]]:
    """Compile a module's variants: what there is to say of all of them, of those that do not compile, and of those
    that spill more than they may."""
    variants = importlib.import_module(f"minithink.kernels.{name}").variants()
    fitting = [variant for variant in variants if variant.arch <= arch]
    errors = list[str]()
    spills = list[str]()
    shared = 0
    most = 0
    for variant in fitting:
        try:
            made = compiled(variant, arch)
        except Exception as error:  # whatever the compiler raises is the finding
            errors.append(f"{name} sm_{arch} {variant.constexprs}: {error}")
            continue
        shared = max(shared, made.metadata.shared)
        spilled = spilled_bytes(made.asm["cubin"])
        most = max(most, spilled)
        titled = title(name, variant)
        allowed, _ = SPILLING.get(titled, (ALLOWED, ""))
        if arch == TUNED and spilled > allowed:
            spills.append(
                f"{titled} sm_{arch}: a thread spills {spilled} bytes, more than {allowed}: {variant.constexprs}"
            )
    said = f"{name:20} sm_{arch}  {len(fitting):3} variants, at most {shared / 1024:.0f} KiB of shared memory"
    if most:
        said += f", {most} bytes spilled by a thread"
    return said, errors, spills


def title(name: str, variant: Any) -> str:
    """What SPILLING calls a variant: its module and kernel, the format of keys if it has one, the limit of registers
    if it has one."""
    words = [f"{name}.{variant.kernel.fn.__name__}"]
    k = variant.constexprs.get("K")
    if hasattr(k, "by_token"):
        words.append(f"{k.kind} {k.bits}")
        words += ["by token"] if k.by_token else []
        words += [] if k.fast else ["slow"]
    if "maxnreg" in variant.options:
        words.append(f"maxnreg {variant.options['maxnreg']}")
    return ", ".join(words)


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of memory that each thread of a compiled kernel has for what its registers do not hold."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(stack) for stack in re.findall(r"\bSTACK:(\d+)", said))


def compiled(variant: Any, arch: int) -> Any:
    """Triton's compiled kernel of a `kernels._common.Variant`; pointers are taken to be aligned to 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(variant.kernel, signature, constexprs=dict(variant.constexprs), attrs=aligned)
    return compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=dict(variant.options))
