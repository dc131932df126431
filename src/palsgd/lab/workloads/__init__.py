"""Workloads and the paper's settings for them, by name; and a user's own by reference.

Each module of this package is a workload: `stories_1m.py` is `stories-1m`. It has a class with that
name, its `RECIPES`, which are named as the workload or begin with its name and a dash, its `GRIDS`,
which begin with its name and a slash, and what tuning may try, `SEARCH`. A module is imported when
it is asked for.

A workload of a user's own is `path/to/mine.py:Name`, `package.module:Name` or an entry point of the
group `palsgd.workloads` (docs/extending.md).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from palsgd import references
from palsgd.checks import check_text, in_error, nearest

if TYPE_CHECKING:
    import torch

    from palsgd.lab.data.download import Progress
    from palsgd.lab.settings import Settings
    from palsgd.lab.workload import Workload

GROUP = "palsgd.workloads"  # of entry points


@cache
def names() -> tuple[str, ...]:
    """The names of palsgd's own workloads, from the listing of this folder."""
    return tuple(sorted(found.name.replace("_", "-") for found in iter_modules(__path__)))


def kind(name: str) -> "type[Workload]":
    """The class of the workload `name`."""
    if _is_own(name):
        return references.find(name, _kind()).value
    if name not in names():  # looking for entry points takes a tenth of a second
        _check_known("workload", name, (*names(), *references.installed(GROUP)))
    classes = (each for each in vars(_module(name)).values() if isinstance(each, type))
    return next(each for each in classes if vars(each).get("name") == name)


def known(name: str) -> bool:
    """Is it palsgd's own, or was it imported before? Names in files of somebody else are asked for
    here first, so that nothing is imported because a file names it."""
    return name in names() or references.known(name)


def examples(name: str) -> int:
    """Of the published training data; 0 where they are not known, also of a workload that is only
    named in a file."""
    return kind(name).examples if known(name) else 0


def load(
    name: str,
    *,
    data: Path | str | None = None,
    device: "torch.device | str" = "cpu",
    seed: int = 2023,
    sharding: str = "reshuffled",
    split: str = "test",
    context: int | None = None,
    download: bool = False,
    progress: "Progress | None" = None,
) -> "Workload":
    """The workload `name`, its data ready on `device`."""
    return kind(name)(
        data=data, device=device, seed=seed, sharding=sharding, split=split, context=context,
        download=download, progress=progress,
    )  # fmt: skip


def data_settings(settings: "Settings") -> dict[str, Any]:
    """The settings that say what data a run sees, as `load` takes them."""
    return {name: getattr(settings, name) for name in ("seed", "sharding", "split", "context")}


def check(settings: "Settings") -> None:
    """Refuse settings that the workload cannot follow, before anything is loaded."""
    kind(settings.workload).check(
        sharding=settings.sharding, context=settings.context, target_on=settings.target_on
    )


def sha256(name: str) -> str | None:
    """Of the file of a user's own workload; None for palsgd's."""
    return references.sha256(name, _kind()) if _is_own(name) else None


def recipe(name: str) -> "Settings":
    """The settings of that name. Of a user's own workload: its recipe (docs/extending.md)."""
    if _is_own(name):
        return _own_recipe(name)
    own = _of_its_workload(name, "RECIPES")
    known = own if name in own else (*recipes(), *references.installed(GROUP))
    _check_known("recipe", name, known)
    return own[name]


def grid(name: str) -> dict[str, list]:
    """The values that a study of the paper tries: the fields it varies, all combinations."""
    own = _of_its_workload(name, "GRIDS")
    _check_known("grid", name, own if name in own else grids())
    return own[name]


def search(name: str) -> dict[str, Any]:
    """The values that `palsgd tune` tries for a recipe: by field, a list or a pair (low, high)."""
    recipe(name)  # refuses a name that is unknown
    if _is_own(name):
        own = getattr(references.find(name, _kind()).module, "SEARCH", {})
    else:
        own = _of_its_workload(name, "SEARCH")
    if not own:
        raise ValueError(
            f"the workload of {name} does not say what to try; add to its file for instance "
            'SEARCH = {"lr": (1e-4, 1e-2)}'
        )
    return dict(own)


def recipes() -> "dict[str, Settings]":
    return {key: value for name in names() for key, value in _module(name).RECIPES.items()}


def grids() -> dict[str, dict[str, list]]:
    return {key: value for name in names() for key, value in _module(name).GRIDS.items()}


def _of_its_workload(name: str, table: str) -> Mapping[str, Any]:
    """The `table` of the workload that `name` begins with, the longest where several do."""
    workload, _, _ = name.partition("/")
    fitting = [each for each in names() if f"{workload}-".startswith(f"{each}-")]
    return getattr(_module(max(fitting, key=len)), table, {}) if fitting else {}


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name.replace('-', '_')}")


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        raise ValueError(
            f"{what} {in_error(name)} is unknown; did you mean {nearest(name, known)!r}? There are "
            f"{', '.join(known)}"
        )


# -- a user's own ----------------------------------------------------------------------------------


def _is_own(name: str) -> bool:
    check_text("the name of a workload", name)
    if references.is_reference(name):
        return True
    ours = any(f"{name}-".startswith(f"{each}-") for each in names())
    return not ours and name in references.installed(GROUP)


def _own_recipe(name: str) -> "Settings":
    """The one in `RECIPES` beside the class, the attribute `recipe` of the class, or the defaults.
    A recipe is Settings, or a dict of what differs from the defaults."""
    from palsgd.lab.settings import Settings

    part = references.find(name, _kind())
    found = _beside(part)
    if found is None:
        found = getattr(part.value, "recipe", {})
    if isinstance(found, Settings):
        return found.changed({"workload": part.reference})
    if not isinstance(found, Mapping):
        raise ValueError(
            f"the recipe of {part.reference} is {found!r:.60}; write a dict such as "
            "dict(steps=1000, lr=0.1)"
        )
    return Settings(workload=part.reference, steps=1000).changed(found)


def _beside(part: references.Part) -> Any:
    """What `RECIPES` has under the name of the class, its `name` or that of the file, or has alone;
    None where there is no such table."""
    kind, table = part.value, getattr(part.module, "RECIPES", {})
    stem = Path(part.module.__file__ or "").stem
    for name in (kind.__name__, getattr(kind, "name", stem), stem):
        if name in table:
            return table[name]
    if len(table) < 2 or hasattr(kind, "recipe"):
        return next(iter(table.values()), None) if len(table) == 1 else None
    raise ValueError(
        f"RECIPES of {part.module.__file__} has {', '.join(table)}, none for {kind.__name__}; name "
        "one after the class"
    )


@cache
def _kind() -> references.Kind:
    from palsgd.lab.workload import Workload

    return references.Kind(
        name="workload",
        group=GROUP,
        fits=lambda value: isinstance(value, type) and issubclass(value, Workload),
        remedy="write a class that inherits from palsgd.lab.workload.Workload",
    )
