"""What worker processes are told to do, as a file, and what they tell of a failure."""

import json
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from palsgd.lab.extras import missing
from palsgd.lab.run_folder import RunFolder, write_json
from palsgd.lab.settings import TIMEOUT_S, Settings
from palsgd.lab.user_errors import in_users_file
from palsgd.progress import Whole


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run for worker processes to do. All jobs of a launch have equally many processes."""

    settings: Settings
    folder: Path
    data: str | None
    download: bool
    resume: bool
    quiet: bool
    elastic: bool = False  # it may be resumed by another number of workers
    link: str | None = None  # the emulated one that its workers communicate over
    twin_of: str | None = None  # the simulated run beside it that has the same settings and seed
    trains: bool = True  # False: its steps are timed, and that is all

    @property
    def done(self) -> bool:
        """Has the run come to an end, or failed by itself?"""
        folder = RunFolder(self.folder)
        return folder.finished or folder.failure is not None

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"settings": self.settings.as_dict(), "folder": str(self.folder)}

    @classmethod
    def read(cls, found: dict[str, Any]) -> Self:
        settings, folder = Settings.from_dict(found["settings"]), Path(found["folder"])
        return cls(**found | {"settings": settings, "folder": folder})


@dataclass(frozen=True, kw_only=True)
class GoingOn:
    """How a run goes on without workers that die."""

    min_workers: int = 1  # it ends when fewer are left
    deadline_s: float | None = None  # after which a sync leaves out those who are late


@dataclass(frozen=True, kw_only=True)
class Order:
    """The jobs of a launch, and how they are done."""

    jobs: list[Job]
    device: str
    whole: Whole | None = None  # what the jobs are part of
    link: str | None = None  # the emulated one between the workers
    timeout_s: float = TIMEOUT_S  # of an exchange between workers
    going_on: GoingOn | None = None  # None: a run ends with the first worker that dies

    def write(self, path: Path, command: list[str]) -> None:
        """`command` is the user's, which config.yaml names."""
        jobs = [replace(job, folder=job.folder.resolve()).as_json() for job in self.jobs]
        parts = {name: _as_dict(getattr(self, name)) for name in ("whole", "going_on")}
        write_json(path, vars(self) | parts | {"jobs": jobs, "command": command})

    @classmethod
    def read(cls, path: Path) -> tuple[Self, list[str]]:
        found = json.loads(path.read_text())
        command = found.pop("command")
        jobs = [Job.read(each) for each in found["jobs"]]
        kinds: dict[str, Any] = {"whole": Whole, "going_on": GoingOn}
        parts = {name: found[name] and kind(**found[name]) for name, kind in kinds.items()}
        return cls(**found | parts | {"jobs": jobs}), command


def _as_dict(part: Any) -> dict[str, Any] | None:
    return None if part is None else asdict(part)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a worker process ended early."""

    kind: str  # of the exception
    message: str
    trace: str
    refuses_input: bool  # is it about something that the user can mend?
    expected: bool  # is its line enough, without a traceback?
    at: float

    @classmethod
    def of(cls, error: BaseException) -> Self:
        ours = type(error).__module__.startswith("palsgd.")
        said = missing(error) if isinstance(error, ModuleNotFoundError) else str(error)
        theirs = in_users_file(error)
        refuses = isinstance(error, ValueError) and (ours or type(error) is ValueError)
        return cls(
            kind=type(error).__name__,
            message=" ".join((theirs or said).split()),
            trace="".join(traceback.format_exception(error)),
            refuses_input=refuses,
            expected=refuses
            or theirs is not None
            or isinstance(error, RuntimeError | OSError | ModuleNotFoundError),
            at=time.time(),
        )

    @property
    def lost_another(self) -> bool:
        """Does it only say that another worker is gone?"""
        return self.kind == "SyncError"

    @property
    def names_worker(self) -> bool:
        """Does its line begin with the worker that it is about? All workers raise an error of a
        disk, whoever's disk it is, so the one that was first to say so is no news."""
        return self.message.startswith("worker ")

    def write(self, folder: Path, rank: int | str) -> None:
        write_json(_place(folder, rank), vars(self))


def failure_of(folder: Path, rank: int) -> tuple[int, Failure] | None:
    """This rank, and why it failed, unless it had no time to say so."""
    path = _place(folder, rank)
    return (rank, Failure(**json.loads(path.read_text()))) if path.exists() else None


def forget_failure(folder: Path, rank: int) -> None:
    """What was said of it is not said again."""
    _place(folder, rank).unlink(missing_ok=True)


def _place(folder: Path, rank: int | str) -> Path:
    return folder / f"failure-{rank}.json"


def first_failure(folder: Path) -> tuple[int, Failure] | None:
    """The rank that failed first, and why. One that lost another comes after the lost one."""
    found = [
        (int(path.stem.partition("-")[2]), Failure(**json.loads(path.read_text())))
        for path in folder.glob("failure-*.json")
    ]
    found.sort(key=lambda each: (each[1].lost_another, each[1].at))
    return found[0] if found else None
