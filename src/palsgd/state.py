"""The saved state of an optimizer, from which training resumes bit for bit, also within a round.

One table defines the state. For each field it has the name, the scope, the kind, and the functions
that read the field from an optimizer and set it. Draws need no state, as plans are pure functions.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palsgd.auto_interval import Costs
from palsgd.codecs.residues import PartResidue, from_messages
from palsgd.flat import FlatModel
from palsgd.replica import Replica
from palsgd.schedule import Span
from palsgd.sharding import is_sharded, local_tensor
from palsgd.state_0_1 import converted
from palsgd.sync import Moment, PendingSync, SentPart
from palsgd.transports.transport import Message, Transport
from palsgd.worker import Progress, Worker

VERSION = 2


class Parts(NamedTuple):
    """The objects that a state is read from and loaded into."""

    worker: Worker
    transport: Transport
    config: dict[str, Any]

    @property
    def outer(self) -> Any:
        """The outer optimizer; None for DDP."""
        return None if self.worker._syncer is None else self.worker.syncer.outer


@dataclass(frozen=True)
class Field:
    """One entry of a saved state."""

    name: str
    scope: str  # "global": equal on all workers; "worker": each one's own; "rank": of its shards
    kind: str
    meaning: str
    save: Callable[[Parts], Any]
    load: Callable[[Parts, Any, bool], None]  # optimizer, saved value, strict


def save_state(of: Parts) -> dict[str, Any]:
    return {"version": VERSION} | {field.name: field.save(of) for field in SCHEMA}


def load_state(of: Parts, state: dict[str, Any], *, strict: bool) -> None:
    if "version" not in state and "counts" in state:
        worker = of.worker
        state = converted(
            state,
            of.config,
            version=VERSION,
            sync_every=worker.facts.sync_every,
            groups=len(worker.inner.optimizer.param_groups),
        )
    _check_schema(state)
    for field in SCHEMA:
        field.load(of, state[field.name], strict)
    of.worker.resumed()


def _check_schema(state: dict[str, Any]) -> None:
    """Raise before anything is changed if `state` is no state of this release."""
    if "version" not in state:
        raise ValueError(
            f"the state has the fields {', '.join(map(str, state)) or 'of nothing'}, which are not "
            "those of a palsgd optimizer; give what its state_dict() returned, or load a plain "
            "optimizer's into opt.inner"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']}, and this release reads version {VERSION}; "
            "load it with the release that saved it"
        )
    missing = [field.name for field in SCHEMA if field.name not in state]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}; give all of what was saved")


# -- settings ----------------------------------------------------------------------------------


def _check_config(of: Parts, saved: dict[str, Any], strict: bool) -> None:
    mine = of.config
    differing = [
        f"{name}: saved {saved.get(name)!r}, here {mine.get(name)!r}"
        for name in mine | saved
        if mine.get(name) != saved.get(name)
    ]
    if strict and differing:
        raise ValueError(
            f"the state was saved under other settings ({'; '.join(differing)}); build the "
            "optimizer with the saved ones, or pass strict=False to go on under the new ones"
        )
    if saved["fragments"] != mine["fragments"]:
        raise ValueError(
            f"the state was saved with fragments={saved['fragments']}, here {mine['fragments']}: "
            "the outer optimizer's state is cut in other places; build the optimizer with "
            f"fragments={saved['fragments']}"
        )


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


def _load_progress(of: Parts, saved: dict[str, Any], strict: bool) -> None:
    worker, saved = of.worker, deepcopy(saved)  # the worker changes some of these lists
    spans, measuring = saved.pop("spans"), saved.pop("measuring")
    costs = [Costs(**found) for found in saved.pop("costs")]
    saved["marks"] = [(steps, tuple(sums)) for steps, sums in saved["marks"]]
    saved["last_record"] = tuple(saved["last_record"])
    worker.at = Progress(**saved)
    worker.at.has_anchor = worker.at.has_anchor and worker._syncer is not None
    if worker.interval is not None and measuring:
        worker.interval.costs = costs
    elif worker.interval is not None or worker.method.varies_length:
        worker.interval = None
        _take_spans(of, [Span(*span) for span in spans])


def _load_clock(of: Parts, saved: int, strict: bool) -> None:
    of.worker.at.clock = saved


def _take_spans(of: Parts, spans: list[Span]) -> None:
    """Set the rounds whose lengths were chosen during training."""
    worker = of.worker
    settled = not worker.method.varies_length
    worker.schedule = replace(worker.schedule, spans=tuple(spans), settled=settled)
    if settled:  # An interval rule chose H. A method that varies H starts from the H it was given.
        worker.facts = replace(worker.facts, sync_every=spans[-1].length)


# -- tensors like the model --------------------------------------------------------------------


def _named(replica: Replica, kept: FlatModel) -> dict[str, Tensor]:
    views = zip(replica.names, replica.params, kept.views, strict=True)
    return {name: _like_shard(view.clone(), param) for name, param, view in views}


@torch.no_grad()
def _load_named(replica: Replica, kept: FlatModel, saved: dict[str, Tensor]) -> None:
    if set(saved) != set(replica.names):
        odd = sorted(set(saved) ^ set(replica.names))
        raise ValueError(f"the saved anchor is of another model: {odd[0]} is only on one side")
    for name, view in zip(replica.names, kept.views, strict=True):
        view.copy_(local_tensor(saved[name]))


def _save_anchor(of: Parts) -> dict[str, Tensor] | None:
    worker = of.worker
    return _named(worker.inner.replica, worker.syncer.anchor) if worker.at.has_anchor else None


def _load_anchor(of: Parts, saved: dict[str, Tensor] | None, strict: bool) -> None:
    worker = of.worker
    worker.at.has_anchor = saved is not None and worker._syncer is not None
    if worker.at.has_anchor:
        assert saved is not None
        _load_named(worker.inner.replica, worker.syncer.anchor, saved)


def _save_method(of: Parts) -> dict[str, Any] | None:
    worker = of.worker
    if not worker.at.has_anchor:
        return None
    states, replica = worker.syncer.states, worker.inner.replica
    return {
        "local": {name: _named(replica, kept) for name, kept in states.local.items()},
        "global": {name: _named(replica, kept) for name, kept in states.common.items()},
        "local scalars": dict(states.local_scalars),
        "global scalars": dict(states.common_scalars),
    }


def _load_method(of: Parts, saved: dict[str, Any] | None, strict: bool) -> None:
    worker = of.worker
    if worker._syncer is None:
        return
    states, replica = worker.syncer.states, worker.inner.replica
    states.reset()
    if saved is None or not worker.at.has_anchor:
        return  # the states start at zero when the local phase begins
    for kept, found in ((states.local, saved["local"]), (states.common, saved["global"])):
        for name in kept:
            if name in found:
                _load_named(replica, kept[name], found[name])
    for scalars, numbers in (
        (states.local_scalars, saved["local scalars"]),
        (states.common_scalars, saved["global scalars"]),
    ):
        scalars.update({name: numbers[name] for name in scalars if name in numbers})


# -- optimizers --------------------------------------------------------------------------------


def _save_outer(of: Parts) -> dict[str, Any] | None:
    """The outer optimizer's state, its tensors marked as shards where the parameters are."""
    worker = of.worker
    if not worker.at.has_anchor:
        return None
    state = worker.syncer.outer.state_dict()
    if worker.at.fragments > 1:  # the parameters are pieces of tensors, and none is sharded
        return state
    state["state"] = {index: dict(entry) for index, entry in state["state"].items()}  # torch's own
    params = worker.inner.replica.params
    for index, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == local_tensor(params[index]).shape:
                entry[key] = _like_shard(value, params[index])
    return state


def _load_outer(of: Parts, saved: dict[str, Any] | None, strict: bool) -> None:
    outer = of.outer
    if outer is None:
        return
    if not of.worker.at.has_anchor or saved is None:
        outer.state.clear()  # the outer state is empty when the local phase begins
        return
    own = [{k: v for k, v in group.items() if k != "params"} for group in outer.param_groups]
    outer.load_state_dict(_plain(saved))
    if not strict:
        for group, settings in zip(outer.param_groups, own, strict=True):
            group.update(settings)


def _save_scheduler(of: Parts) -> Any:
    scheduler = of.worker.inner.scheduler
    return None if scheduler is None else scheduler.state_dict()


def _load_scheduler(of: Parts, saved: Any, strict: bool) -> None:
    scheduler = of.worker.inner.scheduler
    if scheduler is not None and saved is not None:
        scheduler.load_state_dict(saved)


# -- what belongs to a rank --------------------------------------------------------------------


def _save_rank(of: Parts) -> dict[str, Any]:
    syncer = of.worker._syncer
    pending = _save_pending(of)  # first, as an exchange under way changes the residues at its end
    residues = {} if syncer is None else syncer.residues
    return {
        _rank(of): {
            "residues": [
                {"fragment": fragment, "part": part, **kept.saved()}
                for (fragment, part), kept in residues.items()
                if not kept.fresh
            ],
            "pending": pending,
        }
    }


def _load_rank(of: Parts, saved: dict[str, Any], strict: bool) -> None:
    syncer = of.worker._syncer
    if syncer is None:
        return
    own = saved[_rank(of)]
    syncer.residues = _residues(of, own["residues"], own["pending"])
    syncer.pending = None if own["pending"] is None else _pending(own["pending"])


def _residues(
    of: Parts, saved: list[dict[str, Any]], pending: dict[str, Any] | None
) -> dict[tuple[int, str], PartResidue]:
    like = of.worker.syncer.memory.template
    if not any("message" in entry for entry in saved) and not _left(pending):
        return {(r["fragment"], r["part"]): PartResidue.loaded(r, like) for r in saved}
    return _message_residues(of, saved, _left(pending))


def _left(pending: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What the messages of a pending sync have left unsent, in an older state. A newer state has it
    in the residues."""
    if pending is None:
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
    """The residues of an older state, which has them message by message."""
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


def _rank(of: Parts) -> str:
    return f"rank {of.transport.rank_inside}"


def _save_pending(of: Parts) -> dict[str, Any] | None:
    """The pending sync, saved after its means have arrived, so that a resumed run need not wait for
    them. If the means cannot arrive, because a peer is gone, the sync is not saved and its round is
    lost."""
    syncer = of.worker._syncer
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
    return simple | {
        "at": tuple(pending.at),
        "parts": [tuple(part) for part in pending.parts],
        "messages": [_save_message(message) for message in pending.messages],
        "local_when_sent": _cloned(pending.local_when_sent),
    }


def _save_message(message: Message) -> dict[str, Any]:
    return {
        "values": message.values.clone(),
        "sent": message.sent,
        "gather": message.gather,
        "gathered": message.gathered,
        "rows": _cloned(message.rows),
    }


def _pending(saved: dict[str, Any]) -> PendingSync:
    kept = dict(saved)
    fragment, clock, round, due, steps, sums, step_s, *rates = kept["at"]
    lately = tuple(rates[0]) if rates else ()
    kept["at"] = Moment(fragment, clock, round, due, steps, tuple(sums), step_s, lately)
    kept["parts"] = [SentPart(*part) for part in kept["parts"]]
    kept["messages"] = [_message(found) for found in kept["messages"]]
    kept["local_when_sent"] = _cloned(kept["local_when_sent"])
    return PendingSync(**kept)


def _message(saved: dict[str, Any]) -> Message:
    return Message(
        saved["values"].clone(),
        sent=saved["sent"],
        gather=saved["gather"],
        arrived_gathered=saved.get("gathered", False),
        rows=_cloned(saved["rows"]),
    )


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _like_shard(local: Tensor, param: Tensor) -> Tensor:
    """`local` as a DTensor that is sharded as `param` is."""
    if not is_sharded(param):
        return local
    return type(param).from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _plain(state: Any) -> Any:
    """The state with plain tensors in place of shards, for optimizers of plain tensors."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return local_tensor(state) if isinstance(state, Tensor) else state


def _load_inner(of: Parts, saved: dict[str, Any], strict: bool) -> None:
    of.worker.inner.optimizer.load_state_dict(saved)


def _load_buffers(of: Parts, saved: dict[str, Any], strict: bool) -> None:
    of.worker.warmup.buffers.load(saved)


def _load_ledger(of: Parts, saved: dict[str, Any], strict: bool) -> None:
    of.worker.ledger.load(saved)


# The fields are loaded in this order. The settings are compared before anything changes, and torch
# compares the parameters when it loads the inner optimizer.
SCHEMA = (
    Field(
        "config", "global", "settings", "the settings that must agree",
        lambda of: dict(of.config), _check_config,
    ),
    Field(
        "inner", "worker", "optimizer", "the inner optimizer",
        lambda of: of.worker.inner.optimizer.state_dict(), _load_inner,
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
        "anchor", "global", "model", "the global model; None in the warm-up",
        _save_anchor, _load_anchor,
    ),
    Field(
        "outer", "global", "optimizer", "the outer optimizer; None in the warm-up",
        _save_outer, _load_outer,
    ),
    Field(
        "method", "worker", "model", "the method's local and global states",
        _save_method, _load_method,
    ),
    Field(
        "buffers", "global", "tensors", "the global model's buffers",
        lambda of: of.worker.warmup.buffers.state(), _load_buffers,
    ),
    Field(
        "scheduler", "worker", "numbers", "the learning-rate schedule",
        _save_scheduler, _load_scheduler,
    ),
    Field(
        "ledger", "rank", "numbers", "what the worker did",
        lambda of: of.worker.ledger.as_dict(), _load_ledger,
    ),
    Field(
        "rank", "rank", "flat", "residues of codecs, and the sync under way",
        _save_rank, _load_rank,
    ),
)  # fmt: skip
