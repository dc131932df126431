"""Seconds: from measurements in turn or from the cluster's model, and never from a simulation."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from palsgd.cluster import Cluster, Work
from palsgd.lab import timeline, workloads
from palsgd.lab.forecast import model_size
from palsgd.lab.groups import group
from palsgd.lab.launcher import Job, time_jobs
from palsgd.lab.run_folder import RunFolder, find_runs
from palsgd.lab.timing import PARTS, Pace, blocks, paces, record, shares
from palsgd.lab.timing.measure import can_be_timed, measure
from palsgd.lab.timing.pace import NO_LINK
from palsgd.lab.timing.record import Session, Timed
from support import runs
from support.commands import apart, lines, palsgd

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


def test_a_larger_batch_takes_longer_in_proportion(tmp_path):
    usual = simulated(tmp_path / "usual")
    (larger,) = [g for g in simulated(tmp_path / "larger", batch_size=128) if g.method == "ddp"]
    (ddp,) = [group for group in usual if group.method == "ddp"]
    found = paces([*usual, larger], f"{LINK},step=50ms")
    computing = {group: pace.parts(0, 100)["computing"] for group, pace in found.items()}
    share = larger.runs[0].config["batch_size"] / ddp.runs[0].config["batch_size"]
    assert computing[larger] == pytest.approx(share * computing[ddp])


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
    ddp = replace(timed("ddp", None, [0.3, 0.4, 0.5]), mixing_s=0.0)
    programs = ddp, timed("diloco", [0.02, 0.03, 0.04], None)
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


def test_the_first_line_of_a_run_is_not_its_start(tmp_path):
    lines = [runs.line(step, metric=0.5, time_s=step * 0.2) for step in (100, 200, 300)]
    settings = runs.Settings(workload="digits", method="diloco", steps=300, warmup_steps=0)
    runs.write_files(tmp_path / "diloco", runs.config(settings), lines)
    (found,) = paces(groups_in(tmp_path)).values()
    assert found.seconds(300) == pytest.approx(60)


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
    # a tenth of its steps mix, and a mixing step was measured by some method
    assert found["palsgd"].parts(0, 320)["mixing"] == pytest.approx(32 * 0.001)


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


# -- blocks in turn ------------------------------------------------------------------------------


def timing_settings(**changes):
    return workloads.recipe("digits").changed(
        {"workers": 2, "steps": 64, "sync_every": 8, "warmup_steps": 4, **changes}
    )


def measured(runs_to_time, turns):
    """In each of two processes: what was measured, which blocks were taken in which order, and how
    many messages a block of a round took."""
    order, sent = [], []
    all_reduce = dist.all_reduce

    def counted(*args, **how):
        sent.append(1)
        return all_reduce(*args, **how)

    def note(name, take):
        def taken(block):
            before = len(sent)
            found = take(block)
            order.append((name, block.loop.settings.method, len(sent) - before))
            return found

        return taken

    kinds = (blocks.StepsBlock, blocks.RoundBlock)
    takes = [kind.take for kind in kinds]
    dist.all_reduce = counted
    try:
        for kind, take in zip(kinds, takes, strict=True):
            kind.take = note(kind.__name__, take)
        found = measure(runs_to_time, workloads.load("digits"), turns=turns, link=LINK)
    finally:
        dist.all_reduce = all_reduce
        for kind, take in zip(kinds, takes, strict=True):
            kind.take = take
    return found, order


@pytest.fixture(scope="module")
def two_processes(world):
    wanted = {
        "ddp": timing_settings(method="ddp"),
        "diloco,seed=1": timing_settings(method="diloco", seed=1),
        "diloco,seed=2": timing_settings(method="diloco", seed=2, lr=0.5),
        "palsgd": timing_settings(method="palsgd", warmup_steps=0, mix_prob=0.25),
    }
    return world.run(measured, workers=2, runs_to_time=wanted, turns=3)


def test_blocks_are_taken_in_turn_and_the_first_of_each_program_is_not_counted(two_processes):
    _, order = two_processes[0]
    names = [(kind, method) for kind, method, _ in order]
    turn = names[4:8]
    assert len(set(turn)) == 4  # alone, averaging, and a round of each local method
    assert sorted(names[:4]) == sorted(turn)
    assert names[4:] == 3 * turn


def test_a_round_that_is_timed_beside_other_programs_sends_what_it_sends_alone(two_processes):
    _, order = two_processes[0]
    assert {sent for kind, _, sent in order[4:] if kind == "RoundBlock"} == {1}


def test_runs_that_differ_in_nothing_that_takes_time_are_one_program(two_processes):
    session, _ = two_processes[0]
    names = [timed.runs for timed in session.programs]
    assert ("diloco,seed=1", "diloco,seed=2") in names
    assert len(names) == 3


def test_ddp_has_parts_that_add_up_and_a_local_method_its_gradients_mixing_and_syncs(two_processes):
    session, _ = two_processes[0]
    ddp, own = session.program("ddp"), session.program("palsgd")
    assert (ddp.warmup, ddp.local) == (None, None)
    assert (own.warmup, own.averaging) == (0, None)
    assert session.program("diloco,seed=1").averaging == ddp.averaging
    steps_s, averaging = np.array(ddp.step_s), np.array(ddp.averaging)
    computing, mixing, waiting, exchanging = averaging.T
    assert np.all(computing <= steps_s + 1e-12)
    assert np.all(mixing == 0)
    assert np.all(waiting >= 0)
    assert np.all(exchanging >= 0)
    local = np.array(own.local)
    np.testing.assert_allclose(local[:, 1], 0.25 * own.mixing_s)
    assert np.all(local[:, 0] > 0)
    assert local[:, 2:].sum() > 0
    assert all(found == session for found, _ in two_processes)


def test_what_each_worker_did_is_recorded_from_one_instant_on(two_processes):
    session, _ = two_processes[0]
    for name, syncs in (("ddp", blocks.LEAST), ("diloco,seed=1", timeline.ROUNDS)):
        spans = session.program(name).spans
        assert {span["kind"] for span in spans} <= {"gradient", "mixing", "wait", "sync"}
        for worker in (0, 1):
            own = sorted((s["start_s"], s["end_s"]) for s in spans if s["worker"] == worker)
            assert 0 <= own[0][0] < own[-1][1]
            assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(own))
            # On a busy machine an exchange may be all waiting: the other noted its arrival late.
            exchanged = [
                s for s in spans if s["worker"] == worker and s["kind"] in ("wait", "sync")
            ]
            assert len(exchanged) >= syncs


def test_nothing_is_recorded_where_training_records_it(world):
    wanted = {"ddp": timing_settings(method="ddp"), "diloco": timing_settings(method="diloco")}
    session = world.run(measured_here, workers=2, runs_to_time=wanted)[0]
    assert [timed.spans for timed in session.programs] == [[], []]


def measured_here(runs_to_time):
    return measure(runs_to_time, workloads.load("digits"), turns=1)


def test_simulated_runs_whose_steps_were_timed_have_those_seconds(tmp_path):
    for groups in (real(tmp_path / "real", link=LINK), real(tmp_path / "so", LINK, simulated=True)):
        found = by_method(paces(groups))
        assert found["ddp"].seconds(100) == pytest.approx(100 * 0.4)
        assert {(pace.kind, pace.link) for pace in found.values()} == {("measured", LINK)}


def test_only_numbers_of_steps_per_round_are_timed_and_other_rounds_count_by_their_own_clocks():
    assert can_be_timed(timing_settings(method="ddp", sync_every="auto"))
    assert can_be_timed(timing_settings(method="palsgd"))
    assert not can_be_timed(timing_settings(method="palsgd", sync_every="auto"))


def timed_twice(folder):
    """timing.json after a comparison was timed, and after it was again, as when it is resumed."""
    jobs = [
        Job(settings=timing_settings(method=method), folder=folder / method, data=None,
            download=False, resume=False, quiet=True)
        for method in ("ddp", "localsgd")
    ]  # fmt: skip
    found = []
    for _ in range(2):
        time_jobs(jobs, torch.device("cpu"), workloads.load)
        found.append((folder / "timing.json").read_bytes())
    return found


def test_a_comparison_is_timed_once_so_a_resumed_one_keeps_its_seconds(world, tmp_path):
    first, again = world.run(timed_twice, workers=2, folder=tmp_path)[0]
    assert first == again
    (session,) = record.read(tmp_path)
    assert {name for each in session.programs for name in each.runs} == {"ddp", "localsgd"}


def test_a_real_comparison_has_blocks_its_own_seconds_and_a_timeline_of_ddp(tmp_path):
    out = tmp_path / "out"
    words = ("digits", "--methods", "ddp,diloco", "--workers", 2, "--steps", 24, "--sync-every", 8,
             "warmup_steps=4", "--no-report", "--quiet", "--out", out)  # fmt: skip
    assert apart("compare", *words, timeout=300).code == 0
    (session,) = record.read(out)
    assert {name for each in session.programs for name in each.runs} == {"ddp", "diloco"}
    assert lines(out / "ddp")[-1]["time_s"] > 0
    spans = RunFolder(out / "ddp").timeline()
    assert {"gradient", "sync"} <= {span["kind"] for span in spans}
    assert {span["worker"] for span in spans} == {0, 1}


def test_a_simulated_comparison_has_no_seconds_but_its_own(tmp_path):
    said = palsgd("compare", "digits", "--simulate", "--methods", "ddp,palsgd", "--steps", 24,
                  "--workers", 2, "--no-report", "--quiet", "--out", tmp_path / "out")  # fmt: skip
    assert said.code == 0, said.err
    assert NO_LINK in said.out
    for method in ("ddp", "palsgd"):
        found = lines(tmp_path / "out" / method)
        assert {line["time_s"] for line in found} == {None}
        assert found[-1]["simulation_s"] > 0
        summary = json.loads((tmp_path / "out" / method / "summary.json").read_text())
        timed_keys = ("wall_s", "time_to_target_s", "metric_at_equal_time")
        assert {summary[key] for key in timed_keys} == {None}


# -- the timeline of averaged steps --------------------------------------------------------------


def test_in_a_step_that_averages_each_worker_waits_for_the_last_one_to_compute():
    def span(worker, start, end, step):
        return {"worker": worker, "kind": "sync", "start_s": start, "end_s": end, "step": step}

    early, late = [span(0, 1.0, 3.0, 1)], [span(1, 2.5, 3.1, 1)]
    found = timeline.joined([early, late])
    assert found == [
        {"worker": 0, "kind": "wait", "start_s": 1.0, "end_s": 2.5},
        {"worker": 0, "kind": "sync", "start_s": 2.5, "end_s": 3.0},
        {"worker": 1, "kind": "sync", "start_s": 2.5, "end_s": 3.1},
    ]
