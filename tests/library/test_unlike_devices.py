"""Workers that round differently: which outer steps give all of them the same global model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.pages import code_blocks, page
from support.patience import patient

ROOT = Path(__file__).parent.parent.parent
WORKER = """
import sys
import numpy as np
import torch
import torch.distributed as dist
import palsgd

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.set_num_threads(1)
random = np.random.default_rng(0)  # torch's own random numbers differ between instructions too
model = torch.nn.Linear(40, 40)
with torch.no_grad():
    for p in model.parameters():
        p.copy_(torch.from_numpy(random.standard_normal(p.shape).astype("float32")))
inner = torch.optim.SGD(model.parameters(), lr=0.05)
outers = {"nesterov": palsgd.nesterov(0.7, 0.9), "separate": globals().get("SeparatelyRounded")}
if kind == "average":
    opt = palsgd.LocalSGD(model, inner, sync_every=3)
else:
    opt = palsgd.PALSGD(model, inner, sync_every=3, mix_prob=0.3, outer=outers[kind])
own = np.random.default_rng(1 + rank)
batches = [torch.from_numpy(own.standard_normal((8, 40)).astype("float32")) for _ in range(7)]
try:
    for batch in palsgd.until(batches, opt, steps=24):
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()
    print("agreed", torch.backends.cpu.get_cpu_capability())
except palsgd.ConsensusError as error:
    print("differed", torch.backends.cpu.get_cpu_capability(), error)
"""


def run(kind, folder):
    """Two processes, one of which does without the newer instructions of this CPU."""
    outer = next(block for block in code_blocks(page("docs/uneven.md")) if "SeparatelyR" in block)
    script = folder / "worker.py"
    script.write_text("import torch\n" + outer.partition("\n\n\nopt = ")[0] + WORKER)
    processes = []
    for rank, capability in enumerate(("default", "")):
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
        if capability:
            env["ATEN_CPU_CAPABILITY"] = capability
        command = [sys.executable, str(script), kind, str(rank), str(folder / "store")]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    return [process.communicate(timeout=patient(120))[0].decode() for process in processes]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="no other instructions here",
)
@pytest.mark.parametrize(
    ("kind", "word"), [("nesterov", "differed"), ("separate", "agreed"), ("average", "agreed")]
)
def test_outer_steps_that_are_rounded_one_by_one_agree_on_unlike_cpus(kind, word, tmp_path):
    found = run(kind, tmp_path)
    assert found[0].startswith(f"{word} DEFAULT"), found
    assert found[1].startswith(f"{word} AVX"), found
