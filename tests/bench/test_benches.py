"""Every script of bench/ runs with --tiny, and finds the figures for which no clock is needed."""

import importlib.machinery
import json
import sys
from pathlib import Path

import pytest

from support.commands import ran
from support.places import BENCH

# What the scripts share, and tables, which test_tables.py is about.
NOT_BENCHMARKS = ("common", "tables", "experiment_tables", "mixing_tables", "markdown_table",
                  "time_rows")  # fmt: skip
SCRIPTS = sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def about(value, rel=1e-3):
    return pytest.approx(value, rel=rel)


FIGURES = {
    "against": {"figures": 3},
    "checkpoint": {"parameters": 1440, "kept": [2, 2], "clock": [3, 3]},
    "cluster": {
        "8 workers, 10 rounds of 64": {"exchanges": 10, "gradient_steps": about(576, 0.02)},
        "8 workers, 10 rounds of 64, delay 32": {
            "exchanges": 10,
            "gradient_steps": about(576, 0.02),
        },
        "8 workers, 64 steps of DDP": {"exchanges": 64, "gradient_steps": 64},
        "a plan, 4 workers": {"pictures": 2},
    },
    "elastic": {"deaths": 1, "sizes": 1},
    "exogym": {"digits-diloco, 2 workers: loss": [about(0.451173), about(0.451173)]},
    "lab": {"cnn-64": {"gradient_steps": 6, "engine": "exact"}, "sweep": {"runs": 24}},
    "link": {  # steps, exchanges, bytes; a sync has the roll call beside the model's 9,610 floats
        "none": {"ddp": [4, 4, 4 * 4 * 9610], "diloco": [4, 2, about(2 * 4 * 9610, 0.01)]}
    },
    "memory": {
        "elements": 1440,
        "syncs": {
            "int8": 6,
            "fragments=4, delay=1, int8": 24,
            "int8, offload": 6,
            "fragments=4, delay=1, int8, offload": 24,
        },
        "offload gives the same weights": True,
    },
    "peers": {
        "trials": [4],  # of each of three trainings
        "parameters": 10128,
        "runs": 3 * 2 * 3,  # two seeds, three lengths
        # torch's LocalSGD is palsgd's: the same weights after the same rounds
        "norms": {
            "ddp": about(7.457),
            "post-local": about(7.408),
            "localsgd": about(7.408),
            "palsgd-int4": about(7.422),
            "bare": about(7.503),
        },
    },
    "prices": {"trials": 5, "cases": 17, "runs": 34, "failed": 0},
    "pictures": {
        # by bf16, whose sums depend on the order in memory
        "resnet-18": {
            "channels first": about(2.3017, 0.01),
            "channels last": about(2.3017, 0.01),
        }
    },
    "quality": {
        "PALSGD, seed 1": {
            "loss": about(5.2512),
            "bytes_sent": about(10 * 4 * 127168, 0.01),
            "syncs": 10,
        },
        "int8, seed 1": {  # the eight steps of DDP before are not coded
            "loss": about(5.2512),
            "bytes_sent": about((8 * 4 + 2) * 127168, 0.01),
            "syncs": 10,
        },
    },
    "scaling": {
        "gradient steps expected of the last": about(58.954),
        "bytes of a sync": about(4 * 10240, 0.01),
    },
    "simulate": {"parameters": 2274, "gradient steps": [25, 25], "engines agree": True},
    "step": {
        "elements": 1440,
        "idle steps": 401,
        "idle syncs": 0,
        "idle weights equal the bare ones": True,
        "gradient steps of the rounds": 172,
        "syncs of the rounds": 3,
    },
    "sync": {
        "parameters": [1440],
        "bytes of a sync": [about(4 * 1440, 0.02)],
        "weights equal on all processes": True,
        "contenders come to the same weights": True,
    },
    "time_to_target": {  # final loss, gradients, exchanges
        "k2-ddp, seed 11": [about(2.00117), 14, 14],
        "k2-h4-p0, seed 11": [about(2.13995), 14, 5],
        "k2-h4-p0.5, seed 11": [about(2.18621), 7, 5],
    },
    "uneven": {  # of the first seed, worker by worker; the last one is three times slower
        "gradients": {
            "DDP": [32] * 3,
            "DiLoCo": [32] * 3,
            "PALSGD": [28] * 3,
            "DiLoCo, steps and weights by speed": [96, 96, 30],
            "DiLoCo, paced": [96, 96, 30],
            "PALSGD, paced": [98, 98, 33],
        },
    },
    "validate_cluster": {"exchanges": [7, 7], "at the predicted points of the clock": True},
    "workloads": {
        "digits": {"parameters": 9610, "batch": [4, 64]},
        "stories": {"parameters": 127168, "batch": [4, 161]},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs_tiny_and_finds_its_untimed_figures(script, tmp_path):
    out = tmp_path / "record.json"
    said = ran(BENCH / f"{script}.py", "--tiny", "--out", out, timeout=280)
    assert said.code == 0, said.err[-2000:]
    record = json.loads(out.read_text())
    assert record["tiny"] is True
    assert script in FIGURES, f"add to FIGURES what {script}.py --tiny finds: {record['untimed']}"
    assert record["untimed"] == FIGURES[script]
    check_origin(record, script)
    check_summary(record, said.out.splitlines()[-1])


def check_origin(record, script):
    assert record["command"] == f"python bench/{script}.py --tiny --out .../record.json"
    assert {"commit", "dirty"} <= record.keys()
    assert {"cpu", "cores", "gpu", "torch"} <= record["machine"].keys()


def check_summary(record, last_line):
    """The last line names the figures, and the peers that are not installed."""
    assert last_line.startswith("untimed: ")
    assert all(name in last_line for name in record["untimed"])
    missing = record.get("not_installed", [])
    # bench/exogym.py is not the package that it measures, and a test may have put bench/ first
    path = [place for place in sys.path if Path(place).resolve() != BENCH]
    assert not any(importlib.machinery.PathFinder.find_spec(name, path) for name in missing)
    ending = f"; not installed: {', '.join(missing)}"
    assert last_line.endswith(ending) if missing else "not installed" not in last_line
