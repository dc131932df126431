"""The saved state of an optimizer, from which training resumes bit for bit, also within a round.

One table defines the state. For each field it has the name, the scope, the kind, and the functions
that read the field from an optimizer and set it. Draws need no state, as plans are pure functions.
`palsgd.packing` gives the fields the form of a torch optimizer's state.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from palsgd.auto_interval import Costs
from palsgd.course import Course, Progress
from palsgd.pacing import as_records
from palsgd.packing import ModelLike, numbers, packed, snapshot, unpacked
from palsgd.schedule import Span
from palsgd.sharding import local_tensor
from palsgd.state_0_1 import converted
from palsgd.state_optimizers import (
    forget_inner,
    load_inner,
    load_outer,
    load_outer_scheduler,
    load_scheduler,
    save_outer,
    save_outer_scheduler,
    save_scheduler,
)
from palsgd.state_parts import Loading, Parts, load_model_like, model_like, scratch
from palsgd.state_rank import await_pending, load_rank, save_rank

__all__ = ["SCHEMA", "Parts", "load_state", "numbers", "save_state"]

VERSION = 3


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
def load_state(
    of: Parts,
    state: Mapping[str, Any],
    *,
    strict: bool,
    joining: Collection[int] | None = None,
) -> None:
    """Given `joining`, the workers that load another's state, their number may be another one. All
    of them must be at one clock then."""
    saved, inner = _fields(of, state)
    await_pending(of)
    if saved is None:
        of.worker.start_over()
        of.worker.inner.optimizer.load_state_dict(snapshot(inner))
        of.worker.resumed()
        return
    number = saved["worker"]["number"]
    # states of release 0.2.0 do not name the schedule
    config = {"scheduler": of.config["scheduler"]} | saved["config"]
    load = Loading(strict, config, of.config, number == of.transport.worker, joining)
    _check_config(load)
    _check_names(of, saved["parameters"])
    _check_rounds(of, saved["clock"], saved["progress"], load)
    load_inner(of, inner, load)
    for entry in SCHEMA:
        entry.load(of, saved[entry.name], load)
    if joining is not None:
        _change_workers(of, joining, load)
    if not load.own:
        _go_on_from_anchor(of, number, load)
    if load.dropped:
        warnings.warn(
            f"the state was loaded under other settings: {'; '.join(load.dropped)}", stacklevel=3
        )
    of.worker.resumed()


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
    free = () if load.joining is None else ("workers",)
    differing = [
        f"{name}: saved {saved.get(name)!r}, here {mine.get(name)!r}"
        for name in mine | saved
        if mine.get(name) != saved.get(name) and name not in free
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
    syncer.changes.join(worker.schedule.round_of(worker.at.clock))
    syncer.residues.kept = {}
    if syncer.pending is not None:
        part = syncer.anchor.part(syncer.pending.at.fragment)
        syncer.pending.local_when_sent = part.clone()
    if load.joining is not None:
        return  # whoever loads a checkpoint says it for all workers
    warnings.warn(
        f"worker {of.transport.worker} loads the state of worker {number}: it goes on from the "
        f"global model, with worker {number}'s inner state; to resume bit for bit, save and load "
        "each worker's own state (palsgd.checkpoint does)",
        stacklevel=4,
    )


def _change_workers(of: Parts, joining: Collection[int], load: Loading) -> None:
    """Note another number of workers. Those that join have the gradient steps of the worker whose
    state they load, the lowest of the others."""
    if of.transport.elastic:
        return  # who is there is known at every sync
    at, before, now = of.worker.at, load.saved["workers"], load.mine["workers"]
    if at.steps_of_all:
        source = next(k for k in range(now) if k not in joining)
        known = at.steps_of_all
        at.steps_of_all = [known[source if k in joining else k] for k in range(now)]
        at.counted = list(range(now))
    if before != now:
        left, joined = list(range(now, before)), list(range(before, now))
        change = {"clock": at.clock, "left": left, "joined": joined, "workers": now}
        of.worker.ledger.changes.append(change)


def _check_names(of: Parts, saved: list[str] | None) -> None:
    odd = sorted(set(saved or of.replica.names) ^ set(of.replica.names))
    if odd:
        raise ValueError(f"the state is of another model: {odd[0]} is only on one side")


def _check_rounds(of: Parts, clock: int, saved: dict[str, Any], load: Loading) -> None:
    """Where steps without data are drawn, workers stand at different clocks between two syncs. A
    sync of other rounds may lie between them, and they would never meet in it."""
    other = load.differs("sync_every", "fragments", "method")
    if load.strict or other is None or of.transport.workers == 1 or not saved["has_anchor"]:
        return
    mixes = of.worker.method.gradient_share < 1 or saved["gradient_steps"] < clock
    last, first = max(saved["sent_at"]), of.worker.course.first_schedule
    if not mixes or clock == last or first.warms_up(clock):
        return
    spans = tuple(Span(*span) for span in saved["spans"])
    then, now = replace(first, spans=spans, fragments=saved["fragments"]), first.next_send(last)
    if now < then.next_send(last):
        raise ValueError(
            f"the state is of clock {clock}, within a round, and under {other} there is a sync at "
            f"clock {now}, which some workers may have passed and others not; save right after a "
            "sync (opt.synced) to change the rounds"
        )


# -- progress ----------------------------------------------------------------------------------


def _save_progress(of: Parts) -> dict[str, Any]:
    course = of.worker.course
    counts = asdict(course.at)
    del counts["clock"]
    return counts | {
        "spans": [tuple(span) for span in course.schedule.spans],
        "measuring": course.interval is not None,
        "costs": [] if course.interval is None else [asdict(c) for c in course.interval.costs],
    }


def _load_progress(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    course, saved = of.worker.course, deepcopy(saved)  # the worker changes some of these lists
    of.worker.start_over()
    spans, measuring = saved.pop("spans"), saved.pop("measuring")
    costs = [Costs(**found) for found in saved.pop("costs")]
    saved["marks"] = [(steps, tuple(sums)) for steps, sums in saved["marks"]]
    saved["last_record"] = tuple(saved["last_record"])
    _cut_anew(saved, course.schedule.fragments)
    _keep_speeds(saved, course)
    course.at = Progress(**saved)
    if load.differs("sync_every", "method"):
        return  # the rounds are those of the new settings, and "auto" measures anew
    if course.interval is not None and measuring:
        course.interval.costs = costs
    elif course.interval is not None or course.method.varies_length:
        course.interval = None
        _take_spans(course, [Span(*span) for span in spans])


def _keep_speeds(saved: dict[str, Any], course: Course) -> None:
    """The saved speeds, unless others are given, or they are of another number of workers: then a
    run begins with equal ones and measures anew."""
    pacing, found = course.pacing, saved.get("speeds") or []
    found = [(round, tuple(speeds)) for round, speeds in found]
    fits = pacing is not None and all(len(speeds) == pacing.workers for _, speeds in found)
    if found and fits and pacing is not None and pacing.given is None:
        saved["speeds"] = found
    else:
        saved["speeds"], saved["step_seconds"] = course.at.speeds, []


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
    if of.worker.course.warming_up and at.has_anchor:
        # in the warm-up the local model is the global one, so an anchor would be an old one
        at.has_anchor, load.leaves_rounds = False, True
        _leave_rounds(of, load)


def _leave_rounds(of: Parts, load: Loading) -> None:
    """The workers of a warm-up take the same step, so they begin it with equal inner states too. No
    worker knows those of the others, and without a message only empty ones are equal."""
    model, left = "this worker's model", "the outer state is left out"
    if of.transport.workers > 1:
        forget_inner(of)
        model, left = "the saved global model", "the outer state and each worker's inner state are"
        left += " left out"
    load.dropped.append(
        f"clock {of.worker.at.clock} lies in the warm-up of {load.mine['warmup_steps']} steps, in "
        f"which training goes on from {model}; {left}"
    )


def _take_spans(course: Course, spans: list[Span]) -> None:
    """Set the rounds whose lengths were chosen during training."""
    settled = not course.method.varies_length
    course.schedule = replace(course.schedule, spans=tuple(spans), settled=settled)
    if settled:  # An interval rule chose H. A method that varies H starts from the H it was given.
        course.facts = replace(course.facts, sync_every=spans[-1].length)


# -- the models -------------------------------------------------------------------------------


def _save_anchor(of: Parts) -> ModelLike | None:
    """Before the local phase the local model, which is the global one. A new optimizer's state thus
    has a place for every tensor of a later one."""
    if of.syncer is None:
        return None
    if of.worker.at.has_anchor:
        return model_like(of.replica, of.syncer.anchor)
    local = scratch(of.syncer, of.replica.dtype)
    torch._foreach_copy_(local.views, of.replica.local())
    return model_like(of.replica, local)


def _load_anchor(of: Parts, saved: Mapping[str, Tensor] | None, load: Loading) -> None:
    at = of.worker.at
    if at.has_anchor and saved is None:
        raise ValueError("the state lacks the anchor; give all of what was saved")
    at.has_anchor = at.has_anchor and of.syncer is not None
    if at.has_anchor:
        assert saved is not None
        assert of.syncer is not None
        load_model_like(of.replica, of.syncer.anchor, saved)
    elif load.leaves_rounds and saved is not None and of.transport.workers > 1:
        # the local models of several workers differ, and a warm-up begins with equal ones
        for name, tensor in zip(of.replica.names, of.replica.local(), strict=True):
            tensor.copy_(local_tensor(saved[name]))


def _save_method(of: Parts) -> dict[str, Any] | None:
    if of.syncer is None:
        return None
    states, replica = of.syncer.states, of.replica
    return {
        "local": {name: model_like(replica, kept) for name, kept in states.local.items()},
        "global": {name: model_like(replica, kept) for name, kept in states.common.items()},
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
                load_model_like(replica, kept[name], found[name])
    for scalars, found in (
        (states.local_scalars, saved["local scalars"]),
        (states.common_scalars, saved["global scalars"]),
    ):
        scalars.update({name: found[name] for name in scalars if name in found})


def _load_buffers(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    buffers = of.worker.warmup.buffers
    buffers.load(saved)
    if load.leaves_rounds and of.transport.workers > 1:
        buffers.copy_to_local()  # those of the model from which training goes on


def _load_data(of: Parts, saved: Any, load: Loading) -> None:
    of.worker.feed.resume(saved)


def _load_ledger(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    worker = of.worker
    worker.ledger.load(saved)
    if not worker.ledger.speeds or worker.ledger.speeds[-1:] != as_records(worker.at.speeds[-1:]):
        worker.ledger.speeds = as_records(worker.at.speeds)  # not those of the saved run


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
        save_outer, load_outer,
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
        save_scheduler, load_scheduler,
    ),
    Field(
        "outer_scheduler", "global", "numbers", "the schedule of the outer learning rate",
        save_outer_scheduler, load_outer_scheduler,
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
        save_rank, load_rank,
    ),
)  # fmt: skip
