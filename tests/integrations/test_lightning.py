"""palsgd under Lightning, in real processes: it trains as the plain loop does, stays local, and
evaluates, saves and resumes as it should."""

import doctest
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import palsgd
from support.commands import environment
from support.namespaces import bytes_so_far, needs_namespaces, world_alone
from support.pages import code_blocks, executed, page
from support.patience import patient
from support.places import ROOT

pytest.importorskip("lightning")

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from palsgd.integrations.lightning import LocalStrategy
from support.lightning_runs import (
    RULES,
    Batches,
    Net,
    Processes,
    advice_ignored,
    falling,
    fit,
    weights,
)

pytestmark = pytest.mark.slow
PAGE = "docs/integrations-lightning.md"


# -- the plain loop ------------------------------------------------------------------------------


def plain(
    steps, optimizer="PALSGD", *, clip=None, accumulate=1, schedule=None, bf16=False, **rules
):
    """The same training by a loop of one's own."""
    torch.manual_seed(7 + dist.get_rank())
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = None if schedule is None else schedule(inner)
    build = getattr(palsgd.methods, optimizer)
    opt = build(model, inner, scheduler=scheduler, **rules)
    data = list(Batches())
    joined = [data[i : i + accumulate] for i in range(0, len(data), accumulate)]
    torch.manual_seed(7 + dist.get_rank())
    for batches in palsgd.until(joined, opt, steps=steps):
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model.loss(batch) / accumulate
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return weights(model), opt


def same_job(steps, optimizer="PALSGD", *, clip=None, accumulate=1, schedule=None, **rules):
    model = Net(schedule)
    torch.manual_seed(7 + dist.get_rank())
    strategy = LocalStrategy(getattr(palsgd.methods, optimizer), **rules)
    fit(
        model,
        strategy=strategy,
        max_steps=steps,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
    )
    opt, found = strategy.opt, weights(model)
    how = dict(clip=clip, accumulate=accumulate, schedule=schedule)
    twin, other = plain(steps, optimizer, **how, **rules)
    assert (opt.clock, opt.gradient_steps) == (other.clock, other.gradient_steps)
    assert opt.synced
    return found, twin, opt.rounds, model.rates[-1]


@pytest.mark.parametrize(
    "given",
    [
        RULES | dict(steps=24),
        RULES | dict(steps=18, clip=0.05, accumulate=2),
        RULES | dict(steps=18, schedule=falling, delay=1, fragments=2),
        dict(optimizer="DiLoCo", steps=15, sync_every=6, compress="int8"),
        dict(optimizer="FedProx", steps=12, sync_every=6, mu=0.1),
    ],
    ids=["PALSGD", "clipped and accumulated", "schedule, delay, fragments", "DiLoCo", "FedProx"],
)
def test_lightning_trains_to_the_bits_of_the_plain_loop(world, given):
    for found, twin, rounds, _ in world.run(same_job, workers=2, **given):
        assert torch.equal(found, twin)
        assert rounds >= 2


def warmup_job():
    """In the warm-up Lightning clips the mean of the gradients, as the plain loop with max_norm."""
    rules = RULES | dict(mix_prob=0.0, warmup_steps=4)
    model = Net()
    torch.manual_seed(7 + dist.get_rank())
    strategy = LocalStrategy(**rules)
    fit(model, strategy=strategy, max_steps=16, gradient_clip_val=0.05)
    twin, _ = plain(16, max_norm=0.05, **rules)
    return weights(model), twin


def test_a_warmup_clips_the_mean_and_is_local_afterwards(world):
    found = world.run(warmup_job, workers=2)
    for mine, twin in found:
        torch.testing.assert_close(mine, twin, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])


# -- schedules -----------------------------------------------------------------------------------


def schedule_job(folder):
    """The learning rate and the clock before each batch."""
    clocks = []
    model = Net(
        falling, hook=lambda module, number: clocks.append(module.trainer.strategy.opt.clock)
    )
    monitor = LearningRateMonitor()
    logger = CSVLogger(folder, name=f"worker-{dist.get_rank()}")
    fit(model, max_steps=18, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    return clocks, model.rates, list(monitor.lrs)


def test_a_schedule_of_steps_follows_the_clock_and_is_monitored(world, tmp_path):
    for clocks, rates, monitored in world.run(schedule_job, workers=2, folder=str(tmp_path)):
        assert rates == pytest.approx([0.05 * 0.97**clock for clock in clocks])
        assert len(clocks) <= clocks[-1]
        assert "lr-SGD" in monitored


def stretched_job():
    """A schedule that was made for the batches of an epoch."""
    model = Net(lambda inner: torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.0, total_iters=10))
    found = fit(model, max_epochs=2)
    return model.rates, found.lr_scheduler_configs[0].scheduler.last_epoch


def test_a_schedule_of_steps_over_epochs_takes_as_many_steps_as_there_are_batches(world):
    for rates, taken in world.run(stretched_job, workers=2):
        assert len(rates) == 10
        assert 8 <= taken <= 10  # the clock at the end is known on average alone
        assert rates == sorted(rates, reverse=True)


# -- the end -------------------------------------------------------------------------------------


def epochs_job(schedule=None, interval="step", folder=None, **given):
    model = Net(schedule, interval)
    saving = [] if folder is None else [ModelCheckpoint(folder)]
    ending = Ending()
    callbacks = [ending, *saving]
    found = fit(
        model, max_epochs=2, callbacks=callbacks, enable_checkpointing=bool(saving), **given
    )
    opt = found.strategy.opt
    saved = torch.load(saving[0].best_model_path)["state_dict"] if saving else {}
    last = all(torch.equal(value, model.state_dict()[name]) for name, value in saved.items())
    return weights(model), opt.gradient_steps, opt.synced, last, ending.synced


class Ending(Callback):
    def on_train_end(self, trainer, pl_module):
        self.synced = trainer.strategy.opt.synced


def test_a_run_of_epochs_ends_synced_and_its_last_checkpoint_is_the_final_model(world, tmp_path):
    found = world.run(epochs_job, workers=2, folder=str(tmp_path))
    for mine, steps, synced, last, before_others in found:
        assert torch.equal(mine, found[0][0])
        assert (steps, synced, last, before_others) == (10, True, True, True)


def cut_job(steps):
    """Every batch exchanges a metric, which must not meet the last sync."""

    def log(model, number):
        model.log("loss", torch.tensor(float(number)), sync_dist=True)

    model = Net(hook=log)
    found = fit(model, max_steps=steps)
    opt = found.strategy.opt
    return weights(model), opt.clock, opt.gradient_steps, opt.synced


@pytest.mark.parametrize("steps", [1, 4, 14, 20, 22])  # the plans are uneven up to each of these
def test_workers_end_at_the_same_batch_where_max_steps_cuts_a_round_short(world, steps):
    found = world.run(cut_job, workers=2, steps=steps)
    (one, clock, batches, synced), other = found
    assert torch.equal(one, other[0])
    assert synced
    assert batches == other[2] > 0
    assert abs(clock - steps) < 6


# -- what is evaluated and saved -----------------------------------------------------------------


class Looking(Callback):
    """Keeps the local weights before a validation and after it, and the global ones."""

    def __init__(self):
        self.local, self.after, self.whole = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *rest):
        if len(self.local) == len(self.after):
            self.local.append(weights(pl_module))
            with trainer.strategy.opt.anchor_weights():
                self.whole.append(weights(pl_module))
        else:
            self.local[-1] = weights(pl_module)
            with trainer.strategy.opt.anchor_weights():
                self.whole[-1] = weights(pl_module)

    def on_train_batch_start(self, trainer, pl_module, *rest):
        if len(self.local) > len(self.after) and len(pl_module.seen) > len(self.after):
            self.after.append(weights(pl_module))


def evaluation_job(folder):
    looking = Looking()
    model = Net()
    saving = ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False)
    fit(
        model, Batches(count=3), Batches(count=1), max_steps=18, callbacks=[looking, saving],
        enable_checkpointing=True,
    )  # fmt: skip
    return looking.local, looking.after, looking.whole, model.seen, saving.best_model_path


def test_the_global_model_is_evaluated_and_saved_and_the_local_one_trains_on(world, tmp_path):
    first, second = world.run(evaluation_job, workers=2, folder=str(tmp_path))
    for local, after, whole, seen, _ in (first, second):
        assert len(seen) >= 2
        for before, back in zip(local, after, strict=False):
            assert torch.equal(before, back)
        for one, shown in zip(whole, seen, strict=False):
            assert torch.equal(one, shown)
    assert not torch.equal(first[0][0], second[0][0])
    assert all(torch.equal(a, b) for a, b in zip(first[3], second[3], strict=True))
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    for file, shown in zip(files, first[3], strict=False):
        model = Net.load_from_checkpoint(file)
        assert torch.equal(weights(model), shown)


# -- going on ------------------------------------------------------------------------------------


class SaveAt(Callback):
    """Saves within a round, and keeps the local and the global weights of that moment."""

    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, pl_module, *rest):
        opt = trainer.strategy.opt
        if trainer.global_step == self.batch:
            assert not opt.synced
            trainer.save_checkpoint(self.path)
            self.local = weights(pl_module)
            with opt.anchor_weights():
                self.whole = weights(pl_module)


def resumed_job(folder, **rules):
    path, how = Path(folder) / "middle.ckpt", dict(max_steps=30)
    rules = RULES | rules
    whole = Net(falling)
    torch.manual_seed(3 + dist.get_rank())
    saving = SaveAt(10, path)  # the clocks of the two workers differ there
    fit(whole, strategy=LocalStrategy(**rules), callbacks=[saving], **how)
    saved = weights(Net.load_from_checkpoint(path))
    assert torch.equal(saved, saving.whole)
    assert not torch.equal(saved, saving.local)
    again = Net(falling, seed=1)
    torch.manual_seed(99)
    strategy = LocalStrategy(**rules)
    fit(again, strategy=strategy, ckpt_path=path, **how)
    return weights(whole), weights(again), whole.rates[10:], again.rates, strategy.opt.clock


@pytest.mark.parametrize("rules", [{}, dict(delay=2, compress="int4")], ids=str)
def test_a_run_goes_on_in_the_middle_of_a_round_bit_for_bit(world, tmp_path, rules):
    for whole, again, left, rates, clock in world.run(
        resumed_job, workers=2, folder=str(tmp_path), **rules
    ):
        assert torch.equal(whole, again)
        assert left == rates
        assert clock == 30
    assert {path.name for path in tmp_path.iterdir()} == {"middle.ckpt", "middle.ckpt.palsgd"}


def kept_job(folder):
    """What ModelCheckpoint removes, and a checkpoint whose folder is gone."""
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_last="link")
    fit(Net(), max_steps=24, callbacks=[saving], enable_checkpointing=True)
    last = Net()
    done = fit(last, max_steps=24, ckpt_path=Path(folder) / "last.ckpt")
    dist.barrier()
    return done.strategy.opt.clock, done.global_step


def test_workers_states_are_removed_with_their_checkpoint_and_found_through_a_link(world, tmp_path):
    found = world.run(kept_job, workers=2, folder=str(tmp_path))
    assert found[0] == found[1]
    (file,) = [path for path in tmp_path.glob("*.ckpt") if not path.is_symlink()]
    assert [path.name for path in tmp_path.glob("*.palsgd")] == [f"{file.name}.palsgd"]


def other_strategies_job(folder):
    """A run of plain DDP goes on as palsgd, and a run of palsgd as plain DDP."""
    ours, theirs = Path(folder) / "ours.ckpt", Path(folder) / "theirs.ckpt"
    fit(Net(), strategy="ddp", max_steps=5).save_checkpoint(theirs)
    one = fit(Net(), max_steps=17, ckpt_path=theirs)
    begun = one.strategy.opt
    one.save_checkpoint(ours)
    two = fit(Net(), strategy="ddp", max_steps=20, ckpt_path=ours)
    return begun.clock, one.global_step - begun.gradient_steps, two.global_step


def test_plain_ddp_goes_on_as_palsgd_and_back(world, tmp_path):
    for found in world.run(other_strategies_job, workers=2, folder=str(tmp_path)):
        assert found == (12, 5, 20)


def missing_job(folder):
    path = Path(folder) / "moved.ckpt"
    if dist.get_rank() == 0:
        torch.save({"state_dict": Net().state_dict(), "optimizer_states": [{}],
                    "palsgd": "moved.ckpt.palsgd/step-7", "lr_schedulers": [], "loops": None,
                    "pytorch-lightning_version": "2.5.0", "callbacks": {}}, path)  # fmt: skip
    dist.barrier()
    fit(Net(), max_steps=6, ckpt_path=path)


def test_a_checkpoint_without_its_folder_says_what_is_missing(world, tmp_path):
    for outcome in world.outcomes(missing_job, workers=2, folder=str(tmp_path)):
        assert outcome.error == "ValueError"
        assert "moved.ckpt.palsgd/step-7 is not there" in outcome.message
        assert "Net.load_from_checkpoint" in outcome.message


# -- stays local ---------------------------------------------------------------------------------


def standing_still_job(folder):
    """The first worker stands still in its second batch until the other is at its sixth."""
    sign = Path(folder) / "here"

    def wait(model, number):
        if dist.get_rank() == 0 and number == 1:
            limit = time.monotonic() + patient(30)
            while not sign.exists() and time.monotonic() < limit:
                time.sleep(0.01)
            model.waited = sign.exists()
        if dist.get_rank() == 1 and number == 5:
            sign.touch()

    model = Net(hook=wait)
    model.waited = True
    rules = dict(sync_every=8, mix_prob=0.0)
    fit(model, Batches(count=8), strategy=LocalStrategy(**rules), max_steps=8)
    return model.waited


def test_nothing_is_exchanged_between_two_syncs(world, tmp_path):
    assert world.run(standing_still_job, workers=2, folder=str(tmp_path)) == [True, True]


WIDTH = 128


class Counting(Callback):
    """What the kernel has counted while batches were trained."""

    def on_train_start(self, trainer, pl_module):
        dist.barrier()
        self.began = bytes_so_far()

    def on_train_end(self, trainer, pl_module):
        dist.barrier()
        self.bytes = bytes_so_far() - self.began


def bytes_job(ddp=False):
    counting, rules = Counting(), dict(sync_every=16, mix_prob=0.1)
    given = dict(strategy="ddp") if ddp else dict(strategy=LocalStrategy(**rules))
    found = fit(Net(width=WIDTH), Batches(width=WIDTH), max_steps=48, callbacks=[counting], **given)
    own = 0.0 if ddp else float(found.strategy.opt.ledger.bytes_on_the_wire)
    total = torch.tensor([own])
    dist.all_reduce(total)
    return counting.bytes, float(total)


@needs_namespaces
def test_bytes_on_the_wire_are_those_of_the_syncs():
    with world_alone() as alone:
        by_kernel, by_ledger = alone.run(bytes_job, workers=2, timeout=120)[0]
        averaged, _ = alone.run(bytes_job, workers=2, timeout=120, ddp=True)[0]
    assert by_kernel == pytest.approx(by_ledger, rel=0.1)
    assert by_kernel < averaged / 8


# -- SIGTERM -------------------------------------------------------------------------------------


def sigterm_job(folder):
    """The second worker receives SIGTERM within a round."""

    def receive(model, number):
        if dist.get_rank() == 1 and model.trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    model = Net(hook=receive)
    saving = ModelCheckpoint(folder, save_on_exception=True)
    strategy = LocalStrategy(**RULES)
    with pytest.raises(SystemExit):
        fit(
            model, strategy=strategy, max_steps=60, callbacks=[saving], enable_checkpointing=True,
            limit_val_batches=0,
        )  # fmt: skip
    opt = strategy.opt
    after = fit(Net(), max_steps=30, ckpt_path=saving._last_checkpoint_saved)
    return opt.clock, opt.synced, opt.gradient_steps, after.strategy.opt.clock


def test_sigterm_to_one_worker_ends_all_at_the_next_sync(world, tmp_path):
    one, other = world.run(sigterm_job, workers=2, folder=str(tmp_path))
    assert one == other
    assert one[0] % 6 == 0
    assert one[0] < 60
    assert (one[1], one[3]) == (True, 30)


# -- loops that go their own ways ----------------------------------------------------------------


class ByHand(Net):
    """Manual optimization: the module itself goes backward and steps."""

    automatic_optimization = False

    def training_step(self, batch, number):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(opt, 0.05, "norm")
        opt.step()


def own_ways_job(kind, steps=18):
    model = ByHand() if kind == "by hand" else Net()
    torch.manual_seed(7 + dist.get_rank())
    strategy = LocalStrategy(**RULES)
    given = dict(precision="bf16-mixed") if kind == "bf16" else {}
    fit(model, strategy=strategy, max_steps=steps, **given)
    found = weights(model), strategy.opt.clock, strategy.opt.synced
    how = dict(clip=0.05) if kind == "by hand" else dict(bf16=True)
    return found, plain(steps, **how, **RULES)[0]


@pytest.mark.parametrize("kind", ["by hand", "bf16"])
def test_manual_optimization_and_mixed_precision_train_to_the_bits_of_the_plain_loop(world, kind):
    for (found, clock, synced), twin in world.run(own_ways_job, workers=2, kind=kind):
        assert torch.equal(found, twin)
        assert (clock, synced) == (18, True)


class Judged(Net):
    """Logs a metric that never gets better, and sees what it is tested and asked with."""

    def validation_step(self, batch, number):
        self.log("worse", 1.0, sync_dist=True)

    def test_step(self, batch, number):
        self.seen.append(weights(self))

    def predict_step(self, batch, number):
        self.seen.append(weights(self))
        return batch


def stopped_job():
    model = Judged()
    stopping = EarlyStopping("worse", patience=2)
    rules = RULES | dict(sync_every=16)  # a round is longer than three epochs
    found = fit(
        model, Batches(), Batches(count=1), strategy=LocalStrategy(**rules), max_epochs=50,
        callbacks=[stopping],
    )  # fmt: skip
    opt = found.strategy.opt
    ended = weights(model), opt.gradient_steps, opt.synced
    with advice_ignored():
        found.test(model, Batches(count=1), verbose=False)
        found.predict(model, Batches(count=1), return_predictions=False)
    return *ended, model.seen


def test_early_stopping_within_a_round_ends_synced_and_the_global_model_is_tested(world):
    found = world.run(stopped_job, workers=2)
    for mine, steps, synced, seen in found:
        assert torch.equal(mine, found[0][0])
        assert (steps, synced) == (15, True)
        assert len(seen) == 2
        assert all(torch.equal(mine, shown) for shown in seen)


def save_job(folder):
    path = Path(folder) / "two.ckpt"
    found = fit(Net(), max_steps=12)
    found.save_checkpoint(path)


def others_job(folder, elastic):
    strategy = LocalStrategy(elastic=elastic, **RULES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a worker goes on from the global model
        fit(Net(), strategy=strategy, max_steps=24, ckpt_path=Path(folder) / "two.ckpt")
    return strategy.opt.clock, strategy.opt.synced


def test_another_number_of_workers_is_refused_unless_it_is_asked_for(world, tmp_path):
    world.run(save_job, workers=2, folder=str(tmp_path))
    for outcome in world.outcomes(others_job, workers=3, folder=str(tmp_path), elastic=False):
        assert outcome.error == "ValueError", outcome.trace
        assert "2 workers" in outcome.message
    found = world.run(others_job, workers=3, folder=str(tmp_path), elastic=True)
    assert found == [(24, True)] * 3


# -- what is refused -----------------------------------------------------------------------------


class TwoOptimizers(Net):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in self.layers[:2]]


class EveryOther(Net):
    def configure_optimizers(self):
        inner = super().configure_optimizers()
        scheduler = {"scheduler": falling(inner), "interval": "step", "frequency": 2}
        return {"optimizer": inner, "lr_scheduler": scheduler}


def refused_job(model=Net, rules=None, scaled=False, uneven=False, **given):
    strategy = LocalStrategy(**(RULES | (rules or {})))
    if scaled:
        scaler = torch.amp.GradScaler("cpu")
        given["plugins"] = [Processes(), MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    data = Batches(count=5 - dist.get_rank()) if uneven else Batches()
    fit(model(), data, strategy=strategy, max_steps=12, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(sync_batchnorm=True), "SyncBatchNorm exchanges in every forward pass"),
        (dict(rules=dict(draws="independent")), "use draws='balanced'"),
        (dict(rules=dict(draws="paced")), "use draws='balanced'"),
        (dict(scaled=True), "use precision='bf16-mixed'"),
        (dict(model=TwoOptimizers), "returned 2 optimizers"),
        (dict(model=EveryOther), "with frequency [2]"),
        (dict(uneven=True), "the number of batches in an epoch differs"),
    ],
)
def test_what_exchanges_or_takes_unequally_many_batches_is_refused(world, given, said):
    for outcome in world.outcomes(refused_job, workers=2, **given):
        assert outcome.error == "ValueError"
        assert said in outcome.message


def test_settings_are_refused_where_the_strategy_is_made():
    with pytest.raises(TypeError, match="did you mean sync_every"):
        LocalStrategy(sync_evry=8)
    with pytest.raises(TypeError, match="configure_optimizers"):
        LocalStrategy(scheduler=falling)
    with pytest.raises(ValueError, match=r"is not built as palsgd\.PALSGD is"):
        LocalStrategy(torch.optim.AdamW)
    with pytest.raises(RuntimeError, match="before fit"):
        _ = LocalStrategy().opt


def test_a_program_that_uses_the_older_package_gets_a_strategy_of_it():
    pytest.importorskip("pytorch_lightning")
    script = (
        "from pytorch_lightning.strategies import DDPStrategy\n"
        "from palsgd.integrations.lightning import LocalStrategy\n"
        "assert issubclass(LocalStrategy, DDPStrategy)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    subprocess.run(command, env=environment(), timeout=patient(200), check=True)


# -- the page and the example --------------------------------------------------------------------


def test_the_example_of_the_docstring_runs_as_printed():
    found = doctest.testmod(sys.modules[LocalStrategy.__module__])
    assert (found.attempted, found.failed) == (3, 0)


def test_the_lines_of_the_page_make_a_trainer():
    found = executed(PAGE, *code_blocks(page(PAGE)))
    assert isinstance(found["trainer"].strategy, LocalStrategy)


def example(folder):
    """Its accuracy, syncs and bytes."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "with_lightning.py"), str(folder)],
        env=environment(GLOO_SOCKET_IFNAME="lo"), capture_output=True, text=True,
        timeout=patient(200), cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = re.search(r"accuracy (\S+), (\d+) syncs, (\d+) bytes", done.stdout)
    return float(line[1]), int(line[2]), int(line[3])


def test_the_example_trains_in_two_processes_and_goes_on_when_it_is_started_again(tmp_path):
    for _ in range(2):
        accuracy, syncs, sent = example(tmp_path)
        assert accuracy > 0.85
        assert syncs == 19
        # The model has 4,810 parameters, and DDP sends them all at every step.
        assert sent < 4810 * 4 / 16
