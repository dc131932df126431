"""What belongs to a rank in a saved state: residues of codecs, and the sync under way."""

from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from palsgd.codecs.residues import PartResidue, from_messages
from palsgd.packing import ModelLike
from palsgd.pending_sync import Moment, PendingSync, SentPart
from palsgd.state_parts import Loading, Parts, load_model_like, model_like, scratch
from palsgd.sync import Syncer
from palsgd.transports.transport import Message


def await_pending(of: Parts) -> None:
    """Wait for a sync that is under way, as its exchange writes into memory that a load reuses. A
    peer that is gone sends nothing more, so there is nothing to wait for."""
    pending = None if of.syncer is None else of.syncer.pending
    if pending is not None and of.transport.elastic:
        assert of.syncer is not None
        of.syncer.memory.renew()  # an exchange without a worker that has left may never end
    elif pending is not None and not pending.arrived:
        try:
            for message in pending.messages:
                of.transport.finish(message)
        except RuntimeError:
            pass


def save_rank(of: Parts) -> dict[str, Any]:
    pending = _save_pending(of)  # first, as an exchange under way changes the residues at its end
    return {"residues": _save_residues(of), "pending": pending or _room_for_pending(of)}


def load_rank(of: Parts, saved: dict[str, Any], load: Loading) -> None:
    syncer = of.syncer
    if syncer is None or not of.worker.at.has_anchor:
        return
    syncer.residues.kept = _fitting_residues(of, saved, load)
    if saved["pending"] is None or saved["pending"].get("empty"):
        return
    # with other buffers or another inner state to average its messages have another size
    other = load.differs("fragments", "workers", "method", "buffers", "average_state")
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
    if syncer is None or syncer.outgoing.codec is None:
        return {}
    parts = dict.fromkeys(["model", *(part for _, part in syncer.residues.kept)])
    return {part: _save_part_residues(of, syncer, part) for part in parts}


def _save_part_residues(of: Parts, syncer: Syncer, part: str) -> dict[str, Any]:
    own, mean = scratch(syncer, torch.float32), scratch(syncer, torch.float32)
    ranges: list[Any] = [None] * len(syncer.anchor.ranges)  # None: nothing was sent
    for (fragment, name), kept in syncer.residues.kept.items():
        if name == part and not kept.fresh:
            ranges[fragment] = [(each.start, each.stop) for each in kept.ranges]
            own.part(fragment).copy_(kept.own)
            places = _coded_here(mean.part(fragment), ranges[fragment])
            for place, found in zip(places, kept.mean.split([*map(len, places)]), strict=True):
                place.copy_(found)
    like = of.replica
    return {"own": model_like(like, own), "mean": model_like(like, mean), "ranges": ranges}


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
    if syncer.outgoing.codec is None:
        return {}
    by_place = {(entry["fragment"], entry["message"]): entry for entry in [*saved, *left]}
    for fragment in sorted({fragment for fragment, _ in by_place}):
        entries = [by_place[key] for key in sorted(by_place) if key[0] == fragment]
        kept = from_messages(
            entries,
            syncer.outgoing.messages(fragment),
            syncer.outgoing.codec,
            worker=of.transport.worker,
            workers=of.transport.workers,
            like=syncer.memory.template,
        )
        if kept is None or syncer.outgoing.method.overrides("payload"):
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
    lost. Nor is it saved if workers may leave and come: a state is loaded among other workers, and
    the steps that were sent are sent again with the next sync."""
    syncer = of.syncer
    pending = None if syncer is None else syncer.pending
    if syncer is None or pending is None or of.transport.elastic:
        return None
    if not pending.arrived:
        try:
            for message in pending.messages:
                message.sent = of.transport.finish(message)
        except RuntimeError:
            return None
        pending.arrived = True
    simple = {f.name: getattr(pending, f.name) for f in fields(pending) if f.name != "kept"}
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
        model_like(of.replica, scratch(of.syncer, of.replica.dtype)) for _ in range(2)
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
    spread = scratch(of.syncer, flat.dtype)
    spread.part(fragment).copy_(flat)
    return model_like(of.replica, spread)


def _gathered_up(syncer: Syncer, fragment: int, saved: Any) -> Tensor | None:
    """The inverse of `_spread`. Release 0.1.0 saved the flat elements."""
    if saved is None or isinstance(saved, Tensor):
        device = syncer.memory.template.device
        return None if saved is None else saved.to(device, copy=True)
    spread = scratch(syncer, next(iter(saved.values())).dtype)
    load_model_like(syncer.replica, spread, saved)
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
        rows=None if rows is None else rows.to(values.device, copy=True),
    )


def _lacks_pending() -> NoReturn:
    raise ValueError(
        "the state lacks tensors of the sync that was under way when it was saved; give all of "
        "what was saved, or save where no sync is under way"
    )
