"""A warm-up that several simulated runs have in common is computed once, and nobody sees it in what
they compute."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from palsgd.errors import NonFiniteError
from palsgd.lab import compare, run_set, sweep
from palsgd.lab.groups import group
from palsgd.lab.run_folder import RunFolder, find_runs
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_program import SimulatedProgram
from palsgd.lab.warmups import LATER, SharedWarmUps, warmup_of
from palsgd.simulator import Checkpoints
from palsgd.simulator.exact import Exact
from palsgd.simulator.vectorized import Vectorized
from palsgd.worker import Worker
from support.commands import lines, summary
from support.exact_engine import use_exact_engine
from support.simulated_runs import assert_same_runs, config, noisy_workload, runs_in, untimed

WARMUP, STEPS = 18, 50
METHODS = ["ddp", "localsgd", "palsgd", "slowmo"]
SETTINGS = dict(
    workers=3, steps=STEPS, warmup_steps=WARMUP, batch_size=4, sync_every=8, evaluate_every=5,
    inner="sgd", lr=0.02, schedule="cosine", seed=3,
)  # fmt: skip


@pytest.fixture
def noisy(tmp_path):
    return noisy_workload(tmp_path)


@pytest.fixture(params=["vectorized", "exact"])
def engine(request, monkeypatch):
    if request.param == "exact":
        use_exact_engine(monkeypatch.setattr)
    return request.param


def compared(workload, out, *, methods=METHODS, together=True, **more):
    options = {"quiet": True, "share_program": together, **more.pop("options", {})}
    compare(workload, methods, out=out, tuned="none", options=options, **{**SETTINGS, **more})
    return out


def labels(folder: Path) -> dict[str, int]:
    """The settings that are judged, with the number of their seeds."""
    return {each.label: len(each.runs) for each in group(find_runs([folder]))}


@pytest.fixture
def computed_each(monkeypatch):
    """Inside, every run computes its warm-up, as if it were alone."""

    def apart(*args, **more):
        with monkeypatch.context() as patch:
            patch.setattr(SharedWarmUps, "of", lambda self, settings: None)
            return compared(*args, **more)

    return apart


def computed_by(folder: Path) -> str | None:
    return config(folder).get("warmup_computed_by")


def test_runs_that_start_after_a_shared_warm_up_end_bit_for_bit_as_if_they_had_computed_it(
    engine, noisy, tmp_path, computed_each
):
    mine = compared(noisy, tmp_path / "shared", together=False)
    theirs = computed_each(noisy, tmp_path / "own", together=False)
    assert_same_runs(mine, theirs)
    assert [computed_by(mine / name) for name in METHODS] == [None, "ddp", "ddp", "ddp"]


def test_stacked_runs_start_after_the_warm_ups_of_their_seeds(tmp_path, computed_each):
    mine = compared("digits", tmp_path / "shared", seeds=2)
    assert_same_runs(mine, computed_each("digits", tmp_path / "own", seeds=2))
    assert computed_by(mine / "palsgd,seed=4") == "ddp,seed=4"
    assert labels(mine) == dict.fromkeys(METHODS, 2)  # who computed a warm-up is no setting


def test_a_model_of_a_shared_warm_up_that_stays_the_best_is_kept_for_every_run(
    engine, tmp_path, computed_each
):
    spoils = dict(methods=["ddp", "diloco"], outer_lr=500.0, lr=0.3)
    mine = compared("digits", tmp_path / "shared", **spoils)
    assert RunFolder(mine / "diloco").best()["step"] <= WARMUP
    assert_same_runs(mine, computed_each("digits", tmp_path / "own", **spoils))


def test_a_shared_warm_up_is_computed_once(tmp_path, monkeypatch):
    step, count = Vectorized._warmup_step, []
    monkeypatch.setattr(
        Vectorized, "_warmup_step", lambda self: (count.append(self.clock), step(self))
    )
    compared("digits", tmp_path, methods=METHODS[1:], together=False)
    assert count == list(range(WARMUP))


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.01}, {"seed": 4}, {"steps": STEPS + 8}, {"batch_size": 8}, {"warmup_steps": 10},
     {"inner": "adamw"}, {"buffers": "local"}, {"split": "choose"}, {"max_norm": 1.0}],
)  # fmt: skip
def test_runs_whose_warm_ups_differ_share_none(change):
    first = Settings(workload="digits", **SETTINGS)
    second = replace(first, **change)
    shared = SharedWarmUps([first, first, second, second])
    found = [shared.of(each) for each in (first, second, first, second)]
    assert found[0] is found[2] is not None
    assert found[1] is found[3] is not None
    assert found[0] is not found[1]


def test_runs_whose_length_is_rounded_to_their_rounds_share_a_warm_up_only_with_equal_ones():
    """With another H they have other steps in all, and the cosine another shape."""
    epochs = SETTINGS | {"steps": None, "epochs": 3.0, "whole_rounds": True}
    first = Settings(workload="digits", **epochs)
    longer = replace(first, sync_every=13)
    assert warmup_of(first) != warmup_of(longer)
    assert warmup_of(first) == warmup_of(replace(first, method="ddp"))
    assert warmup_of(replace(first, steps=50)) == warmup_of(replace(longer, steps=50))


def test_settings_of_a_method_alone_do_not_keep_runs_apart():
    first = Settings(workload="digits", **SETTINGS)
    own = replace(first, method="slowmo", method_settings={"method.momentum": 0.7})
    assert warmup_of(first) == warmup_of(own)


def test_what_acts_later_is_named_by_its_setting():
    assert set(LATER) <= {each.name for each in fields(Settings)}


def test_a_warm_up_is_forgotten_when_the_last_run_has_it():
    first = Settings(workload="digits", **SETTINGS)
    shared = SharedWarmUps([first, replace(first, method="diloco")])
    assert shared.of(first) is not None
    assert shared.of(replace(first, method="diloco")) is not None
    assert not shared._shared
    assert shared.of(first) is None


def test_a_run_without_a_warm_up_shares_none():
    first = Settings(workload="digits", **SETTINGS | {"warmup_steps": 0})
    assert SharedWarmUps([first, first]).of(first) is None


def test_runs_that_are_begun_together_and_train_in_turn_share_a_warm_up(
    noisy, tmp_path, monkeypatch, computed_each
):
    use_exact_engine(monkeypatch.setattr)
    theirs = computed_each(noisy, tmp_path / "own")
    step, taken = Worker._warmup_step, []

    def counted(self):
        taken.append(self.at.clock)
        return step(self)

    monkeypatch.setattr(Worker, "_warmup_step", counted)
    mine = compared(noisy, tmp_path / "shared", methods=METHODS[1:])
    for name in METHODS[1:]:
        assert list(map(untimed, lines(mine / name))) == list(map(untimed, lines(theirs / name)))
    assert [computed_by(mine / name) for name in METHODS[1:]] == [None, "localsgd", "localsgd"]
    assert sorted(taken) == sorted([*range(WARMUP)] * SETTINGS["workers"])


def test_workers_that_wait_for_their_turn_take_no_memory_though_their_warm_up_is_known(
    tmp_path, monkeypatch
):
    use_exact_engine(monkeypatch.setattr)
    begin, seen = SimulatedProgram.begin, []

    def looking(self, *, resume):
        begin(self, resume=resume)
        seen.append("workers" in vars(self._program._engine))

    monkeypatch.setattr(SimulatedProgram, "begin", looking)
    own = {key: value for key, value in SETTINGS.items() if key != "sync_every"}
    grid = dict(sync_every=[4, 8], mix_prob=[0.25, 0.5])
    sweep("digits", out=tmp_path, options={"quiet": True}, **own, **grid)
    assert seen == [False] * 4
    names = runs_in(tmp_path)
    assert [computed_by(tmp_path / name) for name in names] == [None, *[names[0]] * 3]


def test_no_engine_starts_from_the_warm_up_of_the_other(tmp_path, monkeypatch, computed_each):
    simulate, engines = run_set.simulate_runs, iter([True, False, True])

    def in_turn(runs, **options):
        return simulate(runs, **options | {"vectorize": next(engines)})

    theirs = computed_each("digits", tmp_path / "own", methods=METHODS[1:], together=False)
    monkeypatch.setattr(run_set, "simulate_runs", in_turn)
    mine = compared("digits", tmp_path / "shared", methods=METHODS[1:], together=False)
    assert [computed_by(mine / name) for name in METHODS[1:]] == [None, None, "localsgd"]
    assert untimed(summary(mine / "slowmo")) == untimed(summary(theirs / "slowmo"))


def test_a_run_that_started_after_a_shared_warm_up_and_was_stopped_goes_on_bit_for_bit(
    engine, tmp_path, monkeypatch
):
    methods = ["ddp", "palsgd"]
    whole = compared("digits", tmp_path / "whole", methods=methods, together=False)
    saved = Checkpoints.save

    def stopped(self, clock, state):
        saved(self, clock, state)
        if clock > WARMUP and self.folder.parent.name == "palsgd":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", stopped)
        with pytest.raises(KeyboardInterrupt):
            compared("digits", tmp_path / "out", methods=methods, together=False)
    assert RunFolder(tmp_path / "out" / "palsgd").saved_steps
    compared("digits", tmp_path / "out", methods=methods, together=False, options={"resume": True})
    assert_same_runs(tmp_path / "out", whole)


def test_a_warm_up_that_was_stopped_and_gone_on_with_is_passed_on(engine, tmp_path, monkeypatch):
    """With the best model of it, which was written before the stop."""
    spoils = dict(methods=["ddp", "diloco"], together=False, outer_lr=500.0, lr=0.3)
    whole = compared("digits", tmp_path / "whole", **spoils)
    saved, out = Checkpoints.save, tmp_path / "out"

    def stopped(self, clock, state):
        saved(self, clock, state)
        raise KeyboardInterrupt

    for _ in range(3):  # after steps 5, 10 and 15
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", stopped)
            with pytest.raises(KeyboardInterrupt):
                compared("digits", out, options={"resume": True}, **spoils)
    assert RunFolder(out / "ddp").saved_steps[-1] == 15
    compared("digits", out, options={"resume": True}, **spoils)
    assert computed_by(out / "diloco") == "ddp"
    assert_same_runs(out, whole)


def test_the_best_model_is_that_of_the_run_whose_warm_up_was_left(noisy, tmp_path):
    """With dropout, runs of one seed in one program see other models in the same warm-up."""
    out = tmp_path / "out"
    grid = dict(sync_every=[8, 16], mix_prob=[0.1, 0.25, 0.5])
    own = SETTINGS | {"outer_lr": 500.0, "lr": 0.3}
    own.pop("sync_every")
    sweep(noisy, out=out, options={"quiet": True}, **own, **grid)
    assert computed_by(out / "sync_every=16,mix_prob=0.5") == "sync_every=8,mix_prob=0.1"
    for name in runs_in(out):
        assert RunFolder(out / name).best()["step"] == summary(out / name)["best_step"]


def test_a_run_that_is_stopped_before_its_first_evaluation_has_the_best_model_of_its_warm_up(
    engine, tmp_path, monkeypatch
):
    spoils = dict(methods=["ddp", "diloco"], together=False, outer_lr=500.0, lr=0.3,
                  checkpoint_every=1, evaluate_every=17)  # fmt: skip
    whole = compared("digits", tmp_path / "whole", **spoils)
    saved, out = Checkpoints.save, tmp_path / "out"

    def stopped(self, clock, state):
        saved(self, clock, state)
        if self.folder.parent.name == "diloco":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", stopped)
        with pytest.raises(KeyboardInterrupt):
            compared("digits", out, **spoils)
    assert RunFolder(out / "diloco").best()["step"] == 17
    compared("digits", out, options={"resume": True}, **spoils)
    assert_same_runs(out, whole)


def test_a_warm_up_that_failed_in_its_last_step_is_not_passed_on(tmp_path, monkeypatch):
    checked, calls = Vectorized._loss_error, []

    def at_the_end_of_the_first(self, member, losses):
        calls.append(self.clock)
        if calls.count(WARMUP) == 1 and self.clock == WARMUP:
            return NonFiniteError("the loss is nan")
        return checked(self, member, losses)

    monkeypatch.setattr(Vectorized, "_loss_error", at_the_end_of_the_first)
    with pytest.warns(UserWarning, match="localsgd"):
        compared("digits", tmp_path, methods=["localsgd", "diloco"], together=False)
    assert RunFolder(tmp_path / "localsgd").failure
    assert computed_by(tmp_path / "diloco") is None


def test_what_a_run_has_sent_in_a_shared_warm_up_is_its_own(engine, tmp_path, computed_each):
    """A header of draws=paced is longer than DDP's."""
    paced = dict(methods=["ddp", "palsgd"], draws="paced", speeds="1:1:0.5")
    mine = compared("digits", tmp_path / "shared", **paced)
    assert computed_by(mine / "palsgd") == "ddp"
    assert_same_runs(mine, computed_each("digits", tmp_path / "own", **paced))


def test_a_warm_up_with_a_skipped_step_is_not_passed_on(tmp_path, monkeypatch):
    """How many steps were skipped is part of what a run has done."""
    counted = Vectorized._keep_warmup

    def after_a_skip(self, member):
        member.run.ledgers[0].skipped_steps = 1
        counted(self, member)

    monkeypatch.setattr(Vectorized, "_keep_warmup", after_a_skip)
    compared("digits", tmp_path, methods=["ddp", "palsgd"], together=False)
    assert computed_by(tmp_path / "palsgd") is None


def test_a_warm_up_with_a_skipped_step_of_workers_in_turn_is_not_passed_on(tmp_path, monkeypatch):
    use_exact_engine(monkeypatch.setattr)
    kept = Exact._keep_warmup

    def after_a_skip(self, worker):
        worker.opt.ledger.skipped_steps = 1
        kept(self, worker)

    monkeypatch.setattr(Exact, "_keep_warmup", after_a_skip)
    compared("digits", tmp_path, methods=["ddp", "palsgd"], together=False)
    assert computed_by(tmp_path / "palsgd") is None
