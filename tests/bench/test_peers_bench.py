"""bench/peers.py: contenders that should agree do, and its figures follow from its measurements."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from support.patience import patient
from support.places import BENCH


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which find each other as scripts do."""
    before = list(sys.path), dict(os.environ)
    sys.path[:0] = [str(BENCH), str(BENCH / "peers")]
    import peers

    yield peers
    sys.path[:] = before[0]
    os.environ.clear()
    os.environ.update(before[1])


def trained(bench, contender, **settings):
    """The losses of a tiny run in two processes."""
    from contenders import CONTENDERS
    from starting import LOOPBACK, run_workers

    found = CONTENDERS[contender]
    order = {"class": found.adapter, "settings": found.settings | settings, "size": "tiny"}
    order |= {"mode": "quality", "steps": 16, "peers": "unused"}
    ranks = run_workers("worker.py", order, workers=2, rate=LOOPBACK, timeout=patient(120))
    return [loss for _, loss in ranks[0]["curve"]]


@pytest.mark.slow
def test_local_sgd_of_palsgd_and_of_torch_get_the_same_task(bench):
    ours = trained(bench, "localsgd", sync_every=8)
    torchs = trained(bench, "post-local", sync_every=8)
    assert ours == pytest.approx(torchs, rel=1e-5)
    assert ours[1] < ours[0] < 5.6  # ln 266 is what it began with


def test_expected_maximum_is_that_of_all_outcomes_weighed(bench):
    share, steps, workers = 0.7, 3, 2
    coins = list(itertools.product([0, 1], repeat=steps * workers))
    weights = [share ** sum(c) * (1 - share) ** (len(c) - sum(c)) for c in coins]
    most = [max(sum(c[:steps]), sum(c[steps:])) for c in coins]
    exact = np.dot(weights, most)
    assert bench.expected_maximum(workers, steps, share) == pytest.approx(exact, rel=1e-12)


def test_fitted_ring_finds_the_costs_it_was_made_of(bench):
    made = {k: 2 * (k - 1) / k * 0.3 + 2 * (k - 1) * 0.002 for k in (2, 4, 8)}
    found = bench.fitted(made)
    assert (found["model_s"], found["hop_s"]) == pytest.approx((0.3, 0.002))
    assert found["modelled"]["1024"] == pytest.approx(2 * 1023 / 1024 * 0.3 + 2 * 1023 * 0.002)


def test_fitted_ring_never_gains_by_more_hops(bench):
    faster = {2: 0.30, 4: 0.44, 8: 0.50}  # less than a ring's bytes alone would cost
    found = bench.fitted(faster)
    assert found["hop_s"] == 0
    assert found["modelled"]["8"] < found["modelled"]["1024"] < 2 * found["model_s"]


def test_time_to_target_is_the_steps_of_one_run_times_the_pace_of_another(bench):
    from reporting import faster_than_ddp, figures, time_to_target

    found = {
        "quality": {
            "ddp": {"final_loss": 1.0, "curve": [[64, 1.2], [128, 1.0]]},
            "palsgd": {"final_loss": 0.9, "curve": [[64, 1.009], [128, 0.9]]},
            "torchft": {"final_loss": 1.02, "curve": [[64, 1.3], [128, 1.02]]},
        },
        "pace": {
            "10mbit": {
                "ddp": {"step_s": 5.0, "round_s": 10.0, "exposed_s": 9.5, "round_steps": 2},
                "palsgd": {"step_s": 0.1, "round_s": 6.4, "gradient_steps": 58,
                           "bare_step_s": 0.1, "round_steps": 64},
                "torchft": {"step_s": 0.1},
            }
        },
    }  # fmt: skip
    assert time_to_target(found, "10mbit", "palsgd") == pytest.approx(64 * 0.1)  # within 1%
    assert time_to_target(found, "10mbit", "torchft") is None  # 2% above
    assert faster_than_ddp(found, "10mbit", "palsgd") == pytest.approx(128 * 5 / 6.4)
    shown = {name: value for name, value, _ in figures(found)}
    assert shown["  of the ideal, its compute alone"] == f"{100 * 58 * 0.1 / 6.4:.0f}%"


@pytest.mark.slow
def test_unknown_contender_is_refused_with_the_known_ones():
    command = [sys.executable, str(BENCH / "peers.py"), "--contenders", "ddp,nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 2
    assert "--contenders: 'nobody' is unknown; use some of ddp," in done.stderr
