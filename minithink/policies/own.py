"""Policies of a user's own: a class in a file, in a module, or in an installed package.

    mine.py:Mine        the class Mine of a file; folders may stand in front, as in ideas/mine.py:Mine
    ideas.mine:Mine     the class Mine of a module that Python can import
    mine                the name of an entry point of the group `minithink.policies`, of an installed package

To import a class is to run its file. So nothing here is called because of what a trace, a journal, a result or a
checkpoint says: command lines and Python code call it for what their user has named.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import linecache
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from minithink.errors import MinithinkError, UsageError, escaped, quoted, reason
from minithink.kv.contract import Policy

NAME = re.compile(r"[A-Za-z_][\w.-]*")  # of a policy that is named without a file or a module
# A file or module and a class. It is no policy with options: these have "=" behind the colon.
OWN = re.compile(r"(?P<where>[^:,+=]+):(?P<cls>[A-Za-z_]\w*)(?=[:,+]|$)")
OURS = "own_"  # begins the names of the modules of files
_FILES: dict[Path, tuple[bytes, ModuleType]] = {}  # a file → its content when it was run, and what it defined


def imported(name: str, known: Iterable[str] = ()) -> type[Policy]:
    """The class that a name such as `mine.py:Mine` or `ideas.mine:Mine` stands for. Its file is run, if it has not
    been run or was edited since.

    Args:
        name: as above.
        known: names of policies, one of which may have been meant if there is no such module.

    Raises:
        UsageError: there is no such file, module or class, or the class is no policy that a text can describe.
        MinithinkError: the file cannot be read or raised an error.
    """
    where, _, attribute = name.rpartition(":")
    module = _of_file(where) if where.endswith(".py") else _of_module(where, known)
    if not hasattr(module, attribute):
        others = [key for key, value in vars(module).items() if _is_defined_in(value, module)]
        there = f"its policies are {', '.join(others)}" if others else "there is no policy in it"
        raise UsageError(f"{escaped(where)} has no class {attribute}; {there}.")
    return checked(getattr(module, attribute), name)


def offered(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, of all installed packages. None of them is imported for that."""
    return {point.name: point for point in entry_points(group=group) if NAME.fullmatch(point.name)}


def of_package(point: EntryPoint) -> type[Policy]:
    """The policy of an entry point.

    Raises:
        UsageError, MinithinkError: as in `imported`.
    """
    package = f" of the package {point.dist.name}" if point.dist is not None else ""
    what = f"The policy {point.name}{package}"
    try:
        value = point.load()
    except (Exception, SystemExit) as error:
        raise MinithinkError(f"{what} cannot be imported: {_said(error)}.") from error
    return checked(value, point.name)


def checked(value: Any, name: str) -> type[Policy]:
    """The class, if it is a policy that a text can describe. A class that gives itself no `name` has its own, for
    messages. name: what the user wrote.

    Raises:
        UsageError: it is no such class.
    """
    name = escaped(name)
    if not (isinstance(value, type) and issubclass(value, Policy)):
        raise UsageError(
            f"{name} is {quoted(value)}, and a policy is a class that is derived from minithink.kv.contract.Policy."
        )
    known: set[str] = {f.name for f in fields(value)} if is_dataclass(value) else set()
    own = {key for key, kind in inspect.get_annotations(value).items() if "ClassVar" not in str(kind)}
    undecorated = "__dataclass_fields__" not in vars(value) and own - known
    if not is_dataclass(value) or undecorated:
        raise UsageError(f"{name} is no dataclass: write @dataclass above it, so that its fields become its options.")
    try:
        get_type_hints(value)
    except Exception as error:
        raise UsageError(f"The types of the fields of {name} cannot be read: {reason(error)}.") from error
    given = vars(value).get("name")
    if given is None or (isinstance(given, str) and not given):
        value.name = value.__name__
    return value


def refuse_path(text: str) -> None:
    """UsageError: a text names a file whose path has a character that parts a policy's text, such as a comma."""
    for found in re.finditer(r"\.py:", text):
        end = found.start() + len(".py")
        starts = [0, *(i + 1 for i in range(end) if text[i] in ",+")]
        for path in (text[start:end].strip() for start in starts):
            if set(path) & set(",+:=") and Path(path).expanduser().is_file():
                raise UsageError(
                    f"The path {escaped(path)} has a comma, a plus, a colon or an equals sign, which part a policy's "
                    "text: rename it, or start in its folder and name the file alone."
                )


def _of_file(where: str) -> ModuleType:
    """The module of a file, which is run if its content is new.

    Raises:
        MinithinkError: the file cannot be read, or raised an error.
    """
    path = Path(where).expanduser().resolve()
    try:
        source = path.read_bytes()
    except OSError as error:
        near = ""
        if isinstance(error, FileNotFoundError):
            near = _similar(path.name, (other.name for other in path.parent.glob("*.py")))
        said = f"{reason(error)}{near}"
        raise MinithinkError(f"The policy's file {escaped(where)} cannot be read: {said}.") from None
    before, module = _FILES.get(path, (None, None))
    if module is not None and before == source:
        return module
    digits = hashlib.sha256(bytes(path)).hexdigest()[:8]
    module = ModuleType(f"{OURS}{path.stem}_{digits}")  # a name that no module of Python or of a package has
    module.__file__ = str(path)
    _refuse_same_neighbours(path.parent)
    _also_from(path.parent)
    linecache.checkcache(str(path))  # for `inspect`, which reads the source again
    replaced = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses look for it there
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        if replaced is not None:
            sys.modules[module.__name__] = replaced
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        at = f" (line {line[-1]})" if line else ""
        raise MinithinkError(f"The policy's file {escaped(where)} raised an error{at}: {_said(error)}.") from error
    _FILES[path] = (source, module)
    return module


def _refuse_same_neighbours(folder: Path) -> None:
    """UsageError: a file in this folder has the name of a module that a policy in another folder has imported from
    there. Python has one module of a name, so the policy here would get that one."""
    others = {path.parent for path in _FILES} - {folder}
    if not others:
        return
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.startswith(OURS) or Path(file).parent not in others:
            continue
        if (folder / Path(file).name).is_file():
            raise UsageError(
                f"{escaped(folder / Path(file).name)} and {escaped(file)} are both the module {name}, and Python has "
                "one of a name: rename one, or run these policies apart."
            )


def _of_module(where: str, known: Iterable[str]) -> ModuleType:
    """An importable module; modules in the folder where the program was started are importable, too.

    Raises:
        UsageError: there is no such module, or it belongs to minithink.
        MinithinkError: it raised an error.
    """
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(f"{quoted(where)} is no module: name a policy's class as FILE.py:Class or module:Class.")
    if where.partition(".")[0] == "minithink":
        raise UsageError(f"{where} is a part of minithink, whose policies have names: see --list-policies.")
    _also_from(Path.cwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            near = _similar(error.name.rpartition(".")[2], _beside(error.name))
            if not near and "." not in error.name:
                near = _similar(error.name, known, "the policy ")
            raise UsageError(
                f"There is no module {error.name}{near}: name a policy's class as FILE.py:Class, or as module:Class "
                "where Python finds the module."
            ) from None
        raise MinithinkError(f"The policy's module {where} cannot be imported: {_said(error)}.") from error
    except (Exception, SystemExit) as error:
        raise MinithinkError(f"The policy's module {where} cannot be imported: {_said(error)}.") from error


def _beside(module: str) -> list[str]:
    """The modules in the package of a module that does not exist, or in the folder where the program was started."""
    package = module.rpartition(".")[0]
    places = getattr(sys.modules.get(package), "__path__", []) if package else [str(Path.cwd())]
    return [found.name for found in pkgutil.iter_modules(places)]


def _similar(name: str, others: Iterable[str], what: str = "") -> str:
    """A suggestion such as " (did you mean mine.py?)", or "". what: stands in front of the name."""
    near = get_close_matches(name, others, 1)
    return f" (did you mean {what}{escaped(near[0])}?)" if near else ""


def _also_from(folder: Path) -> None:
    """Let Python import from a folder, after all other places, so that no file there hides another module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    """Whether a value is a policy's class that the module itself defines."""
    return isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__


def _said(error: BaseException) -> str:
    """An error with its kind: "NameError: name 'x' is not defined"."""
    words = reason(error) if isinstance(error, Exception) else str(error)
    words = words.removesuffix(".")  # the sentence has one
    kind = type(error).__name__
    return words if words == kind else f"{kind}: {words}"
