"""Finds which ranks are this worker, and refuses groups that do not fit together.

One level: every rank is a worker. Two levels: the ranks of a worker average every gradient among
themselves (DistributedDataParallel, fully_shard), and the group of the optimizer has one rank of
every worker.
"""

from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from palsgd.process_groups import ranks_of
from palsgd.replica import uncompiled
from palsgd.transports.json_exchange import gathered
from palsgd.transports.transport import Transport
from palsgd.two_levels import is_inside, ranks_inside

_REMEDY = (
    'make both with m = palsgd.worker_groups(ranks_per_worker): m["inside"] for {wrapper}, '
    'group=m["workers"].get_group() for palsgd'
)


class Place(NamedTuple):
    """The groups that one rank was given."""

    rank: int
    inside: tuple[int, ...]  # the ranks that its wrapper averages over
    across: tuple[int, ...]  # the ranks of the optimizer's group

    @classmethod
    def read(cls, found: Any) -> Self:
        rank, inside, across = found
        return cls(int(rank), tuple(map(int, inside)), tuple(map(int, across)))


def wrapper_group(model: nn.Module) -> ProcessGroup | None:
    """The group that the model's DistributedDataParallel averages over; None for a plain module."""
    model = uncompiled(model)
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def leaves_workers_apart(model: DistributedDataParallel, transport: Transport) -> bool:
    """Does `model` average over ranks of this worker only? A transport that is not over processes
    has workers of one rank."""
    averaged = set(ranks_of(model.process_group))
    several = len(averaged) > 1 or transport.workers > 1
    others = set(ranks_of(transport.group)) if hasattr(transport, "group") else averaged
    return several and averaged & others == {dist.get_rank()}


def check_attached(model: nn.Module, transport: Transport) -> None:
    """Raise if a wrapper that was put around the model later does not fit the optimizer's group.
    All ranks must call this."""
    if hasattr(transport, "group"):
        copies_inside(transport.group, wrapper_group(model))


def copies_inside(group: ProcessGroup | None, wrapper: ProcessGroup | None) -> ProcessGroup | None:
    """The ranks of this worker that hold copies of its model, if it has several. `wrapper` is the
    group of the model's DistributedDataParallel, if it has one."""
    check_group(group)
    inside = ranks_inside(group)
    if wrapper is None or (inside is None and ranks_of(wrapper) == ranks_of(group)):
        return inside
    check_places(wrapper, group, "DistributedDataParallel")
    return wrapper if dist.get_world_size(wrapper) > 1 else None


def check_group(group: ProcessGroup | None) -> None:
    if is_inside(group):
        raise ValueError(
            f"group= has the ranks {_words(ranks_of(group))} of one worker, so nothing would be "
            'exchanged between workers; give group=m["workers"].get_group() of the same mesh'
        )


def check_places(inside: ProcessGroup, group: ProcessGroup | None, wrapper: str) -> None:
    """Raise unless the ranks are a grid: workers of equally many ranks, and groups that have one
    rank of every worker. First the ranks inside each worker exchange their places, then those of
    each group, so that all ranks raise if one of them does."""
    mine = Place(dist.get_rank(), ranks_of(inside), ranks_of(group))
    of_worker = gathered(mine, inside, Place.read)
    of_all = gathered(of_worker, group, lambda found: [Place.read(each) for each in found])
    places = [place for each in of_all for place in each]
    for place in sorted(places, key=lambda found: (found.rank != mine.rank, found.rank)):
        if set(place.inside) & set(place.across) != {place.rank}:
            raise ValueError(_overlap(place, wrapper, missing=group is None))
    sizes = {(len(place.inside), len(place.across)) for place in places}
    if len(sizes) > 1:
        raise ValueError(
            f"workers have unequal numbers of ranks, or groups unequal numbers of workers "
            f"({', '.join(f'{a} and {b}' for a, b in sorted(sizes))}); {_remedy(wrapper)}"
        )


def _overlap(place: Place, wrapper: str, *, missing: bool) -> str:
    inside, across = _words(place.inside), _words(place.across)
    if missing:
        return (
            f"{wrapper} averages over the ranks {inside} of {len(place.across)} only, and group=, "
            f"which must have one rank of every worker, is missing; {_remedy(wrapper)}"
        )
    return (
        f"{wrapper} averages over the ranks {inside}, and group= has the ranks {across}: it must "
        f"have one rank of every worker, and only rank {place.rank} of this one; {_remedy(wrapper)}"
    )


def _remedy(wrapper: str) -> str:
    return _REMEDY.format(wrapper=wrapper)


def _words(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
