"""examples/with_ray.py, on a Ray of this machine."""

import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

import palsgd
from support.commands import environment
from support.patience import patient
from support.places import ROOT

pytest.importorskip("ray.train")
pytestmark = pytest.mark.slow


def saved_job(folder):
    """The first round of the same run, by processes that Ray has not started."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )  # fmt: skip
    opt = palsgd.PALSGD(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=32)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for batch in palsgd.until([inputs], opt, steps=32):
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()
    palsgd.checkpoint.save(folder, model, opt)


@pytest.fixture
def variables():
    short = tempfile.mkdtemp()  # names of sockets may not be as long as pytest's folders are
    wait = str(int(patient(120)))  # seconds, for Ray's own processes
    yield environment(
        GLOO_SOCKET_IFNAME="lo", RAY_raylet_start_wait_time_s=wait, RAY_TMPDIR=short
    )  # fmt: skip
    shutil.rmtree(short, ignore_errors=True)


def trained(folder, variables):
    """The example, ended. Ray looks for a free port long before a worker listens there, and another
    test may have it by then: nothing has been trained in that case, and it is begun anew."""
    command = [sys.executable, str(ROOT / "examples" / "with_ray.py"), str(folder)]
    for _ in range(3):
        done = subprocess.run(
            [*command, "--steps", "128"], env=variables, capture_output=True, text=True,
            timeout=patient(200),
        )  # fmt: skip
        if "EADDRINUSE" not in done.stderr:
            break
    return done


def test_the_example_with_ray_goes_on_from_a_save_and_trains_locally(world, tmp_path, variables):
    world.run(saved_job, workers=2, folder=str(tmp_path / "saves"))
    done = trained(tmp_path, variables)
    assert done.returncode == 0, done.stderr
    clocks, losses = done.stdout.splitlines()[-2:]
    sent = re.fullmatch(r"clock 32 to 128, 4 syncs, (\d+) bytes per step", clocks)[1]
    # The model has 4,810 parameters, and DDP sends them all at every step.
    assert int(sent) < 4810 * 4 / 16
    first, last = map(float, re.fullmatch(r"loss (\S+) -> (\S+)", losses).groups())
    assert last < 0.8 * first
