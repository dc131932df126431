"""What a torch process group was made with, further groups that are made alike, and the device of
a process.

torch gives a new group its own default timeout, half an hour, whatever the timeout of the others.
A worker that waits in such a group would wait that long for one that is lost.

Workers that torchrun starts again find the store of those before them, with the addresses of dead
processes in it, and may connect to these. `join` has them agree on a part of the store that is new.
"""

import hashlib
import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

START_S = 300.0  # ranks import and load at their own pace before they meet


def device_and_backend() -> tuple[torch.device, str]:
    """The device of this process, and the backend for its messages.

    The processes of a machine take its GPUs in turn. NCCL needs a GPU for each of them. Processes
    that share a GPU, or have none, use gloo. The GPU becomes torch's current one. torchrun says
    which process of its machine this is (`LOCAL_RANK` of `LOCAL_WORLD_SIZE`); a process that nobody
    has told is the only one.

    Example:
        >>> from palsgd import process_groups
        >>> device, backend = process_groups.device_and_backend()
        >>> (device.type, backend) in {("cpu", "gloo"), ("cuda", "nccl")}
        True
    """
    device = device_in_turn(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cpu":
        return device, "gloo"
    torch.cuda.set_device(device)
    one_each = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    return device, "nccl" if one_each else "gloo"


def device_in_turn(number: int) -> torch.device:
    """The GPU of one of several processes on a machine, or the CPU where torch sees no GPU."""
    gpus = torch.cuda.device_count()
    return torch.device("cuda", number % gpus) if gpus else torch.device("cpu")


def join(backend: str | None = None, *, timeout_s: float = 300.0) -> None:
    """`torch.distributed.init_process_group` for a worker of torchrun, whether it was started for
    the first time or again.

    Args:
        backend: gloo, nccl; None: the one of each device. All ranks must give the same.
        timeout_s: the seconds that an exchange may take. The start may take five minutes, or as
            long as that.

    Raises:
        RuntimeError: not all ranks came within that time.
        ValueError: ranks gave different backends.
    """
    timeout, start_s = timedelta(seconds=timeout_s), max(timeout_s, START_S)
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=start_s)))
    store = dist.PrefixStore(_agreed_prefix(store, rank, world, start_s, backend), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _agreed_prefix(
    store: Any, rank: int, world: int, timeout_s: float, backend: str | None = None
) -> str:
    """A name that the ranks which are alive have in common, and no others.

    Every rank has a new token, which ends with its backend, and writes down the tokens that it has
    read of all. The list of a dead process lacks the token of this one. So once all lists are
    equal, all were written by ranks that are alive, and no rank changes its list any more."""
    known = [""] * world
    known[rank] = f"{uuid.uuid4().hex} {backend}"
    deadline = time.monotonic() + timeout_s
    while True:
        store.set(f"palsgd/join/{rank}", json.dumps(known))
        lists = [_list_of(store, other, world) for other in range(world)]
        if all(found == known for found in lists):
            _check_backends([token.partition(" ")[2] for token in known])
            return "palsgd/" + hashlib.blake2b("".join(known).encode(), digest_size=8).hexdigest()
        known = [each[k] if k != rank else known[k] for k, each in enumerate(lists)]
        if time.monotonic() > deadline:
            late = [str(k) for k, found in enumerate(lists) if found[rank] != known[rank]]
            raise RuntimeError(
                f"rank {', '.join(late)} of {world} did not come within {timeout_s:g} s; look at "
                "what it says, or give it more time"
            )
        time.sleep(0.02)


def _check_backends(backends: list[str]) -> None:
    """Raise on all ranks unless they are equal: ranks of two backends would wait for each other."""
    for rank, backend in enumerate(backends):
        if backend != backends[0]:
            raise ValueError(
                f"rank {rank} uses {backend}, and rank 0 uses {backends[0]}; give join() the same "
                "backend on all ranks, such as gloo if a machine has too few GPUs"
            )


def _list_of(store: Any, rank: int, world: int) -> list[str]:
    """What a rank has written down; empty texts if that is nothing, or of another run."""
    key = f"palsgd/join/{rank}"
    try:
        found = json.loads(store.get(key)) if store.check([key]) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) != world:
        return [""] * world
    return [str(token) for token in found]


def backends_of(group: ProcessGroup | None) -> dict[str, str]:
    """The name of the backend for each type of device."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def ranks_of(group: ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def device_of(group: ProcessGroup | None) -> torch.device:
    """Where small messages of a group may lie: the CPU, or for NCCL this rank's GPU."""
    types = backends_of(group)
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(next(iter(types)), torch.accelerator.current_device_index())


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """How long an exchange of the group may take. None: its backend does not say."""
    found = [getattr(options, "_timeout", None) for options in _options(group).values()]
    return max((each for each in found if each is not None), default=None)


def twin(group: ProcessGroup | None) -> ProcessGroup:
    """A new group of the same ranks, with the backends, the timeout and the NCCL options of this
    one. Every rank of the group must call this."""
    ranks = ranks_of(group)
    made = dist.new_group(
        list(ranks),
        timeout=timeout_of(group),
        backend=_backend(group),
        pg_options=_nccl_options(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(made, ProcessGroup)  # this rank is in the group
    return made


def take_timeout(group: ProcessGroup, like: ProcessGroup | None = None) -> None:
    """Give a group that torch has made the timeout of `like`, by default of the group of all
    ranks."""
    timeout = timeout_of(like)
    if timeout is not None:
        for device in backends_of(group):
            group._get_backend(torch.device(device))._set_default_timeout(timeout)


def _backend(group: ProcessGroup | None) -> str:
    """As `new_group` takes it: one name if all devices have the same backend."""
    names = set(backends_of(group).values())
    return names.pop() if len(names) == 1 else dist.get_backend_config(group)


def _options(group: ProcessGroup | None) -> dict[str, Any]:
    whole: Any = group or dist.group.WORLD
    backends = {device: whole._get_backend(torch.device(device)) for device in backends_of(group)}
    return {device: getattr(backend, "options", None) for device, backend in backends.items()}


def _nccl_options(group: ProcessGroup | None) -> Any:
    """A copy, as torch writes the name of the new group into it. None where the group has not NCCL
    alone."""
    if set(backends_of(group).values()) != {"nccl"}:
        return None
    (given,) = _options(group).values()
    copy = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.is_high_priority_stream)
    copy.config, copy._timeout = given.config, given._timeout
    return copy
