"""Compile every kernel for the GPUs that it claims, without one: what the interpreter lets pass may not compile."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from minithink.cli.commands import natural
from minithink.errors import UsageError, alternatives, counted, quoted

ARCHITECTURES = (80, 90)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="modules of kernels/ (default: all)")
    parser.add_argument("--arch", type=natural, action="append", metavar="SM", help="80 or 90 (default: both)")


def modules() -> list[str]:
    """Names of the modules that hold kernels."""
    import minithink.kernels as package

    folder = next(Path(path) for path in package.__path__ if Path(path, "README.md").exists())
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit code 1 if anything did not compile."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise UsageError("TRITON_INTERPRET=1 interprets the kernels: unset it to compile them.")
    unknown = [name for name in args.names if name not in modules()]
    if unknown:
        raise UsageError(f"There is no kernel named {quoted(unknown[0])}; {alternatives(unknown[0], modules())}.")
    pairs = [(name, arch) for name in args.names or modules() for arch in args.arch or ARCHITECTURES]
    failed = 0
    # processes that begin anew: what this one has loaded need not survive a fork
    with ProcessPoolExecutor(min(len(pairs), os.cpu_count() or 1), get_context("spawn")) as pool:
        for said, errors in pool.map(check, *zip(*pairs, strict=True)):
            print(said, flush=True)
            print("".join(f"{error}\n" for error in errors), end="", file=sys.stderr)
            failed += len(errors)
    if failed:
        print(f"{counted(failed, 'variant')} did not compile.", file=sys.stderr)
    return int(failed > 0)


def check(name: str, arch: int) -> tuple[str, list[str]]:
    """Compile a module's variants: what there is to say of all of them, and of those that do not compile."""
    variants = importlib.import_module(f"minithink.kernels.{name}").variants()
    fitting = [variant for variant in variants if variant.arch <= arch]
    errors = list[str]()
    shared = 0
    for variant in fitting:
        try:
            shared = max(shared, compiled(variant, arch).metadata.shared)
        except Exception as error:  # whatever the compiler raises is the finding
            errors.append(f"{name} sm_{arch} {variant.constexprs}: {error}")
    said = f"{name:20} sm_{arch}  {len(fitting):3} variants, at most {shared / 1024:.0f} KiB of shared memory"
    return said, errors


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
