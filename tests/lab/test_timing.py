"""Seconds: from measurements in turn or from the cluster's model, and never from a simulation."""

import json
import math

import numpy as np
import pytest

from palsgd.cluster import Cluster, Work
from palsgd.lab.forecast import model_size
from palsgd.lab.groups import group
from palsgd.lab.run_folder import find_runs
from palsgd.lab.timing import PARTS, Pace, paces, record, shares
from palsgd.lab.timing.record import Session, Timed
from support import runs

LINK = "100mbit,20ms"
DIGITS = model_size("digits").parameters


def steps(*rows: float) -> np.ndarray:
    """Seconds of a step in each repetition, a tenth of them exchanging."""
    return np.array([[0.9 * row, 0.0, 0.0, 0.1 * row] for row in rows])


# -- a pace --------------------------------------------------------------------------------------


def test_a_step_of_the_warm_up_and_a_step_after_it_have_seconds_of_their_own():
    pace = Pace(kind="measured", source="", warmup=10, averaging=steps(0.5), local=steps(0.01))
    assert pace.seconds(4) == pytest.approx(4 * 0.5)
    assert pace.seconds(110) == pytest.approx(10 * 0.5 + 100 * 0.01)


def test_a_paces_value_is_the_median_and_its_interval_that_of_medians_drawn_again():
    each = (0.1, 0.2, 0.3, 0.4, 5.0)
    pace = Pace(kind="measured", source="", warmup=0, local=steps(*each))
    found = pace.interval(10)
    assert found.value == pytest.approx(10 * 0.3)
    rows = np.random.default_rng(7).integers(0, 5, size=(20_000, 5))
    twin = 10 * np.median(np.array(each)[rows], axis=1)
    assert found.low == pytest.approx(np.quantile(twin, 0.025), rel=0.01)
    assert found.high == pytest.approx(np.quantile(twin, 0.975), rel=0.01)
    assert "5 repetitions" in found.kind


def test_paces_are_drawn_together_so_a_slow_turn_of_the_machine_leaves_their_ratio_alone():
    slow_turns = np.array([1.0, 3.0, 1.2, 9.0, 0.8, 1.1, 2.0])
    ddp = Pace(kind="measured", source="", warmup=math.inf, averaging=steps(*(0.2 * slow_turns)))
    own = Pace(kind="measured", source="", warmup=0, local=steps(*(0.05 * slow_turns)))
    np.testing.assert_allclose(ddp.drawn(100) / own.drawn(100), 4.0)
    assert np.ptp(ddp.drawn(100)) > 1
    np.testing.assert_allclose(ddp.factors(100), ddp.drawn(100) / ddp.seconds(100))


def test_one_measurement_has_a_value_and_no_interval():
    found = Pace(kind="measured", source="", warmup=0, local=steps(0.2)).interval(5)
    assert found.value == pytest.approx(1.0)
    assert not found.known
    assert found.kind == "one measurement, no interval"


def test_the_parts_of_a_stretch_add_up_to_its_seconds():
    local = np.array([[0.02, 0.001, 0.002, 0.004], [0.03, 0.002, 0.004, 0.001]])
    averaging = np.array([[0.02, 0.0, 0.01, 0.1], [0.04, 0.0, 0.02, 0.3]])
    pace = Pace(kind="measured", source="", warmup=8, averaging=averaging, local=local)
    found = pace.parts(0, 108)
    assert list(found) == list(PARTS)
    assert sum(found.values()) == pytest.approx(pace.seconds(108))
    by_hand = 8 * averaging.mean(axis=0) + 100 * local.mean(axis=0)
    np.testing.assert_allclose(
        np.array(list(found.values())) / by_hand, sum(found.values()) / by_hand.sum()
    )


# -- whose seconds -------------------------------------------------------------------------------


def groups_in(folder):
    return group(find_runs([folder]))


def by_method(found):
    return {each.method: pace for each, pace in found.items()}


def simulated(tmp_path, **settings):
    common = {"simulated": True, "workers": 4, "steps": 320, "sync_every": 32, **settings}
    for method in ("ddp", "diloco", "palsgd"):
        runs.write_run(tmp_path / method, method=method, **common)
    return groups_in(tmp_path)


def test_a_simulation_has_no_seconds(tmp_path):
    assert set(paces(simulated(tmp_path)).values()) == {None}


@pytest.mark.parametrize("where", ["link", "settings"])
def test_a_simulation_is_projected_by_the_cluster_on_a_link_or_on_the_one_its_settings_name(
    tmp_path, where
):
    spec = f"{LINK},step=50ms"
    groups = simulated(tmp_path, cluster=spec if where == "settings" else None)
    found = by_method(paces(groups, spec if where == "link" else None))
    place = Cluster(workers=4, step=0.05, rate="100mbit", latency="20ms")
    ddp = place.project(Work.ddp(DIGITS), steps=320)
    assert found["ddp"].seconds(320) == pytest.approx(ddp.time_s)
    local = place.project(Work(parameters=DIGITS, sync_every=32), steps=320)
    assert found["diloco"].seconds(320) == pytest.approx(local.time_s)
    assert found["diloco"].kind == "projected"
    assert spec in found["diloco"].source
    # a tenth of the steps are mixing steps, which take no time here
    saved = local.time_s - 320 * 0.1 * 0.05
    assert found["palsgd"].seconds(320) == pytest.approx(saved)


def test_a_projection_has_the_warm_ups_all_reduces(tmp_path):
    found = by_method(paces(simulated(tmp_path, warmup_steps=40), f"{LINK},step=50ms"))
    place = Cluster(workers=4, step=0.05, rate="100mbit", latency="20ms")
    whole = place.project(Work(parameters=DIGITS, sync_every=32, warmup_steps=40), steps=320)
    assert found["diloco"].seconds(320) == pytest.approx(whole.time_s)
    assert found["diloco"].seconds(40) == pytest.approx(found["ddp"].seconds(40))


def test_a_link_without_a_step_is_refused_where_nothing_was_measured_and_says_what_to_add(tmp_path):
    with pytest.raises(ValueError, match="add it, for instance 100mbit,20ms,step=50ms"):
        paces(simulated(tmp_path), LINK)


def timed(name: str, local: list[float] | None, averaging: list[float] | None) -> Timed:
    def rows(values):
        return None if values is None else steps(*values).tolist()

    return Timed(runs=(name,), warmup=None if local is None else 0, step_s=[0.01, 0.02, 0.03],
                 averaging=rows(averaging), local=rows(local), mixing_s=0.001)  # fmt: skip


def real(tmp_path, link=None, **settings):
    for method in ("ddp", "diloco"):
        common = {"workers": 4, "steps": 320, "sync_every": 32, **settings}
        runs.write_run(tmp_path / method, method=method, **common)
    programs = timed("ddp", None, [0.3, 0.4, 0.5]), timed("diloco", [0.02, 0.03, 0.04], None)
    session = Session(link=link, backend="gloo", machine="a machine", repetitions=3,
                      programs=programs)  # fmt: skip
    record.add(tmp_path, session)
    return groups_in(tmp_path)


def test_real_processes_have_what_their_blocks_measured_and_not_what_training_took(tmp_path):
    found = by_method(paces(real(tmp_path)))
    assert found["ddp"].seconds(100) == pytest.approx(100 * 0.4)
    assert found["diloco"].seconds(100) == pytest.approx(100 * 0.03)
    assert {pace.kind for pace in found.values()} == {"measured"}


def test_without_blocks_the_clocks_of_the_runs_count_each_run_a_repetition(tmp_path):
    for seed, pace in ((1, 0.2), (2, 0.4)):
        lines = [runs.line(step, metric=0.5, time_s=step * pace) for step in (10, 60, 110)]
        settings = runs.Settings(workload="digits", method="ddp", steps=110, seed=seed)
        runs.write_files(tmp_path / f"seed={seed}", runs.config(settings), lines)
    (found,) = paces(groups_in(tmp_path)).values()
    assert found.seconds(100) == pytest.approx(100 * 0.3)
    assert found.repetitions == 2
    assert "one after another" in found.source


def test_a_measured_step_is_projected_on_any_link_with_an_interval(tmp_path):
    found = by_method(paces(real(tmp_path), LINK))
    place = Cluster(workers=4, step=0.02, rate="100mbit", latency="20ms", all_reduce="gloo")
    assert found["ddp"].seconds(10) == pytest.approx(
        place.project(Work.ddp(DIGITS), steps=10).time_s
    )
    assert found["ddp"].kind == "projected"
    assert found["diloco"].repetitions == 3
    assert found["diloco"].interval(320).known


def test_the_step_that_a_link_names_counts_before_the_measured_one(tmp_path):
    found = by_method(paces(real(tmp_path), f"{LINK},step=1s,all_reduce=ring"))
    place = Cluster(workers=4, step=1.0, rate="100mbit", latency="20ms", all_reduce="ring")
    ddp = place.project(Work.ddp(DIGITS), steps=10)
    assert found["ddp"].seconds(10) == pytest.approx(ddp.time_s)


def test_what_was_measured_over_a_link_is_not_projected_on_the_same_link(tmp_path):
    found = by_method(paces(real(tmp_path, link=LINK), LINK))
    assert {pace.kind for pace in found.values()} == {"measured"}
    assert "emulated link, 100mbit,20ms" in found["ddp"].source


def test_measured_and_projected_seconds_are_not_compared(tmp_path):
    real(tmp_path)
    runs.write_run(tmp_path / "palsgd", method="palsgd", simulated=True, workers=4, steps=320,
                   cluster=f"{LINK},step=50ms")  # fmt: skip
    found = by_method(paces(groups_in(tmp_path)))
    assert found["palsgd"] is None
    assert found["ddp"].kind == "measured"


def test_simulated_runs_may_be_projected_with_the_step_that_real_ones_measured(tmp_path):
    real(tmp_path)
    runs.write_run(tmp_path / "palsgd", method="palsgd", simulated=True, workers=4, steps=320,
                   sync_every=32)  # fmt: skip
    found = by_method(paces(groups_in(tmp_path), LINK))
    assert {pace.kind for pace in found.values()} == {"projected"}
    assert found["palsgd"].repetitions == 3


def test_shares_are_the_seconds_of_a_thousand_steps_by_what_they_are_spent_on(tmp_path):
    ddp, diloco = real(tmp_path)
    found = paces([ddp, diloco])
    own = shares(diloco, found[diloco])
    assert sum(own.values()) == pytest.approx(1000 * 0.03)
    assert own["exchanging"] == pytest.approx(100 * 0.03)
    assert sum(shares(ddp, found[ddp]).values()) == pytest.approx(1000 * 0.4)


def test_a_timing_file_that_is_no_such_file_is_refused_by_name(tmp_path):
    real(tmp_path)
    (tmp_path / "timing.json").write_text(json.dumps({"schema": 9}))
    with pytest.raises(ValueError, match=r"timing\.json cannot be read"):
        paces(groups_in(tmp_path))
