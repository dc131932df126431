"""What torchft needs before anything is trained: a lighthouse, a store and a manager per worker."""

import os
import socket
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=300)


def start_manager(address: str) -> tuple[Any, ExitStack]:
    """This worker's manager, of a replica group of one process; close what stands beside it last.
    Worker 0 runs the lighthouse, so that its small messages travel over the same link."""
    from torchft import Manager, ProcessGroupGloo

    beside = ExitStack()
    lighthouse, lighthouse_address = meet_at_lighthouse(address)
    if lighthouse is not None:
        beside.callback(lighthouse.shutdown)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    beside.callback(lambda: store)  # kept for as long
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=lambda: {},
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse_address,
        replica_id=f"worker_{dist.get_rank()}",
        hostname=address,
        init_sync=False,  # the first weights are equal
    )
    return manager, beside


def own_address() -> str:
    """The address of the interface that the others are reached through."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]


def meet_at_lighthouse(address: str) -> tuple[Any, str]:
    from torchft.coordination import LighthouseServer

    lighthouse, found = None, [""]
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size())
        found = [f"http://{address}:{lighthouse.address().rsplit(':', 1)[1]}"]
    dist.broadcast_object_list(found)
    return lighthouse, found[0]
