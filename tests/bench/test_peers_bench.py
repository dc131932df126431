"""bench/peers.py: all have the same chances, and its figures follow from what it found."""

import itertools
import math
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


# -- trainings and contenders ----------------------------------------------------------------------


def test_all_trainings_have_equally_many_trials(bench):
    from contenders import TRAININGS, TRIALS

    assert {len(each.grid) for each in TRAININGS.values()} == {TRIALS}
    lengths = {len(size.lengths) for size in bench.SIZES.values()}
    assert lengths == {len(size.ddp_lengths) for size in bench.SIZES.values()} == {3}


def test_palsgd_and_diloco_have_the_same_codec_and_delay(bench):
    """So that what codec and overlap gain is told from what the method gains."""
    from contenders import TRAININGS, settings_of

    found = [settings_of(TRAININGS[name], {"lr": 1.0}, 32) for name in
             ("diloco-int4", "palsgd-int4")]  # fmt: skip
    assert {(each["compress"], each["delay"]) for each in found} == {("int4", 12)}
    assert found[1].pop("mix_prob") == 0.1
    assert found[0] == found[1]


def test_ddp_with_bf16_and_with_one_bucket_take_part_without_being_asked_for(bench):
    from contenders import STANDARD

    assert {"ddp", "ddp-bf16", "ddp-buckets", "ddp-bf16-buckets", "diloco-int4"} <= set(STANDARD)
    assert not {"torchft", "accelerate"} & set(STANDARD)


def test_peers_that_are_installed_have_one_version_each(bench):
    import installing

    wanted = [*installing.PEERS.values(), *itertools.chain(*installing.BESIDE.values())]
    assert all(each.count("==") == 1 for each in wanted)


def test_nothing_is_installed_for_contenders_that_need_nothing(bench, monkeypatch, tmp_path):
    import installing

    commands = []

    def run(command, **how):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(installing.subprocess, "run", run)
    installing.install([], tmp_path)
    assert commands == []
    installing.install(["torchft"], tmp_path)
    assert len(commands) == 1  # one that can be imported is looked for, and not installed


def test_settings_are_chosen_on_other_stories_and_another_seed_than_figures_are_of(bench):
    from task import SPLITS

    tuning, test = (set(range(500)[SPLITS[name]]) for name in ("tuning", "test"))
    assert tuning
    assert not tuning & test
    assert bench.TUNING_SEED < bench.SEED


# -- figures ---------------------------------------------------------------------------------------


def runs(training, length, *curves):
    return [
        {"training": training, "steps": length, "seed": seed, "curve": curve}
        for seed, curve in enumerate(curves)
    ]


def made_record():
    """Two seeds. DDP's middle length ends at 1.0 on average, so the target is 1.01."""
    return {
        "quality": [
            *runs("ddp", 8, [[4, 2.0], [8, 1.5]], [[4, 2.0], [8, 1.5]]),
            *runs("ddp", 16, [[8, 2.0], [16, 1.1]], [[8, 2.0], [16, 0.9]]),
            *runs("ddp", 32, [[16, 1.2], [32, 0.8]], [[16, 1.2], [32, 0.8]]),
            *runs("palsgd", 16, [[8, 1.4], [16, 1.2]], [[8, 1.4], [16, 1.2]]),
            *runs("palsgd", 24, [[12, 1.21], [24, 0.81]], [[12, 1.21], [24, 0.81]]),
            *runs("palsgd", 48, [[24, 1.3], [48, 0.7]], [[24, 1.3], [48, 0.7]]),
            *runs("diloco", 48, [[24, 1.3], [48, 1.2]], [[24, 1.3], [48, 1.2]]),
        ],
        "pace": {
            "10mbit": {
                "ddp": {"step_s": [4.0, 6.0]},
                "palsgd": {"step_s": [0.1, 0.3]},
                "diloco": {"step_s": [0.1, 0.3]},
            }
        },
    }  # fmt: skip


def test_the_target_is_ddps_mean_loss_at_its_middle_length(bench):
    from reporting import ddp_losses, target

    assert ddp_losses(made_record()).tolist() == [1.1, 0.9]
    assert target(ddp_losses(made_record())) == pytest.approx(1.01 * 1.0)


def test_steps_to_target_are_those_of_the_best_length_between_evaluations(bench):
    """By hand: 1.21 to 0.81 over 12 steps passes 1.01 half-way, at step 18. The shorter length
    never does, the longer one later."""
    from reporting import steps_to_target

    found = steps_to_target(made_record(), "palsgd")
    assert (found.length, found.resolution) == (24, 12)
    assert found.steps.value == pytest.approx(18)


def test_time_to_target_is_steps_times_seconds_with_both_their_doubts(bench):
    """By hand: 18 steps at 0.2 s. With both blocks drawn as 0.1 s and both seeds as the worse one
    of DDP, the target is 1.111, passed at step 14.97: 1.5 s; the other extreme is 21.03 x 0.3."""
    from reporting import time_to_target

    found = time_to_target(made_record(), "10mbit", "palsgd")
    assert found.value == pytest.approx(18 * 0.2)
    assert found.draws.min() == pytest.approx(0.1 * (12 + 12 * (1.21 - 1.111) / 0.4))
    assert found.draws.max() == pytest.approx(0.3 * (12 + 12 * (1.21 - 0.909) / 0.4))
    assert found.words(".2f").startswith("3.60 [1.50, 6.31]")


def test_ratios_are_of_paired_draws(bench):
    """The same seeds and the same blocks in both: a contender against itself is 1, always."""
    from reporting import time_to_target

    own = time_to_target(made_record(), "10mbit", "palsgd")
    assert (own / own).words(".2f") == "1.00 [1.00, 1.00]"


def test_what_is_not_reached_takes_for_ever_and_says_so(bench):
    from reporting import Drawn, summary_table, time_to_target

    record = made_record()
    missed = time_to_target(record, "10mbit", "diloco")
    assert math.isinf(missed.value)
    assert "| palsgd DiLoCo | not reached |" in summary_table(record)
    own = time_to_target(record, "10mbit", "palsgd")
    assert (missed / own).words(".2f") == (own / missed).words(".2f") == "not reached"
    # If only some draws reach it, the speed-up may be 0.
    rarely = Drawn(4.0, np.where(np.arange(1000) % 10, 4.0, math.inf))
    assert (Drawn(8.0, np.full(1000, 8.0)) / rarely).words(".1f") == "2.0 [0.0, 2.0]"


def test_seeds_and_blocks_are_drawn_apart(bench):
    """With as many blocks as seeds, good seeds must not always come with fast blocks."""
    from reporting import step_seconds

    from palsgd.lab.judging.quality_curve import resampled

    blocks = np.arange(5.0)
    drawn = step_seconds({"pace": {"x": {"a": {"step_s": blocks}}}}, "x", "a").draws
    seeds = blocks[resampled(5, len(drawn))].mean(axis=1)
    assert abs(np.corrcoef(seeds, drawn)[0, 1]) < 0.1


def test_intervals_of_time_to_target_cover_the_truth(bench):
    """Known truth: runs pass the target after 100 steps on average, a step takes 1 s. In 100
    repetitions with 8 seeds and 8 blocks the interval holds 100 s in about 19 of 20."""
    from reporting import time_to_target

    rng, hits = np.random.default_rng(3), 0
    for _ in range(100):
        found = []
        for seed in range(8):
            line = [[clock, 2 - clock / 100 + 0.05 * rng.normal()] for clock in (90, 100, 110)]
            flat = [[steps, 1 / 1.01] for steps in (8, 16)]
            found += [{"training": "ddp", "steps": steps, "seed": seed, "curve": flat} for steps in
                      (16, 32, 64)]  # fmt: skip
            found.append({"training": "palsgd", "steps": 120, "seed": seed, "curve": line})
        pace = {"palsgd": {"step_s": (1 + 0.05 * rng.normal(size=8)).tolist()}}
        drawn = time_to_target({"quality": found, "pace": {"x": pace}}, "x", "palsgd").draws
        low, high = np.quantile(drawn, [0.025, 0.975])
        hits += low <= 100 <= high
    assert 0.85 <= hits / 100 <= 0.99


# -- waiting and syncs (bench/scaling.py) ----------------------------------------------------------


@pytest.fixture(scope="module")
def scaling(bench):
    import scaling

    return scaling


def test_expected_maximum_is_that_of_all_outcomes_weighed(scaling):
    share, steps, workers = 0.7, 3, 2
    coins = list(itertools.product([0, 1], repeat=steps * workers))
    weights = [share ** sum(c) * (1 - share) ** (len(c) - sum(c)) for c in coins]
    most = [max(sum(c[:steps]), sum(c[steps:])) for c in coins]
    exact = np.dot(weights, most)
    assert scaling.expected_maximum(workers, steps, share) == pytest.approx(exact, rel=1e-12)


def test_fitted_ring_finds_the_costs_it_was_made_of(scaling):
    made = {k: 2 * (k - 1) / k * 0.3 + 2 * (k - 1) * 0.002 for k in (2, 4, 8)}
    found = scaling.fitted(made)
    assert (found["model_s"], found["hop_s"]) == pytest.approx((0.3, 0.002))
    assert found["modelled"]["1024"] == pytest.approx(2 * 1023 / 1024 * 0.3 + 2 * 1023 * 0.002)


def test_fitted_ring_never_gains_by_more_hops(scaling):
    faster = {2: 0.30, 4: 0.44, 8: 0.50}  # less than a ring's bytes alone would cost
    found = scaling.fitted(faster)
    assert found["hop_s"] == 0
    assert found["modelled"]["8"] < found["modelled"]["1024"] < 2 * found["model_s"]


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_unknown_contender_is_refused_with_the_known_ones():
    command = [sys.executable, str(BENCH / "peers.py"), "--contenders", "ddp,nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 2
    assert "--contenders: 'nobody' is unknown; use some of ddp," in done.stderr
