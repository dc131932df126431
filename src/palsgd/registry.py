"""The methods by name: one file of `palsgd/methods` each, found by listing that folder."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palsgd.method import Method
    from palsgd.outer import OuterFactory


@dataclass(frozen=True, kw_only=True)
class Row:
    """The facts about a method that the library, the simulator and the lab use."""

    name: str  # name of its module, used on the command line and in files
    title: str  # name in tables, and of its function in palsgd.methods
    method: type["Method"]
    summary: str  # one line
    colours: tuple[str, str]  # of its lines in figures, on light and on dark paper
    dashes: tuple[float, ...] = ()  # lengths of dash and gap; none: a solid line
    outer: "Callable[[], OuterFactory] | None" = None  # the default outer step; None: no rounds
    mixes: bool = False  # has it steps without data?
    rounds: bool = True  # False: gradients are averaged at every step
    baseline: bool = False  # are the others measured against it?
    fixed_outer: bool = False  # is the outer step part of the method, so that outer= is refused?
    default: bool = False  # is it compared if no methods are named?

    def settings(self) -> list[str]:
        """The names of the method's own settings."""
        return [f.name for f in fields(self.method)]


@cache
def names() -> tuple[str, ...]:
    """All names, without importing any of them."""
    folder = Path(__file__).parent / "methods"
    return tuple(sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")))


@cache
def row(name: str) -> Row:
    if name not in names():
        raise ValueError(f"method={name!r} is unknown; use one of {', '.join(names())}")
    return importlib.import_module(f"palsgd.methods.{name}").ROW


def rows() -> list[Row]:
    return [row(name) for name in names()]
