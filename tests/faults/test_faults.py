"""Some twenty of the faults that `make chaos` injects, in one process that forks all workers."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import palsgd
from faults import chaos, soak
from faults.crew import Ended
from faults.damage import newest
from faults.fault import KINDS, PAIRS, Fault, seed_of
from faults.scenario import Run
from faults.trial import BAD, _Trial
from support.commands import Said, ran

FAULTS = Path(__file__).parent
GO_ON = [
    ("kill", "elastic"),
    ("stop", "delayed"),
    ("stop", "lab"),
    ("clock jump", "plain"),
    ("out of memory, caught", "paced"),
    ("second run", "lab"),
    ("link down", "plain"),
    ("lossy link", "compressed"),
]
END = [
    ("kill", "compressed"),
    ("kill", "lab"),
    ("kill all", "plain"),
    ("kill in a save", "delayed"),
    ("kill in a save", "lab"),
    ("cut a write", "plain"),
    ("stop for good", "delayed"),
    ("terminate", "plain"),
    ("truncate", "plain"),
    ("flip", "lab"),
    ("full disk", "plain"),
    ("read-only disk", "plain"),
    ("nan", "fragmented"),
    ("out of memory", "plain"),
    ("other settings", "plain"),
    ("other code", "plain"),
]


def script(name: str, *words: object) -> Said:
    return ran(FAULTS / f"{name}.py", *words, timeout=280)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """By kind and scenario: the record of each fault, all from one process."""
    out = tmp_path_factory.mktemp("chaos") / "record.json"
    said = script("chaos", "--out", out, "--only", *(seed_of(*pair) for pair in GO_ON + END))
    assert out.exists(), said.err
    found = json.loads(out.read_text())
    assert found["machine"]["cores"] == os.cpu_count()
    return {(each["fault"]["kind"], each["fault"]["scenario"]): each for each in found["faults"]}


def found(records, kind: str, scenario: str) -> dict:
    if KINDS[kind].needs_root and os.geteuid() != 0:
        pytest.skip("mounts and network namespaces need root")
    return records[kind, scenario]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scenario"), GO_ON, ids=map(" ".join, GO_ON))
def test_a_run_that_is_disturbed_goes_on_to_the_same_weights(records, kind, scenario):
    record = found(records, kind, scenario)
    assert record["outcome"] == "survived", record["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scenario"), END, ids=map(" ".join, END))
def test_a_run_that_ends_does_so_in_clear_words_and_resumes_to_the_same_weights(
    records, kind, scenario
):
    record = found(records, kind, scenario)
    assert record["outcome"] == "clean error", record["text"]
    assert record["lost"] == 0


def saved_with_nan(folder, on_nonfinite):
    """Save, spoil worker 1, and try to save again."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.DiLoCo(model, inner, sync_every=4, on_nonfinite=on_nonfinite)
    palsgd.checkpoint.save(folder, model, opt)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.weight.fill_(float("nan"))
    palsgd.checkpoint.save(folder, model, opt)


def test_a_model_with_nan_takes_the_place_of_no_sound_save(world, tmp_path):
    for outcome in world.outcomes(
        saved_with_nan, workers=2, folder=str(tmp_path), on_nonfinite="raise"
    ):
        assert outcome.error == "NonFiniteError"
        assert outcome.message.startswith("worker 1 could not save")
    assert [saved.path.name for saved in palsgd.checkpoint.find(tmp_path)] == ["step-0"]


def test_a_worker_that_will_be_left_out_may_be_saved_with_nan(world, tmp_path):
    world.run(saved_with_nan, workers=2, folder=str(tmp_path), on_nonfinite="skip")
    assert len(palsgd.checkpoint.find(tmp_path)) == 2


# -- the harness itself --------------------------------------------------------------------------


def test_a_fault_follows_from_its_seed_and_seeds_in_a_row_have_all_kinds():
    seeds = range(1000, 1000 + len(PAIRS))
    assert [Fault.of(seed) for seed in seeds] == [Fault.of(seed) for seed in seeds]
    assert {(Fault.of(seed).kind, Fault.of(seed).scenario) for seed in seeds} == set(PAIRS)
    assert Fault.of(seed_of("nan", "paced")).kind == "nan"
    assert len({Fault.of(seed_of("kill", "lab", repeat)).chance for repeat in range(5)}) == 5


class Scripted:
    """Runs whose outcomes are given."""

    def __init__(self, saves: Path, *runs: Run):
        self._saves, self._runs = saves, list(runs)

    def run(self, place, fault=None, *, resume=False):
        return self._runs.pop(0)

    def saves(self, place):
        return self._saves

    def clean(self, error):
        return error == "SyncError: lost"


def run(*, digest=None, codes=(-9, 1), errors=("ended", "SyncError: lost"), hung=False, **noted):
    """A run with its notes: the second at which the fault came, and at which the last one ended."""
    late = noted.pop("ended_at", 1.0)
    lines = [{"what": "struck", "at": 0.0, "step": 4}]
    lines += [{"what": what, "at": 1.0, "step": step} for what, step in noted.items()]
    return Run(Ended(codes, hung), [lines, [{"what": "error", "at": late}]], list(errors), digest)


def right(digest="right", **noted):
    return run(digest=digest, codes=(0, 0), errors=("", ""), **noted)


@pytest.mark.parametrize(
    ("kind", "runs", "outcome"),
    [
        ("stop", [right()], "survived"),
        ("stop", [right("other")], "wrong weights"),
        ("stop", [run()], "stopped"),
        ("nan", [right()], "unnoticed"),
        ("kill", [run(hung=True)], "hang"),
        ("kill", [run(ended_at=99.0)], "hang"),
        ("kill", [run(errors=("ended", "Traceback"))], "unclean error"),
        ("kill", [run(saved=8), right(resumed=8)], "clean error"),
        ("kill", [run(saved=8), right(resumed=4)], "steps lost"),
        ("kill", [run(saved=8), right("other", resumed=8)], "wrong weights"),
        ("kill", [run(saved=8), run(resumed=8)], "unclean error"),
        ("kill", [run(saved=8), run(hung=True)], "hang"),
    ],
)
def test_defects_are_told_from_what_is_promised(tmp_path, monkeypatch, kind, runs, outcome):
    monkeypatch.setattr("faults.trial.twin", lambda scenario: "right")
    fault = Fault(seed=0, kind=kind, scenario="plain", victim=0, step=4, chance=0.5)
    judged = _Trial(fault, Scripted(tmp_path, *runs), tmp_path).judged()
    assert judged[0] == outcome


def test_the_tally_counts_every_outcome_once():
    records = [{"outcome": name, "fault": {"kind": "kill"}} for name in ("survived", *BAD, *BAD)]
    tally = chaos.tallied(records)
    assert tally["injected"] == 1 + 2 * len(BAD)
    assert [tally[name] for name in BAD] == [2] * len(BAD)
    assert chaos.by_kind(records)["kill"]["hang"] == 2


def test_the_newest_save_is_the_one_with_the_highest_step(tmp_path):
    for name in ("step-8", "step-16", "step-16-2", "step-24.1f.part", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in newest(tmp_path)] == ["step-16-2", "step-16", "step-8"]


# -- the soak ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_soak_survives_its_faults_and_samples_what_may_grow(tmp_path):
    out = tmp_path / "soak.json"
    said = script("soak", "--minutes", 0.35, "--every", 3, "--ends", 2, "--out", out)
    assert said.code == 0, said.out + said.err
    found = json.loads(out.read_text())
    assert found["faults"] >= 3
    assert found["starts"] >= 2
    assert found["steps"] > 0
    assert (found["hangs"], found["steps_lost"], found["unclean"]) == (0, 0, [])
    assert min(found["save_bytes"]) > 0
    assert set(found["grows_per_hour"]) == {"memory_mb", "files", "threads"}


def test_a_leak_shows_as_a_slope_whose_interval_leaves_zero_out():
    leaks = [(float(second), 100 + second / 3600) for second in range(100)]
    (slope,) = soak._slope(leaks)
    assert slope == pytest.approx(1.0)
    low, high = soak._interval([1.0, 1.1, 0.9])["interval"]
    assert 0 < low < 1 < high
    assert soak._interval([0.5])["interval"] is None
