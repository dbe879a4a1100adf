"""Errors that a user can act on.

Each message is one sentence with the actual values and what to do. The command line prints it without a traceback:
`UsageError` ends with exit code 2, every other `MinithinkError` with 1.
"""


class MinithinkError(Exception):
    """Something failed that is not a bug of minithink: a bad file, a missing model, not enough memory."""


class UsageError(MinithinkError):
    """What was asked for makes no sense as asked: an unknown policy, a negative temperature."""


def reason(error: Exception) -> str:
    """Why something failed, for such a sentence: of an OSError without its number, and without the path that the
    sentence has already."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def unwritable(what: str, path: object, error: OSError, other: str) -> MinithinkError:
    """What is raised where a file cannot be written. other: what to give another of."""
    return MinithinkError(f"{what} cannot be written to {path}: {reason(error)}; give another {other}.")
