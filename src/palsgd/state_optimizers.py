"""The inner and the outer optimizer, and their schedules, in a saved state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from palsgd.inner import parts_of
from palsgd.packing import ModelLike, snapshot
from palsgd.schedulers import step_on, steps_of
from palsgd.sharding import local_tensor
from palsgd.state_parts import Loading, Parts, load_model_like, model_like, scratch
from palsgd.sync import Syncer

# Settings under which an inner optimizer keeps one more tensor for each parameter.
_ADD_TENSORS = ("momentum", "amsgrad", "centered")


def load_inner(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    inner = of.worker.inner.optimizer
    own = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    other = None if load.strict else load.differs("inner") or _turned_on(saved, load)
    if other is None:
        inner.load_state_dict(snapshot(saved))
    else:
        _take_rates_alone(of, saved["param_groups"])
        load.dropped.append(f"the inner state does not fit {other}, so it starts anew")
    if load.strict:
        return
    for group, mine, now, then in zip(
        inner.param_groups, own, _initial_rates(load.mine), _initial_rates(load.saved), strict=False
    ):
        rate = group["lr"] * (now / then) if now != then and then else group["lr"]
        group.update(mine, lr=rate)  # the same point of the schedule of another initial rate


def _turned_on(saved: dict[str, Any], load: Loading) -> str | None:
    """The first setting that has torch's optimizers look for a tensor that the state has not."""
    if not any(saved["state"].values()):
        return None
    groups = (each.get("inner_settings", []) for each in (load.mine, load.saved))
    for now, then in zip(*groups, strict=False):
        for name in _ADD_TENSORS:
            if now.get(name) and not then.get(name):
                return f"{name}={now[name]!r} (saved {then.get(name)!r})"
    return None


def _take_rates_alone(of: Parts, saved: list[dict[str, Any]]) -> None:
    """Of another kind of inner optimizer only the point of the schedule counts."""
    forget_inner(of)
    groups = of.worker.inner.optimizer.param_groups
    if len(groups) == len(saved):
        for group, found in zip(groups, saved, strict=True):
            group["lr"] = found["lr"]


def forget_inner(of: Parts) -> None:
    for part in parts_of(of.worker.inner.optimizer):
        part.state.clear()


def _initial_rates(config: dict[str, Any]) -> list[float]:
    return [group["lr"] for group in config.get("inner_settings", [])]


# -- the outer optimizer -----------------------------------------------------------------------


def save_outer(of: Parts) -> dict[str, Any] | None:
    """The outer optimizer's tensors, joined where fragments cut them; and what it keeps beside
    tensors, for each piece."""
    if of.syncer is None:
        return None
    outer, params = of.syncer.changes.outer, of.syncer.anchor.params
    has_state = [bool(outer.state.get(p)) for p in params]
    states = _complete_outer_state(of.syncer)
    like_pieces = {k for p in params for k, v in states[p].items() if _is_like(v, p)}
    return {
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in outer.param_groups],
        "used": has_state,
        "tensors": {name: _joined_outer(of, states, name) for name in sorted(like_pieces)},
        "numbers": [
            {k: snapshot(v) for k, v in states[p].items() if k not in like_pieces} for p in params
        ],
    }


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0


def _complete_outer_state(syncer: Syncer) -> dict[Tensor, dict[str, Any]]:
    """The state of each piece. For a piece that was never synced it is what a step with a gradient
    of zeros makes. Every state of an optimizer thus has the same tensors, as readers of checkpoints
    require, and `used` says which of them count."""
    outer, params = syncer.changes.outer, syncer.anchor.params
    unused = [p for p in params if not outer.state.get(p)]
    if unused:
        kept = syncer.anchor.flat.clone()
        for param in unused:
            param.grad = torch.zeros_like(param)
        try:
            outer.step()
        finally:
            syncer.anchor.flat.copy_(kept)
            for param in unused:
                param.grad = None
    found: dict[Tensor, dict[str, Any]] = {p: dict(outer.state.get(p, {})) for p in params}
    for param in unused:
        outer.state.pop(param, None)
    return found


def _joined_outer(of: Parts, states: dict[Tensor, dict[str, Any]], name: str) -> ModelLike:
    syncer = of.syncer
    assert syncer is not None
    first = next(states[p][name] for p in syncer.anchor.params if name in states[p])
    joined = scratch(syncer, first.dtype)
    for fragment, params in enumerate(syncer.anchor.outer_params):
        for piece, param in zip(joined.pieces(fragment), params, strict=True):
            if name in states[param]:
                piece.copy_(states[param][name])
    return model_like(of.replica, joined)


def load_outer(of: Parts, saved: dict[str, Any] | None, load: Loading) -> None:
    if of.syncer is None or saved is None or not of.worker.at.has_anchor:
        return  # the outer state is empty when the local phase begins
    outer, params = of.syncer.changes.outer, of.syncer.anchor.params
    if "state" in saved:  # of release 0.1.0
        outer.load_state_dict(_plain(saved))
        return
    entries, used = saved["numbers"], saved["used"]
    other = load.differs("outer")
    if other is not None and any(used) and _names_of(of.syncer) != _saved_names(saved):
        load.dropped.append(f"the outer state does not fit {other}, so it starts anew")
        return
    if len(entries) != len(params) or load.differs("fragments"):
        # the pieces are others, also if there are as many: all are as the first that was synced
        first = entries[used.index(True) if any(used) else 0]
        entries, used = [first] * len(params), [any(used)] * len(params)
    for param, entry, counts in zip(params, entries, used, strict=True):
        if counts:
            outer.state[param] = snapshot(entry)
    for name, tensors in saved["tensors"].items():
        _cut_outer(of, name, tensors)
    if load.strict:
        for group, settings in zip(outer.param_groups, saved["groups"], strict=True):
            group.update(settings)


def _names_of(syncer: Syncer) -> set[str]:
    """What this outer optimizer keeps for a parameter."""
    return {name for kept in _complete_outer_state(syncer).values() for name in kept}


def _saved_names(saved: dict[str, Any]) -> set[str]:
    return set(saved["tensors"]) | {name for entry in saved["numbers"] for name in entry}


def _cut_outer(of: Parts, name: str, saved: Mapping[str, Tensor]) -> None:
    syncer = of.syncer
    assert syncer is not None
    joined = scratch(syncer, next(iter(saved.values())).dtype)
    load_model_like(of.replica, joined, saved)
    for fragment, params in enumerate(syncer.anchor.outer_params):
        for piece, param in zip(joined.pieces(fragment), params, strict=True):
            if param in syncer.changes.outer.state:
                syncer.changes.outer.state[param][name] = piece.clone()


def _plain(state: Any) -> Any:
    """The state with plain tensors in place of shards, for optimizers of plain tensors."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return local_tensor(state) if isinstance(state, Tensor) else state


def save_scheduler(of: Parts) -> Any:
    scheduler = of.worker.inner.scheduler
    return None if scheduler is None else snapshot(scheduler.state_dict())


def load_scheduler(of: Parts, saved: Any, load: Loading) -> None:
    scheduler, groups = of.worker.inner.scheduler, of.worker.inner.optimizer.param_groups
    other = None if load.strict else load.differs("scheduler")
    if scheduler is None or saved is None:
        if other is not None:
            rate = "the learning rate stays" if scheduler is None else "the schedule begins anew"
            load.dropped.append(f"the state does not fit {other}, so {rate}")
            _begin_anew(scheduler, groups)
        return
    if other is not None:
        _go_on(scheduler, groups, _steps_ahead(scheduler, saved), load, "scheduler")
        return
    own = _base_rates(scheduler)
    scheduler.load_state_dict(saved)
    if not load.strict:
        _set_base_rates(scheduler, own)


def _begin_anew(scheduler: Any, groups: list[dict[str, Any]]) -> None:
    """A schedule that is to begin does so with its own rates, not with those of the state."""
    if scheduler is not None:
        step_on(scheduler, groups, 0)


def _base_rates(scheduler: Any) -> Any:
    """The initial learning rates of a scheduler and of those inside it."""
    inside = [_base_rates(each) for each in getattr(scheduler, "_schedulers", [])]
    return getattr(scheduler, "base_lrs", None), inside


def _set_base_rates(scheduler: Any, rates: Any) -> None:
    own, inside = rates
    if own is not None:
        scheduler.base_lrs = own
    for each, found in zip(getattr(scheduler, "_schedulers", []), inside, strict=False):
        _set_base_rates(each, found)


def save_outer_scheduler(of: Parts) -> Any:
    changes = of.worker.changes
    scheduler = None if changes is None else changes.outer_scheduler
    return None if scheduler is None else snapshot(scheduler.state_dict())


def load_outer_scheduler(of: Parts, saved: Any, load: Loading) -> None:
    """Load the schedule of the outer learning rate, and set the rate to where it stood."""
    changes = of.worker.changes
    if changes is None or changes.outer_scheduler is None or saved is None:
        return
    scheduler, groups = changes.outer_scheduler, changes.outer.param_groups
    ahead = _steps_ahead(scheduler, saved)
    if load.strict or (ahead is None and not load.differs("outer", "outer_scheduler")):
        scheduler.load_state_dict(saved)
        for group, lr in zip(groups, saved["_last_lr"], strict=True):
            group["lr"] = lr
    else:
        _go_on(scheduler, groups, ahead, load, "outer_scheduler")


def _steps_ahead(scheduler: Any, saved: Any) -> int | None:
    """The steps from here to where the saved schedule stands; None if they cannot be taken."""
    now, then = steps_of(scheduler.state_dict()), steps_of(saved)
    return None if now is None or then is None or then < now else then - now


def _go_on(scheduler: Any, groups: Any, ahead: int | None, load: Loading, option: str) -> None:
    """Bring a schedule to the step at which the saved one stands, under its own settings."""
    kind = f"{option}={type(scheduler).__name__}"
    if ahead is None:
        load.dropped.append(
            f"{kind} cannot be brought to the step of the saved schedule, so it stays where it is; "
            "load into a new optimizer"
        )
    elif not step_on(scheduler, groups, ahead):
        load.dropped.append(f"{kind} ends before the step of the saved schedule, {ahead} further")
