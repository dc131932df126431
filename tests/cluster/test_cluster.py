"""The model of time, against closed forms and against a slow twin that goes tick by tick."""

import itertools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import palsgd
from palsgd.cluster import Cluster, Work
from palsgd.cluster.gradient_counts import Drawn, Planned
from palsgd.lab.forecast import expected_most
from palsgd.methods.palsgd import PALSGDMethod
from palsgd.schedule import Schedule

MODEL = 8_054_656


def cluster(**fields) -> Cluster:
    common = dict(workers=4, step=0.05, rate=1e8, latency=0.02, all_reduce="ring")
    return Cluster(**{**common, **fields})


def work(**fields) -> Work:
    return Work(**{"parameters": MODEL, "sync_every": 16, **fields})


def sync_bytes(job: Work, workers: int = 4) -> int:
    """Of the first fragment, as handed over."""
    return sum(job.payload(workers).sync())


# -- what an all-reduce costs --------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 8, 1000])
def test_a_ring_takes_its_textbook_time(workers):
    size, rate, latency = 4e6, 1e9, 1e-3
    textbook = 2 * (workers - 1) / workers * size * 8 / rate + 2 * (workers - 1) * latency
    network = cluster(workers=workers, rate=rate, latency=latency).network
    assert network.all_reduce(size) == pytest.approx(textbook, rel=1e-12)


def test_trees_take_two_passes_and_a_hop_per_level():
    network = cluster(workers=1000, rate="1gbit", latency="1ms", all_reduce="tree").network
    assert network.all_reduce(1e6) == pytest.approx(2 * 8e6 / 1e9 + 2 * 10 * 1e-3)


def test_two_levels_are_a_ring_inside_and_a_ring_between_nodes():
    inside = dict(node_rate="100gbit", node_latency="1us")
    both = cluster(workers=32, per_node=8, all_reduce="two-level", **inside).network
    within = cluster(workers=8, rate="100gbit", latency="1us").network
    between = cluster(workers=4).network
    size = 4e7
    assert both.all_reduce(size) == pytest.approx(
        within.all_reduce(size) + between.all_reduce(size)
    )


def test_a_flat_ring_over_nodes_runs_at_the_pace_of_the_slow_links():
    nodes = cluster(workers=32, per_node=8, all_reduce="ring").network
    assert nodes.all_reduce(1e6) == cluster(workers=32).network.all_reduce(1e6)
    one_node = cluster(workers=8, per_node=8, node_rate=1e10, node_latency=1e-5).network
    assert one_node.all_reduce(1e6) == pytest.approx(2 * 7 * (1e6 / 1e10 + 1e-5))


@pytest.mark.parametrize(("workers", "size"), [(4, 1e8), (1000, 1e3), (64, 1e6)])
def test_auto_is_the_cheapest(workers, size):
    def cost(name):
        return cluster(workers=workers, per_node=4, all_reduce=name).network.all_reduce(size)

    assert cost("auto") == min(cost("ring"), cost("tree"), cost("two-level"))


def gloo_twin(workers: int, size: float, rate: float, latency: float) -> float:
    """gloo's two phases, segment by segment: when each is sent by, and has come to, a worker.
    Workers do the same at the same time, so one stands for all; K > 2."""
    segments = max(2, math.ceil(size / workers / 2**20))
    t, now = 8 * size / workers / segments / (rate * 1448 / 1547), 0.0
    for _phase in range(2):
        asked, arrived, free = [now, now], [], now
        for i in range((workers - 1) * segments):
            data = arrived[i - segments] if i >= segments else now
            free = max(free, asked[i] + latency, data) + t
            arrived.append(free + latency)
            asked.append(arrived[i])  # for the next but one
        now = arrived[-1]
    return now


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.02, 0.3])
@pytest.mark.parametrize("size", [4e2, 1e6, 6e6, 3e7])
@pytest.mark.parametrize("workers", [3, 4, 8])
def test_gloo_asks_for_two_segments_at_a_time(workers, size, latency):
    network = cluster(workers=workers, latency=latency, all_reduce="gloo").network
    expected = gloo_twin(workers, size, 1e8, latency)
    assert network.all_reduce(size) == pytest.approx(expected, rel=0.03)


def test_short_messages_of_gloo_cost_a_round_trip_per_hop():
    for workers in (2, 4):
        network = cluster(workers=workers, all_reduce="gloo").network
        assert network.all_reduce(4) == pytest.approx(2 * (workers - 1) * 0.04, rel=1e-3)


def test_a_coded_exchange_sends_each_half_once():
    network = cluster(workers=8, latency=0).network
    assert network.coded(1e6) == pytest.approx(network.all_reduce(1e6))
    # in nodes of four, the chunks of all four cross the node's one link
    nodes = cluster(workers=8, latency=0, per_node=4, node_rate=1e15, node_latency=0).network
    scatter, gather = 4 * 8e6 * 4 / 8 / 1e8, 7 * 8e6 / 8 / 1e8
    assert nodes.coded(1e6) == pytest.approx(scatter + gather)


def test_chunks_of_gloo_wait_behind_the_requests_of_the_worker_that_comes_last():
    network = cluster(workers=4, latency="20ms", all_reduce="gloo").network
    chunks = 8e6 * 3 / 4 / 1e8 / (1448 / 1547)  # of one worker, with TCP's headers
    ring = gloo_twin(4, 1e6, 1e8, 0.02) / 2  # a ring that gathers is half of an all-reduce
    assert network.coded(1e6) == pytest.approx(2 * chunks + 2 * 0.02 + ring, rel=0.01)


def test_uneven_links_are_as_slow_as_the_slowest():
    uneven = cluster(workers=8, slow_rate="10mbit").network
    slow = cluster(workers=8, rate="10mbit").network
    assert uneven.all_reduce(1e6) == slow.all_reduce(1e6)
    assert uneven.coded(1e6) == slow.coded(1e6)
    faster = cluster(workers=8, slow_rate="1000gbit").network
    assert faster.all_reduce(1e6) == cluster(workers=8).network.all_reduce(1e6)


def test_several_stragglers_are_all_slow():
    run = cluster(workers=8, straggler=3, stragglers=2).project(work(sync_every=8), steps=8)
    assert run.compute_s == pytest.approx((6 + 2 * 3) / 8 * 8 * 0.05)
    assert run.wait_s == pytest.approx(6 / 8 * 2 * 8 * 0.05)


def test_ranks_of_a_worker_average_every_gradient_and_ddp_averages_over_all_of_them():
    levels = cluster(
        workers=2, ranks_per_worker=4, node_rate="10gbit", node_latency=0, latency=0, overlap=0,
        all_reduce="auto",
    )  # fmt: skip
    size = 4 * MODEL
    inside = 2 * 3 / 4 * 8 * size / 1e10  # a ring of four ranks
    between = 2 * 1 / 2 * 8 * size / 1e8  # a ring of two workers over their one link each
    handed_on = 3 / 4 * 8 * size / 1e10  # the part of each rank to the other ranks
    run = levels.project(work(sync_every=8), steps=8)
    assert run.time_s == pytest.approx(8 * (0.05 + inside) + between + handed_on, rel=1e-3)
    assert run.exchange_s == pytest.approx(8 * inside + between + handed_on, rel=1e-3)
    ddp = levels.project(Work.ddp(MODEL), steps=1)
    assert ddp.time_s == pytest.approx(0.05 + inside + between, rel=1e-3)


def test_every_rank_of_a_worker_sends_a_coded_message_whole():
    one, four = (cluster(workers=2, ranks_per_worker=n, latency=0) for n in (1, 4))
    (message,) = work(compress="int8").payload(2).messages()
    assert four.sync_s(message) == pytest.approx(4 * one.sync_s(message))


def test_coding_is_part_of_an_exchange_and_hides_behind_a_delay():
    place = cluster(workers=2)
    free, costly = (work(sync_every=80, compress="int8", coding=s) for s in (0.0, 1e-7))
    longer = place.project(costly, steps=160).time_s - place.project(free, steps=160).time_s
    assert longer == pytest.approx(2 * 1e-7 * MODEL)
    hidden = [replace(each, delay=40) for each in (free, costly)]
    runs = [place.project(each, steps=400).time_s for each in hidden]
    assert runs[1] - runs[0] == pytest.approx(1e-7 * MODEL)  # of the last sync alone


def test_accumulated_gradients_are_averaged_once():
    place = cluster(workers=4, overlap=0)
    plain, many = Work.ddp(MODEL), Work.ddp(MODEL, accumulate=8)
    exchange = place.project(plain, steps=1).exchange_s
    run = place.project(many, steps=20)  # two of eight gradients, one of four
    assert run.time_s == pytest.approx(20 * 0.05 + 3 * exchange)
    assert run.gradient_steps == 20
    assert run.clocks == [8, 16, 20]
    halved = place.project(Work.ddp(MODEL, sent_share=0.5), steps=1)
    assert halved.bytes_sent == 2 * MODEL


@pytest.mark.parametrize(
    ("compress", "width"), [(None, 4), ("bf16", 2), ("int8", 260 / 256), ("int4", 136 / 256)]
)
def test_codes_have_the_bytes_that_the_optimizer_sends(compress, width):
    assert sync_bytes(work(compress=compress)) == pytest.approx(MODEL * width, rel=1e-3)
    assert sync_bytes(work(compress=compress, fragments=4)) == pytest.approx(
        MODEL * width / 4, rel=1e-3
    )
    run = simulated(
        method=palsgd.DiLoCo, compress=compress, steps=8, sync_every=8, width=6_000, engine=False
    )
    size = sum(p.numel() for p in run.model.parameters())
    job = Work(parameters=size, sync_every=8, compress=compress)
    assert run.ledger.history[0]["bytes_sent"] == sync_bytes(job, workers=3)


def test_codes_that_are_gathered_cross_every_link_of_the_ring():
    place = cluster(workers=8)
    found = place.project(work(compress="topk:0.05"), steps=16)
    sent = sync_bytes(work(compress="topk:0.05"), workers=8)
    assert (found.bytes_sent, found.bytes_on_the_wire) == (sent, 7 * sent)
    assert found.time_s == pytest.approx(16 * 0.05 + 7 * (8 * sent / 1e8 + 0.02))
    gloo = cluster(workers=8, all_reduce="gloo", latency=0).network
    assert gloo.gather(1e7) == pytest.approx(7 * 8e7 / (1e8 * 1448 / 1547), rel=0.1)


# -- time, with constant steps -------------------------------------------------------------------


def test_constant_rounds_take_their_steps_and_their_syncs():
    place = cluster(workers=8, sync=0.3)
    found = place.project(work(), steps=5 * 16)
    sync = place.network.all_reduce(sync_bytes(work(), workers=8))
    assert found.time_s == pytest.approx(5 * (16 * 0.05 + sync + 0.3))
    assert found.clocks == [16, 32, 48, 64, 80]
    assert found.wait_s == 0
    assert found.exchange_s == pytest.approx(5 * (sync + 0.3))
    header = 4 * 9 * 8  # nine numbers of each worker
    assert found.bytes_sent == 5 * (4 * MODEL + header)
    assert found.bytes_on_the_wire == 5 * 2 * 7 * (4 * MODEL + header) // 8


def test_steps_that_are_no_multiple_end_with_a_shorter_round():
    place = cluster()
    sync = place.network.all_reduce(sync_bytes(work()))
    assert place.project(work(), steps=20).time_s == pytest.approx(20 * 0.05 + 2 * sync)


def test_ddp_without_overlap_is_compute_and_then_its_buckets():
    place = cluster(overlap=0)
    sizes = [2**20, 25 * 2**20, 4 * MODEL - 26 * 2**20]
    exchange = sum(place.network.all_reduce(size) for size in sizes)
    found = place.project(Work.ddp(MODEL), steps=3)
    assert found.time_s == pytest.approx(3 * (0.05 + exchange))


@pytest.mark.parametrize("step", [0.05, 1.0, 5.0, 20.0])
def test_ddp_sends_a_bucket_when_it_is_ready_and_the_link_free(step):
    place, size = cluster(step=step), 4 * MODEL
    free, done = 0.0, 0.0
    for bucket in (2**20, 25 * 2**20, size - 26 * 2**20):
        done += bucket
        ready = step / 3 + step * 2 / 3 * done / size
        free = max(free, ready) + place.network.all_reduce(bucket)
    assert place.project(Work.ddp(MODEL), steps=1).time_s == pytest.approx(max(free, step))


def test_a_worker_alone_only_computes():
    assert cluster(workers=1).project(work(), steps=32).time_s == pytest.approx(32 * 0.05)
    assert cluster(workers=1).project(Work.ddp(MODEL), steps=32).time_s == pytest.approx(32 * 0.05)


def test_a_straggler_sets_the_pace_and_the_others_wait():
    found = cluster(straggler=3).project(work(), steps=32)
    sync = cluster().network.all_reduce(sync_bytes(work()))
    assert found.time_s == pytest.approx(2 * (3 * 16 * 0.05 + sync))
    assert found.wait_s == pytest.approx(2 * 16 * 0.05 * 2 * 3 / 4)


def twin(place: Cluster, job: Work, steps: int, plan) -> float:
    """Tick by tick, worker by worker, in plain Python."""
    at, pending, free = [0.0] * place.workers, None, 0.0
    sends = [(f + 1) * job.sync_every // job.fragments for f in range(job.fragments)]
    costs = [
        place.network.all_reduce(sum(job.payload(place.workers).sync(f)))
        for f in range(job.fragments)
    ]
    for clock in range(1, steps + 1):
        round, tick = divmod(clock - 1, job.sync_every)
        for worker in range(place.workers):
            slow = place.straggler if worker == place.workers - 1 else 1.0
            if not plan(worker, round)[tick]:
                at[worker] += place.step * slow
        if pending and clock in (pending[0], steps):
            at, pending = [max(t, pending[1]) for t in at], None
        due = [f for f in range(job.fragments) if clock == steps or sends[f] == tick + 1]
        for fragment in due:
            free = max(free, *at) + costs[fragment]
            if job.delay and clock < steps:
                pending = (clock + job.delay, free)
            else:
                at = [free] * place.workers
    return max(at)


@pytest.mark.parametrize("draws", ["balanced", "independent", "shared"])
@pytest.mark.parametrize(
    ("delay", "fragments"), [(0, 1), (1, 1), (7, 1), (16, 1), (0, 4), (3, 4), (4, 4), (2, 5)]
)
def test_delay_fragments_and_mixing_agree_with_the_tick_by_tick_twin(delay, fragments, draws):
    place = cluster(step=0.3, straggler=1.2)
    job = work(delay=delay, fragments=fragments, mix_prob=0.25, draws=draws)
    method = PALSGDMethod(mix_prob=0.25, mix_rate=0.1)
    facts = palsgd.Facts(sync_every=16, workers=place.workers, draws=draws, seed=5)
    machine = palsgd.cluster.TimeSimulation(place, job, end=70, counts=Planned(method, facts))
    machine.run_until(70)
    seen = replace(facts, stops=job.schedule.stops(0))
    expected = twin(place, job, 70, lambda worker, round: method.plan(worker, round, 16, seen))
    assert machine.projection.time_s == pytest.approx(expected, rel=1e-12)


def test_what_a_delay_cannot_hide_is_exposed():
    sync = cluster().network.all_reduce(sync_bytes(work()))  # about 3.9 s
    hidden = cluster(step=1.0).project(work(delay=8), steps=16 * 10).time_s
    assert hidden == pytest.approx(160 + sync)  # the last sync has nothing to hide behind
    partly = cluster(step=0.1).project(work(delay=8), steps=16 * 10).time_s
    assert partly == pytest.approx(16 + 9 * (sync - 0.8) + sync)


# -- laws ----------------------------------------------------------------------------------------


def normal_most(number: int) -> float:
    """The mean of the largest of so many standard normals, by integration of 1 - F^K."""
    x = np.linspace(-10, 10, 200_001)
    below = 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))
    high, low = x >= 0, x < 0
    return float((1 - below[high] ** number).sum() - (below[low] ** number).sum()) * (x[1] - x[0])


def test_the_slowest_of_many_workers_is_as_late_as_order_statistics_say():
    workers, H = 64, 256
    place = cluster(workers=workers, spread="lognormal", cv=0.05, rate=1e15, latency=0)
    found = place.project(work(sync_every=H), steps=H * 300)
    mean, deviation = H * 0.05, math.sqrt(H) * 0.05 * 0.05
    late = (found.time_s / 300 - mean) / deviation  # a sum of 256: normal, nearly
    assert late == pytest.approx(normal_most(workers), rel=0.03)
    assert found.wait_s / 300 == pytest.approx(normal_most(workers) * deviation, rel=0.03)


def test_ddp_waits_for_the_slowest_at_every_step():
    place = cluster(workers=32, spread="lognormal", cv=0.2, rate=1e15, latency=0)
    found = place.project(Work.ddp(1000), steps=20_000)
    rng = np.random.default_rng(1)
    sigma = math.sqrt(math.log(1.04))
    drawn = rng.lognormal(-(sigma**2) / 2, sigma, (20_000, 32)) * 0.05
    assert found.time_s / 20_000 == pytest.approx(drawn.max(axis=1).mean(), rel=0.01)


def test_heavy_tails_have_their_mean_and_their_index():
    place = cluster(workers=1000, spread="heavy-tail", tail=2.5)
    drawn = np.concatenate(
        [place.compute(np.random.default_rng(s)).seconds(np.ones(1000, int)) for s in range(500)]
    )
    assert drawn.mean() == pytest.approx(0.05, rel=0.02)
    for factor in (2, 10, 40):
        beyond = (drawn > factor * 0.05 * 1.5 / 2.5).mean()
        assert beyond == pytest.approx(factor**-2.5, rel=0.25)


def counts_of(draws: str, *, cuts, stops=(), workers=50, rounds=400):
    drawn = Drawn(workers=workers, mix_prob=0.2, draws=draws, rng=np.random.default_rng(3))
    return stretches_of(drawn, [0, *cuts, 32], rounds, stops)


class Stopping(Schedule):
    """A schedule whose rounds have any stops."""

    within: tuple[int, ...] = ()

    def stops(self, clock):
        return self.within


def stretches_of(counts, bounds, rounds, stops):
    """Gradients by round, stretch and worker; stretches end at the stops."""
    when = type("Stopping", (Stopping,), {"within": tuple(stops)}).fixed(sync_every=bounds[-1])
    parts, length = list(itertools.pairwise(bounds)), bounds[-1]
    return np.array(
        [
            [counts.gradients(when, r * length + a, r * length + b) for a, b in parts]
            for r in range(rounds)
        ]
    )


@pytest.mark.parametrize("cuts", [[], [8], [1, 10, 31]])
def test_balanced_counts_are_binomial_for_each_and_equal_for_all(cuts):
    stretches = counts_of("balanced", cuts=cuts)
    whole = stretches.sum(axis=1)
    assert (whole == whole[:, :1]).all()
    assert whole[:, 0].mean() == pytest.approx(32 * 0.8, rel=0.02)
    assert whole[:, 0].var() == pytest.approx(32 * 0.8 * 0.2, rel=0.25)
    lengths = np.diff([0, *cuts, 32])
    assert stretches.mean(axis=(0, 2)) == pytest.approx(lengths * 0.8, rel=0.03)
    if cuts:  # places are each worker's own
        assert stretches[:, 0].std(axis=1).max() > 0


@pytest.mark.parametrize("cuts", [[8], [1, 10, 31]])
def test_balanced_counts_are_binomial_and_equal_for_all_between_stops(cuts):
    stretches = counts_of("balanced", cuts=cuts, stops=cuts, rounds=4000)
    assert (stretches == stretches[:, :, :1]).all()
    lengths = np.diff([0, *cuts, 32])
    each = stretches[:, :, 0]
    assert each.mean(axis=0) == pytest.approx(lengths * 0.8, rel=0.02)
    assert each.var(axis=0) == pytest.approx(lengths * 0.8 * 0.2, rel=0.1)
    between = np.corrcoef(each.T)[np.triu_indices(len(lengths), 1)]
    assert np.abs(between).max() < 4 / math.sqrt(4000)  # stretches are drawn on their own


def test_a_stretch_that_is_cut_has_its_number_in_all_and_each_workers_own_on_the_way():
    stretches = counts_of("balanced", cuts=[3, 20], stops=[8], rounds=2000)
    assert stretches[:, 0].std(axis=1).max() > 0  # [0, 3): inside the stretch [0, 8)
    whole = stretches.sum(axis=1)
    assert (whole == whole[:, :1]).all()
    assert stretches.mean(axis=(0, 2)) == pytest.approx(np.array([3, 17, 12]) * 0.8, rel=0.02)


@pytest.mark.parametrize("lag", [{}, dict(delay=16), dict(fragments=4)], ids=str)
@pytest.mark.parametrize("mix_prob", [0.0, 0.1])
def test_nobody_waits_for_a_straggler_whose_gradients_are_paced(mix_prob, lag):
    """One of three workers takes three times as long for a gradient."""
    place = cluster(workers=3, straggler=3.0, latency=0.0, rate="100gbit")
    even, paced = (
        place.project(
            work(sync_every=64, mix_prob=mix_prob, draws=draws, parameters=1000, **lag), steps=6400
        )
        for draws in ("balanced", "paced")
    )
    of_the_fast = 3 / 2 * even.wait_s / even.time_s
    assert of_the_fast == pytest.approx(2 / 3, abs=0.01)
    assert 3 / 2 * paced.wait_s / paced.time_s < 0.05
    assert paced.time_s < 0.37 * even.time_s


def law_of(stretches):
    """The share of rounds with each count of worker 0 in the first stretch and of worker 1 in the
    second, and of rounds in which both workers have the same count in a stretch."""
    table = np.zeros((4, 5))
    np.add.at(table, (stretches[:, 0, 0], stretches[:, 1, 1]), 1 / len(stretches))
    same = (stretches[:, :, 0] == stretches[:, :, 1]).mean(axis=0)
    return np.concatenate([table.ravel(), same])


@pytest.mark.parametrize("stops", [[], [3], [2, 5]])
@pytest.mark.parametrize("draws", ["balanced", "independent", "shared", "paced"])
def test_planned_and_drawn_counts_have_the_same_law(draws, stops):
    rounds, facts = 6000, palsgd.Facts(sync_every=7, workers=2, seed=5, draws=draws)
    speeds, rng = (1.0, 0.6), np.random.default_rng(9)
    planned = Planned(PALSGDMethod(mix_prob=0.4, mix_rate=0.1), facts, lambda round: speeds)
    drawn = Drawn(workers=2, mix_prob=0.4, draws=draws, rng=rng, speeds=np.array(speeds))
    planned, drawn = (
        law_of(stretches_of(each, [0, 3, 7], rounds, stops)) for each in (planned, drawn)
    )
    error = np.sqrt((planned * (1 - planned) + drawn * (1 - drawn)) / rounds)
    assert (np.abs(planned - drawn) <= 4 * error).all()


def test_own_coins_make_the_slowest_as_slow_as_the_exact_law_says():
    counts = counts_of("independent", cuts=[])[:, 0]
    most = expected_most(workers=50, coins=32, chance=0.8)
    assert counts.max(axis=1).mean() == pytest.approx(most, rel=0.01)


def test_a_projection_is_a_function_of_its_seed():
    place = cluster(spread="lognormal")
    job = work(mix_prob=0.2, draws="independent")
    times = [place.project(job, steps=160, seed=s).times for s in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_a_hundred_thousand_workers_fit_into_little_memory():
    place = cluster(workers=100_000, spread="lognormal")
    tracemalloc.start()
    try:
        place.project(work(mix_prob=0.1, draws="independent"), steps=32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6


def test_the_timeline_is_without_gaps_and_adds_up():
    place = cluster(spread="lognormal", cv=0.5)
    found = place.project(work(delay=4, warmup_steps=8), steps=72, watched=range(4))
    for worker in range(4):
        spans = [s for s in found.spans if s["worker"] == worker]
        assert spans[0]["start_s"] == 0
        for before, after in itertools.pairwise(spans):
            assert after["start_s"] == pytest.approx(before["end_s"])
        assert spans[-1]["end_s"] == pytest.approx(found.time_s)

    def mean_of(kind):
        return sum(s["end_s"] - s["start_s"] for s in found.spans if s["kind"] == kind) / 4

    assert mean_of("gradient") == pytest.approx(found.compute_s)
    assert mean_of("wait") == pytest.approx(found.wait_s)
    assert mean_of("sync") == pytest.approx(found.exchange_s)


# -- attached to a simulation --------------------------------------------------------------------


def simulated(method=palsgd.PALSGD, *, workers=3, steps=48, width=4, engine="auto", on=None, **how):
    def build(model):
        inner = torch.optim.SGD(model.parameters(), 0.01)
        return method(model, inner, **{"sync_every": 16, **how})

    def batches(worker):
        while True:
            yield torch.linspace(0, 1 + worker, 2 * width).view(2, width)

    return palsgd.simulate(
        workers=workers, steps=steps, model=lambda: nn.Linear(width, 3), data=batches,
        loss=lambda model, x: model(x).square().mean(), method=build, vectorize=engine, cluster=on,
    )  # fmt: skip


@pytest.mark.parametrize("engine", [True, False])
def test_a_simulation_tells_the_time_on_the_cluster_by_its_own_plans(engine):
    place = cluster(workers=3, overlap=0)
    how = dict(mix_prob=0.3, mix_rate=0.1, draws="independent", seed=7, warmup_steps=2)
    run = simulated(on=place, engine=engine, steps=2 + 48, **how)
    step = 0.05 + place.network.all_reduce(15 * 4)
    sync = place.network.all_reduce(15 * 4 + 4 * 9 * 3)  # and nine numbers of each worker
    expected = [step, 2 * step]
    for round in range(3):
        plans = [
            palsgd.round_plan(seed=7, worker=k, round=round, sync_every=16, mix_prob=0.3,
                              draws="independent")
            for k in range(3)
        ]  # fmt: skip
        slowest = max(plan.count(False) for plan in plans) * 0.05
        expected.append(expected[-1] + slowest + sync)
    assert [entry["time_s"] for entry in run.history] == pytest.approx(expected)
    assert all("seconds" in entry for entry in run.history)


def test_a_simulation_with_overlap_hides_on_the_cluster_what_the_model_hides():
    place = cluster(workers=2)
    run = simulated(on=place, workers=2, method=palsgd.DiLoCo, delay=8, engine=False)
    job = Work(parameters=15, sync_every=16, delay=8)
    found = place.project(job, steps=48)
    assert [entry["clock"] for entry in run.history] == found.clocks
    assert [entry["time_s"] for entry in run.history] == pytest.approx(found.times)


def test_without_a_cluster_nothing_is_projected():
    assert "time_s" not in simulated(method=palsgd.DiLoCo).history[0]


def test_a_cluster_must_have_as_many_workers_as_the_simulation():
    with pytest.raises(ValueError, match="workers=3, but the cluster has workers=4"):
        simulated(on=cluster(), mix_prob=0.1, mix_rate=0.1)


# -- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bits"), [(1e8, 1e8), ("100mbit", 1e8), ("1.5 Gbit/s", 1.5e9), ("25GB/s", 2e11)]
)
def test_rates_are_numbers_or_text(given, bits):
    assert cluster(rate=given).rate == bits


def test_a_cluster_is_written_as_rate_latency_and_names():
    found = Cluster.parse("100mbit, 20ms, step=50ms, spread=lognormal, cv=0.3", workers=4)
    assert found == Cluster(
        workers=4, rate=1e8, latency=0.02, step=0.05, spread="lognormal", cv=0.3
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rate": -1}, "rate=-1 must be more than 0 bit/s"),
        ({"rate": "fast"}, "rate='fast' is no rate"),
        ({"rate": "0mbit"}, "rate='0mbit' must be more than 0 bit/s"),
        ({"rate": math.nan}, "rate=nan must be more than 0 bit/s"),
        ({"latency": "-3ms"}, "latency='-3ms' must be a time of 0 s or more"),
        ({"step": 0}, "step=0 must be a time of more than 0 s"),
        ({"step": "3 apples"}, "step='3 apples' is no time"),
        ({"workers": 0}, "workers=0 must be a whole number >= 1"),
        ({"tail": 1}, "tail=1 must be more than 1"),
        ({"cv": 0}, "cv=0 must be more than 0"),
        ({"straggler": 0.5}, "straggler=0.5 must be a factor of at least 1"),
        ({"overlap": 1.5}, r"overlap=1.5 must be in \[0, 1\]"),
        ({"spread": "gaussian"}, "spread='gaussian' is unknown; use one of 'constant'"),
        ({"all_reduce": "star"}, "all_reduce='star' is unknown; use one of 'auto'"),
        ({"per_node": 0}, "per_node=0 must be a whole number >= 1"),
        ({"slow_rate": "0mbit"}, "slow_rate='0mbit' must be more than 0 bit/s"),
        ({"stragglers": 0}, "stragglers=0 must be a whole number >= 1"),
        ({"per_node": 2, "ranks_per_worker": 4}, "give one of them"),
    ],
)
def test_impossible_clusters_are_refused_with_field_and_range(fields, said):
    with pytest.raises(ValueError, match=said):
        cluster(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parameters": 0}, "parameters=0 must be at least 1"),
        ({"mix_prob": 1.0}, r"mix_prob=1.0 must be a number in \[0, 1\)"),
        ({"delay": 17}, "delay=17 must be at most sync_every / fragments = 16"),
        ({"delay": 5, "fragments": 4}, "delay=5 must be at most sync_every / fragments = 4"),
        ({"fragments": 17}, "fragments=17 must be at most sync_every=16"),
        ({"compress": "zip"}, "compress='zip' is unknown"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be a whole number >= 0"),
        ({"accumulate": 0}, "accumulate=0 must be a whole number >= 1"),
        ({"sent_share": 0.0}, r"sent_share=0.0 must be a share in \(0, 1\]"),
        ({"coding": -1.0}, "coding=-1.0 must be a time of 0 s or more"),
    ],
)
def test_impossible_work_is_refused_with_field_and_range(fields, said):
    with pytest.raises(ValueError, match=said):
        work(**fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("100mbit,20ms", "the cluster has no step; add for instance step=50ms"),
        ("100mbit,20ms,50ms", "'50ms' in cluster '100mbit,20ms,50ms' has no name"),
        ("100mbit,step=50ms,rtt=3", "a field of the cluster='rtt' is unknown"),
    ],
)
def test_a_text_that_is_no_cluster_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Cluster.parse(text, workers=4)
