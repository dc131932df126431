import signal
import sys

import pytest
import torch
import torch.distributed as dist

pytest.register_assert_rewrite("support")  # before any of it is imported

from support.patience import factor, patient  # noqa: E402
from support.world import World  # noqa: E402


def pytest_configure():
    # A shell may have started these tests in the background, where Ctrl-C and the end of a terminal
    # are ignored. They and their processes are as in a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        factor()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


# Files of many tests that together take long, though none of them does by itself.
SLOW_FILES = {
    "test_checkpoints.py",
    "test_cli.py",
    "test_codecs_converge.py",
    "test_demo.py",
    "test_draws.py",
    "test_engines_agree.py",
    "test_every_method.py",
    "test_lag.py",
    "test_many_runs.py",
    "test_sharding.py",
    "test_sync.py",
    "test_tensors.py",
    "test_theory.py",
    "test_theory_verdicts.py",
    "test_timing.py",
    "test_vectorized.py",
    "test_workloads.py",
}


# The files that take longest begin first, so that none is left over for one process at the end.
LONGEST = (
    "test_benches.py",
    "test_lab.py",
    "test_restarts.py",
    "test_faults.py",
    "test_links.py",
    "test_demo.py",
    "test_elastic.py",
    "test_ranks_per_worker.py",
    "test_train.py",
    "test_several_processes.py",
    "test_every_method.py",
    "test_two_levels.py",
    "test_sharding.py",
    "test_sync.py",
    "test_package.py",
    "test_timeouts.py",
    "test_timing.py",
    "test_at_once.py",
    "test_studies.py",
    "test_cifar10.py",
    "test_interrupts.py",
    "test_simulations_survive.py",
    "test_fuzz.py",
    "test_lightning.py",
    "test_huggingface.py",
    "test_ray.py",
    "test_fsdp2.py",
)


def _place(item):
    return LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """The limit for each test follows PALSGD_TEST_PATIENCE as the limits inside tests do."""
    items.sort(key=_place)
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    if factor() != 1 and config.getoption("timeout") is None:
        limit = pytest.mark.timeout(patient(float(config.getini("timeout"))))
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(limit)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """As worker processes have: another number of threads adds up a matrix product differently, and
    for models as small as these it costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def signals_as_before():
    """What a test does with signals ends with it: `leave_on_sigterm` would end these tests."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


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
