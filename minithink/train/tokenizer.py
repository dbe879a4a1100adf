"""The files of a tokenizer that a run makes in a folder of its own, from which they are copied with the results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minithink.checkpoint.gguf_file import GGUF
from minithink.errors import unwritable
from minithink.tasks.prepare import CHAT_TEMPLATE
from minithink.text.gguf_tokenizer import tokenizer_files
from minithink.text.tokenizer import Tokenizer


def write_from_gguf(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file. Without a chat template it gets that of the puzzles.

    Args:
        path: the GGUF file.
        folder: as of `write_files`.

    Raises:
        MinithinkError: the file's tokenizer cannot be read, or the folder not be written.
    """
    template = Tokenizer.from_folder(path).chat_template or CHAT_TEMPLATE
    tokenizer, settings = tokenizer_files(GGUF.read(path).fields)
    settings.pop("chat_template", None)
    write_files(folder, tokenizer, settings, template)


def write_files(folder: Path, tokenizer: Mapping[str, Any], settings: Mapping[str, Any], template: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Args:
        folder: a temporary one of this process, which is made here.
        tokenizer: the content of tokenizer.json.
        settings: the content of tokenizer_config.json, without the template.
        template: of the chat.

    Raises:
        MinithinkError: the folder cannot be written.
    """
    contents = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=1) + "\n",
        "chat_template.jinja": template,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content.encode())  # no system turns its ends of lines into others
    except OSError as error:
        raise unwritable("The tokenizer", folder, error, "folder for temporary files (TMPDIR)") from None
