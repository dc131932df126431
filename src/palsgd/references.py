"""Parts of a user's own by name: a class in a file or module, or what a package has installed.

A reference is text, so that settings can carry it to other processes, each of which finds the part
again: `path/to/mine.py:Name`, `package.module:Name`, `path/to/mine.py` where the file has exactly
one, or the name of an entry point.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class Kind:
    """What is looked for: workloads, or methods."""

    name: str  # in errors
    group: str  # of entry points
    fits: Callable[[Any], bool]
    remedy: str  # what to write, in errors


@dataclass(frozen=True)
class Part:
    """What a reference names."""

    reference: str  # whole: with the name, and the path absolute
    module: ModuleType
    value: Any


def is_reference(text: str) -> bool:
    """Does the text name a file, or something in a module?"""
    return ":" in text or text.endswith(".py")


def absolute(text: str) -> str:
    """The reference with the absolute path of its file, so that it means the same elsewhere."""
    place, name = _split(text)
    if not place.endswith(".py"):
        return text
    path = os.path.abspath(os.path.expanduser(place))
    return f"{path}:{name}" if name else path


def short(text: str) -> str:
    """The name for people and folders: of `path/to/mine.py:Name` it is `Name`."""
    if not is_reference(text):
        return text
    place, name = _split(text)
    return name or Path(place).stem


def installed(group: str) -> "dict[str, EntryPoint]":
    """The entry points of a group by name."""
    from importlib.metadata import entry_points  # takes longer than all other imports of help

    return {entry.name: entry for entry in entry_points(group=group)}


def known(text: str) -> bool:
    """Was the part found before, so that nothing is imported for it?"""
    return text in _KNOWN


def files() -> set[str]:
    """Those of the parts that were found, as a traceback names them."""
    return _FILES


_KNOWN: set[str] = set()
_FILES: set[str] = set()


def find(text: str, kind: Kind) -> Part:
    """The part that a reference, or the name of an entry point, stands for."""
    entry = None if is_reference(text) else installed(kind.group).get(text)
    if entry is None:
        place, name = _split(absolute(text))
    else:
        place, name = entry.module, entry.attr
    module = _imported(place)
    name = name or _only(module, place, kind)
    value = _value(module, place, name, kind)
    part = Part(text if entry is not None else f"{place}:{name}", module, value)
    _KNOWN.update((text, part.reference))
    _FILES.update(filter(None, [getattr(module, "__file__", None)]))
    return part


def sha256(text: str, kind: Kind) -> str | None:
    """Of the file that a reference leads to, as this process has imported it; None for a name of
    palsgd's own, or a module without a file."""
    if is_reference(text):
        place, _ = _split(absolute(text))
    elif (entry := installed(kind.group).get(text)) is not None:
        place = entry.module
    else:
        return None
    file = place if place.endswith(".py") else getattr(_imported(place), "__file__", None)
    if file is None:
        return None
    return _digest(str(file))


def _split(text: str) -> tuple[str, str]:
    """The file or module, and the name in it, which may be missing. A colon after a drive's letter
    has no name behind it."""
    place, colon, name = text.rpartition(":")
    if not colon or (not name.isidentifier() and text.endswith(".py")):
        return text, ""
    return place, name


def _imported(place: str) -> ModuleType:
    return _from_file(place) if place.endswith(".py") else _from_module(place)


@cache
def _from_file(path: str) -> ModuleType:
    """The module of a file, which is run once. It may import files that lie beside it."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}; {_beside(Path(path))}")
    folder, stem = str(Path(path).parent), Path(path).stem
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: it hides no module of others
    # Two files may have the same name, and a file may have that of a module.
    name = f"{stem}_{_sha256(path.encode())[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _digest(path)  # of what is run now, should the file change later
    sys.modules[name] = module  # dataclasses look for the module of their class there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {_where(error, path)}; mend it") from error
    return module


@cache
def _digest(path: str) -> str:
    return _sha256(Path(path).read_bytes())


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _from_module(name: str) -> ModuleType:
    """As `python -m` does, a module is also looked for in the present folder."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {name!r}; give one that Python finds from here, or a file: "
                "path/to/mine.py:Name"
            ) from error
        raise ValueError(f"{name} cannot be imported: {error}; install what it needs") from error
    except Exception as error:
        raise ValueError(f"{name} cannot be imported: {_where(error, '')}; mend it") from error


def _beside(path: Path) -> str:
    """What there is in place of a file that is missing."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either"
    others = sorted(each.name for each in path.parent.glob("*.py"))
    return f"that folder has {', '.join(others[:8]) or 'no .py file'}"


def _where(error: Exception, path: str) -> str:
    """The error in one line, with the last line of the user's file that led to it."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # says the line itself
        return said
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f"line {lines[-1]}: {said}" if lines else said


def _fitting(module: ModuleType, kind: Kind) -> list[str]:
    """The names of what the module itself defines and can be used."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and kind.fits(value) and _own(value, module)
    ]


def _own(value: Any, module: ModuleType) -> bool:
    defined = value if isinstance(value, type) else type(value)
    return not isinstance(value, type) or (
        defined.__module__ == module.__name__ and not inspect.isabstract(defined)
    )


def _only(module: ModuleType, place: str, kind: Kind) -> str:
    found = _fitting(module, kind)
    # An instance says more than its class, which is then there to make it.
    made = [name for name in found if not isinstance(getattr(module, name), type)]
    found = made or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"{place} has no {kind.name}; {kind.remedy}")
    raise ValueError(
        f"{place} has several {kind.name}s, {', '.join(found)}; write {place}:{found[0]}"
    )


def _value(module: ModuleType, place: str, name: str, kind: Kind) -> Any:
    has = ", ".join(_fitting(module, kind)) or f"no {kind.name}"
    if not hasattr(module, name):
        raise ValueError(f"{place} has no {name!r}; it has {has}")
    value = getattr(module, name)
    if not kind.fits(value):
        raise ValueError(f"{place}:{name} is no {kind.name}; {kind.remedy}; the file has {has}")
    if inspect.isabstract(value):
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise ValueError(f"{place}:{name} lacks {missing}; write what is missing")
    return value
