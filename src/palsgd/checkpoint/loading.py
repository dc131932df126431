"""A load: from the save that all workers choose into a model and an optimizer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from palsgd import tensor_files
from palsgd.checkpoint import stored_tree
from palsgd.checkpoint.everyone import everyone_of
from palsgd.checkpoint.saved_choice import Choice, choose
from palsgd.checkpoint.saving import TEXT
from palsgd.checks import warn
from palsgd.optimizer import LocalOptimizer
from palsgd.replica import unwrapped
from palsgd.sharding import is_sharded


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
    _check_may_load(opt)
    elastic = elastic or opt.transport.elastic
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


def _check_may_load(opt: LocalOptimizer) -> None:
    if opt.transport.elastic and opt.clock:
        raise ValueError(
            f"worker {opt.transport.worker} is at clock {opt.clock}, in the middle of a run whose "
            "other workers would not load; load where opt.clock is 0, as newcomers need not"
        )


def _contents(choice: Choice, opt: LocalOptimizer) -> dict[str, Any]:
    replica = opt._worker.inner.replica
    mesh = next((p.device_mesh for p in replica.params if is_sharded(p)), None)
    tensors, texts = tensor_files.parsed(choice.data, str(choice.path))
    try:
        found = stored_tree.put_together(tensors, texts[TEXT], mesh, replica.device)
        return {name: found[name] for name in ("model", "optimizer", "extra")}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{choice.path} is not what save() writes ({error!r})") from None
