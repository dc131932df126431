"""Simulated runs that share a program: which they are, their training, and their checkpoints."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palsgd import references
from palsgd.lab.factory import low_precision
from palsgd.lab.forecast import work_of
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_run import SimulatedRun, shape_of
from palsgd.lab.worker_loop import split_batch
from palsgd.lab.workload import Workload
from palsgd.progress import ProgressBar, Whole
from palsgd.simulator import Checkpoints, Program, programs


class OutOfTimeError(RuntimeError):
    """The time that a command was given is over. Runs that are finished are kept, and those under
    way are saved: the same command with `resume` goes on with them."""

    def __init__(self) -> None:
        super().__init__("the time is over; the same command with resume goes on")


def check_time(until: float | None) -> None:
    """Raise if that time, as time.monotonic() has it, has come."""
    if until is not None and time.monotonic() >= until:
        raise OutOfTimeError


class Group(NamedTuple):
    """Runs that are simulated together, by name, as far as they fit into memory together."""

    names: list[str]
    vectorize: bool | str
    resumed: bool = False  # do they go on with the program that they had?


def grouped(
    runs: Mapping[str, Settings],
    waiting: Sequence[str],
    out: Path,
    *,
    resume: bool,
    share: bool,
    vectorize: bool | str,
) -> list[Group]:
    """The runs that are waiting, in groups. Runs of equal shape share a group if they may. Runs
    that are resumed share the program that they had, with all of its runs, on the same engine."""
    groups, left = [], list(waiting)
    for name in waiting if resume else ():
        if name in left and (before := _recorded(RunFolder(out / name), runs)):
            groups.append(before)
            left = [each for each in left if each not in before.names]
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for name in left:
        alone = () if share else (name,)
        shapes.setdefault(shape_of(runs[name]) + alone, []).append(name)
    return groups + [Group(names, vectorize) for names in shapes.values()]


def _recorded(folder: RunFolder, runs: Mapping[str, Settings]) -> Group | None:
    """The program that a run was part of; None: it has none that can be made again."""
    if not (folder.path / "config.yaml").exists():
        return None
    config = folder.config()
    names = config.get("program", [])
    gone = [name for name in names if name not in runs]
    if names and not gone:
        return Group(names, config["engine"] == "vectorized", resumed=True)
    if gone:
        folder.start_over(f"it shared a program with {gone[0]}, which is not among the runs now")
    return None


def simulate_runs(
    runs: list[SimulatedRun], *, quiet: bool, vectorize: bool | str = "auto", resume: bool = False,
    whole: Whole | None = None, until: float | None = None,
) -> None:  # fmt: skip
    """Train runs that differ in nothing but what runs of one program may differ in. `whole` is what
    they are part of. The first pause after `until` ends them by an OutOfTimeError."""
    first = runs[0]
    settings, workload = first.settings, first.workload
    autocast = low_precision(settings, workload.device)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        parts = split_batch(batch, settings.micro_batches)
        with autocast():
            losses = [workload.loss(model, part) for part in parts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    loss.likeness = settings.precision, settings.micro_batches  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # The library cannot know that each evaluation recomputes the buffers itself.
        warnings.filterwarnings("ignore", message="buffers='recompute'")
        for together in programs(
            [run.plan() for run in runs],
            workers=settings.workers,
            steps=first.steps,
            model=workload.new_model,
            loss=loss,
            device=workload.device,
            vectorize=False if in_turn(workload, workload.device, vectorize) else vectorize,
            at_once=len(runs) if resume else None,
            progress=False,
            compile=_replayed(workload, workload.device) or None,
        ):
            made = [
                SimulatedProgram(each, [runs[number] for number in each.runs]) for each in together
            ]
            together.clear()  # so that each is gone when it has ended
            for program in made:  # all of them are recorded before the first one trains
                program.begin(resume=resume)
            del program
            while made:
                check_time(until)
                made.pop(0).train(quiet=quiet, whole=whole, until=until)


def _replayed(workload: Workload | type[Workload], device: torch.device) -> bool:
    """Are gradients of one worker CUDA graphs?"""
    return workload.graphs and device.type == "cuda"


def in_turn(
    workload: Workload | type[Workload], device: torch.device, vectorize: bool | str
) -> bool:
    """Do workers train one after another? They do where the command says so, and where gradients
    are graphs unless it says otherwise: those leave a GPU nothing to wait for, so that a stack has
    nothing to gain (VGG-16: it takes four times as long), and to try it takes up to a minute of
    every process."""
    return vectorize is False or (vectorize == "auto" and _replayed(workload, device))


QUICK_S = 1.0  # a save that takes less is made at every pause


class SimulatedProgram:
    """A program and the files of its runs. Its checkpoints are with its first run."""

    def __init__(self, program: Program, runs: list[SimulatedRun]):
        self._program, self._runs = program, runs
        self._checkpoints = Checkpoints(runs[0].folder.checkpoints)
        self._is_cold = False  # does it begin with the first step?
        self._save_s: float | None = None  # what the last save took
        self._saved_at = 0.0

    def begin(self, *, resume: bool) -> None:
        state = self._checkpoints.newest() if resume else None
        if state is not None:
            self._program.load(state)
            for number, (run, history) in enumerate(self._histories()):
                run.resume(state[f"files-{number}"], history)
            return
        first = self._runs[0].folder
        if resume and first.saved_steps:
            raise ValueError(
                f"no checkpoint in {first.checkpoints} is whole; restore one, use --force to start "
                "over, or another --out"
            )
        names = [run.folder.path.name for run in self._runs]
        for run in self._runs:
            run.start(self._program.engine, names)
        self._is_cold = True

    def _start_warm(self) -> None:
        """Go to the end of a warm-up that another run has computed, if one has: maybe one that was
        begun together with this one, as they train one after another. Not before that, as workers
        take memory from then on."""
        if self._is_cold and self._program.starts_warm:
            self._is_cold = False
            self._program.start_warm()
            for run, history in self._histories():
                run.start_warm(history)

    def train(self, *, quiet: bool, whole: Whole | None = None, until: float | None = None) -> None:
        first, program = self._runs[0], self._program
        self._start_warm()
        with ProgressBar(
            self._title(), first.steps, start=program.clock, quiet=quiet, whole=whole,
            runs=len(self._runs), work=work_of([run.settings for run in self._runs]),
        ) as bar:  # fmt: skip
            first.bar = bar
            while program.advance():
                for run, history in self._histories():
                    run.pause(history)
                    run.pass_warmup(program.clock)
                self._kept(until)
        for run, result in zip(self._runs, program.results(), strict=True):
            run.finish(result)
        self._checkpoints.remove()

    def _kept(self, until: float | None) -> None:
        """Save the state at a pause. A program that is given an end is saved there alone: states of
        many workers are large, and until then nobody has asked it to stop."""
        if until is None:
            if self._save_is_due():
                self._save()
        elif time.monotonic() >= until and not self._is_done:
            self._save()
            raise OutOfTimeError

    @property
    def _is_done(self) -> bool:
        return self._program.clock >= self._runs[0].steps

    def _save_is_due(self) -> bool:
        """At every pause, unless a save takes seconds: those may take a tenth of the time, and none
        is made of a program that only has to write its results."""
        if self._runs[0].settings.checkpoint_every is not None:
            return True
        if self._save_s is None:
            return not self._is_done
        apart = time.monotonic() - self._saved_at
        return self._save_s < QUICK_S or (apart > 9 * self._save_s and not self._is_done)

    def _save(self) -> None:
        began = time.monotonic()
        counts = [run.norms for run in self._runs]
        for run in self._runs:
            run.keep_best()
        self._checkpoints.save(self._program.clock, self._state())
        for run, count in zip(self._runs, counts, strict=True):
            run.forget_norms(count)
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - began

    def _state(self) -> Iterator[tuple[str, Any]]:
        # first, as making the state of the program adds norms that are no syncs'
        for number, run in enumerate(self._runs):
            yield f"files-{number}", run.state()
        yield from self._program.state()

    def _histories(self) -> Iterator[tuple[SimulatedRun, list[dict[str, Any]]]]:
        return zip(self._runs, self._program.histories, strict=True)

    def _title(self) -> str:
        settings, count = self._runs[0].settings, len(self._runs)
        method = f" {references.short(settings.method)}" if count == 1 else ""
        return f"{references.short(settings.workload)}{method}"
