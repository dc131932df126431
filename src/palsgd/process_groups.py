"""What a torch process group was made with, and further groups that are made alike.

torch gives a new group its own default timeout, half an hour, whatever the timeout of the others.
A worker that waits in such a group would wait that long for one that is lost.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


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
