"""A run that was begun before, beside the settings of now: is it done, may it go on, and how?"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from palsgd.lab.programs import NOT_COMPUTED
from palsgd.lab.run_folder import Record, RunFolder
from palsgd.lab.settings import FIELDS, IN_EPOCHS, Settings
from palsgd.lab.trainer import own_files
from palsgd.lab.worker_changes import changes_in

log = logging.getLogger("palsgd")


@dataclass(frozen=True, kw_only=True)
class Resuming:
    """What may be other than before."""

    simulate: bool
    elastic: bool  # the number of workers may
    keep_batch: str  # what then stays the same: the batch of a "worker", or the "global" one
    go_on: bool = False  # it goes on without workers that die


def left_to_do(folder: RunFolder, settings: Settings, how: Resuming) -> Settings | None:
    """The settings with which a run is begun, or goes on; None: it is done. A run with other
    settings is an error and is not overwritten."""
    if not (folder.path / "config.yaml").exists():
        return settings
    before, done = folder.config(), folder.finished or folder.failure is not None
    others = how.elastic and not how.simulate and before.get("workers") != settings.workers
    if others and done:
        log.warning(
            "palsgd: %s is done and stays as it is, with %s workers", folder.path, before["workers"]
        )
        return None
    if others or before.get("changes"):
        settings = _as_recorded(settings, before)
    _check_files(folder, before, settings)
    _check_settings(folder, before, settings, how)
    if others and how.keep_batch == "global":
        settings = replace(settings, batch_size=_share(before, settings.workers, folder))
    return None if done else settings


def was_changed(folder: RunFolder) -> bool:
    """Has the number of its workers changed? Its newest checkpoint may still be one of before."""
    return (folder.path / "config.yaml").exists() and bool(folder.config().get("changes"))


def _share(before: Record, workers: int, folder: RunFolder) -> int:
    """A worker's share of the batch that all workers had together."""
    total = int(before["workers"]) * int(before["batch_size"])
    if total % workers:
        raise ValueError(
            f"the batch of all workers of {folder.path}, {before['workers']} times "
            f"{before['batch_size']}, cannot be dealt evenly to {workers}; use a number of workers "
            f"that divides {total}, or --keep-batch worker"
        )
    return total // workers


def _as_recorded(settings: Settings, before: Record) -> Settings:
    """The settings with the lengths in steps that the run has, which its schedules follow, and with
    the batch that it has by now where the one it began with is given."""
    found = {name: before[name] for name, in_epochs in IN_EPOCHS if getattr(settings, in_epochs)}
    changes = changes_in(before)
    if changes and settings.batch_size == changes[0].batch_size[0]:
        found["batch_size"] = before["batch_size"]
    return replace(settings, **found)


def _check_files(folder: RunFolder, before: Record, settings: Settings) -> None:
    for key, digest in own_files(settings).items():
        if before.get(key) != digest:
            raise ValueError(
                f"the file of {getattr(settings, key.removesuffix('_sha256'))} has changed since "
                f"{folder.path} was run with it; restore it, use --force to start over, or another "
                "--out"
            )


def _check_settings(folder: RunFolder, before: Record, settings: Settings, how: Resuming) -> None:
    if bool(before.get("goes_on")) != how.go_on:
        was = "with" if before.get("goes_on") else "without"
        raise ValueError(
            f"{folder.path} was run {was} --go-on, and its checkpoints are of that kind; go on "
            f"{was} it, use --force to start over, or another --out"
        )
    wanted = settings.as_dict() | {"simulated": how.simulate}
    for name, in_epochs in IN_EPOCHS:  # what is given in epochs is resolved in the file
        if wanted[in_epochs] and not wanted[name]:
            del wanted[name]
    if how.elastic and not how.simulate:
        del wanted["workers"]
    for key, value in wanted.items():
        then = before.get(key, _default(key))
        if then != value and key not in NOT_COMPUTED:
            raise ValueError(
                f"{folder.path} was run with {key}={then}, now it is {value}; use the old value, "
                f"{_remedies(key, how)}--force to start over, or another --out"
            )


def _remedies(key: str, how: Resuming) -> str:
    elastic = key == "workers" and not how.simulate
    return "--elastic to go on with another number, " if elastic else ""


def _default(key: str) -> Any:
    """The value of a setting in a folder that is older than the setting."""
    return FIELDS[key].default if key in FIELDS else None
