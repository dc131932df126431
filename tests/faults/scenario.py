"""The runs that faults happen to: the library's training loop in its modes, and `palsgd train`."""

import functools
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import crew, lab_run, library_run, notes
from faults.crew import Ended, Member
from faults.fault import Fault
from palsgd.lab.links import Link, Network
from support.patience import patient

TIMEOUT_S = 6.0  # of the process group
LIMIT_S = 60.0  # after which a run hangs

# What a worker may say when another one is lost, when its disk refuses, or when workers differ.
CLEAN = ("SyncError", "NonFiniteError", "ConsensusError", "ValueError", "OSError")
LEFT, REFUSED = "exit code 143", "exit code 2"  # of workers that say nothing else


@dataclass(frozen=True)
class Run:
    """What a run came to."""

    ended: Ended
    lines: list[list[dict[str, Any]]]  # the notes of each worker
    errors: list[str]  # what each worker said of an error; "": nothing
    digest: str | None  # of all that must be equal to the twin's; None: it has not come to its end

    def noted(self, what: str) -> list[dict[str, Any]]:
        return [line for lines in self.lines for line in lines if line["what"] == what]

    @property
    def saved(self) -> int | None:
        """The newest save that some worker saw complete."""
        return max((line["step"] for line in self.noted("saved")), default=None)

    @property
    def seconds_to_end(self) -> float:
        """From the fault to the last worker's last word."""
        struck = [line["at"] for line in self.noted("struck")]
        last = [lines[-1]["at"] for lines in self.lines if lines]
        return max(last) - min(struck) if struck else 0.0


class LibraryRuns:
    """Runs of the training loop in library_run."""

    def __init__(self, name: str):
        self.name = name

    def run(self, place: Path, fault: Fault | None = None, *, resume: bool = False) -> Run:
        with fresh() as (noted, store), _links(fault) as networks:
            order = library_run.Order(
                scenario=self.name, folder=self.saves(place), notes=noted, store=store,
                timeout_s=patient(TIMEOUT_S), interface="eth0" if networks else "lo",
                resume=resume, fault=fault, save_every=_save_every(fault),
            )  # fmt: skip
            started = crew.start(order, range(2), networks=networks)
            ended = crew.wait(started, limit_s=patient(LIMIT_S), when_stopped=waking(fault))
            lines = [notes.read(noted, worker) for worker in range(2)]
            errors = [last_words(noted, worker, lines[worker]) for worker in range(2)]
        digests = [line["digest"] for found in lines for line in found if line["what"] == "done"]
        whole = len(digests) == 2 and not any(errors)
        return Run(ended, lines, errors, " ".join(digests) if whole else None)

    def saves(self, place: Path) -> Path:
        return place / "saves"

    def clean(self, error: str) -> bool:
        return error == LEFT or (error.startswith(CLEAN) and "\n" not in error)


class LabRuns:
    """Runs of `palsgd train`, as torchrun starts its ranks."""

    def run(self, place: Path, fault: Fault | None = None, *, resume: bool = False) -> Run:
        folder, again = place / "run", resume or (place / "run").exists()
        with fresh() as (noted, _):
            order = lab_run.Order(
                folder=folder, notes=noted, port=free_port(), timeout_s=patient(TIMEOUT_S),
                resume=again, fault=fault,
            )  # fmt: skip
            started = crew.start(order, range(2))
            wake = waking(fault, functools.partial(self._second, place))
            ended = crew.wait(started, limit_s=patient(LIMIT_S), when_stopped=wake)
            lines = [notes.read(noted, worker) for worker in range(2)]
            errors = [_printed(noted, worker, ended.codes[worker]) for worker in range(2)]
        whole = ended.codes == (0, 0)
        return Run(ended, lines, errors, lab_run.digest(folder) if whole else None)

    def saves(self, place: Path) -> Path:
        return lab_run.saves(place / "run")

    def clean(self, error: str) -> bool:
        """One line of ours, and no traceback. Remarks may stand before it. What rank 0 says for all
        is not repeated by the others."""
        if error in (LEFT, REFUSED):
            return True
        lines = error.splitlines()
        return bool(lines) and "Traceback" not in error and lines[-1].startswith("palsgd: ")

    def _second(self, place: Path, member: Member) -> None:
        """Another command in the folder of a run that is under way must be refused in one line."""
        with fresh() as (noted, _):
            order = lab_run.Order(
                folder=place / "run", notes=noted, port=free_port(), timeout_s=patient(TIMEOUT_S),
                resume=True,
            )  # fmt: skip
            ended = crew.wait(
                crew.start(order, [0]),
                limit_s=patient(LIMIT_S),
                when_stopped=lambda member: None,
            )
            said = _printed(noted, 0, ended.codes[0])
        if ended.codes != (2,) or not self.clean(said):
            raise AssertionError(f"a second run ended with {ended.codes[0]} and said {said!r}")


Runs = LibraryRuns | LabRuns


def runs_of(scenario: str) -> Runs:
    return LabRuns() if scenario == "lab" else LibraryRuns(scenario)


@functools.cache
def twin(scenario: str) -> str:
    """The digest of the run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        run = runs_of(scenario).run(Path(folder))
    if run.digest is None:
        raise AssertionError(f"the undisturbed run of {scenario} failed: {run.errors}")
    return run.digest


# -- what runs have in common --------------------------------------------------------------------


@contextmanager
def fresh() -> Iterator[tuple[Path, Path]]:
    """A folder for notes and a file for the store, on a disk that does not fill up."""
    noted = Path(tempfile.mkdtemp(prefix="notes-"))
    try:
        yield noted, noted / "store"
    finally:
        shutil.rmtree(noted)


@contextmanager
def _links(fault: Fault | None) -> Iterator[list[str]]:
    """The network namespaces of the workers, where a link is to fail."""
    if fault is None or "link" not in fault.kind:
        yield []
        return
    theirs = {"slow link": Link(delay_ms=20.0), "lossy link": Link(loss=0.03)}.get(fault.kind)
    others = {} if theirs is None else {fault.victim: theirs}
    with Network(2, others=others, seed=fault.seed) as network:
        yield [network.namespace(worker) for worker in range(2)]


def _save_every(fault: Fault | None) -> int:
    """Where a worker is silent, the others are to wait for it in a sync, not in a save."""
    silent = fault is not None and fault.kind.endswith("for good")
    return 3 * library_run.SAVE_EVERY if silent else library_run.SAVE_EVERY


def waking(fault: Fault | None, second: Any = None) -> Any:
    """What to do with a worker that has stopped itself."""

    def wake(member: Member) -> None:
        assert fault is not None
        if fault.kind == "stop for good":
            return
        if fault.kind == "second run":
            second(member)
        else:
            time.sleep(0.2 + 1.3 * fault.chance)
        member.signal(signal.SIGCONT)

    return wake


def last_words(noted: Path, worker: int, lines: list[dict[str, Any]]) -> str:
    if any(line["what"] == "left" for line in lines):
        return LEFT
    errors = [line for line in lines if line["what"] == "error"]
    if errors:
        return f"{errors[-1]['kind']}: {errors[-1]['message']}"
    done = any(line["what"] == "done" for line in lines)
    return "" if done else (noted / f"{worker}.err").read_text().strip() or "ended"


def _printed(noted: Path, worker: int, code: int | None) -> str:
    said = (noted / f"{worker}.err").read_text().strip()
    return "" if code == 0 else said or f"exit code {code}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
