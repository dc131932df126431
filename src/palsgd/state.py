"""The saved state of an optimizer, from which training resumes bit for bit, also within a round.

One table defines the state. For each field it has the name, the scope, the kind, and the functions
that read the field from an optimizer and set it. Draws need no state, as plans are pure functions.
`palsgd.packing` gives the fields the form of a torch optimizer's state.
"""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from palsgd.auto_interval import Costs
from palsgd.codecs.residues import PartResidue, from_messages
from palsgd.flat import FlatModel
from palsgd.packing import ModelLike, like_shard, numbers, packed, snapshot, unpacked
from palsgd.replica import Replica
from palsgd.schedule import Span
from palsgd.sharding import local_tensor
from palsgd.state_0_1 import converted
from palsgd.sync import Moment, PendingSync, SentPart, Syncer
from palsgd.transports.transport import Message, Transport
from palsgd.worker import Progress, Worker

__all__ = ["SCHEMA", "Parts", "load_state", "numbers", "save_state"]

VERSION = 3


@dataclass(frozen=True)
class Parts:
    """The objects that a state is read from and loaded into."""

    worker: Worker
    transport: Transport
    config: dict[str, Any]

    @property
    def syncer(self) -> Syncer | None:
        """None for DDP."""
        return self.worker._syncer

    @property
    def replica(self) -> Replica:
        return self.worker.inner.replica


@dataclass
class Loading:
    """A load under way."""

    strict: bool
    saved: dict[str, Any]  # the settings under which the state was saved
    mine: dict[str, Any]  # the settings of the optimizer that loads it
    own: bool  # did this worker save the state?
    dropped: list[str] = field(default_factory=list)  # what the state has and this run cannot use
    leaves_rounds: bool = False  # does it lead from the local phase back into the warm-up?

    def differs(self, *names: str) -> str | None:
        """The first of these settings that differs, with both values."""
        for name in names:
            if self.saved.get(name) != self.mine.get(name):
                return f"{name}={self.mine.get(name)!r} (saved {self.saved.get(name)!r})"
        return None


@dataclass(frozen=True)
class Field:
    """One entry of a saved state."""

    name: str
    scope: str  # "global": equal on all workers; "worker": each one's own; "rank": of its shards
    kind: str
    meaning: str
    save: Callable[[Parts], Any]
    load: Callable[[Parts, Any, Loading], None]


@torch.no_grad()
def save_state(of: Parts) -> dict[str, Any]:
    """A snapshot: training that goes on does not change it."""
    found = {"version": VERSION} | {field.name: field.save(of) for field in SCHEMA}
    return packed(found, snapshot(of.worker.inner.optimizer.state_dict()), of.replica)


@torch.no_grad()
def load_state(of: Parts, state: Mapping[str, Any], *, strict: bool) -> None:
    saved, inner = _fields(of, state)
    await_pending(of)
    if saved is None:
        of.worker.start_over()
        of.worker.inner.optimizer.load_state_dict(snapshot(inner))
        of.worker.resumed()
        return
    number = saved["worker"]["number"]
    load = Loading(strict, saved["config"], of.config, number == of.transport.worker)
    _check_config(load)
    _check_names(of, saved["parameters"])
    _load_inner(of, inner, load)
    for entry in SCHEMA:
        entry.load(of, saved[entry.name], load)
    if not load.own:
        _go_on_from_anchor(of, number, load)
    if load.dropped:
        warnings.warn(
            f"the state was loaded under other settings: {'; '.join(load.dropped)}", stacklevel=3
        )
    of.worker.resumed()


def await_pending(of: Parts) -> None:
    """Wait for a sync that is under way, as its exchange writes into memory that a load reuses. A
    peer that is gone sends nothing more, so there is nothing to wait for."""
    pending = None if of.syncer is None else of.syncer.pending
    if pending is not None and not pending.arrived:
        try:
            for message in pending.messages:
                of.transport.finish(message)
        except RuntimeError:
            pass


def _fields(of: Parts, state: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The fields of a state, None for that of a plain optimizer, and the inner optimizer's state.
    Raises before anything is changed if `state` is no state of this release."""
    if "counts" in state:
        old = converted(
            dict(state),
            of.config,
            version=VERSION,
            sync_every=of.worker.facts.sync_every,
            groups=len(of.worker.inner.optimizer.param_groups),
            worker=of.transport.worker,
        )
        return old, old.pop("inner")
    if "version" in state:
        raise ValueError(
            f"the state has version {state['version']}, and this release reads version {VERSION}; "
            "load it with the release that saved it"
        )
    if not {"state", "param_groups"} <= set(state):
        raise ValueError(
            f"the state has the fields {', '.join(map(str, state)) or 'of nothing'}, which are not "
            "those of an optimizer; give what its state_dict() returned"
        )
    saved, inner = unpacked(state, of.replica, of.transport.rank_inside)
    if saved is not None:
        _check_schema(saved)
    return saved, inner


def _check_schema(saved: dict[str, Any]) -> None:
    if saved["version"] != VERSION:
        raise ValueError(
            f"the state has version {saved['version']}, and this release reads version {VERSION}; "
            "load it with the release that saved it"
        )
    missing = [field.name for field in SCHEMA if field.name not in saved]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}; give all of what was saved")


# -- settings ----------------------------------------------------------------------------------


def _check_config(load: Loading) -> None:
    saved, mine = load.saved, load.mine
    differing = [
        f"{name}: saved {saved.get(name)!r}, here {mine.get(name)!r}"
        for name in mine | saved
        if mine.get(name) != saved.get(name)
    ]
    if load.strict and differing:
        raise ValueError(
            f"the state was saved under other settings ({'; '.join(differing)}); build the "
            "optimizer with the saved ones, or pass strict=False to go on under the new ones"
        )


def _save_worker(of: Parts) -> dict[str, int]:
    transport = of.transport
    return {"number": transport.worker, "of": transport.workers, "rank": transport.rank_inside}


def _go_on_from_anchor(of: Parts, number: int, load: Loading) -> None:
    """Another worker's state holds the global model but not this worker's progress. This worker
    goes on from the global model, with the other worker's moments."""
    worker, syncer = of.worker, of.syncer
    if syncer is None or not worker.at.has_anchor:
        return  # in the warm-up all workers hold the same
    syncer.anchor.copy_to_local()
    syncer.states.reset_local()
    syncer.residues = {}
    if syncer.pending is not None:
        part = syncer.anchor.part(syncer.pending.at.fragment)
        syncer.pending.local_when_sent = part.clone()
    warnings.warn(
        f"worker {of.transport.worker} loads the state of worker {number}: it goes on from the "
        f"global model, with worker {number}'s inner state; to resume bit for bit, save and load "
        "each worker's own state (palsgd.checkpoint does)",
        stacklevel=4,
    )


def _check_names(of: Parts, saved: list[str] | None) -> None:
    odd = sorted(set(saved or of.replica.names) ^ set(of.replica.names))
    if odd:
        raise ValueError(f"the state is of another model: {odd[0]} is only on one side")


# -- progress ----------------------------------------------------------------------------------


def _save_progress(of: Parts) -> dict[str, Any]:
    worker = of.worker
    counts = asdict(worker.at)
    del counts["clock"]
    return counts | {
        "spans": [tuple(span) for span in worker.schedule.spans],
        "measuring": worker.interval is not None,
        "costs": [] if worker.interval is None else [asdict(c) for c in worker.interval.costs],
    }


def _load_progress(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    worker, saved = of.worker, deepcopy(saved)  # the worker changes some of these lists
    worker.start_over()
    spans, measuring = saved.pop("spans"), saved.pop("measuring")
    costs = [Costs(**found) for found in saved.pop("costs")]
    saved["marks"] = [(steps, tuple(sums)) for steps, sums in saved["marks"]]
    saved["last_record"] = tuple(saved["last_record"])
    _cut_anew(saved, worker.schedule.fragments)
    worker.at = Progress(**saved)
    if load.differs("sync_every", "method"):
        return  # the rounds are those of the new settings, and "auto" measures anew
    if worker.interval is not None and measuring:
        worker.interval.costs = costs
    elif worker.interval is not None or worker.method.varies_length:
        worker.interval = None
        _take_spans(of, [Span(*span) for span in spans])


def _cut_anew(saved: dict[str, Any], fragments: int) -> None:
    """The marks of the fragments, if their number has changed: each new fragment was synced with
    the last of the old ones, and has the steps since the first of them."""
    if saved["fragments"] != fragments:
        saved["sent_at"] = [max(saved["sent_at"])] * fragments
        saved["marks"] = [min(saved["marks"])] * fragments if saved["marks"] else []
        saved["fragments"] = fragments


def _load_clock(of: Parts, saved: int, load: Loading) -> None:
    at = of.worker.at
    at.clock = saved
    if of.worker.warming_up and at.has_anchor:
        # in the warm-up the local model is the global one, so an anchor would be an old one
        at.has_anchor, load.leaves_rounds = False, True
        model = "the saved global model" if of.transport.workers > 1 else "this worker's model"
        load.dropped.append(
            f"clock {saved} lies in the warm-up of {load.mine['warmup_steps']} steps, in which "
            f"training goes on from {model}; the outer state is left out"
        )


def _take_spans(of: Parts, spans: list[Span]) -> None:
    """Set the rounds whose lengths were chosen during training."""
    worker = of.worker
    settled = not worker.method.varies_length
    worker.schedule = replace(worker.schedule, spans=tuple(spans), settled=settled)
    if settled:  # An interval rule chose H. A method that varies H starts from the H it was given.
        worker.facts = replace(worker.facts, sync_every=spans[-1].length)


# -- tensors like the model --------------------------------------------------------------------


def _model_like(replica: Replica, kept: FlatModel) -> ModelLike:
    views = zip(replica.names, replica.params, kept.views, strict=True)
    return ModelLike({name: like_shard(view.clone(), param) for name, param, view in views})


def _load_model_like(replica: Replica, kept: FlatModel, saved: Mapping[str, Tensor]) -> None:
    if set(saved) != set(replica.names):
        odd = sorted(set(saved) ^ set(replica.names))
        raise ValueError(f"the saved anchor is of another model: {odd[0]} is only on one side")
    for name, view in zip(replica.names, kept.views, strict=True):
        view.copy_(local_tensor(saved[name]))


def _scratch(syncer: Syncer, dtype: torch.dtype) -> FlatModel:
    """Tensors of the model's shapes, cut into fragments as the anchor is."""
    layout, device = syncer.replica.layout, syncer.anchor.home.storage
    return FlatModel(layout, syncer.anchor.ranges, dtype=dtype, device=device)


def _save_anchor(of: Parts) -> ModelLike | None:
    """Before the local phase the local model, which is the global one. A new optimizer's state thus
    has a place for every tensor of a later one."""
    if of.syncer is None:
        return None
    if of.worker.at.has_anchor:
        return _model_like(of.replica, of.syncer.anchor)
    local = _scratch(of.syncer, of.replica.dtype)
    torch._foreach_copy_(local.views, of.replica.local())
    return _model_like(of.replica, local)


def _load_anchor(of: Parts, saved: Mapping[str, Tensor] | None, load: Loading) -> None:
    at = of.worker.at
    if at.has_anchor and saved is None:
        raise ValueError("the state lacks the anchor; give all of what was saved")
    at.has_anchor = at.has_anchor and of.syncer is not None
    if at.has_anchor:
        assert saved is not None
        assert of.syncer is not None
        _load_model_like(of.replica, of.syncer.anchor, saved)
    elif load.leaves_rounds and saved is not None and of.transport.workers > 1:
        # the local models of several workers differ, and a warm-up begins with equal ones
        for name, tensor in zip(of.replica.names, of.replica.local(), strict=True):
            tensor.copy_(local_tensor(saved[name]))


def _save_method(of: Parts) -> dict[str, Any] | None:
    if of.syncer is None:
        return None
    states, replica = of.syncer.states, of.replica
    return {
        "local": {name: _model_like(replica, kept) for name, kept in states.local.items()},
        "global": {name: _model_like(replica, kept) for name, kept in states.common.items()},
        "local scalars": dict(states.local_scalars),
        "global scalars": dict(states.common_scalars),
    }


def _load_method(of: Parts, saved: dict[str, Any] | None, load: Loading) -> None:
    if of.syncer is None or saved is None or not of.worker.at.has_anchor:
        return  # the states start at zero when the local phase begins
    states, replica = of.syncer.states, of.replica
    for kept, found in ((states.local, saved["local"]), (states.common, saved["global"])):
        for name in kept:
            if name in found:
                _load_model_like(replica, kept[name], found[name])
    for scalars, found in (
        (states.local_scalars, saved["local scalars"]),
        (states.common_scalars, saved["global scalars"]),
    ):
        scalars.update({name: found[name] for name in scalars if name in found})


# -- the inner optimizer -----------------------------------------------------------------------


def _load_inner(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    inner = of.worker.inner.optimizer
    own = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    inner.load_state_dict(snapshot(saved))
    if load.strict:
        return
    for group, mine, now, then in zip(
        inner.param_groups, own, _initial_rates(load.mine), _initial_rates(load.saved), strict=False
    ):
        rate = group["lr"] * (now / then) if now != then and then else group["lr"]
        group.update(mine, lr=rate)  # the same point of the schedule of another initial rate


def _initial_rates(config: dict[str, Any]) -> list[float]:
    return [group["lr"] for group in config.get("inner_settings", [])]


# -- the outer optimizer -----------------------------------------------------------------------


def _save_outer(of: Parts) -> dict[str, Any] | None:
    """The outer optimizer's tensors, joined where fragments cut them; and what it keeps beside
    tensors, for each piece."""
    if of.syncer is None:
        return None
    outer, params = of.syncer.outer, of.syncer.anchor.params
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
    outer, params = syncer.outer, syncer.anchor.params
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
    joined = _scratch(syncer, first.dtype)
    for fragment, params in enumerate(syncer.anchor.outer_params):
        for piece, param in zip(joined.pieces(fragment), params, strict=True):
            if name in states[param]:
                piece.copy_(states[param][name])
    return _model_like(of.replica, joined)


def _load_outer(of: Parts, saved: dict[str, Any] | None, load: Loading) -> None:
    if of.syncer is None or saved is None or not of.worker.at.has_anchor:
        return  # the outer state is empty when the local phase begins
    outer, params = of.syncer.outer, of.syncer.anchor.params
    if "state" in saved:  # of release 0.1.0
        outer.load_state_dict(_plain(saved))
        return
    entries, used = saved["numbers"], saved["used"]
    other = load.differs("outer")
    if other is not None and any(used) and _names_of(of.syncer) != _saved_names(saved):
        load.dropped.append(f"the outer state does not fit {other}, so it starts anew")
        return
    if len(entries) != len(params):  # other fragments
        entries, used = [entries[0]] * len(params), [any(used)] * len(params)
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
    joined = _scratch(syncer, next(iter(saved.values())).dtype)
    _load_model_like(of.replica, joined, saved)
    for fragment, params in enumerate(syncer.anchor.outer_params):
        for piece, param in zip(joined.pieces(fragment), params, strict=True):
            if param in syncer.outer.state:
                syncer.outer.state[param][name] = piece.clone()


def _plain(state: Any) -> Any:
    """The state with plain tensors in place of shards, for optimizers of plain tensors."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return local_tensor(state) if isinstance(state, Tensor) else state


def _save_scheduler(of: Parts) -> Any:
    scheduler = of.worker.inner.scheduler
    return None if scheduler is None else snapshot(scheduler.state_dict())


def _load_scheduler(of: Parts, saved: Any, load: Loading) -> None:
    scheduler = of.worker.inner.scheduler
    if scheduler is None or saved is None:
        return
    own = _base_rates(scheduler)
    scheduler.load_state_dict(saved)
    if not load.strict:
        _set_base_rates(scheduler, own)


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


def _save_outer_scheduler(of: Parts) -> Any:
    syncer = of.worker._syncer
    scheduler = None if syncer is None else syncer.outer_scheduler
    return None if scheduler is None else snapshot(scheduler.state_dict())


def _load_outer_scheduler(of: Parts, saved: Any, load: Loading) -> None:
    """Load the schedule of the outer learning rate, and set the rate to where it stood."""
    syncer = of.worker._syncer
    if syncer is None or syncer.outer_scheduler is None or saved is None:
        return
    syncer.outer_scheduler.load_state_dict(saved)
    for group, lr in zip(syncer.outer.param_groups, saved["_last_lr"], strict=True):
        group["lr"] = lr


# -- what belongs to a rank --------------------------------------------------------------------


def _save_rank(of: Parts) -> dict[str, Any]:
    pending = _save_pending(of)  # first, as an exchange under way changes the residues at its end
    return {"residues": _save_residues(of), "pending": pending or _room_for_pending(of)}


def _load_rank(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    syncer = of.syncer
    if syncer is None or not of.worker.at.has_anchor:
        return
    syncer.residues = _fitting_residues(of, saved, load)
    if saved["pending"] is None or saved["pending"].get("empty"):
        return
    other = load.differs("fragments", "workers", "method")
    if other is not None:
        load.dropped.append(
            f"the sync under way does not fit {other}, so its steps are sent with the next one"
        )
        return
    pending = _pending(of, saved["pending"])
    if load.differs("sync_every", "delay", "warmup_steps"):
        # applied before the next step, as the new schedule has no place for it
        pending = replace(pending, at=pending.at._replace(due=of.worker.at.clock))
    syncer.pending = pending


def _of_rank(of: Parts, value: Any) -> dict[str, Any]:
    """The value under the name of this rank. A checkpoint that the ranks of a worker write together
    thus has the tensors of each, which are no shards of common ones."""
    return {f"rank {of.transport.rank_inside}": value}


def _mine(of: Parts, saved: Any) -> Any:
    """What `_of_rank` saved on this rank; None if the state is of other ranks."""
    return None if saved is None else saved.get(f"rank {of.transport.rank_inside}")


# -- residues of codecs ------------------------------------------------------------------------


def _save_residues(of: Parts) -> dict[str, Any]:
    """For each part that is sent, the residues of all fragments as tensors like the model's. The
    displacement has a place for them before its first sync too."""
    syncer = of.syncer
    if syncer is None or syncer.codec is None:
        return {}
    parts = dict.fromkeys(["model", *(part for _, part in syncer.residues)])
    return {part: _save_part_residues(of, syncer, part) for part in parts}


def _save_part_residues(of: Parts, syncer: Syncer, part: str) -> dict[str, Any]:
    own, mean = _scratch(syncer, torch.float32), _scratch(syncer, torch.float32)
    ranges: list[Any] = [None] * len(syncer.anchor.ranges)  # None: nothing was sent
    for (fragment, name), kept in syncer.residues.items():
        if name == part and not kept.fresh:
            ranges[fragment] = [(each.start, each.stop) for each in kept.ranges]
            own.part(fragment).copy_(kept.own)
            places = _coded_here(mean.part(fragment), ranges[fragment])
            for place, found in zip(places, kept.mean.split([*map(len, places)]), strict=True):
                place.copy_(found)
    like = of.replica
    return {"own": _model_like(like, own), "mean": _model_like(like, mean), "ranges": ranges}


def _coded_here(flat: Tensor, ranges: list[tuple[int, int]]) -> list[Tensor]:
    """The numbers of a fragment whose means this worker codes."""
    return [flat[start:stop] for start, stop in ranges]


def _fitting_residues(
    of: Parts, saved: dict[str, Any], load: Loading
) -> dict[tuple[int, str], PartResidue]:
    """What codecs have not sent yet, if it belongs to the same parts as now."""
    found, left = saved["residues"], _left(saved["pending"])
    old = isinstance(found, list)  # of release 0.1.0
    if not (found or left if old else any(_sent(each) for each in found.values())):
        return {}
    other = load.differs("workers", "fragments", "compress", "method")
    if not old and any(each["own"] is None or each["mean"] is None for each in found.values()):
        other = other or "a state from which their tensors are missing"
    if other is not None:
        load.dropped.append(f"what codecs had not sent yet does not fit {other} and is left out")
        return {}
    return _message_residues(of, found, left) if old else _load_residues(of, found)


def _sent(saved: dict[str, Any]) -> bool:
    return any(ranges is not None for ranges in saved["ranges"])


def _load_residues(of: Parts, saved: dict[str, Any]) -> dict[tuple[int, str], PartResidue]:
    syncer, found = of.worker.syncer, {}
    for part, kept in saved.items():
        for fragment, ranges in enumerate(kept["ranges"]):
            if ranges is not None:
                own, mean = (_gathered_up(syncer, fragment, kept[name]) for name in ("own", "mean"))
                assert mean is not None
                means = torch.cat([mean[:0], *_coded_here(mean, ranges)])
                found[fragment, part] = PartResidue.loaded(
                    {"own": own, "mean": means, "ranges": ranges}, syncer.memory.template
                )
    return found


def _left(pending: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What the messages of a pending sync have left unsent, in a state of release 0.1.0. Later
    states have it in the residues."""
    if pending is None or pending.get("empty"):
        return []
    return [
        {
            "fragment": pending["at"][0],
            "message": m,
            "own": found["left"][0],
            "mean": found["left"][1],
        }
        for m, found in enumerate(pending["messages"])
        if found.get("left") is not None
    ]


def _message_residues(
    of: Parts, saved: list[dict[str, Any]], left: list[dict[str, Any]]
) -> dict[tuple[int, str], PartResidue]:
    """The residues of a state of release 0.1.0, which has them message by message."""
    syncer, found = of.worker.syncer, {}
    if syncer.codec is None:
        return {}
    by_place = {(entry["fragment"], entry["message"]): entry for entry in [*saved, *left]}
    for fragment in sorted({fragment for fragment, _ in by_place}):
        entries = [by_place[key] for key in sorted(by_place) if key[0] == fragment]
        kept = from_messages(
            entries,
            syncer.messages(fragment),
            syncer.codec,
            worker=of.transport.worker,
            workers=of.transport.workers,
            like=syncer.memory.template,
        )
        if kept is None or syncer.method.overrides("payload"):
            raise ValueError(
                "the state has residues of messages that are cut otherwise here, and an earlier "
                "release saved it; go on once with the bucket_mb and the release that saved it"
            )
        found[fragment, "model"] = kept
    return found


# -- the sync under way ------------------------------------------------------------------------


def _save_pending(of: Parts) -> dict[str, Any] | None:
    """The pending sync, saved after its means have arrived, so that a resumed run need not wait for
    them. If the means cannot arrive, because a peer is gone, the sync is not saved and its round is
    lost."""
    syncer = of.syncer
    pending = None if syncer is None else syncer.pending
    if syncer is None or pending is None:
        return None
    if not pending.arrived:
        try:
            for message in pending.messages:
                message.sent = of.transport.finish(message)
        except RuntimeError:
            return None
        pending.arrived = True
    simple = {f.name: getattr(pending, f.name) for f in fields(pending)}
    fragment = pending.at.fragment
    return simple | {
        "at": tuple(pending.at),
        "parts": [tuple(part) for part in pending.parts],
        "messages": [_save_message(of, pending, number) for number in range(len(pending.messages))],
        "local_when_sent": _spread(of, fragment, pending.local_when_sent),
    }


def _room_for_pending(of: Parts) -> dict[str, Any] | None:
    """The tensors that a pending sync would have, if there may be one. A checkpoint is read into
    the tensors of a new optimizer's state, which has none under way."""
    if of.syncer is None or not of.config["delay"]:
        return None
    # each its own, as a reader writes into them
    values, when_sent = (
        _model_like(of.replica, _scratch(of.syncer, of.replica.dtype)) for _ in range(2)
    )
    return {"empty": True, "messages": [{"values": values}], "local_when_sent": when_sent}


def _save_message(of: Parts, pending: PendingSync, number: int) -> dict[str, Any]:
    message = pending.messages[number]
    tail = pending.tail if number == 0 else 0
    body = message.values[: len(message.values) - tail]
    like_model = pending.parts[number].displacement
    return {
        "values": _spread(of, pending.at.fragment, body) if like_model else body,
        "tail": message.values[len(body) :].tolist(),
        "sent": message.sent,
        "divisor": message.divisor,
        "gather": message.gather,
        "gathered": message.gathered,
        "rows": None if message.rows is None else _of_rank(of, message.rows),
    }


def _spread(of: Parts, fragment: int, flat: Tensor | None) -> ModelLike | None:
    """The elements of a fragment as tensors like the model's, zero in the other fragments."""
    if flat is None:
        return None
    assert of.syncer is not None
    spread = _scratch(of.syncer, flat.dtype)
    spread.part(fragment).copy_(flat)
    return _model_like(of.replica, spread)


def _gathered_up(syncer: Syncer, fragment: int, saved: Any) -> Tensor | None:
    """The inverse of `_spread`. Release 0.1.0 saved the flat elements."""
    if saved is None or isinstance(saved, Tensor):
        return None if saved is None else saved.clone()
    spread = _scratch(syncer, next(iter(saved.values())).dtype)
    _load_model_like(syncer.replica, spread, saved)
    return spread.part(fragment).clone()


def _pending(of: Parts, saved: dict[str, Any]) -> PendingSync:
    assert of.syncer is not None
    kept = dict(saved)
    at: Any = [tuple(each) if isinstance(each, list) else each for each in kept["at"]]
    kept["at"], fragment = Moment(*at), int(at[0])
    kept["parts"] = [SentPart(*part) for part in kept["parts"]]
    kept["messages"] = [_message(of, fragment, found) for found in kept["messages"]]
    kept["local_when_sent"] = _gathered_up(of.syncer, fragment, kept["local_when_sent"])
    if kept["local_when_sent"] is None:
        _lacks_pending()
    return PendingSync(**kept)


def _message(of: Parts, fragment: int, saved: dict[str, Any]) -> Message:
    assert of.syncer is not None
    values, rows = _gathered_up(of.syncer, fragment, saved["values"]), _mine(of, saved["rows"])
    if values is None or (rows is None and saved["rows"] is not None):
        _lacks_pending()
    return Message(
        torch.cat([values, values.new_tensor(saved.get("tail", []))]),
        sent=saved["sent"],
        divisor=saved.get("divisor", 1),
        gather=saved["gather"],
        arrived_gathered=saved.get("gathered", False),
        rows=None if rows is None else rows.clone(),
    )


def _lacks_pending() -> NoReturn:
    raise ValueError(
        "the state lacks tensors of the sync that was under way when it was saved; give all of "
        "what was saved, or save where no sync is under way"
    )


def _load_buffers(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    of.worker.warmup.buffers.load(saved)


def _load_data(of: Parts, saved: Any, load: Loading) -> None:
    of.worker.feed.resume(saved)


def _load_ledger(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    of.worker.ledger.load(saved)


def _nothing(of: Parts, saved: Any, load: Loading) -> None:
    """The field is compared before anything is loaded."""


# The fields are loaded in this order, after the inner optimizer. The settings are compared before
# anything changes, and torch compares the parameters when it loads the inner optimizer.
SCHEMA = (
    Field(
        "config", "global", "settings", "the settings that must agree",
        lambda of: dict(of.config), _nothing,
    ),
    Field(
        "worker", "rank", "numbers", "which worker saved it, of how many",
        _save_worker, _nothing,
    ),
    Field(
        "parameters", "global", "names", "the trained parameters",
        lambda of: list(of.replica.names), _nothing,
    ),
    Field(
        "progress", "worker", "numbers", "counts and rounds",
        _save_progress, _load_progress,
    ),
    Field(
        "clock", "worker", "number", "steps so far",
        lambda of: of.worker.at.clock, _load_clock,
    ),
    Field(
        "anchor", "global", "tensors of each parameter", "the global model",
        _save_anchor, _load_anchor,
    ),
    Field(
        "outer", "global", "tensors of each parameter", "the outer optimizer",
        _save_outer, _load_outer,
    ),
    Field(
        "method", "worker", "tensors of each parameter", "the method's local and global states",
        _save_method, _load_method,
    ),
    Field(
        "buffers", "global", "loose tensors", "the global model's buffers",
        lambda of: of.worker.warmup.buffers.state(), _load_buffers,
    ),
    Field(
        "scheduler", "worker", "numbers", "the learning-rate schedule",
        _save_scheduler, _load_scheduler,
    ),
    Field(
        "outer_scheduler", "global", "numbers", "the schedule of the outer learning rate",
        _save_outer_scheduler, _load_outer_scheduler,
    ),
    Field(
        "data", "worker", "any", "the state of the loader of until(), if the loader has one",
        lambda of: of.worker.feed.state(), _load_data,
    ),
    Field(
        "ledger", "rank", "numbers", "what the worker did",
        lambda of: of.worker.ledger.as_dict(), _load_ledger,
    ),
    Field(
        "rank", "rank", "loose tensors", "residues of codecs, and the sync under way",
        _save_rank, _load_rank,
    ),
)  # fmt: skip
