"""tuned.yaml: the settings that `palsgd tune` chose for each method, and how it came to them."""

import difflib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from palsgd.checks import check_text, in_error
from palsgd.lab.settings import Settings, with_alternatives

SCHEMA = 1
SHIPPED = Path(__file__).parent.parent / "workloads" / "tuned"


def shipped() -> list[str]:
    """The recipes that come with a tuned.yaml."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def tuned_settings(
    source: Path | str, method: str, base: Settings, *, given: Collection[str] = ()
) -> Settings:
    """`base` with the settings that were chosen for the method.

    `source` is a file that `palsgd tune` wrote, or the name of a recipe that comes with one. Fields
    in `given` keep the value they have in `base`: the user asked for them.
    """
    found = read_tuned(source)
    if found["workload"] != base.workload:
        raise ValueError(
            f"{source} was tuned on {found['workload']}, this is {base.workload}; tune it by "
            f"`palsgd tune {base.workload}`"
        )
    if method not in found["methods"]:
        raise ValueError(
            f"{source} has no settings for {method}, only for {', '.join(found['methods'])}; tune "
            f"it by `palsgd tune {base.workload} --methods {method}`"
        )
    kept = with_alternatives(given)
    chosen = found["methods"][method]["settings"]
    changes = {name: value for name, value in chosen.items() if name not in kept}
    return base.changed({"method": method, **changes})


def tuned_elsewhere(source: Path | str, base: Settings) -> str | None:
    """A sentence about tuning that was done under other conditions than `base`; None if it was
    not."""
    conditions = read_tuned(source)["conditions"]
    odd = [
        f"{name}={value}, not {getattr(base, name)}"
        for name, value in conditions.items()
        if getattr(base, name, value) != value
    ]
    return f"{source} was tuned with {', '.join(odd)}" if odd else None


def read_tuned(source: Path | str) -> dict[str, Any]:
    """The contents of a tuned.yaml, by its path or by the name of the recipe it comes with."""
    return _read(tuned_path(source))


def write_tuned(path: Path, record: dict[str, Any]) -> None:
    from palsgd.lab.atomic import atomic_write
    from palsgd.lab.yaml_files import yaml_text

    atomic_write(path, yaml_text({"schema": SCHEMA, **record}, width=100))
    _read.cache_clear()


def tuned_path(source: Path | str) -> Path:
    check_text("tuned", str(source) if isinstance(source, Path) else source)
    beside = SHIPPED / f"{source}.yaml"
    if not Path(source).suffix and beside.exists():
        return beside
    if not Path(source).is_file():
        nearest = difflib.get_close_matches(str(source)[:60], shipped(), n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(
            f"there is no file {source}; {hint}give one of `palsgd tune`, or a recipe that comes "
            f"with one: {', '.join(shipped()) or 'there is none'}"
        )
    return Path(source)


@cache
def _read(path: Path) -> dict[str, Any]:
    from palsgd.lab.yaml_files import read_yaml

    found = read_yaml(path, fix="make it again by `palsgd tune`")
    for key in ("schema", "workload", "conditions", "methods"):
        if key not in found:
            raise ValueError(f"{path} has no {key}, so it is no file of `palsgd tune`; give one")
    if found["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {in_error(found['schema'])}, not {SCHEMA}; tune again")
    if not isinstance(found["conditions"], dict) or not isinstance(found["methods"], dict):
        raise ValueError(f"{path} has conditions or methods that are no fields; tune again")
    for method, chosen in found["methods"].items():
        _check_chosen(path, method, chosen)
    return found


def _check_chosen(path: Path, method: str, chosen: Any) -> None:
    """What was chosen are numbers and words. A file of somebody else must not say which code is
    run, so it cannot name a workload or a method in place of the one that the user asked for."""
    settings = chosen.get("settings") if isinstance(chosen, dict) else None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} has no settings of {in_error(method)}; tune again")
    for name in ("workload", "method"):
        if settings.get(name, method) != method:
            raise ValueError(f"{path} sets {name} for {in_error(method)}; leave it out")
