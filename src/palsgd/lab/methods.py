"""The methods that the lab selects by the fields of their rows, never by name."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from palsgd import references, registry
from palsgd.checks import check_text, in_error
from palsgd.lab.clock_values import function_of_clock
from palsgd.lab.settings import FIELDS, OF_CLOCK, Settings, method_setting
from palsgd.method import Method
from palsgd.outer import nesterov
from palsgd.registry import Row


def baseline() -> Row:
    """The method that the others are measured against."""
    return next(row for row in registry.rows() if row.baseline)


def is_baseline(name: str) -> bool:
    """Is it the baseline? The name may come from a file that another version wrote."""
    row = registry.known(name)
    return row is not None and row.baseline


def default_names() -> tuple[str, ...]:
    """The methods that are compared if none are named, the baseline first."""
    rows = sorted(registry.rows(), key=lambda row: not row.baseline)
    return tuple(row.name for row in rows if row.default)


def whole_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names as settings have them. Methods of a user's own are imported, so that their settings
    are known."""
    try:
        names = list(names)
    except TypeError:
        given = in_error(names)
        raise ValueError(f"methods={given} must be a list of names, such as ['ddp']") from None
    names = [check_text("the name of a method", name) for name in names]
    return tuple(name if name in registry.names() else registry.row(name).name for name in names)


def runs_of(settings: Settings, methods: Iterable[str]) -> dict[str, Settings]:
    """A run for each method, by the name of its folder."""
    found: dict[str, Settings] = {}
    for method in methods:
        name, run = references.short(method), settings.changed({"method": method})
        if found.setdefault(name, run) != run:
            raise ValueError(
                f"{found[name].method} and {method} would both be called {name!r}; rename a class"
            )
    return found


def plain_local() -> Row:
    """The default method whose outer step the recipe sets and that has no steps without data."""
    rows = (row for row in registry.rows() if row.default and takes_outer(row))
    return next(row for row in rows if not row.mixes)


def mixing() -> Row:
    """The default method that has steps without data."""
    return next(row for row in registry.rows() if row.default and row.mixes)


def takes_outer(row: Row) -> bool:
    """Does the recipe set the outer step? A method whose default is no Nesterov step keeps its
    default, as recipes are tuned for Nesterov steps."""
    return row.rounds and not row.fixed_outer and row.outer is nesterov


def own_settings(settings: Settings, steps: int | None = None) -> dict[str, Any]:
    """The settings of the method itself, by the names of its fields. Those that change with the
    clock do so up to `steps`, which a run that is given in epochs does not know by itself."""
    row, given = registry.row(settings.method), settings.as_dict()
    found = dict(row.values)
    for field in fields(row.method):
        name = method_setting(field.name)
        if given.get(name) is not None:
            found[field.name] = _of_clock(name, given[name], steps or settings.steps or 1)
        elif field.name not in found and field.default is field.default_factory is MISSING:
            raise ValueError(f"{row.name} needs {name}; add for instance {name}=0.1")
    return found


def _of_clock(name: str, value: Any, steps: int) -> Any:
    if name in OF_CLOCK and isinstance(value, str):
        return function_of_clock(name, value, steps)
    return value


def method_of(settings: Settings, steps: int | None = None) -> Method:
    """The rules of the optimizer that is built from these settings."""
    return registry.row(settings.method).method(**own_settings(settings, steps))


def without_effect(name: str, draws: str = "balanced") -> set[str]:
    """Settings that have no effect on a method, with such draws. A comparison hands all methods the
    same ones. Paced draws change every method that has rounds."""
    row = registry.known(name)
    if row is None:
        return set()
    of_methods = {method_setting(own) for each in registry.all_rows() for own in each.settings()}
    found = of_methods - {method_setting(own) for own in row.settings()}
    if not (row.mixes or (row.rounds and draws == "paced")):
        found |= {"draws", "speeds"}
    if not row.mixes:
        found.add("discard_batches")
    if not takes_outer(row):
        found |= {name for name in FIELDS if name.startswith("outer")}
    if not row.rounds:
        found |= {"sync_every", "warmup_steps", "compress", "delay", "fragments"}
    return found
