import pytest
import torch.distributed as dist

from world import World


@pytest.fixture(scope="session")
def world():
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def alone():
    """This process as the only worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
