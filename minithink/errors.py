"""Errors that a user can act on.

Each message is one sentence with the actual values and what to do. The command line prints it without a traceback:
`UsageError` ends with exit code 2, every other `MinithinkError` with 1.
"""


class MinithinkError(Exception):
    """Something failed that is not a bug of minithink: a bad file, a missing model, not enough memory."""


class UsageError(MinithinkError):
    """What was asked for makes no sense as asked: an unknown policy, a negative temperature."""
