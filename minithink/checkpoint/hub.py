"""Files from the Hugging Face hub, and what to do where they cannot be had."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from minithink.errors import MinithinkError, named, quoted

Kind = Literal["model", "dataset"]


def download(repo: str, patterns: Sequence[str], revision: str | None = None, kind: Kind = "model") -> Path:
    """The folder of a repository's snapshot, with the files that match the patterns, downloaded if not cached.

    Args:
        repo: an id such as `Qwen/Qwen3-0.6B`.
        patterns: of file paths in the repository, as `fnmatch` reads them: `*` matches a slash, too.
        revision: branch, tag or commit; None: `main`.
        kind: model or dataset.

    Raises:
        MinithinkError: the files cannot be fetched. HF_HUB_OFFLINE=1 is respected.
    """
    from huggingface_hub import snapshot_download  # here, because it is slow to import and local files need it not

    try:
        return Path(snapshot_download(repo, repo_type=kind, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # which exceptions leave a network library differs from version to version
        raise MinithinkError(_sentence(repo, revision or "main", kind, error)) from error


def _sentence(repo: str, revision: str, kind: Kind, error: Exception) -> str:
    """What to do about an error of huggingface_hub."""
    from huggingface_hub import constants, errors

    local = "folder" if kind == "model" else "file"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{repo}"
        login = "log in with `hf auth login` or set HF_TOKEN"
        return f"The {kind} {repo} is gated: accept its terms at {page}, then {login}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The {kind} {repo} is not at {constants.ENDPOINT}, or is private: check the spelling (or that the "
            f"{local} exists, if you meant one), or log in with `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The {kind} {repo} has no revision {quoted(revision)}: give one of its branches, tags or commits."
    if isinstance(error, errors.HFValidationError):
        return f"{quoted(repo)} is neither a {local} nor a valid Hugging Face id (name or owner/name): correct it."
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"The {kind} {repo} (revision {named(revision)}) is not complete in the cache {constants.HF_HUB_CACHE} "
            f"and HF_HUB_OFFLINE forbids downloading: unset it, or fetch the {kind} first."
        )
    # Nothing cached is only half of what happened; the cause says what the network did.
    cause = (error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None) or error
    reason = textwrap.shorten(str(cause).strip().removesuffix("."), 200, placeholder=" …") or type(cause).__name__
    return (
        f"The {kind} {repo} (revision {named(revision)}) could not be fetched from {constants.ENDPOINT}: check the "
        f"network and the free disk space and try again, or give a local {local} ({reason})."
    )
