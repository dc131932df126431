"""What is said about runs, beside numbers worked out by hand and by others."""

import math

import numpy as np
import pytest
from scipy import stats

from palsgd.lab.judging.interval import of_difference, of_mean, relative_difference
from palsgd.lab.judging.noise_floor import noise_floor
from palsgd.lab.judging.quality_curve import QualityCurve, crossing, reach
from palsgd.lab.judging.robustness import Point, robustness
from palsgd.lab.judging.speedup import speed_up
from palsgd.lab.judging.verdict import Word, judge


def curve(values, step, seeds=None, **costs):
    values = np.atleast_2d(np.array(values, dtype=float))
    seeds = tuple(range(len(values))) if seeds is None else seeds
    costs = {"step": np.array(step, dtype=float)} | {k: np.array(v) for k, v in costs.items()}
    return QualityCurve(seeds, values, costs)


# -- intervals ---------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_students():
    values = [0.3, 0.5, 0.4, 0.9]
    found = of_mean(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_differences_are_paired_by_seed_whatever_their_order():
    own, other = {1: 5.0, 2: 7.0, 3: 6.0}, {3: 5.5, 1: 4.0, 2: 6.5, 9: 100.0}
    found = of_difference(own, other)
    ends = stats.t.interval(0.95, 2, *_mean_and_error([1.0, 0.5, 0.5]))
    assert (found.low, found.high) == pytest.approx(ends)
    assert found.n == 3


def _mean_and_error(values):
    return np.mean(values), stats.sem(values)


def test_one_seed_has_no_interval():
    found = of_mean([1.0])
    assert not found.known
    assert found.as_dict()["low"] is None


def test_runs_without_a_common_seed_are_refused():
    with pytest.raises(ValueError, match="none in common"):
        of_difference({1: 0.0}, {2: 0.0})


def test_95_of_100_intervals_contain_the_truth():
    rng = np.random.default_rng(0)
    inside = [
        found.low <= 0 <= found.high
        for found in (of_mean(row) for row in rng.normal(size=(2000, 5)))
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)


# -- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ((0.001, -0.001, 0.002, 0.0), Word.EQUIVALENT),
        ((-0.05, -0.04, -0.06, -0.05), Word.BETTER),
        ((0.05, 0.04, 0.06, 0.05), Word.WORSE),
        ((0.05, -0.06, 0.04, -0.02), Word.UNDECIDED),
        ((0.03,), Word.UNDECIDED),
    ],
)
def test_a_verdict_is_the_place_of_the_interval_beside_zero_and_margin(differences, word):
    own = {seed: 1.0 + difference for seed, difference in enumerate(differences)}
    other = dict.fromkeys(own, 1.0)
    assert judge(relative_difference(own, other), 0.01).word == word


def test_undecided_says_how_many_seeds_would_decide():
    rng = np.random.default_rng(1)
    own = {seed: 1 + float(x) for seed, x in enumerate(rng.normal(0.005, 0.02, size=6))}
    verdict = judge(relative_difference(own, dict.fromkeys(own, 1.0)), 0.01)
    deviation = np.std([x - 1 for x in own.values()], ddof=1)
    assert verdict.word == Word.UNDECIDED
    assert verdict.seeds_needed == max(7, math.ceil((2.8 * deviation / 0.01) ** 2))


def test_a_margin_of_nothing_is_refused():
    with pytest.raises(ValueError, match="margin=0"):
        judge(of_mean([1.0, 2.0]), 0.0)


# -- crossings ---------------------------------------------------------------------------------


def test_a_level_is_reached_between_two_evaluations():
    falling, steps = np.array([4.0, 2.0, 1.0]), np.array([0.0, 10.0, 30.0])
    assert crossing(falling, steps, np.array([5.0, 3.0, 1.5, 1.0, 0.9])) == pytest.approx(
        [0.0, 5.0, 20.0, 30.0, math.nan], nan_ok=True
    )


def test_a_curve_that_rises_again_has_reached_what_it_once_reached():
    found = reach(curve([4.0, 2.0, 3.0, 1.0], [0, 10, 20, 30]), 2.5, "step")
    assert found.cost.value == pytest.approx(7.5)
    assert found.resolution == 10


def test_the_mean_over_seeds_reaches_a_level_not_the_lucky_ones():
    both = curve([[2.0, 1.0, 0.0], [2.0, 2.0, 2.0]], [0, 10, 20])
    assert reach(both, 1.0, "step").cost.value == pytest.approx(20.0)
    assert reach(both, 0.5, "step") is None


def test_a_level_that_some_draws_of_seeds_never_reach_has_no_upper_bound():
    found = reach(curve([[2.0, 1.0, 0.0], [2.0, 2.0, 2.0]], [0, 10, 20]), 1.0, "step")
    assert found.cost.high == math.inf


def test_a_bootstrap_interval_is_that_of_scipy():
    """Lines that fall by one a step from different heights: the crossing is the mean height."""
    rng = np.random.default_rng(5)
    heights = rng.normal(50, 4, size=12)
    steps = np.arange(100.0)
    many = curve(heights[:, None] - steps[None, :], steps)
    found = reach(many, 0.0, "step", draws=4000)
    twin = stats.bootstrap(
        (heights,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(7)
    ).confidence_interval
    assert (found.cost.low, found.cost.high) == pytest.approx((twin.low, twin.high), abs=0.25)


# -- speed-ups ---------------------------------------------------------------------------------


def test_a_speed_up_is_the_ratio_of_what_was_spent_to_each_level():
    ddp = curve([4.0, 2.0, 1.0], [0, 10, 20])
    fast = curve([4.0, 2.0, 1.5], [0, 5, 10])
    found = speed_up(ddp, fast, "step", np.array([3.0, 2.0, 1.5, 1.2]))
    assert found.ratio == pytest.approx([2.0, 2.0, 1.5, math.nan], nan_ok=True)


def test_a_program_against_itself_has_a_speed_up_of_one_without_a_band():
    rng = np.random.default_rng(2)
    values = np.sort(rng.uniform(1, 4, size=(5, 9)), axis=1)[:, ::-1]
    same = curve(values, np.arange(9.0))
    found = speed_up(same, same, "step", np.array([3.0, 2.0]))
    assert [*found.ratio, *found.low, *found.high] == pytest.approx([1.0] * 6)


def test_draws_in_which_a_method_never_arrives_lower_the_band_to_nothing():
    ddp = curve([[2.0, 1.0, 0.0]] * 2, [0, 10, 20])
    odd = curve([[2.0, 1.0, 0.0], [2.0, 2.0, 2.0]], [0, 10, 20])
    found = speed_up(ddp, odd, "step", np.array([1.0]))
    assert found.low[0] == 0.0
    assert found.high[0] == pytest.approx(1.0)


# -- noise floor -----------------------------------------------------------------------------------


def test_the_noise_floor_is_that_of_halves_of_the_seeds():
    """Three seeds that reach 0.5 after 10, 20 and 40 steps: a half is one of them or two."""
    values = [np.interp(np.arange(41), [0, at], [1.0, 0.5]) for at in (10, 20, 40)]
    found = noise_floor(curve(values, np.arange(41)), "step", np.array([0.5]))
    ratios = [a / b for a, b in ((10, 40), (20, 40), (40, 20))]  # of one seed to two others
    assert found.low[0] == pytest.approx(min(ratios))
    assert found.high[0] == pytest.approx(1 / min(ratios))
    assert (found.ratio[0], found.pairs) == (1, 3)


def test_seeds_without_a_difference_have_no_noise():
    found = noise_floor(curve([[1.0, 0.5]] * 14, [0, 10]), "step", np.array([0.8, 0.5]))
    assert found.low.tolist() == found.high.tolist() == [1, 1]


def test_a_level_that_half_of_the_seeds_never_reaches_has_no_noise_floor():
    found = noise_floor(curve([[1.0, 0.5], [1.0, 0.9]], [1, 10]), "step", np.array([0.95, 0.6]))
    assert np.isfinite(found.low[0])
    assert np.isnan(found.low[1])
    assert np.isnan(noise_floor(curve([[1.0, 0.5]], [1, 10]), "step", np.array([0.9])).low[0])


# -- robustness ------------------------------------------------------------------------------------


def grid(*losses, **settings):
    """Points along the first setting; a loss of each."""
    (name, values), *others = settings.items()
    return [
        Point({name: value, **dict(others)}, loss)
        for value, loss in zip(values, losses, strict=True)
    ]


def test_points_near_the_best_are_counted_by_hand():
    points = grid(1.00, 1.03, 1.04, math.inf, lr=[1, 2, 3, 4])
    found = robustness(points, best_of_all=0.98)
    assert (found.points, found.best, found.near_own, found.near_all) == (4, 1.0, 2, 1)


def test_heat_is_lr_times_h_times_the_gain_of_the_outer_step():
    whole = Point({"lr": 0.1, "outer_lr": 0.5, "outer_momentum": 0.75, "sync_every": 20}, 1.0)
    assert whole.heat == pytest.approx(0.1 * 20 * 0.5 / 0.25)
    assert Point({"lr": 0.1, "sync_every": 20}, 1.0).heat == pytest.approx(2.0)
    assert Point({"outer_lr": 0.5, "outer_momentum": 1.0}, 1.0).heat == math.inf


def test_the_hottest_setting_that_trains_ends_below_twice_the_best():
    points = grid(1.0, 1.5, 1.99, 2.0, math.inf, lr=[1, 2, 4, 8, 16])
    hottest = robustness(points).hottest
    assert (hottest.settings, hottest.loss) == ({"lr": 4}, 1.99)


def test_of_equally_hot_settings_the_worst_counts():
    points = [Point({"lr": 1, "sync_every": 4}, 1.0), Point({"lr": 2, "sync_every": 2}, 1.2)]
    assert robustness(points).hottest is points[1]


def test_a_grid_in_which_nothing_trains_has_no_hottest_setting():
    found = robustness(grid(math.inf, math.inf, lr=[1, 2]))
    assert (found.near_own, found.near_all, found.hottest) == (0, 0, None)
    with pytest.raises(ValueError, match="without a point"):
        robustness([])
