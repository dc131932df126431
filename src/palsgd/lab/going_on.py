"""What a run must be like to go on without workers that die (docs/elastic.md)."""

import warnings
from collections.abc import Sequence

from torch import nn

import palsgd
from palsgd.lab.factory import build_optimizer
from palsgd.lab.settings import Settings
from palsgd.lab.torchrun import under_torchrun
from palsgd.lab.workloads import kind


def check_going_on(
    runs: Sequence[Settings],
    *,
    go_on: bool,
    simulate: bool,
    min_workers: int | None,
    deadline_s: float | None,
) -> None:
    """Raise a ValueError for options that say nothing, and for runs that cannot go on."""
    if not go_on:
        for flag, value in (("min-workers", min_workers), ("deadline", deadline_s)):
            if value is not None:
                raise ValueError(f"--{flag} {value:g} is for runs that go on; add --go-on")
        return
    if simulate:
        raise ValueError("--go-on is for worker processes, of which one may die; leave it out")
    if under_torchrun():
        raise ValueError(
            "--go-on is for worker processes that are started here, and torchrun starts all of "
            "them again; leave it out, or see docs/elastic.md for several machines"
        )
    for settings in runs:
        if min_workers is not None and min_workers > settings.workers:
            raise ValueError(f"--min-workers {min_workers} of {settings.workers} workers; lower it")
        _check_run(settings)


def _check_run(settings: Settings) -> None:
    for name, refused, instead in (
        ("ranks_per_worker", settings.ranks_per_worker > 1, 1),
        ("buffers", settings.buffers == "recompute", "average"),
    ):
        if refused:
            raise ValueError(
                f"{name}={getattr(settings, name)} with --go-on: it counts on the same workers in "
                f"every exchange; use {name}={instead}"
            )
    settings = settings.in_steps(kind(settings.workload).examples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        build_optimizer(settings, settings.total_steps(1), nn.Linear(64, 64), transport=_MayLeave())


class _MayLeave(palsgd.Alone):
    """One worker, whose optimizer is built as those of workers that may leave."""

    elastic = True
