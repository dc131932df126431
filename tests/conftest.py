import pytest
import torch
import torch.distributed as dist

from world import World


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """As worker processes have: another number of threads adds up a matrix product differently, and
    for models as small as these it costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
