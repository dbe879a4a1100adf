"""The options that say which model a command loads, and how it is spoken to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from minithink.cli.commands import DECIMAL, location
from minithink.errors import UsageError, quoted
from minithink.text.tags import THINK, Tags, tags_of

WORDS = {"true": True, "false": False, "none": None, "null": None}  # values of --template that are no text


def model_name(model: str, adapter: Path | None) -> str:
    """How a record names a model, with what was merged into it."""
    return model if adapter is None else f"{model} --adapter {adapter}"


def add_model_arguments(parser: argparse.ArgumentParser, default: str | None = "tiny", tags: bool = True) -> None:
    """Add --model, --adapter, --template and --think-tags.

    Args:
        default: of `args.model`; None: the command must know whether the user named a model.
        tags: whether the command has --think-tags.
    """
    add = parser.add_argument
    add("--model", default=default, help="folder, GGUF file or Hugging Face id (default: the embedded model, tiny)")
    add(
        "--adapter",
        type=location,
        metavar="FOLDER",
        help="of a LoRA adapter in PEFT's format, which is merged into the model's weights",
    )
    add(
        "--template",
        type=variable,
        action=_Variables,
        metavar="NAME=VALUE",
        help="a variable of the model's chat template, as in enable_thinking=false; several --template are combined",
    )
    if not tags:
        return
    add(
        "--think-tags",
        type=pair,
        metavar="OPEN,CLOSE",
        help=f"the tags between which the model thinks, as in [THINK],[/THINK] (default: {','.join(THINK)})",
    )


def model_options(args: Any) -> dict[str, Any]:
    """What these options say, as options of `load`. args: an object with their values, such as a command's."""
    return {"adapter": args.adapter, "template": args.template, "think_tags": getattr(args, "think_tags", None)}


def model_settings(args: Any) -> dict[str, Any]:
    """What a record says of these options beside the model's name: only what was given."""
    said = dict[str, Any]()
    if args.template:
        said["template"] = args.template
    if getattr(args, "think_tags", None):
        said["think_tags"] = list(args.think_tags)
    return said


def pair(text: str) -> Tags:
    """For argparse: OPEN,CLOSE."""
    try:
        return tags_of(text.split(","))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


def variable(text: str) -> tuple[str, Any]:
    """For argparse: NAME=VALUE → the name and the value.

    The value is true, false, none, a number, JSON that begins with `{`, `[` or `"`, or else the text itself.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not NAME=VALUE, as in enable_thinking=false")
    if value.lower() in WORDS:
        return name, WORDS[value.lower()]
    if DECIMAL.fullmatch(value) or value[:1] in ("{", "[", '"'):
        try:
            return name, json.loads(value)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"the value of {quoted(name)} is no JSON: {error}") from None
    return name, value


class _Variables(argparse.Action):
    """Puts the variables into one dictionary."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name, value = values
        found = dict(getattr(namespace, self.dest) or {})
        if name in found:
            raise argparse.ArgumentError(self, f"it gives {quoted(name)} twice")
        found[name] = value
        setattr(namespace, self.dest, found)
