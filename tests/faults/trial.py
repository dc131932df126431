"""One fault, injected and judged.

The run goes on by itself and ends with the weights of its undisturbed twin. Or every worker that
the fault has left ends with one clear line within the process group's timeout and five seconds, and
the run that is started again goes on from the newest whole save to those weights. Anything else is
a defect.
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults import elastic_trial
from faults.damage import damage, newest, step_of
from faults.fault import DAMAGES, Fault
from faults.launched import launched
from faults.scenario import TIMEOUT_S, Run, Runs, runs_of, twin
from support.patience import patient

GOOD = ("survived", "clean error")
BAD = ("steps lost", "hang", "wrong weights", "unclean error", "stopped", "unnoticed")
_GRACE_S = 5.0
_DISK = "size=8m"  # of the disk that fills up; saves take a fraction of it


@dataclass(frozen=True)
class Record:
    """A fault and what came of it."""

    fault: Fault
    outcome: str  # one of GOOD or BAD
    seconds_to_end: float  # from the fault to the end of the last worker that it left
    lost: int  # steps beyond the newest save, which the run that was started again did not have
    remark: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.outcome:<14} {self.seconds:5.1f} s  {self.fault}; {self.remark}".rstrip("; ")


def tried(fault: Fault) -> Record:
    """Inject the fault."""
    began = time.monotonic()
    with _place(fault) as place:
        try:
            if fault.scenario == "launched":
                found = launched(fault, place, twin("lab"))
            elif fault.scenario == "elastic":
                found = elastic_trial.judged(fault)
            else:
                found = _Trial(fault, runs_of(fault.scenario), place).judged()
        except AssertionError as error:
            found = "unclean error", 0.0, 0, str(error)
    return Record(fault, *found, seconds=time.monotonic() - began)


@contextmanager
def _place(fault: Fault) -> Iterator[Path]:
    """A folder; a small disk of its own where the disk is to fail."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if not fault.kind.endswith("disk"):
            yield Path(folder)
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass(frozen=True)
class _Trial:
    fault: Fault
    runs: Runs
    place: Path

    def judged(self) -> tuple[str, float, int, str]:
        """Outcome, seconds to the end, steps lost and a remark."""
        fault, wanted = self.fault, twin(self.fault.scenario)
        run = self.runs.run(self.place, fault)
        if not run.noted("struck"):
            return "unclean error", 0.0, 0, f"the fault did not come: {run.errors}"
        seconds = run.seconds_to_end
        if run.ended.hung:
            return "hang", seconds, 0, f"exit codes {run.ended.codes}; {run.errors}"
        if run.digest is not None:
            return self._survivor(run, wanted, seconds)
        if fault.goes_on:
            return "stopped", seconds, 0, "; ".join(filter(None, run.errors))
        if remark := self._unclean(run):
            return "unclean error", seconds, 0, remark
        if seconds > patient(TIMEOUT_S) + patient(_GRACE_S):
            return "hang", seconds, 0, f"the last worker ended after {seconds:.1f} s"
        return self._started_again(run, wanted, seconds)

    def _survivor(self, run: Run, wanted: str, seconds: float) -> tuple[str, float, int, str]:
        if run.digest != wanted:
            return "wrong weights", seconds, 0, "it went on to other weights"
        if self.fault.kind in ("nan", "other settings", "other code"):
            return "unnoticed", seconds, 0, "it went on as if nothing had happened"
        return "survived", seconds, 0, ""

    def _unclean(self, run: Run) -> str:
        """What is wrong with the errors of the workers that the fault has not ended itself."""
        for worker, (code, error) in enumerate(zip(run.ended.codes, run.errors, strict=True)):
            struck = self.fault.kind == "kill all" or worker == self.fault.victim
            if struck and (code is None or code < 0 or self.fault.kind == "out of memory"):
                continue
            if not error and not struck and self._was_over(run, worker):
                continue
            if not self.runs.clean(error):
                return f"worker {worker} ended with {code} and said {error[-600:]!r}"
        return ""

    def _was_over(self, run: Run, worker: int) -> bool:
        """Had the worker come to its end, when the other one did not need it any more?"""
        return run.ended.codes[worker] == 0

    def _started_again(self, run: Run, wanted: str, seconds: float) -> tuple[str, float, int, str]:
        remark, promised = self._repair(run)
        resume = bool(newest(self.runs.saves(self.place)))
        again = self.runs.run(self.place, resume=resume)
        resumed = min((line["step"] for line in again.noted("resumed")), default=0)
        lost = max(0, (promised or 0) - resumed)
        if again.ended.hung:
            return "hang", seconds, lost, f"started again; {remark}"
        if again.digest is None:
            errors = "; ".join(filter(None, again.errors))
            return "unclean error", seconds, lost, f"started again: {errors[-600:]}; {remark}"
        if lost:
            return "steps lost", seconds, lost, f"from {promised} back to {resumed}; {remark}"
        if again.digest != wanted:
            return "wrong weights", seconds, lost, f"resumed at {resumed}; {remark}"
        return "clean error", seconds, lost, remark

    def _repair(self, run: Run) -> tuple[str, int | None]:
        """What happens between the two starts, and the step that must not be lost."""
        saves = self.runs.saves(self.place)
        if self.fault.kind in DAMAGES:
            older = newest(saves)[1]
            return damage(saves, self.fault), step_of(older)
        if self.fault.kind.endswith("disk"):
            subprocess.run(["mount", "-o", "remount,rw", str(self.place)], check=True)
            (self.place / "ballast").unlink(missing_ok=True)
        return "", run.saved
