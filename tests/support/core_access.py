"""What tests read of an optimizer that users cannot: all access to its private parts is here, so
that a change of the core changes this file and no test."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from palsgd import offload
from palsgd.codecs.coded_mean import Residue
from palsgd.packing import packed, unpacked
from palsgd.worker import Worker


def core_of(opt) -> Worker:
    return opt._worker


def speeds_of(opt) -> tuple[list, list]:
    """The settled speeds of paced draws, and the seconds that they are taken from."""
    return core_of(opt).at.speeds, core_of(opt).at.step_seconds


def anchor_of(opt) -> Tensor:
    """The global model laid end to end. Writing into it changes the anchor itself."""
    return core_of(opt).syncer.anchor.flat


def anchor_views(opt) -> list[Tensor]:
    """The global model, shaped as the parameters are."""
    return core_of(opt).syncer.anchor.views


def local_tensors(opt) -> list[Tensor]:
    """The local model's parameters as the core holds them."""
    return core_of(opt).inner.replica.local()


def layout_size(opt) -> int:
    """How many numbers a worker sends for the whole model."""
    return core_of(opt).inner.replica.layout.size


def outer_state(opt) -> Tensor:
    """All that the outer optimizer keeps, laid end to end."""
    syncer = core_of(opt).syncer
    state, params = syncer.changes.outer.state, syncer.anchor.params
    return torch.cat([v.reshape(-1) for p in params for v in state[p].values()])


def global_buffers(opt) -> list[Tensor]:
    """The buffers of the last sync."""
    return core_of(opt).warmup.buffers._global


def pending_sync(opt) -> bool:
    """Is a sync under way?"""
    return core_of(opt).syncer.pending is not None


def shares_group(opt) -> bool:
    """Do other optimizers of this process use the same process group?"""
    return core_of(opt).position.crowded


def round_origin(opt) -> tuple[float, int]:
    """The clock from which rounds are counted, and the number of the round that began there."""
    last = opt.schedule.spans[-1]
    return last.start, last.round


def residues_of(opt) -> dict[tuple[int, int], Residue]:
    """What compression has not sent yet, by fragment and message."""
    return core_of(opt).syncer.residues.kept


def message_memory(opt) -> Tensor | None:
    """The memory that messages are packed into, once there has been one."""
    return core_of(opt).syncer.memory._storage


def departure_memory(opt) -> Tensor | None:
    """The memory that keeps a fragment as it was sent, where syncs overlap with steps."""
    return core_of(opt).syncer.memory._when_sent


def method_states(opt) -> dict[str, Tensor]:
    """What the method keeps beside the model, each state laid end to end like the anchor."""
    states = core_of(opt).syncer.states
    return {name: kept.flat for name, kept in (states.local | states.common).items()}


def fields_of(opt, state=None) -> dict:
    """The fields of a state, by default of the present one."""
    state = opt.state_dict() if state is None else state
    found, _ = unpacked(state, core_of(opt).inner.replica, opt.transport.rank_inside)
    return found


def with_fields(opt, state, fields) -> dict:
    """The state with other fields."""
    replica = core_of(opt).inner.replica
    _, inner = unpacked(state, replica, opt.transport.rank_inside)
    return packed(fields, inner, replica)


def held_tensors(opt) -> list[Tensor]:
    """Tensors whose memory an optimizer holds: of the anchor, the outer optimizer, messages, and
    fragments as they were sent."""
    syncer = core_of(opt).syncer
    outer = syncer.changes.outer.state.values()
    state = [v for entry in outer for v in entry.values() if isinstance(v, Tensor)]
    residues = [t for kept in syncer.residues.kept.values() for t in (kept.own, kept.mean)]
    memory = [t for t in (message_memory(opt), departure_memory(opt)) if t is not None]
    anchor = syncer.anchor
    return [anchor.flat, *anchor.views, *anchor.params, *state, *residues, *memory]


@contextmanager
def windows_opened(elements: int) -> Iterator[list[range]]:
    """The ranges of the flat model that are copied to the device inside, of so many elements."""
    opened: list[range] = []
    init, width = offload.Window.__init__, offload.WINDOW

    def noted(self, layout, place, device):
        opened.append(place)
        init(self, layout, place, device)

    offload.Window.__init__, offload.WINDOW = noted, elements
    try:
        yield opened
    finally:
        offload.Window.__init__, offload.WINDOW = init, width
