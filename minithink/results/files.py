"""Files that are read only if they are regular files, replaced whole or not at all, or appended to by one process at
a time; folders that are there only when they are whole; JSON that people read."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minithink.errors import MinithinkError, UsageError, escaped, quoted, unwritable

try:
    import fcntl
except ImportError:  # Windows has no such locks: two processes may open the same file there
    fcntl = None  # type: ignore[assignment]

DIGITS = 5  # that are kept of every measurement
WIDTH = 240  # characters of a line that holds a whole list or object
BLOCK = 2**20  # bytes that are read at once
LARGEST = 2**28  # bytes of a file that is read whole: more than ten times a published tokenizer.json


def read_bytes(path: Path, at_most: int = LARGEST) -> bytes:
    """The content of a regular file, which is read without waiting.

    Raises:
        OSError: it cannot be read; it is a pipe, a device or another thing that has no end; or it is too large.
    """
    with open_regular(path) as file:
        content = bytearray()
        size = os.fstat(file.fileno()).st_size  # 0 for files that the system makes up
        while size <= at_most:
            block = file.read(BLOCK)
            if not block:
                break
            content += block
            size = max(size, len(content))
    if size > at_most:
        raise OSError(f"it is larger than {at_most:,} bytes")
    return bytes(content)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. OSError: it cannot be read, or is a pipe or a device."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, but do not wait for the writer of a pipe. Windows has no such flag, and no such pipes."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def replace(path: Path, content: str | bytes) -> None:
    """Write a file, with the folder it lies in. An earlier file of that name is replaced only by a whole one; links
    lead to it. What is no file, such as /dev/stdout, is written to.

    Raises:
        OSError: it cannot be written; the earlier file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # root could put a file in the place of a device
        path.write_bytes(data)
        return
    path = _resolved(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:  # with the mode that the umask asks for
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)
        raise


def _resolved(path: Path) -> Path:
    """The path to which links lead. OSError: they lead in a circle."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:  # `resolve` would raise a RuntimeError, or from Python 3.13 on nothing
            raise
    return path.resolve()


def check_place(path: Path) -> None:
    """Ask whether `replace` could write a file there, before the work that makes its content. Nothing is written.

    Raises:
        OSError: it could not.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():  # such as /dev/stdout
        return
    folder = _resolved(path).parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def new_folder(path: Path, what: str, option: str) -> Iterator[tuple[Path, Path]]:
    """A folder that is written, and is at its place when the context has ended well. Else nothing of it is left.

    Args:
        path: where it will be. An empty folder may be there.
        what: what is written, as the beginning of a sentence: "The model".
        option: of the command line, which names the place.

    Yields:
        The folder, which the caller makes; and an empty folder on the same disk for files that are not to last.

    Raises:
        UsageError: something is there already.
        MinithinkError: the folder cannot be written: any OSError within the context.
    """
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{escaped(path)} is there already, and nothing is overwritten: give another {option}.")
    try:
        parent = path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".new-") as temporary:
            folder = Path(temporary, "folder")
            spare = Path(temporary, "spare")
            spare.mkdir()
            yield folder, spare
            if path.is_dir():
                path.rmdir()  # it is empty
            os.rename(folder, path)
    except OSError as error:
        raise unwritable(what, escaped(path), error, option) from None


def open_to_others(path: Path) -> None:
    """Give a file the mode that `open` gives to a new one: what the umask says. safetensors makes private files."""
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _remove(path: Path) -> None:
    """Remove a file, if it is there and can be removed."""
    with contextlib.suppress(OSError):
        path.unlink()


def hold(path: Path) -> io.FileIO:
    """Open a file for appending, and keep other processes out until it is closed. The file is made if there is none,
    with its folder. The system closes the files of a process that dies.

    A process that is refused has changed nothing: never remove or truncate a file before it is held.

    Raises:
        MinithinkError: another process holds the file.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("ab", buffering=0)  # appended: no write ever lands on another
        try:
            if not _lock(file, exclusive=True):
                raise in_use(path.parent)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the process that held this file has removed it: open the one that is there now


def in_use(folder: Path) -> MinithinkError:
    """What is raised where another process writes to the files of a folder."""
    return MinithinkError(
        f"Another process is writing to {folder}: wait until it ends, stop it, or give another folder."
    )


def is_held(path: Path) -> bool:
    """Whether some process holds a file, this one or another. A file that is not there is not held."""
    try:
        with path.open("rb") as file:
            return not _lock(file, exclusive=False)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process has its turn in a folder; then this one has it until the context ends.

    The folder is made if there is none. Where there are no such locks, nobody waits.

    Raises:
        OSError: the folder cannot be made or opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_held(file: io.FileIO, path: Path) -> None:
    """Remove a file that this process holds, then let go of it: no other process holds the file when it goes."""
    try:
        if fcntl is None:  # Windows removes no file that is open
            file.close()
        path.unlink(missing_ok=True)
    finally:
        file.close()


def _lock(file: io.IOBase, exclusive: bool) -> bool:
    """Lock a file until it is closed → False: another process has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: no process is kept out
        return True
    return True


def _is_at(file: io.FileIO, path: Path) -> bool:
    """Whether a path leads to an open file. A lock belongs to the file; another process may have removed its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def append(file: io.FileIO, line: bytes) -> None:
    """Write at the end of a file, all of it or nothing. OSError: it cannot be written; the file is as it was."""
    size = os.fstat(file.fileno()).st_size
    try:
        if (written := file.write(line)) != len(line):  # the disk became full within the line
            raise OSError(f"{written} of {len(line)} bytes fitted")
    except OSError:
        file.truncate(size)
        raise


def rounded(value: Any) -> Any:
    """Every float in a tree to DIGITS significant digits; the others as they are. Infinities and NaN become None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def loads(text: str | bytes, parse_int: Callable[[str], int] = int) -> Any:
    """JSON as `dumps` writes it. ValueError: it is no JSON, or a number in it is NaN or infinite."""
    return json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=parse_int)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{quoted(text)} is too large")
    return number


def dumps(value: Any, indent: str = "") -> str:
    """JSON with two spaces of indentation. What fits into WIDTH characters takes one line; so does a list of plain
    values."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = indent + "  "
    if len(indent + line) <= WIDTH:
        return line
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(k)}: {dumps(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, (list, dict)) for v in value):
        return "[\n" + ",\n".join(inner + dumps(v, inner) for v in value) + f"\n{indent}]"
    return line
