"""What a newcomer is given: the state of the run that all workers have in common.

The fields are those of a saved state. A newcomer takes the ones that are global, and from the
others' own the clock, the rounds and the schedule of the learning rate, which are equal on all
workers after a sync. Its local model becomes the global one, and its method sets its local states
(`Method.join`). A worker without an inner state of its own takes the sender's.
"""

from typing import Any

import torch

from palsgd.packing import snapshot
from palsgd.state import SCHEMA
from palsgd.state_optimizers import load_inner
from palsgd.state_parts import Loading, Parts
from palsgd.state_rank import await_pending

_COMMON = ("progress", "clock", "method", "scheduler")  # of a worker, but equal on all
_COMPARED = ("config", "parameters")  # when the optimizer was built


@torch.no_grad()
def gift(of: Parts, *, fresh: bool) -> dict[str, Any]:
    """What this worker gives to newcomers. `fresh`: does one of them lack an inner state?"""
    given = {
        field.name: field.save(of)
        for field in SCHEMA
        if field.name in _COMMON or (field.scope == "global" and field.name not in _COMPARED)
    }
    if given["method"] is not None:
        given["method"] |= {"local": {}, "local scalars": {}}
    inner = of.worker.inner.optimizer.state_dict()
    given["inner"] = snapshot(inner if fresh else {"param_groups": inner["param_groups"]})
    given["frozen"] = of.worker.warmup.untrained.frozen_digest()
    return given


@torch.no_grad()
def take(of: Parts, given: dict[str, Any], *, fresh: bool) -> None:
    """Go on from what another worker has given."""
    worker, syncer = of.worker, of.worker.syncer
    if given["frozen"] != worker.warmup.untrained.frozen_digest():
        raise ValueError(
            f"worker {of.transport.worker} has other frozen parameters than the workers that let "
            "it in; load the same file on all"
        )
    await_pending(of)
    epoch = worker.at.epoch
    load = Loading(strict=True, saved=of.config, mine=of.config, own=False)
    inner = given["inner"] if fresh else worker.inner.optimizer.state_dict() | given["inner"]
    load_inner(of, inner, load)
    for field in SCHEMA:
        if field.name in given:
            field.load(of, given[field.name], load)
    worker.at.epoch = worker.at.epoch if fresh else epoch
    syncer.changes.start_again(worker.at.rounds)
    worker.warmup.buffers.copy_to_local()
    worker.welcomed()
