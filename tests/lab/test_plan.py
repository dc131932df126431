"""What `palsgd plan` says, against closed forms, the optimizer's own tensors, and the paper."""

import json
import re

import pytest
import torch
import yaml
from torch import nn

import palsgd as library
from palsgd.cluster import Cluster, Work
from palsgd.lab.plan.candidates import (
    SHARE,
    WORTH,
    Task,
    best_of,
    break_even,
    choices,
    ddp,
    gain,
    local,
    with_workers,
)
from palsgd.lab.plan.memory import memory
from palsgd.lab.plan.paper import PUBLISHED, Published
from palsgd.lab.plan.scale import cells
from palsgd.payload import REPORT
from support.commands import lines, palsgd, summary
from support.core_access import anchor_of, departure_memory, message_memory, residues_of

TOLD = ("plan", "--step-ms", 50, "--parameters", "8M", "--workers", 4)
TASK = Task(parameters=8_000_000, steps=10_000)


def cluster(**fields) -> Cluster:
    return Cluster(**{"workers": 8, "step": 0.05, "rate": "10gbit", "latency": "50us", **fields})


def test_a_choice_costs_what_its_closed_form_says():
    place, base = cluster(), ddp(cluster(), TASK)
    found = local(place, TASK, Work(parameters=8_000_000, sync_every=32, mix_prob=0.1), base)
    sent = 4 * 8_000_000 + 4 * REPORT * 8  # with some numbers of each worker
    sync = place.network.all_reduce(sent)
    assert found.step_s == pytest.approx(0.9 * 0.05 + sync / 32)
    assert found.exchanging == pytest.approx(sync / 32 / found.step_s)
    assert found.run_s == pytest.approx(10_000 * found.step_s)
    assert found.bytes_on_the_wire == pytest.approx(10_000 / 32 * 2 * 7 / 8 * sent)
    assert gain(found, base) == pytest.approx(1 - found.step_s / 0.9 / base.step_s)


def test_warm_up_is_paid_at_the_price_of_ddp_and_extra_steps_by_the_local_phase():
    place, base = cluster(), ddp(cluster(), TASK)
    task = Task(parameters=8_000_000, steps=10_000, warmup_steps=4000, extra_steps=0.5)
    found = local(place, task, Work(parameters=8_000_000, sync_every=32), base)
    assert found.run_s == pytest.approx(4000 * base.step_s + 9000 * found.step_s)
    assert found.gradient_s == pytest.approx(1.5 * found.step_s)


def test_every_local_choice_has_the_shortest_interval_that_keeps_exchanges_small():
    place = cluster()
    for choice in choices(place, TASK):
        if choice.method == "ddp":
            continue
        assert choice.exchanging <= SHARE
        work = choice.work
        if work.sync_every > 4 and not work.delay:
            shorter = Work(
                parameters=work.parameters, sync_every=work.sync_every // 2,
                mix_prob=work.mix_prob, compress=work.compress,
            )  # fmt: skip
            assert local(place, TASK, shorter, ddp(place, TASK)).exchanging > SHARE


def test_choices_are_ranked_by_time():
    times = [choice.run_s for choice in choices(cluster(), TASK)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("fields", "method", "compress", "overlap"),
    [
        ({"rate": "400gbit", "latency": "5us"}, "ddp", None, False),
        ({"rate": "10gbit"}, "palsgd", None, False),
        ({"rate": "500mbit"}, "palsgd", None, True),
        ({"rate": "100mbit", "latency": "20ms"}, "palsgd", "int8", True),
    ],
)
def test_the_plainest_choice_that_does_is_chosen(fields, method, compress, overlap):
    best = best_of(choices(cluster(**fields, workers=4), TASK))
    assert best.method == method
    assert best.work.compress == compress
    assert (best.work.delay > 0) == overlap


def test_at_the_break_even_rate_the_gain_is_just_worth_it():
    place = cluster()
    best = best_of(choices(place, TASK))
    even = break_even(place, TASK, best)

    def gain_at(rate):
        there = place.changed(rate=rate)
        return gain(local(there, TASK, best.work, ddp(there, TASK)), ddp(there, TASK))

    assert gain_at(even * 0.98) > WORTH > gain_at(even * 1.02)


def test_latency_alone_can_be_reason_enough_and_extra_steps_can_spoil_all():
    far = cluster(latency="20ms")
    choice = best_of(choices(far, TASK))
    assert break_even(far, TASK, choice) is None
    slow = Task(parameters=8_000_000, steps=10_000, extra_steps=100.0)
    assert break_even(cluster(), slow, choice) == 0


def test_more_workers_give_more_gradients_up_to_what_exchanges_allow():
    place = cluster()
    best = best_of(choices(place, TASK))
    rows = list(with_workers(place, TASK, best, [4, 8, 64]))
    assert [number for number, _, _ in rows] == [4, 8, 64]
    for number, base, choice in rows:
        there = place.changed(workers=number)
        assert base.step_s == ddp(there, TASK).step_s
        assert choice.step_s == local(there, TASK, best.work, base).step_s


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


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.name} {run.cluster[0]}")
def test_the_fitted_exchange_gives_the_published_figure(run):
    assert by_hand(run, run.needed_s()) == pytest.approx(run.saved, abs=1e-6)


def test_what_is_said_of_the_papers_runs_is_what_the_model_gives():
    found = {
        f"{run.name.split(',')[0]} {run.cluster[0]}": run.saves(
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


# -- the command ---------------------------------------------------------------------------------


def test_a_plan_says_what_pays_and_leaves_a_record_and_pictures(tmp_path):
    said = palsgd(*TOLD, "--rate", "100mbit", "--latency", 20, "--out", tmp_path / "p")
    assert said.code == 0, said.err
    for word in ("* palsgd H=", "Break-even", "memory per device", "anchor", "--extra-steps"):
        assert word in said.out
    record = json.loads((tmp_path / "p" / "plan.json").read_text())
    chosen = record["choices"][record["chosen"]]
    assert f"* palsgd H={chosen['sync_every']}" in said.out
    assert record["cluster"]["rate"] == 1e8
    for name in ("plan", "plan-timeline"):
        assert (tmp_path / "p" / f"{name}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / "p" / f"{name}.svg").read_text()


def test_a_recipe_is_measured(tmp_path):
    said = palsgd("plan", "stories", "--rate", "10mbit", "--out", tmp_path / "p", "--device", "cpu")
    assert said.code == 0, said.err
    record = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert 0 < record["cluster"]["step"] < 5
    assert 0 < record["cluster"]["sync"] < 5
    assert record["task"]["parameters"] > 1000
    assert record["task"]["inner"] == "adamw"


def test_a_recipes_model_is_known_without_measuring(tmp_path):
    said = palsgd("plan", "tinystories-gptneo-8m", "--step-ms", 100, "--out", tmp_path / "p")
    assert said.code == 0, said.err
    assert "8,054,656 parameters, 8 workers" in said.out
    task = json.loads((tmp_path / "p" / "plan.json").read_text())["task"]
    assert task["warmup_steps"] == 1024
    assert task["steps"] == 15 * (2_119_719 // 2048)


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
    assert "projected on the cluster" in " ".join(said.out.split())
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
