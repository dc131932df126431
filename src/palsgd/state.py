"""What an optimizer saves, so that training resumed mid-round goes on bit for bit."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from palsgd.compression import Residue
from palsgd.replica import Replica, local_tensor
from palsgd.sync import Flight
from palsgd.transport import Message

if TYPE_CHECKING:
    from palsgd.core import Core
    from palsgd.optimizer import LocalOptimizer


def save_state(opt: "LocalOptimizer") -> dict[str, Any]:
    """The keys of DESIGN's table (inner, outer, anchor, clock, seed, config) and the counts,
    buffers, scheduler and ledger that belong to them. Draws need no state: plans are pure."""
    core = opt._core
    scheduler = core.scheduler
    return {
        "inner": opt.inner.state_dict(),
        "outer": _outer_state(opt) if core.opened else None,
        "anchor": _named_anchor(core.replica) if core.opened else None,
        "buffers": core.buffers.state(),
        "clock": core.clock,
        "counts": core.counts(),
        "seed": getattr(opt.method, "seed", None),
        "config": dict(opt.config),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "ledger": core.ledger.as_dict(),
        "own": {_rank_inside(opt): {"residues": _residues(core), "flight": _flight(opt)}},
    }


def load_state(opt: "LocalOptimizer", state: dict[str, Any], *, strict: bool) -> None:
    if strict:
        _check_settings(opt.config, state["config"])
    saved, here = state["config"]["fragments"], opt.config["fragments"]
    if saved != here:
        raise ValueError(
            f"the state was saved with fragments={saved}, here {here}: the outer optimizer's state "
            f"is cut in other places; build the optimizer with fragments={saved}"
        )
    core = opt._core
    opt.inner.load_state_dict(state["inner"])
    core.opened = state["anchor"] is not None and core.replica.anchor is not None
    if core.opened:
        _load_anchor(core.replica, state["anchor"])
        _load_outer(core.outer, _plain(state["outer"]), keep_settings=not strict)
    elif core._outer is not None:
        core.outer.state.clear()  # it starts empty at the switch
    core.buffers.load(state["buffers"])
    if core.scheduler is not None and state["scheduler"] is not None:
        core.scheduler.load_state_dict(state["scheduler"])
    core.ledger.load(state["ledger"])
    own = state["own"][_rank_inside(opt)]
    core.residues = {
        (r["fragment"], r["message"]): Residue(r["own"].clone(), r["mean"].clone())
        for r in own["residues"]
    }
    _load_flight(core, own["flight"])
    core.resume(state["clock"], state["counts"])


def _rank_inside(opt: "LocalOptimizer") -> str:
    """Residues and what is in flight belong to a rank, not to a worker: they are flat, and of
    this rank's shards."""
    inside = getattr(opt.transport, "inside", None)
    return f"rank {0 if inside is None else dist.get_rank(inside)}"


def _residues(core: "Core") -> list[dict[str, Any]]:
    return [
        {"fragment": f, "message": m, "own": r.own.clone(), "mean": r.mean.clone()}
        for (f, m), r in core.residues.items()
    ]


def _flight(opt: "LocalOptimizer") -> dict[str, Any] | None:
    """A sync that is under way is saved as arrived, so that a resumed run has nothing to wait
    for. One that cannot arrive, since a peer is gone, is not in the state: its round is lost."""
    flight = opt._core.flight
    if flight is None:
        return None
    if not flight.arrived:
        try:
            flight.sent = opt.transport.finish(flight.message)
        except RuntimeError:
            return None
        flight.arrived = True
    kept = {f.name: getattr(flight, f.name) for f in fields(flight) if f.name != "message"}
    left = flight.message.left
    return kept | {
        "departure": flight.departure.clone(),
        "values": flight.message.values.clone(),
        "left": None if left is None else [left.own.clone(), left.mean.clone()],
    }


def _load_flight(core: "Core", saved: dict[str, Any] | None) -> None:
    if saved is None:
        core.flight = None
        return
    kept = dict(saved)
    left = kept.pop("left")
    message = Message(kept.pop("values").clone())
    message.left = None if left is None else Residue(left[0].clone(), left[1].clone())
    core.flight = Flight(message=message, **kept | {"departure": kept["departure"].clone()})


def _check_settings(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    differing = [
        f"{name}: saved {saved.get(name)!r}, here {mine.get(name)!r}"
        for name in mine | saved
        if mine.get(name) != saved.get(name)
    ]
    if differing:
        raise ValueError(
            f"the state was saved under other settings ({'; '.join(differing)}); build the "
            "optimizer with the saved ones, or pass strict=False to go on under the new ones"
        )


def _named_anchor(replica: Replica) -> dict[str, Tensor]:
    assert replica.anchor is not None
    views = zip(replica.names, replica.params, replica.anchor.views, strict=True)
    return {name: _like_shard(view.clone(), param) for name, param, view in views}


def _load_anchor(replica: Replica, saved: dict[str, Tensor]) -> None:
    assert replica.anchor is not None
    if set(saved) != set(replica.names):
        odd = sorted(set(saved) ^ set(replica.names))
        raise ValueError(f"the saved anchor is of another model: {odd[0]} is only on one side")
    with torch.no_grad():
        for name, view in zip(replica.names, replica.anchor.views, strict=True):
            view.copy_(local_tensor(saved[name]))


def _outer_state(opt: "LocalOptimizer") -> dict[str, Any]:
    """The outer optimizer's state, its tensors marked as shards where the parameters are."""
    state = opt._core.outer.state_dict()
    if opt._core.fragments > 1:  # of pieces, and nothing is sharded
        return state
    state["state"] = {index: dict(entry) for index, entry in state["state"].items()}  # torch's own
    params = opt._core.replica.params
    for index, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == local_tensor(params[index]).shape:
                entry[key] = _like_shard(value, params[index])
    return state


def _load_outer(outer: Optimizer, state: dict[str, Any], *, keep_settings: bool) -> None:
    own = [{k: v for k, v in group.items() if k != "params"} for group in outer.param_groups]
    outer.load_state_dict(state)
    if keep_settings:
        for group, settings in zip(outer.param_groups, own, strict=True):
            group.update(settings)


def _like_shard(local: Tensor, param: Tensor) -> Tensor:
    """`local` as the same shard of a whole that `param`'s local tensor is of its own."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _plain(state: Any) -> Any:
    """Shards as plain tensors, for optimizers that work on those."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return local_tensor(state) if isinstance(state, Tensor) else state
