"""What the page says of the runs themselves: how they were made, and what is missing."""

from typing import Any

from palsgd.lab.groups import shown, sortable
from palsgd.lab.run_folder import Run
from palsgd.lab.timing import record
from palsgd.lab.timing.pace import NO_LINK
from palsgd.lab.timing.paces import timed_at


def facts(runs: list[Run]) -> list[tuple[str, str]]:
    versions = f"palsgd {values_of(runs, 'palsgd')}, torch {values_of(runs, 'torch')}"
    return [
        ("runs", str(len(runs))),
        ("workers", values_of(runs, "workers")),
        ("run as", _run_as(runs)),
        ("machine", values_of(runs, "device")),
        ("parameters", values_of(runs, "parameters")),
        ("steps", values_of(runs, "steps")),
        ("seeds", values_of(runs, "seed")),
        ("versions", versions),
    ]


def notes(runs: list[Run]) -> list[str]:
    found = [f"{run.name}: {note}." for run in runs for note in run.notes]
    for run in runs:
        if run.folder.failure is not None:
            found.append(f"{run.name}: {run.folder.failure.splitlines()[0]}")
        elif not run.finished:
            at = f"step {run.lines[-1]['step']:,}" if run.lines else "no line yet"
            curves = "its curves are shown, no final values"
            shown = curves if run.twin_place is None else "not shown"
            found.append(f"{run.name}: unfinished ({at}); {shown}.")
    clusters = dict.fromkeys(run.config.get("cluster") for run in runs)
    for cluster in filter(None, clusters):
        found.append(
            f"Simulated, and time is that of a model of the cluster {cluster}: a projection, "
            "no measurement. Steps, gradients and bytes are what real workers would count."
        )
    unclear = [run for run in runs if run.config.get("simulated") and not run.config.get("cluster")]
    timed = [run for run in unclear if record.session_of(timed_at(run)) is not None]
    if timed:
        found.append(
            "Trained by simulated workers, who compute what real ones do; the seconds are those of "
            "real processes, whose steps were timed."
        )
    if len(timed) < len(unclear):
        found.append(
            "Simulated: one process did the work of all workers, so there are no seconds of a "
            f"cluster ({NO_LINK}). Steps, gradients and bytes are what real workers would count."
        )
    return found


def values_of(runs: list[Run], key: str) -> str:
    """Every value of a key of config.yaml that occurs."""
    values = sorted((run.config.get(key) for run in runs), key=sortable)
    return ", ".join(dict.fromkeys(map(_text, values)))


def _run_as(runs: list[Run]) -> str:
    engines = {
        f"simulated in one process ({run.config.get('engine')})"
        if run.config.get("simulated")
        else "real processes"
        for run in runs
    }
    return ", ".join(sorted(engines))


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else shown(value)
