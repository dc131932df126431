"""timing.json of a collection: what was measured, in which turn, for which runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from palsgd.checks import check_int, check_number, check_text
from palsgd.json_files import read_json_object
from palsgd.lab.run_folder import write_json
from palsgd.lab.timing.pace import PARTS, Pace

NAME = "timing.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one program took, in seconds; a list has an entry per repetition. Runs that differ in
    nothing that takes time are one program."""

    runs: tuple[str, ...]  # their folders, in the collection's
    warmup: int | None  # steps of the warm-up; None: no step is local, as under DDP
    step_s: list[float]  # a gradient step, with no exchange
    averaging: list[list[float]] | None  # a step that averages gradients, by PARTS
    local: list[list[float]] | None  # a step of the local phase, a share of a sync included
    mixing_s: float  # a mixing step
    # what each worker did when, as in timeline.jsonl, where that was recorded
    spans: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Programs whose blocks were taken in turn by the same processes."""

    link: str | None  # that was emulated; None: the network between the processes as it is
    backend: str
    machine: str
    repetitions: int
    programs: tuple[Timed, ...]

    def program(self, run: str) -> Timed | None:
        return next((each for each in self.programs if run in each.runs), None)

    def pace(self, run: str) -> Pace | None:
        """The pace of a run; None where it was not timed."""
        timed = self.program(run)
        if timed is None:
            return None
        steps = {
            name: np.array(rows)
            for name, rows in (("averaging", timed.averaging), ("local", timed.local))
            if rows is not None
        }
        warmup = np.inf if timed.warmup is None else timed.warmup
        return Pace(kind="measured", source=self.source, warmup=warmup, link=self.link, **steps)

    @property
    def source(self) -> str:
        where = f"over an emulated link, {self.link}" if self.link else f"by {self.backend}"
        return f"{where}, {self.repetitions} blocks each in turn, {self.machine}"


def read(folder: Path) -> list[Session]:
    """The sessions of a collection, the last one first; none where nothing was measured."""
    path = folder / NAME
    if not path.exists():
        return []
    fix = "delete it, and time is the runs' own"
    found = read_json_object(path, fix=fix)
    try:
        if found["schema"] != SCHEMA or found["parts"] != list(PARTS):
            raise ValueError(f"has schema {found['schema']}, this palsgd reads {SCHEMA}")
        return [_session(each) for each in reversed(found["sessions"])]
    except KeyError as error:
        raise ValueError(f"{path} cannot be read (it has no {error}); {fix}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {fix}") from None


def _session(values: Mapping[str, Any]) -> Session:
    link = values["link"]
    return Session(
        link=None if link is None else check_text("link", link),
        backend=check_text("backend", values["backend"]),
        machine=check_text("machine", values["machine"]),
        repetitions=check_int("repetitions", values["repetitions"], least=1),
        programs=tuple(_timed(each) for each in values["programs"]),
    )


def _timed(values: Mapping[str, Any]) -> Timed:
    warmup = values["warmup"]
    return Timed(
        runs=tuple(check_text("runs", each) for each in values["runs"]),
        warmup=None if warmup is None else check_int("warmup", warmup),
        step_s=[_seconds("step_s", each) for each in values["step_s"]],
        averaging=_rows("averaging", values["averaging"]),
        local=_rows("local", values["local"]),
        mixing_s=_seconds("mixing_s", values["mixing_s"]),
        spans=[_span(each) for each in values.get("spans", [])],
    )


def _span(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "worker": check_int("worker", values["worker"]),
        "kind": check_text("kind", values["kind"]),
        "start_s": _seconds("start_s", values["start_s"]),
        "end_s": _seconds("end_s", values["end_s"]),
    }


def _rows(name: str, rows: Any) -> list[list[float]] | None:
    if rows is None:
        return None
    found = [[_seconds(name, each) for each in row] for row in rows]
    if not found or any(len(row) != len(PARTS) for row in found):
        raise ValueError(f"{name} must have rows of {len(PARTS)} numbers: {', '.join(PARTS)}")
    return found


def _seconds(name: str, value: Any) -> float:
    return check_number(name, value, "a number of seconds")


def session_of(folder: Path) -> Session | None:
    """The last session in which the run in this folder was timed."""
    return next((each for each in read(folder.parent) if each.program(folder.name)), None)


def add(folder: Path, session: Session) -> None:
    """Write the session behind those that are there."""
    sessions = [*reversed(read(folder)), session]
    write_json(
        folder / NAME,
        {"schema": SCHEMA, "parts": list(PARTS), "sessions": [asdict(each) for each in sessions]},
    )
