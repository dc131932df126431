"""What worker processes are told to do, as a file, and what they tell of a failure."""

import builtins
import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from palsgd.lab.run_folder import RunFolder, write_json
from palsgd.lab.settings import TIMEOUT_S, Settings
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
class Order:
    """The jobs of a launch, and how they are done."""

    jobs: list[Job]
    device: str
    whole: Whole | None = None  # what the jobs are part of
    link: str | None = None  # the emulated one between the workers
    timeout_s: float = TIMEOUT_S  # of an exchange between workers

    def write(self, path: Path, command: list[str]) -> None:
        """`command` is the user's, which config.yaml names."""
        whole = None if self.whole is None else asdict(self.whole)
        jobs = [replace(job, folder=job.folder.resolve()).as_json() for job in self.jobs]
        write_json(path, vars(self) | {"jobs": jobs, "whole": whole, "command": command})

    @classmethod
    def read(cls, path: Path) -> tuple[Self, list[str]]:
        found = json.loads(path.read_text())
        command = found.pop("command")
        whole = None if found["whole"] is None else Whole(**found["whole"])
        jobs = [Job.read(each) for each in found["jobs"]]
        return cls(**found | {"jobs": jobs, "whole": whole}), command


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a worker process ended early."""

    kind: str  # of the exception
    message: str
    trace: str
    refuses_input: bool  # is it about something that the user can mend?
    at: float

    @classmethod
    def of(cls, error: BaseException) -> Self:
        ours = type(error).__module__.startswith("palsgd.")
        return cls(
            kind=type(error).__name__,
            message=" ".join(str(error).split()),
            trace="".join(traceback.format_exception(error)),
            refuses_input=isinstance(error, ValueError) and (ours or type(error) is ValueError),
            at=time.time(),
        )

    @property
    def lost_another(self) -> bool:
        """Does it only say that another worker is gone?"""
        return self.kind == "SyncError"

    @property
    def expected(self) -> bool:
        """Is its line enough, without a traceback?"""
        kind = getattr(builtins, self.kind, RuntimeError)
        return self.refuses_input or issubclass(kind, RuntimeError | OSError)

    def write(self, folder: Path) -> None:
        write_json(folder / f"failure-{os.environ['RANK']}.json", vars(self))


def first_failure(folder: Path) -> tuple[int, Failure] | None:
    """The rank that failed first, and why. One that lost another comes after the lost one."""
    found = [
        (int(path.stem.partition("-")[2]), Failure(**json.loads(path.read_text())))
        for path in folder.glob("failure-*.json")
    ]
    found.sort(key=lambda each: (each[1].lost_another, each[1].at))
    return found[0] if found else None
