"""The methods by name: one file of `palsgd/methods` each, found by listing that folder; and a
user's own by reference."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palsgd import references
from palsgd.checks import in_error

if TYPE_CHECKING:
    from palsgd.method import Method
    from palsgd.outer import OuterFactory


@dataclass(frozen=True, kw_only=True)
class Row:
    """The facts about a method that the library, the simulator and the lab use."""

    name: str  # name of its module, or a reference; used on the command line and in files
    title: str  # name in tables, and of its function in palsgd.methods
    method: type["Method"]
    summary: str  # one line
    colours: tuple[str, str] | None = None  # of its lines in figures, on light and on dark paper
    dashes: tuple[float, ...] = ()  # lengths of dash and gap; none: a solid line
    outer: "Callable[[], OuterFactory] | None" = None  # the default outer step; None: no rounds
    mixes: bool = False  # has it steps without data?
    rounds: bool = True  # False: gradients are averaged at every step
    baseline: bool = False  # are the others measured against it?
    fixed_outer: bool = False  # is the outer step part of the method, so that outer= is refused?
    default: bool = False  # is it compared if no methods are named?
    # Settings of the instance that a reference names; those that are given replace them.
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def settings(self) -> list[str]:
        """The names of the method's own settings."""
        return [f.name for f in fields(self.method)]


@cache
def names() -> tuple[str, ...]:
    """The names of palsgd's own methods, without importing any of them."""
    folder = Path(__file__).parent / "methods"
    return tuple(sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")))


def row(name: str) -> Row:
    """The row of a method. A user's own method is imported when it is first asked for."""
    if name in names():
        return importlib.import_module(f"palsgd.methods.{name}").ROW
    reference = references.absolute(name)
    if reference not in _OWN:
        found = _own_row(reference)
        _OWN[reference] = _OWN[found.name] = found
    return _OWN[reference]


def known(name: str) -> Row | None:
    """The row of a method whose name may come from a file that somebody else wrote: nothing is
    imported for it that is not palsgd's, or was imported before."""
    return row(name) if name in names() else _OWN.get(name)


def rows() -> list[Row]:
    """The rows of palsgd's own methods."""
    return [row(name) for name in names()]


def all_rows() -> list[Row]:
    """The rows of palsgd's own methods, and of the users' that were asked for so far."""
    return [*rows(), *{each.name: each for each in _OWN.values()}.values()]


# -- a user's own ----------------------------------------------------------------------------------

_OWN: dict[str, Row] = {}  # by reference


def sha256(name: str) -> str | None:
    """Of the file of a user's own method; None for palsgd's."""
    return None if name in names() else references.sha256(name, _kind())


def _own_row(reference: str) -> Row:
    """What a method of the library says in its row, as far as the class itself says it."""
    from palsgd.method import Method
    from palsgd.outer import nesterov

    group = _kind().group
    if not references.is_reference(reference) and reference not in references.installed(group):
        choices = (*names(), *references.installed(group))
        known = ", ".join(map(repr, choices))
        raise ValueError(
            f"method={in_error(reference)} is unknown; use one of {known}, or one of your own: "
            "path/to/mine.py:Name"
        )
    part = references.find(reference, _kind())
    value, made = part.value, isinstance(part.value, Method)
    method = type(value) if made else value
    refused = "outer" in method.refuses
    first_line, _, _ = (inspect.getdoc(method) or "").partition("\n")
    return Row(
        name=part.reference,
        title=references.short(part.reference),
        method=method,
        summary=first_line,
        outer=None if refused else nesterov,
        fixed_outer=refused,
        mixes=method.plan is not Method.plan,
        values=value.settings() if made else {},
    )


@cache
def _kind() -> references.Kind:
    from palsgd.method import Method

    def fits(value: Any) -> bool:
        if isinstance(value, type):
            return issubclass(value, Method) and value is not Method
        return isinstance(value, Method)

    return references.Kind(
        name="method",
        group="palsgd.methods",
        fits=fits,
        remedy="write a class that inherits from palsgd.Method, or an instance of one",
    )
