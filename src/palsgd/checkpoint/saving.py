"""A save: the stages that all ranks go through, and what the file of a rank holds."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from palsgd import tensor_files
from palsgd.agreement import versions
from palsgd.checkpoint import step_folders, stored_tree
from palsgd.checkpoint.everyone import everyone_of, speaks_for_all
from palsgd.checkpoint.step_folders import SCHEMA, find
from palsgd.checks import check_int
from palsgd.disk import force, naming
from palsgd.errors import NonFiniteError
from palsgd.finite import all_finite
from palsgd.optimizer import LocalOptimizer
from palsgd.packing import compact
from palsgd.replica import unwrapped
from palsgd.scalars import plain
from palsgd.tensor_files import SUFFIX

TEXT = "palsgd"  # the name of the text in a rank's file


def save(
    folder: str | Path,
    model: nn.Module,
    opt: LocalOptimizer,
    *,
    keep: int = 2,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Save model and optimizer of all workers as a new folder in `folder`; every rank calls it.

    The new folder appears when all ranks have written. Until then, and if anything fails, the saves
    that are there stay as they are. Workers may share `folder` or have one each on disks of their
    own.

    With an `ElasticTransport` the lowest worker saves for all, right after a sync, where all of
    them have the same global model. The others return the name that its save will have. `folder`
    must be on a disk that all of them reach.

    Args:
        folder: where the saves of this run lie.
        model: the model that `opt` trains.
        opt: the palsgd optimizer.
        keep: so many saves are kept, and older ones removed.
        extra: what else this rank wants to keep: a dict of numbers, texts, lists, dicts and
            tensors, which `load` gives back to it.

    Returns:
        The new folder, `step-N`, where N is the clock of the worker that is ahead.

    Raises:
        RuntimeError: `opt.may_save` is False, so states that the workers save now could not be
            loaded together.
        OSError: a worker could not write. It is raised on all of them, and names the worker.
        NonFiniteError: the model of a worker has inf or nan, unless `on_nonfinite="skip"`.
        SyncError: a worker is lost. The saves that are there stay as they are.

    Example:
        >>> import tempfile, torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> palsgd.checkpoint.save(tempfile.mkdtemp(), model, opt, extra={"best": 0.5}).name
        'step-0'
    """
    _check_may_save(opt)
    keep, folder = check_int("keep", keep, least=1), Path(folder)
    everyone = everyone_of(opt, "a save")
    if opt.transport.elastic and not speaks_for_all(opt):
        return folder / step_folders.free_name(opt.clock, set())
    fails = "could not save, so nothing was added to the saves that are there"
    found = everyone.do(lambda: _survey(folder, opt), fails=fails, at=folder)
    plan = _Plan.of(folder, [each for ranks in found for each in ranks])

    def undo() -> None:
        for path in (plan.whole, plan.part):
            step_folders.remove(path, plan.identity)

    files = everyone.do(
        lambda: _write(plan.part, everyone.rank, model, opt, extra),
        fails=fails,
        at=plan.part,
        undo=undo,
    )
    manifest = plan.manifest(opt, files)
    leads = everyone.do(
        lambda: _commit(plan, manifest, everyone.rank), fails=fails, at=plan.part, undo=undo
    )
    worker, rank = everyone.rank
    if leads[worker][rank]:
        step_folders.keep_newest(folder, keep, plan.identity)
    return plan.whole


# -- the stages of a save ----------------------------------------------------------------------


def _check_may_save(opt: LocalOptimizer) -> None:
    # Workers that save right after a sync, each when it gets there, have the same syncs behind
    # them.
    if not (opt.may_save or opt.synced):
        raise RuntimeError(
            f"worker {opt.transport.worker} cannot save at clock {opt.clock}: after "
            f"{opt.gradient_steps} gradient steps some workers are before a sync and others behind "
            "it; save after an iteration at which opt.may_save is True"
        )
    worker = opt._worker
    if opt.transport.elastic and (worker.pending is not None or not worker.course.at_stop):
        raise RuntimeError(
            f"worker {opt.transport.worker} cannot save at clock {opt.clock} for workers that may "
            "leave and come: they are alike only right after a sync, and while none is under way; "
            "save where opt.synced is True, with delay=0"
        )


def _check_finite(opt: LocalOptimizer) -> None:
    """A run that is resumed with inf or nan ends at its next sync, as the one that saved them does,
    and saves of it would take the place of those that are sound."""
    worker = opt._worker
    if worker.warmup.guard.skip_nonfinite or all_finite(worker.inner.replica.local()):
        return
    raise NonFiniteError(
        f"its model has inf or nan at clock {opt.clock}; lower the learning rate or clip "
        "gradients, and go on from the newest save"
    )


def _survey(folder: Path, opt: LocalOptimizer) -> dict[str, Any]:
    """What all ranks must know of each other's disks and clocks to agree on a name."""
    _check_finite(opt)
    step_folders.make(folder)
    step_folders.remove_parts(folder)
    found = find(folder)
    return {
        "clock": opt.clock,
        "identity": os.urandom(8).hex(),
        "names": [saved.path.name for saved in found],
        "order": max((saved.manifest["order"] for saved in found if saved.manifest), default=0),
    }


@dataclass(frozen=True)
class _Plan:
    """What all ranks have agreed on before they write."""

    folder: Path
    name: str
    identity: str
    order: int
    step: int

    @classmethod
    def of(cls, folder: Path, found: list[dict[str, Any]]) -> "_Plan":
        step = max(each["clock"] for each in found)
        name = step_folders.free_name(step, {name for each in found for name in each["names"]})
        order = 1 + max(each["order"] for each in found)
        return cls(folder, name, found[0]["identity"], order, step)

    @property
    def whole(self) -> Path:
        return self.folder / self.name

    @property
    def part(self) -> Path:
        return step_folders.part_of(self.folder, self.name, self.identity)

    def manifest(self, opt: LocalOptimizer, files: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "versions": versions(),
            "id": self.identity,
            "order": self.order,
            "step": self.step,
            "workers": len(files),
            "ranks": len(files[0]),
            "at_stop": all(each["at_stop"] for ranks in files for each in ranks),
            "settings": plain(opt.config),
            "files": [each for ranks in files for each in ranks],
        }


def _write(
    part: Path, mine: tuple[int, int], model: nn.Module, opt: LocalOptimizer, extra: Any
) -> dict[str, Any]:
    """Write the file of this rank. Returns its entry in the manifest."""
    worker, rank = mine
    path = part / f"worker-{worker}" / f"rank-{rank}{SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with opt.training_state():
        tensors, text = stored_tree.taken_apart(
            {
                "model": unwrapped(model).state_dict(),
                "optimizer": compact(opt.state_dict()),
                "extra": extra,
            }
        )
        with naming(path):
            written = tensor_files.write(path, tensors, {TEXT: text})
    force(path.parent)
    return {
        "file": str(path.relative_to(part)),
        "worker": worker,
        "rank": rank,
        "clock": opt.clock,
        "at_stop": opt._worker.course.at_stop,
        **written._asdict(),
    }


def _commit(plan: _Plan, manifest: dict[str, Any], mine: tuple[int, int]) -> bool:
    """Give the save its name on this disk, if this is the lowest rank that writes to the disk.
    Ranks that share a disk see each other's files, or none if the lowest has been faster. Returns
    whether it is."""
    here = [each for each in manifest["files"] if (plan.part / each["file"]).exists()]
    leads = bool(here) and (here[0]["worker"], here[0]["rank"]) == mine
    if leads:
        step_folders.commit(
            plan.part, plan.whole, manifest | {"here": [each["file"] for each in here]}
        )
    return leads
