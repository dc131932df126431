"""The lines about Ray Train on the page for operators, run by a Ray of two workers here."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import palsgd
from support.commands import environment
from support.pages import code_blocks, executed, section
from support.patience import patient
from support.places import ROOT

pytest.importorskip("ray.train")
pytestmark = pytest.mark.slow


def loader(worker):
    numbers = torch.Generator().manual_seed(worker)
    return [(torch.randn(4, 8, generator=numbers), torch.randn(4, 1, generator=numbers))] * 5


def saved_job(folder):
    """The first round of the same run, by processes that Ray has not started."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    opt = palsgd.PALSGD(model, torch.optim.AdamW(model.parameters()), sync_every=64)
    for inputs, targets in palsgd.until(loader(dist.get_rank()), opt, steps=64):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        opt.step()
        opt.zero_grad()
    palsgd.checkpoint.save(folder, model, opt)
    return opt.ledger.bytes_sent


def drive(folder):
    """What the run reports. This is called in a process of its own: Ray leaves processes and
    warnings behind."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    short = tempfile.mkdtemp()  # names of sockets may not be as long as pytest's folders are
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=short)
    (code,) = code_blocks(section("docs/operations.md", "Ray"))
    trainer = TorchTrainer(
        executed("docs/operations.md", code)["train_under_ray"],
        train_loop_config={"folder": f"{folder}/saves", "loader": loader, "steps": 192},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray", name="run"),
    )
    found = trainer.fit().return_value
    ray.shutdown()
    shutil.rmtree(short, ignore_errors=True)
    return found


def test_the_lines_for_ray_train_locally_and_go_on_from_a_save(world, tmp_path):
    begun = world.run(saved_job, workers=2, folder=str(tmp_path / "saves"))[0]
    script = "import json, sys, test_ray; print(json.dumps(test_ray.drive(sys.argv[1])))"
    here = os.pathsep.join([str(ROOT / "tests"), str(Path(__file__).parent)])
    wait = str(int(patient(120)))  # seconds, for Ray's own processes
    variables = environment(GLOO_SOCKET_IFNAME="lo", RAY_raylet_start_wait_time_s=wait)
    # Ray ends its workers when the memory of the machine is used up, whoever uses it.
    variables["RAY_memory_monitor_refresh_ms"] = "0"
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], here])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=variables, capture_output=True, text=True, timeout=patient(280),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["clock"] == 192
    assert begun < found["bytes_sent"] <= 3 * begun  # one sync in each round, and one comparison
    assert (tmp_path / "saves" / "step-192").is_dir()
