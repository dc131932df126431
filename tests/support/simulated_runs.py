"""Folders of simulated runs: what they hold, and a workload that keeps no two workers alike."""

from pathlib import Path

import torch
import yaml

from palsgd.lab.run_folder import RunFolder
from support.commands import lines, summary

NOISY = '''
from torch import nn
from palsgd.lab.workloads.digits import Digits
from palsgd.lab.settings import Settings

RECIPES = {"Noisy": Settings(workload="digits", steps=16)}

class Noisy(Digits):
    """With statistics that differ between workers, and random numbers in its loss."""

    name = "Noisy"

    def model(self):
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
                             nn.Linear(16, 10))
'''


def noisy_workload(place: Path) -> str:
    """As a command names it."""
    (place / "noisy.py").write_text(NOISY)
    return f"{place / 'noisy.py'}:Noisy"


def untimed(line):
    return {key: value for key, value in line.items() if not key.endswith("_s")}


def runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))


def assert_same_runs(mine: Path, theirs: Path):
    assert runs_in(mine) == runs_in(theirs)
    for name in runs_in(mine):
        assert list(map(untimed, lines(mine / name))) == list(map(untimed, lines(theirs / name)))
        assert untimed(summary(mine / name)) == untimed(summary(theirs / name))
        best, wanted = RunFolder(mine / name).best(), RunFolder(theirs / name).best()
        assert (best["step"], best["metric"]) == (wanted["step"], wanted["metric"])
        for key, x in wanted["model"].items():
            assert torch.equal(best["model"][key], x)


def config(folder: Path) -> dict:
    return yaml.safe_load((folder / "config.yaml").read_text())
