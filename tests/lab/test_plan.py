"""What `palsgd plan` says, against closed forms, the optimizer's own tensors, and the paper."""

import json
import math
import re
from functools import cache

import pytest
import torch
import yaml
from torch import nn

import palsgd as library
from palsgd import registry
from palsgd.cluster import Cluster, Work
from palsgd.lab.plan.candidates import UNUSABLE, Candidate, Planner, Task
from palsgd.lab.plan.choosing import (
    LEAST_ROUNDS,
    WORTH,
    Plan,
    break_even,
    make_plan,
    recommended,
    strongest,
    with_workers,
)
from palsgd.lab.plan.measure import BLOCKS, STEPS, Measured, in_blocks
from palsgd.lab.plan.memory import memory
from palsgd.lab.plan.paper import PUBLISHED, Published
from palsgd.lab.plan.prices import PriceTable, committed
from palsgd.lab.plan.scale import cells
from palsgd.lab.plan.text import conclusion, remarks
from palsgd.payload import REPORT
from support.commands import lines, palsgd, summary
from support.core_access import anchor_of, departure_memory, message_memory, residues_of
from support.price_records import price_record

TOLD = ("plan", "--step-ms", 50, "--parameters", "8M", "--workers", 4)
M = 1_000_000
DILOCO, PALSGD = registry.row("diloco"), registry.row("palsgd")
TABLES = {
    "made up": PriceTable(price_record()),
    "committed": committed(),
    "empty": PriceTable({"tiny": True}),
}


def planner(fields=None, table="made up", **task) -> Planner:
    given = {"workers": 8, "step": 0.05, "rate": "10gbit", "latency": "50us", **(fields or {})}
    known = {"parameters": 8 * M, "steps": 10_000, "coding": {}, "prices": TABLES[table]}
    return Planner(Cluster(**given), Task(**(known | task)))


# -- time to quality -----------------------------------------------------------------------------


def test_a_run_takes_the_steps_of_its_price_and_all_of_its_syncs():
    place = planner(extra_steps=0.25)
    found = place.local(PALSGD, place.work(PALSGD, 32))
    sync = place.cluster.network.all_reduce(4 * 8 * M + 4 * REPORT * 8)  # a header of each worker
    assert found.steps == 12_500  # 390 rounds, and one of 20 steps
    assert found.run_s == pytest.approx(0.9 * 0.05 * 12_500 + 391 * sync)
    assert found.exchanging == pytest.approx(391 * sync / found.run_s)
    assert found.bytes_on_the_wire == pytest.approx(391 * 2 * 7 / 8 * (32 * M + 4 * REPORT * 8))


def test_the_last_sync_of_a_delayed_run_is_counted():
    place = planner({"rate": "1gbit"}, extra_steps=0.0)
    work = place.work(DILOCO, 64, overlap=True)
    assert 0 < work.delay <= 32
    whole = place.cluster.project(work, steps=10_000)
    assert place.local(DILOCO, work).run_s == pytest.approx(whole.time_s)
    sync = place.cluster.network.all_reduce(4 * 8 * M + 4 * REPORT * 8)
    assert whole.time_s == pytest.approx(500 + sync)  # the last one hides behind nothing


def test_warm_up_is_paid_at_the_price_of_ddp_and_extra_steps_by_the_local_phase():
    place = planner(warmup_steps=4000, extra_steps=0.5)
    found = place.local(DILOCO, place.work(DILOCO, 40))
    ddp = place.opponents()[0]
    assert found.run_s == pytest.approx(4000 * ddp.step_s + 9000 * found.step_s, rel=1e-3)


def test_prices_come_from_the_table_and_the_given_one_replaces_them():
    place = planner({"rate": "100mbit"})
    found = place.local(DILOCO, place.work(DILOCO, 64, compress="int8"))
    assert found.price.extra == pytest.approx(0.02 * 6 + 0.01)
    assert found.steps == math.ceil(10_000 * (1 + 0.13))
    given = planner({"rate": "100mbit"}, extra_steps=0.5)
    assert given.local(DILOCO, given.work(DILOCO, 64)).steps == 15_000


def test_a_price_that_is_not_measured_is_shown_as_such_and_the_time_is_of_equal_gradients():
    place = planner(table="empty")
    found = place.local(PALSGD, place.work(PALSGD, 64))
    assert found.price.extra is None
    assert found.steps == math.ceil(10_000 / 0.9)


def test_waiting_is_told_from_exchanging():
    even, uneven = planner(), planner({"straggler": 3})
    plain = even.local(DILOCO, even.work(DILOCO, 64))
    slow = uneven.local(DILOCO, uneven.work(DILOCO, 64))
    assert plain.waiting == pytest.approx(0, abs=1e-9)
    assert slow.waiting == pytest.approx(7 / 8 * 2 / 3, rel=0.02)  # seven wait for two thirds
    assert slow.exchanging < plain.exchanging


def test_a_plan_says_what_paced_draws_would_save():
    for slower, words in ((1.0, []), (3.0, ["wait 58", "leaves"])):
        place = planner({"straggler": slower})
        best = place.local(DILOCO, place.work(DILOCO, 64))
        plan = Plan(place.opponents(), {}, best, place.opponents()[0])
        said = [x for x in remarks(place.cluster, place.task, plan, None) if "draws=paced" in x]
        assert len(said) == bool(words)
        assert all(word in each for each in said for word in words)


def test_coding_takes_time():
    free = planner({"rate": "1gbit"}, extra_steps=0.0)
    costly = planner({"rate": "1gbit"}, extra_steps=0.0, coding={"int8": 10e-9})
    runs = [p.local(DILOCO, p.work(DILOCO, 50, compress="int8")).run_s for p in (free, costly)]
    assert runs[1] - runs[0] == pytest.approx(200 * 10e-9 * 8 * M)


# -- opponents -----------------------------------------------------------------------------------


def test_ddp_has_the_variants_that_send_less():
    found = {each.variant: each for each in planner({"rate": "1gbit"}).opponents()}
    assert set(found) == {
        "fp32", "bf16", "bf16, 4 accumulated", "bf16, 16 accumulated", "bf16, 64 accumulated",
        "PowerSGD rank 16",
    }  # fmt: skip
    half = found["bf16"].bytes_on_the_wire / found["bf16"].steps
    assert half == pytest.approx(found["fp32"].bytes_on_the_wire / 10_000 / 2)
    accumulated = found["bf16, 16 accumulated"]
    assert accumulated.bytes_on_the_wire == pytest.approx(half / 16 * accumulated.steps)
    assert accumulated.price.extra == pytest.approx(1.6)
    assert not found["PowerSGD rank 16"].price.measured


def test_the_opponent_is_the_fastest_ddp_whose_price_is_known_or_is_that_of_bf16():
    opponents = planner({"rate": "100mbit"}, table="empty").opponents()
    assert strongest(opponents).variant == "bf16"
    priced = planner({"rate": "100mbit"}).opponents()
    best = strongest(priced)
    assert "accumulated" in best.variant
    assert best.run_s == min(each.run_s for each in priced if each.price.measured)


# -- what is recommended -------------------------------------------------------------------------


def test_every_method_with_rounds_is_a_candidate_with_and_without_codes_and_delays():
    found = make_plan(planner({"rate": "200mbit"}))
    names = {family.row.name for family in found.families}
    assert names == {row.name for row in registry.rows() if row.rounds}
    for name in ("localsgd", "diloco", "palsgd"):
        kinds = {(f.compress, f.overlap) for f in found.families if f.row.name == name}
        assert kinds == {(code, o) for code in (None, "bf16", "int8", "int4") for o in (0, 1)}
    refused = {f.row.name for f in found.families if f.overlap}
    assert refused.isdisjoint({"scaffold", "easgd"})  # they refuse a delay


def test_a_run_has_thirty_rounds_and_a_delay_is_at_most_half_of_one():
    for steps in (100, 500, 10_000):
        for each in make_plan(planner({"rate": "200mbit"}, steps=steps)).local:
            assert each.work.sync_every * LEAST_ROUNDS <= steps
            assert each.work.delay <= each.work.sync_every / 2


def test_no_delay_is_offered_where_there_is_nothing_to_hide():
    found = make_plan(planner({"rate": "400gbit"}))
    for family, candidates in found.families.items():
        plain = {
            c.work.sync_every: c
            for other, some in found.families.items()
            for c in some
            if (other.row, other.compress, other.overlap) == (family.row, family.compress, False)
        }
        if family.overlap:
            assert all(plain[c.work.sync_every].exchanging > WORTH for c in candidates)


def candidate(**fields) -> Candidate:
    """A candidate of which only what is compared matters."""
    base = planner(table="empty")
    found = base.local(DILOCO, base.work(DILOCO, fields.pop("H", 64)))
    return Candidate(**{**vars(found), "exchanging": 0.1, **fields})


def test_what_is_measured_comes_before_what_is_faster_by_an_unknown_price():
    known = candidate(
        run_s=200.0, price=planner(extra_steps=0.0)._price(DILOCO, Work(parameters=1))
    )
    guess = candidate(run_s=100.0)
    assert recommended([guess, known]) is known
    unusable = Candidate(**{**vars(known), "exchanging": UNUSABLE + 0.01})
    assert recommended([guess, unusable]) is guess
    assert recommended([unusable]) is unusable


def test_of_choices_within_five_percent_the_plainest_is_recommended():
    long, short = candidate(run_s=100.0, H=128), candidate(run_s=104.0, H=64)
    assert recommended([long, short]) is short
    assert recommended([long, Candidate(**{**vars(short), "run_s": 106.0})]) is long


# Situations in which plans once gave ruinous advice. The step is 50 ms unless it is given.
SITUATIONS = {
    "a straggler": ({"rate": "1gbit", "latency": "1ms", "straggler": 3}, {"parameters": 25 * M}),
    "heavy tails": (
        {"rate": "100gbit", "latency": "1ms", "straggler": 1.5, "spread": "heavy-tail"},
        {"parameters": 25 * M},
    ),
    "a run shorter than a round": (
        {"workers": 2, "rate": "1mbit", "latency": "300ms"},
        {"steps": 200},
    ),
    "a short run": ({"workers": 4, "rate": "100mbit", "latency": "1ms"}, {"steps": 500}),
    "a slow link": ({"workers": 4, "rate": "100mbit", "latency": "20ms"}, {}),
    "a larger model": (
        {"workers": 4, "rate": "100mbit", "latency": "1ms", "step": "200ms"},
        {"parameters": 125 * M},
    ),
    "a billion parameters": (
        {"rate": "1gbit", "latency": "30ms", "step": "1s"},
        {"parameters": 1000 * M},
    ),
    "a fast link": (
        {"workers": 4, "rate": "10gbit", "latency": "1ms", "step": "20ms"},
        {"parameters": 25 * M},
    ),
    "a far link": (
        {"workers": 16, "rate": "10mbit", "latency": "150ms"},
        {"parameters": 1 * M},
    ),
    "no mixing": (
        {"workers": 4, "rate": "100mbit", "latency": "1ms", "step": "200ms"},
        {"parameters": 125 * M, "mix_prob": 0.0},
    ),
}


@cache
def plan_of(name: str, table: str) -> tuple[Planner, Plan]:
    fields, task = SITUATIONS[name]
    place = planner(fields, table, **task)
    return place, make_plan(place)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_rounds_longer_than_the_run_allows_and_late_syncs_are_not_recommended(name, table):
    place, found = plan_of(name, table)
    best = found.best.work
    assert best.is_ddp or best.sync_every <= place.task.steps / 30
    assert best.delay <= best.sync_every / 2
    if any(each.usable for each in [*found.opponents, *found.local]):
        assert found.best.usable
    least = place.work(PALSGD if place.task.mix_prob else DILOCO, 4, compress="int4")
    sync = least.payload(place.cluster.workers).on_the_wire()  # of the smallest code
    assert all(each.bytes_on_the_wire >= sync for each in found.local)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["a straggler", "heavy tails"])
def test_waiting_does_not_lengthen_the_recommended_rounds(name, table):
    _, found = plan_of(name, table)
    fields, task = SITUATIONS[name]
    even = {k: v for k, v in fields.items() if k not in ("straggler", "spread")}
    without = make_plan(planner(even, table, **task)).best
    if not (without.is_ddp or found.best.is_ddp):
        assert found.best.work.sync_every <= without.work.sync_every
    assert found.best.work.sync_every <= 128


def test_a_run_for_which_the_link_is_too_slow_is_called_so():
    place, found = plan_of("a run shorter than a round", "made up")
    assert not found.best.usable
    assert "nothing is usable" in conclusion(place.cluster, place.task, found)


@pytest.mark.parametrize("table", ["made up", "empty"])
def test_over_a_fast_link_hardly_a_delay_is_recommended(table):
    _, found = plan_of("a fast link", table)
    assert found.best.work.delay <= found.best.work.sync_every / 8


@pytest.mark.parametrize("table", TABLES)
def test_without_mixing_diloco_has_codes_and_delays_too(table):
    _, found = plan_of("no mixing", table)
    assert "palsgd" not in {family.row.name for family in found.families}
    kinds = {(f.compress, f.overlap) for f in found.families if f.row.name == "diloco"}
    assert {("int8", False), ("int4", False)} <= kinds
    assert found.best.work.compress or found.best.is_ddp


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "fields", [{"rate": "400gbit", "latency": "1us"}, {"workers": 1, "rate": "100mbit"}]
)
def test_where_exchanges_cost_nothing_ddp_is_recommended(fields, table):
    found = make_plan(planner(fields, table, parameters=25 * M))
    assert found.best.is_ddp or table == "committed"
    if table == "empty":
        assert found.best.variant == "fp32"


# -- break-even ----------------------------------------------------------------------------------


def gain_at(place: Planner, best: Candidate, rate: float) -> float:
    there = Planner(place.cluster.changed(rate=rate), place.task)
    own = there.local(registry.row(best.method), best.work)
    return 1 - own.run_s / strongest(there.opponents()).run_s


def test_at_the_break_even_rate_the_gain_is_just_worth_it():
    place = planner(extra_steps=0.2)
    best = place.local(DILOCO, place.work(DILOCO, 64))
    even = break_even(place, best)
    assert even.cause == "rate"
    assert gain_at(place, best, even.rate * 0.97) > WORTH > gain_at(place, best, even.rate * 1.03)


@pytest.mark.parametrize(
    ("fields", "task", "cause"),
    [
        ({"latency": "20ms"}, {"extra_steps": 0.0}, "latency"),
        ({"latency": "100us"}, {"extra_steps": 0.0, "parameters": 70_000 * M}, "buckets"),
        ({"spread": "lognormal", "cv": 1.0}, {"extra_steps": 0.0}, "waiting"),
        ({}, {"extra_steps": -0.2}, "gradients"),
    ],
)
def test_a_gain_at_any_rate_is_put_down_to_its_cause(fields, task, cause):
    place = planner(fields, "empty", **task)
    best = place.local(DILOCO, place.work(DILOCO, 64))
    even = break_even(place, best)
    assert (even.rate, even.cause) == (None, cause)


def test_extra_steps_can_spoil_all():
    place = planner(extra_steps=1000.0)
    assert break_even(place, place.local(DILOCO, place.work(DILOCO, 64))).rate == 0


def test_more_workers_are_planned_with_the_same_choice():
    place = planner({"rate": "1gbit"})
    best = make_plan(place).best
    rows = list(with_workers(place.cluster, place, best, [4, 8, 64]))
    assert [number for number, _, _ in rows] == [4, 8, 64]
    for number, base, choice in rows:
        there = Planner(place.cluster.changed(workers=number), place.task)
        assert base.run_s == strongest(there.opponents()).run_s
        assert choice.work == best.work


# -- measuring -----------------------------------------------------------------------------------


def measured(low: float, high: float) -> Measured:
    return Measured(0.1, low, high, 0.0, 1, "a machine", {})


def test_a_step_is_the_median_of_blocks_and_a_poor_measurement_warns():
    times = [float(1 + block) for block in range(BLOCKS) for _ in range(STEPS)]
    times[0] += 30  # one slow step is one slow block
    assert in_blocks(times) == (5.0, 3.0, 7.0)
    assert "WARNING" not in measured(0.095, 0.105).words
    assert "WARNING: they differ by 50%" in measured(0.09, 0.14).words


# -- memory --------------------------------------------------------------------------------------


def tensors_of(opt) -> dict[str, int]:
    """Bytes that an optimizer holds after some rounds, from its own tensors."""
    inner = [v for s in opt.inner.state.values() for v in s.values()]
    outer = [v for s in opt.outer.state.values() for v in s.values()]
    held = {
        "model": list(opt.model.parameters()),
        "gradients": [p.grad for p in opt.model.parameters()],
        "inner optimizer": [v for v in inner if isinstance(v, torch.Tensor)],
        "anchor": [anchor_of(opt)],
        "outer optimizer": [v for v in outer if isinstance(v, torch.Tensor)],
        "messages": [message_memory(opt)],
    }
    departures = departure_memory(opt)
    if departures is not None:
        held["fragment as it was sent"] = [departures]
    residues = [t for r in residues_of(opt).values() for t in (r.own, r.mean)]
    if residues:
        held["compression residues"] = residues
    return {name: sum(t.nbytes for t in found) for name, found in held.items()}


def trained(rank_settings: dict) -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Linear(400, 300)
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    opt = library.DiLoCo(model, inner, sync_every=4, **rank_settings)
    own = torch.full((2, 400), 1.0 + opt.transport.worker)
    for _ in library.until([own] * 4, opt, steps=16):
        model(own).square().mean().backward()
        opt.step()
    return tensors_of(opt)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"delay": 2}, {"compress": "int8"}, {"delay": 1, "fragments": 2, "compress": "int4"}],
)
def test_memory_is_what_a_real_worker_holds(world, settings):
    real, _ = world.run(trained, workers=2, rank_settings=settings)
    work = Work(parameters=400 * 300 + 300, sync_every=4, **settings)
    expected = memory(work, inner="adamw", workers=2)
    assert real.keys() == expected.keys()
    for name, size in expected.items():
        assert real[name] == pytest.approx(size, rel=0.02), name


# -- the paper's clusters ------------------------------------------------------------------------


def by_hand(run: Published, exchange: float) -> float:
    """The share of DDP's time that is saved where exchanges are not hidden."""
    ddp_s = run.step_s + exchange
    local_s = run.step_s * (1 - run.mix_prob) + exchange / run.sync_every
    steps = run.steps * (1 - run.fewer_steps)
    return 1 - (run.warmup * ddp_s + (steps - run.warmup) * local_s) / (run.steps * ddp_s)


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.name} {run.machine.name[0]}")
def test_the_link_of_a_machine_is_the_papers_cluster(run):
    link = Cluster.parse(run.machine.link(run.workers, run.operations), workers=run.workers)
    assert link.all_reduce == run.place.all_reduce
    for name in ("step", "rate", "latency"):
        assert getattr(link, name) == pytest.approx(getattr(run.place, name), rel=2e-3), name


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.name} {run.machine.name[0]}")
def test_the_fitted_exchange_gives_the_published_figure(run):
    assert by_hand(run, run.needed_s()) == pytest.approx(run.saved, abs=1e-6)


def test_what_is_said_of_the_papers_runs_is_what_the_model_gives():
    found = {
        f"{run.name.split(',')[0]} {run.machine.name[0]}": run.saves(
            run.released_ddp_s(), run.local_s(run.mix_prob)
        )
        - run.saved
        for run in PUBLISHED
    }
    assert abs(found["GPT-Neo-125M B"]) < 0.01
    assert abs(found["ResNet-50 C"]) < 0.03
    assert -0.12 < found["GPT-Neo-8M B"] < -0.1
    assert -0.14 < found["GPT-Neo-8M A"] < -0.12
    resnet = PUBLISHED[0]
    against_torch = resnet.saves(resnet.torch_ddp_s(), resnet.local_s(resnet.mix_prob))
    against_released = resnet.saves(resnet.released_ddp_s(), resnet.local_s(resnet.mix_prob))
    assert against_torch / against_released == pytest.approx(1 / 3, abs=0.05)


def test_the_papers_clusters_are_printed_with_assumptions_and_what_is_fitted():
    said = palsgd("plan", "--paper-clusters")
    assert said.code == 0
    for figure in ("18.4", "24.4", "21.1", "23.0"):
        assert figure in said.out
    for word in ("Assumed:", "fitted", "NVLink", "T4", "L40S", "V100"):
        assert word in said.out


# -- the scale study -----------------------------------------------------------------------------


def test_the_slower_the_link_the_more_is_gained_up_to_what_an_interval_saves():
    found = list(cells(workers=(8,), rates=(1e7, 1e9, 1e11), rounds=2))
    for model in ("8 M", "70 B"):
        gains = [cell.faster for cell in found if cell.model == model]
        assert gains == sorted(gains, reverse=True)
        assert gains[0] < 64 / 2 * 1.01  # DDP's gradients are half as long as a sync
        assert gains[-1] > 1


def test_cells_in_which_palsgd_itself_communicates_most_of_the_time_are_unusable():
    cell = next(cells(workers=(8,), rates=(1e7,), rounds=2))
    # by hand: a ring of 32 MB takes 2 * 7 hops, and 64 steps of 50 ms, a tenth of them mixing
    sync, steps = 14 * (8 * 32e6 / 8 / 1e7 + 0.02), 0.9 * 64 * 0.05
    assert cell.exchanging == pytest.approx(sync / (sync + steps), rel=0.01)
    assert cell.utilisation < 0.1
    assert not cell.usable
    assert next(cells(workers=(8,), rates=(4e11,), rounds=2)).usable


# -- the command ---------------------------------------------------------------------------------


def test_a_plan_begins_with_its_conclusion_and_leaves_a_record_and_pictures(tmp_path):
    said = palsgd(*TOLD, "--rate", "100mbit", "--latency", 20, "--out", tmp_path / "p")
    assert said.code == 0, said.err
    for word in ("time to DDP's quality", "Break-even", "memory per device", "unusable"):
        assert word in said.out
    record = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert record["conclusion"].startswith("Over 100")
    assert " ".join(said.out.split()).startswith(" ".join(record["conclusion"].split()))
    chosen = record["candidates"][record["chosen"]]
    assert chosen["usable"]
    assert f"H = {chosen['sync_every']}" in record["conclusion"]
    assert ("not measured" in record["conclusion"]) == (chosen["extra_steps"] is None)
    assert record["cluster"]["rate"] == 1e8
    for name in ("plan", "plan-timeline"):
        assert (tmp_path / "p" / f"{name}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / "p" / f"{name}.svg").read_text()


def test_a_run_too_short_for_rounds_is_said_to_be(tmp_path):
    said = palsgd(*TOLD, "--steps", 3, "--out", tmp_path / "p")
    words = " ".join(said.out.split())
    assert "3 steps are too few for methods with rounds: 30 rounds of H = 4 are 120." in words
    assert "H is at most" not in words


def test_the_rival_of_ddp_is_called_the_fastest_of_those_with_rounds():
    """A variant of DDP may be faster than it."""
    place = planner({"rate": "400gbit", "latency": "1us"}, "empty", parameters=25 * M)
    said = conclusion(place.cluster, place.task, make_plan(place))
    assert "stay with DDP" in said
    assert "; the fastest with rounds, " in said


def test_the_largest_model_is_planned():
    place = planner(parameters=999 * 10**12)
    assert make_plan(place).best.run_s > 0


def test_two_levels_uneven_links_and_thousands_are_inputs(tmp_path):
    said = palsgd(
        "plan", "--step-ms", 50, "--parameters", "100K", "--workers", 4, "--ranks-per-worker", 8,
        "--node-rate", "10gbit", "--slow-link", "10mbit", "--straggler", 2, "--stragglers", 2,
        "--coding-ns", 0, "--out", tmp_path / "p",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "100,000 parameters, 4 workers of 8 ranks" in said.out
    found = json.loads((tmp_path / "p" / "plan.json").read_text())
    fields = ("ranks_per_worker", "slow_rate", "straggler", "stragglers")
    assert [found["cluster"][name] for name in fields] == [8, 1e7, 2, 2]
    assert set(found["task"]["coding"].values()) == {0}


def test_a_recipe_is_measured(tmp_path):
    said = palsgd("plan", "stories", "--rate", "10mbit", "--out", tmp_path / "p", "--device", "cpu")
    assert said.code == 0, said.err
    record = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert 0 < record["cluster"]["step"] < 5
    assert 0 < record["cluster"]["sync"] < 5
    assert record["task"]["parameters"] > 1000
    assert record["task"]["inner"] == "adamw"
    assert record["measured"]["low_s"] <= record["cluster"]["step"] <= record["measured"]["high_s"]
    assert "A step was measured on" in said.out
    assert all(0 < ns < 1e-5 for ns in record["task"]["coding"].values())


def test_a_recipes_model_is_known_without_measuring(tmp_path):
    said = palsgd("plan", "tinystories-gptneo-8m", "--step-ms", 100, "--out", tmp_path / "p")
    assert said.code == 0, said.err
    assert "8,054,656 parameters, 8 workers" in said.out
    task = json.loads((tmp_path / "p" / "plan.json").read_text())["task"]
    assert task["warmup_steps"] == 1024
    epochs = 15 * (2_119_719 // 2048)
    assert abs(task["steps"] - epochs) <= 32  # to the end of a round


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "give a recipe to measure, for instance stories, or --step-ms"),
        ((*TOLD, "--rate", "-3mbit"), "rate='-3mbit' must be more than 0 bit/s"),
        ((*TOLD, "--rate", "swift"), "rate='swift' is no rate"),
        ((*TOLD, "--latency", -1), "latency='-1' must be a time of 0 ms or more"),
        ((*TOLD, "--step-ms", 0), "step_ms=0.0 must be more than 0 ms"),
        ((*TOLD, "--parameters", "many"), "parameters='many' is no count"),
        ((*TOLD, "--mix-prob", 1), "mix_prob=1.0 must be a number in [0, 1)"),
        ((*TOLD, "--overlap", 2), "overlap=2.0 must be in [0, 1]"),
        ((*TOLD, "--extra-steps", -2), "extra_steps=-2.0 must be more than -1"),
        ((*TOLD, "--steps", 0), "steps=0 must be a whole number >= 1"),
        ((*TOLD, "--workers", 0), "workers=0 must be a whole number >= 1"),
        (
            (*TOLD, "--workers", 1_000_000_000),
            "workers=1000000000 must be a whole number <= 100000",
        ),
        ((*TOLD, "--parameters", "1e19"), "parameters='1e19' must be below 1000T"),
        (("plan", "storeis"), "did you mean 'stories'"),
        (("plan", "imagenet-resnet50", "--step-ms", 9), "add --parameters, e.g. 25M"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(words, said, tmp_path):
    found = palsgd(*words, "--out", tmp_path / "p")
    assert found.code == 2
    assert said in found.line


def test_help_has_an_example_that_works(tmp_path):
    help_text = palsgd("plan", "--help").out
    (example,) = re.findall(r"Example: palsgd (.*)", help_text)
    assert palsgd(*example.split(), "--out", tmp_path / "p").code == 0


# -- a simulation's time on a cluster ------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cluster(tmp_path_factory):
    """DDP and DiLoCo on a cluster that a file describes."""
    folder = tmp_path_factory.mktemp("on-cluster")
    (folder / "slow.yaml").write_text("rate: 10mbit\nlatency: 20ms\nstep: 5ms\noverlap: 0\n")
    said = palsgd(
        "compare", "digits", "warmup_steps=0", "evaluate_every=32", "--methods", "ddp,diloco",
        "--simulate", "--steps", 32, "--sync-every", 16, "--cluster", folder / "slow.yaml",
        "--out", folder / "runs", "--quiet", "--device", "cpu",
    )  # fmt: skip
    assert said.code == 0, said.err
    return said, folder / "runs"


def test_a_comparison_tells_its_time_as_on_the_cluster(on_cluster):
    said, folder = on_cluster
    assert "seconds projected (on " in " ".join(said.out.split())
    config = yaml.safe_load((folder / "ddp" / "config.yaml").read_text())
    assert config["cluster"] == "rate=10mbit,latency=20ms,step=5ms,overlap=0"
    place = Cluster(workers=4, rate="10mbit", latency="20ms", step="5ms", overlap=0)
    size = config["parameters"]
    found = {name: summary(folder)[name]["wall_s"] for name in ("ddp", "diloco")}
    assert found["ddp"] == pytest.approx(place.project(Work.ddp(size), steps=32).time_s)
    diloco = place.project(Work(parameters=size, sync_every=16), steps=32)
    assert found["diloco"] == pytest.approx(diloco.time_s)
    last = lines(folder / "diloco")[-1]
    assert last["time_s"] == found["diloco"] != last["simulation_s"] > 0


def test_the_report_says_that_time_is_a_projection(on_cluster):
    page = (on_cluster[1] / "report.html").read_text()
    assert "time is that of a model of the cluster rate=10mbit" in page
    assert "so time is its own" not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "10mbit,5ms,step=1ms"), "is for simulated workers"),
        (("--simulate", "--cluster", "10mbit,5ms"), "the cluster has no step"),
        (("--simulate", "--cluster", "-1mbit,5ms,step=1ms"), "rate='-1mbit' must be more than 0"),
        (("--simulate", "--cluster", "no.yaml"), "there is no file no.yaml"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(words, said, tmp_path):
    found = palsgd("compare", "stories", *words, "--out", tmp_path / "p")
    assert found.code == 2
    assert said in found.line
