"""The end of a trace in a terminal: the text, shaded by how many heads keep each token; bytes; tokens of each
head."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minithink.cli.terminal import plain_console
from minithink.errors import CONTROL, counted
from minithink.trace.format import KINDS, File, Trace

# A token kept by more than this share of the heads has this style. The colours suit light and dark terminals.
STYLES = ((0.0, "on grey93"), (0.25, "on light_sky_blue1"), (0.5, "on sky_blue2"), (0.75, "on steel_blue1"))
NOBODY = "dim strike"
# The largest table of layers and heads.
ROWS = 256
COLUMNS = 64


def show(file: File, sequence: int, console: Console | None = None) -> None:
    """Print the end of a sequence's trace. Without colours, tokens that no head keeps stand in [brackets]."""
    trace = file.traces[sequence]
    console = console or plain_console()
    head = trace.head
    generated = max(0, trace.steps)
    policies = CONTROL.sub("\ufffd", " + ".join(head.policies))
    counts = f"{counted(trace.prompt, 'prompt token')}, {generated:,} generated and read"
    console.print(f"{policies}, sequence {sequence}: {counts}{file.cut}", soft_wrap=True)  # the terminal itself wraps
    about = [f"{key} {value}" for key, value in head.about.items()]
    about.append(f"{counted(head.layers, 'layer')} × {counted(head.kv_heads, 'KV head')}")
    console.print(CONTROL.sub("\ufffd", " ".join(" · ".join(about).split())), soft_wrap=True)
    coloured = bool(console.color_system) and not console.no_color
    console.print(text(trace, coloured), soft_wrap=True)
    if trace.steps < 0:
        return
    lost = int((trace.holders(trace.steps) == 0).sum())
    how = "the darker, the more heads keep it; struck out: none" if coloured else "in brackets: what no head keeps"
    which = f"{lost:,} of {counted(trace.tokens, 'token')} {'is' if lost == 1 else 'are'}"
    console.print(f"{which} kept by no head ({how})", soft_wrap=True)
    if trace.think_end >= 0:
        console.print(thinking(trace), soft_wrap=True)
    console.print(bytes_held(trace), soft_wrap=True)
    console.print(heads(trace))
    more = left_out(trace)
    if more:
        console.print(more, soft_wrap=True)


def text(trace: Trace, coloured: bool = True) -> Text:
    """All tokens as the cache holds them at the end."""
    shares = (trace.holders(max(0, trace.steps)) / trace.head.units).tolist()
    out = Text()
    gone = False
    for piece, share in zip(trace.texts, shares, strict=True):
        piece = CONTROL.sub("\ufffd", piece)
        if coloured:
            style = next((style for least, style in reversed(STYLES) if share > least), NOBODY)
            out.append(piece, "black " + style if share else style)
            continue
        if gone != (share == 0):
            out.append("]" if gone else "[")
            gone = not gone
        out.append(piece)
    return out.append("]" if gone else "")


def thinking(trace: Trace) -> str:
    """One line: by how many heads the thinking tokens are kept when thinking ends."""
    end = trace.think_end
    kept = trace.holders(end)[trace.prompt :][trace.thinks[1:] == 1]
    when = f"when thinking ends (step {end:,})" if end < trace.steps else "at the last step, for there is no answer"
    every = int((kept == trace.head.units).sum())
    none = int((kept == 0).sum())
    of = counted(len(kept), "thinking token")
    return f"{every:,} of {of} {'is' if every == 1 else 'are'} kept by all heads {when}, {none:,} by no head"


def bytes_held(trace: Trace) -> str:
    """One line: bytes at the end by kind, and the most at any step."""
    last = trace.ledger[-1]
    totals = trace.ledger.sum(1)
    full = trace.tokens * trace.head.full_bytes
    parts = ", ".join(f"{kind} {size:,}" for kind, size in zip(KINDS, last.tolist(), strict=True) if size)
    return (
        f"{totals[-1]:,} bytes held, {totals[-1] / full:.1%} of a full cache's {full:,} ({parts}); at most "
        f"{totals.max():,}"
    )


def heads(trace: Trace) -> Table:
    """Tokens that each head of each layer keeps at the end. Layers or heads that share a block table share a row or
    column."""
    layers, kv_heads = trace.head.tables
    table = Table(title="tokens kept", title_justify="left")
    table.add_column("")
    for head in range(min(kv_heads, COLUMNS)):
        table.add_column("all heads" if trace.head.scope != "head" else f"head {head}", justify="right")
    kept = trace.held(trace.steps).reshape(layers, kv_heads).tolist()
    for layer, row in enumerate(kept[:ROWS]):
        name = "all layers" if trace.head.scope == "sequence" else f"layer {layer}"
        table.add_row(name, *(f"{count:,}" for count in row[:COLUMNS]))
    return table


def left_out(trace: Trace) -> str:
    """A sentence if the table of `heads` does not show all layers and heads; "": it does."""
    layers, kv_heads = trace.head.tables
    if layers <= ROWS and kv_heads <= COLUMNS:
        return ""
    return f"the table shows the first {min(layers, ROWS):,} of {counted(layers, 'layer')} and the first " + (
        f"{min(kv_heads, COLUMNS):,} of {counted(kv_heads, 'head')}"
    )
