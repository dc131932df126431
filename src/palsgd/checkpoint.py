"""Checkpoints: what all workers need to go on bit for bit, as files that are whole or absent.

Every rank writes one file. When all have written, each disk gets a manifest, and the save its name.
Workers may share a disk or have one each. Nothing in a checkpoint is code, and nothing is parsed
before its checksum was compared.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palsgd import step_folders, stored_tree, tensor_files
from palsgd.agreement import versions
from palsgd.checks import check_int, warn
from palsgd.disk import force, naming
from palsgd.errors import NonFiniteError
from palsgd.everyone import everyone_of, speaks_for_all
from palsgd.finite import all_finite
from palsgd.optimizer import LocalOptimizer
from palsgd.packing import compact
from palsgd.replica import unwrapped
from palsgd.saved_choice import Choice, choose
from palsgd.scalars import plain
from palsgd.sharding import is_sharded
from palsgd.step_folders import SCHEMA, Saved, find
from palsgd.tensor_files import SUFFIX
from palsgd.transports.waiting import waiting_for

__all__ = ["Loaded", "Saved", "find", "load", "save", "save_model"]

_TEXT = "palsgd"  # the name of the text in a rank's file


@dataclass(frozen=True)
class Loaded:
    """What `load` has loaded.

    Attributes:
        path: the folder of the save.
        clock: the steps that this worker has behind it.
        older: was a newer save passed over?
        why: the reason, in one line; empty if the newest was loaded.
        workers: how many workers saved it.
        source: the worker whose file this worker loaded: its own, except for one that joins.
        extra: what this rank gave to `save`; that of the source, if this worker joins.
    """

    path: Path
    clock: int
    older: bool
    why: str
    workers: int
    source: int
    extra: Any = field(default=None, repr=False)


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
    keep, folder, everyone = (
        check_int("keep", keep, least=1),
        Path(folder),
        everyone_of(opt, "a save"),
    )
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


def load(
    folder: str | Path,
    model: nn.Module,
    opt: LocalOptimizer,
    *,
    strict: bool = True,
    elastic: bool = False,
) -> Loaded:
    """Read the newest save that is whole on all workers into a freshly built model and optimizer,
    in place; every rank calls it. Nothing is deleted.

    A save that is damaged, or missing on one of the disks, is passed over on all workers alike, and
    a warning says so. With an `ElasticTransport` the workers that begin a run load; a newcomer is
    given the state of the others, and is refused.

    Args:
        folder: what `save` was given, or one of the folders that it returned.
        model: the model that `opt` trains.
        opt: the palsgd optimizer.
        strict: must the settings be those of the saved run? See `load_state_dict`.
        elastic: may the number of workers be another one, or a worker have lost its disk? Such a
            worker then goes on from the global model, with the inner state of the lowest worker
            that was saved. The save must be one right after a sync.

    Returns:
        What was loaded: `path`, `clock`, whether an `older` save was taken and `why`, `workers`,
        and the `extra` of this rank.

    Raises:
        ValueError: no save is whole, or it does not fit the model, the settings or the number of
            workers.
        OSError: a disk refuses to be read, and no older save is whole.
        SyncError: a worker is lost. Nothing was loaded.

    Example:
        >>> import tempfile, torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> folder = tempfile.mkdtemp()
        >>> path = palsgd.checkpoint.save(folder, model, opt, extra={"best": 0.5})
        >>> palsgd.checkpoint.load(folder, model, opt).extra
        {'best': 0.5}
    """
    elastic = elastic or opt.transport.elastic
    _check_may_load(opt)
    choice = choose(Path(folder), everyone_of(opt, "a load"), elastic=elastic)
    for line in filter(None, (choice.passed, choice.said)):
        warn(line)
    contents = _contents(choice, opt)
    try:
        unwrapped(model).load_state_dict(contents["model"])
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise ValueError(f"{choice.path} is of another model: {lines}") from None
    opt._load(contents["optimizer"], strict=strict, joining=choice.joining)
    return Loaded(
        choice.path,
        opt.clock,
        bool(choice.passed),
        choice.passed,
        choice.workers,
        choice.source,
        contents["extra"],
    )


@torch.no_grad()
def save_model(folder: str | Path, opt: LocalOptimizer) -> Path:
    """Write the global model alone, as `model.safetensors`, which needs no palsgd to be read.

    Every worker that calls this writes the file, on its own disk or over an equal one. For a method
    whose workers have no common anchor the global model takes a message, so all workers must call
    this; all ranks of a worker must always.

    Args:
        folder: where the file lies.
        opt: the palsgd optimizer.

    Returns:
        The file.

    Raises:
        OSError: the file cannot be written.
        SyncError: a worker is lost that has a part of the model.

    Example:
        >>> import tempfile, torch, palsgd
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> palsgd.checkpoint.save_model(tempfile.mkdtemp(), opt).name
        'model.safetensors'
    """
    path = Path(folder) / f"model{SUFFIX}"
    with opt.anchor_weights():
        state = unwrapped(opt.model).state_dict()
        inside = opt.transport.inside if opt.transport.sharded else None
        with nullcontext() if inside is None else waiting_for(inside, "in save_model()"):
            whole = {name: _whole(tensor) for name, tensor in state.items()}
        if opt.transport.rank_inside == 0:
            _write_model(path, whole, {"format": "pt", "clock": str(opt.clock)})
    return path


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _write_model(path: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
    step_folders.make(path.parent)
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    try:
        tensor_files.write(part, tensors, texts)
        os.replace(part, path)
        force(path.parent)
    finally:
        part.unlink(missing_ok=True)


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

    syncer = opt._worker._syncer
    flying = syncer is not None and syncer.pending is not None
    if opt.transport.elastic and (flying or not opt._worker.at_stop):
        raise RuntimeError(
            f"worker {opt.transport.worker} cannot save at clock {opt.clock} for workers that may "
            "leave and come: they are alike only right after a sync, and while none is under way; "
            "save where opt.synced is True, with delay=0"
        )


def _check_may_load(opt: LocalOptimizer) -> None:
    if opt.transport.elastic and opt.clock:
        raise ValueError(
            f"worker {opt.transport.worker} is at clock {opt.clock}, in the middle of a run whose "
            "other workers would not load; load where opt.clock is 0, as newcomers need not"
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
            written = tensor_files.write(path, tensors, {_TEXT: text})
    force(path.parent)
    return {
        "file": str(path.relative_to(part)),
        "worker": worker,
        "rank": rank,
        "clock": opt.clock,
        "at_stop": opt._worker.at_stop,
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


# -- the contents of a file --------------------------------------------------------------------


def _contents(choice: Choice, opt: LocalOptimizer) -> dict[str, Any]:
    replica = opt._worker.inner.replica
    mesh = next((p.device_mesh for p in replica.params if is_sharded(p)), None)
    tensors, texts = tensor_files.parsed(choice.data, str(choice.path))
    try:
        found = stored_tree.put_together(tensors, texts[_TEXT], mesh, replica.device)
        return {name: found[name] for name in ("model", "optimizer", "extra")}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{choice.path} is not what save() writes ({error!r})") from None
