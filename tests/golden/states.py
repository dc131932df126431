"""States that release 0.1.0 saved in the middle of a run, and what they go on to.

A state file is written once and never again: later releases must load what this one saved. What a
run goes on to may change with the rules of a method and is recorded beside it.
"""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trajectory
from torch import nn
from trajectory import Setup

import palsgd
from support.inside import under_way, unsent

FOLDER = Path(__file__).parent / "states"

# By what is special about the moment: the row that is run, and the clock from which on each worker
# saves after its next iteration.
MOMENTS = {
    "delay-under-way": ("palsgd-balanced-delay-fp32", 8),
    "delay-under-way-bf16": ("palsgd-independent-delay-bf16", 10),
    "between-fragments-bf16-adamw": ("palsgd-balanced-fragments-bf16", 7),
    "between-fragments-batchnorm": ("palsgd-shared-fragments-fp32", 10),
    "residues": ("palsgd-independent-int8-fp32", 8),
    "residues-under-way": ("palsgd-balanced-all-fp32", 11),
    "residues-under-way-bf16": ("palsgd-shared-all-bf16", 10),
    "round-begun": ("palsgd-balanced-plain-fp32", 9),
    "warmup-just-over": ("localsgd-balanced-plain-fp32", 4),
    "warmup-begun": ("palsgd-balanced-int8-bf16", 2),
    "residues-diloco": ("diloco-balanced-int8-fp32", 7),
    "ddp": ("ddp-balanced-plain-fp32", 9),
}


def setup_of(moment: str) -> tuple[Setup, int]:
    kind, clock = MOMENTS[moment]
    (name,) = (name for name in trajectory.setups() if name.split("-", 1)[1].startswith(kind))
    return trajectory.setups()[name], clock


def saving_process(setup: Setup, at: int) -> dict[str, Any]:
    """Train to the end; what this worker saved after the first iteration that reached `at`, and
    where it then stood."""
    saved = io.BytesIO()
    where: dict[str, Any] = {}

    def after_step(model: nn.Module, opt: palsgd.PALSGD) -> None:
        if where or opt.clock < at:
            return
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, saved)
        where.update(clock=opt.clock, gradient_steps=opt.gradient_steps, syncs=opt.ledger.syncs)
        where.update(under_way=under_way(opt), unsent=unsent(opt))

    trajectory.run_process(setup, after_step=after_step)
    return {"saved": saved.getvalue(), "where": where}


def write_state(path: Path, workers: list[dict[str, Any]]) -> None:
    states = [torch.load(io.BytesIO(each["saved"]), weights_only=True) for each in workers]
    path.parent.mkdir(exist_ok=True)
    torch.save({f"worker {k}": state for k, state in enumerate(states)}, path)


def load_state(path: str, model: nn.Module, opt: palsgd.PALSGD, worker: int) -> None:
    state = torch.load(path, weights_only=True)[f"worker {worker}"]
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])


def resuming_process(setup: Setup, path: str) -> dict[str, Any]:
    def load(model: nn.Module, opt: palsgd.PALSGD, worker: int) -> None:
        assert worker == dist.get_rank()
        load_state(path, model, opt, worker)

    return trajectory.run_process(setup, load)


def head(setup: Setup, path: Path, where: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the file that says what a state goes on to."""
    return {"setup": setup, "state": file_hash(path), "where": where}


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def golden(moment: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{moment}.json").read_text())
