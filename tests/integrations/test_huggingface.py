"""Hugging Face's Trainer with a palsgd optimizer, between two real processes."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers import get_scheduler as hf_scheduler

import palsgd
from palsgd.integrations.huggingface import LocalTrainingCallback
from support.launched import launched
from support.namespaces import bytes_so_far, needs_namespaces, world_alone
from support.problems import vector

pytestmark = pytest.mark.slow

RULES = dict(sync_every=8, seed=3)


class Net(nn.Module):
    def __init__(self, width=6, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 3))

    def forward(self, x, labels=None):
        found = self.layers(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Counting(Net):
    """A model whose loss is a mean over the items of all batches of a step."""

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        found = self.layers(x)
        count = labels.numel() if num_items_in_batch is None else num_items_in_batch
        return {"loss": (found - labels).square().sum() / count, "logits": found}


def examples(count=40, inputs=4):
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn(count, inputs + 3, generator=draw)
    return [{"x": row[:inputs], "labels": row[inputs:]} for row in rows]


def arguments(folder, **given):
    settings = dict(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=24,
        per_device_train_batch_size=2, logging_strategy="no", save_strategy="no",
        average_tokens_across_devices=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    return TrainingArguments(**(settings | given))


def palsgd_mixing(*args, **rules):
    return palsgd.PALSGD(*args, **(dict(mix_prob=0.25) | rules))


def optimizer(model, kind=palsgd_mixing, lr=0.02, **rules):
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    return kind(model, inner, **(RULES | rules))


def model_of(seed=0, kind=Net, **how):
    torch.manual_seed(seed)
    return kind(**how)


def trainer_of(folder, model, opt, *callbacks, resume_from=None, **given):
    return Trainer(
        model, arguments(folder, **given), train_dataset=examples(), eval_dataset=examples(8),
        optimizers=(opt, None),
        callbacks=[*callbacks, LocalTrainingCallback(opt, resume_from=resume_from)],
    )  # fmt: skip


def trained(folder, *callbacks, model=None, rules=None, resume=None, **given):
    """A run of Trainer: its trainer, model and optimizer."""
    model = model or model_of()
    opt = optimizer(model, **(rules or {}))
    trainer = trainer_of(folder, model, opt, *callbacks, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, model, opt


# -- the plain loop --------------------------------------------------------------------------------


def plainly_trained(loader, *, steps, accumulate=1, max_norm=1.0, schedule=None, **rules):
    """The same by hand: a loop over until(). Gradients that DDP averages are clipped afterwards."""
    model = DistributedDataParallel(model_of())
    opt = optimizer(model, scheduler=schedule, **rules)
    for place, batch in enumerate(palsgd.until(loader, opt, steps=steps)):
        (model(**batch)["loss"] / accumulate).backward()
        if (place + 1) % accumulate == 0:
            clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            opt.zero_grad()
    return model, opt


def beside_plain_loop(folder, accumulate=1, max_norm=1.0, steps=24, **rules):
    with launched():
        trainer, model, opt = trained(
            folder, rules=rules, gradient_accumulation_steps=accumulate, max_grad_norm=max_norm,
            warmup_steps=4, lr_scheduler_type="cosine", max_steps=steps,
        )  # fmt: skip
        twin, other = plainly_trained(
            trainer.get_train_dataloader(), steps=steps, accumulate=accumulate, max_norm=max_norm,
            schedule=lambda o: hf_scheduler("cosine", o, 4, steps), **rules,
        )  # fmt: skip
        rates = [group["lr"] for each in (opt, other) for group in each.param_groups]
        return vector(model), vector(twin), (opt.clock, opt.gradient_steps, opt.synced), rates


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(accumulate=2, max_norm=0.05),
        dict(warmup_steps=5, steps=29),
        dict(delay=2, fragments=2),
        dict(kind=palsgd.DiLoCo, steps=21),
        dict(draws="shared", steps=21),
    ],
    ids=str,
)
def test_trainer_ends_at_the_weights_of_the_plain_loop(world, tmp_path, how):
    """Also with clipping and accumulation, and where a scheduler follows the clock."""
    for got, want, (clock, _, synced), rates in world.run(
        beside_plain_loop, workers=2, folder=tmp_path, **how
    ):
        np.testing.assert_array_equal(got, want)
        assert (clock, synced) == (how.get("steps", 24), True)
        assert rates[0] == rates[1]


# -- the end ---------------------------------------------------------------------------------------


def cut_short(folder, steps):
    """A run that ends within a round, and as many iterations by hand, with finish()."""
    with launched():
        trainer, model, opt = trained(folder, max_steps=steps, lr_scheduler_type="constant")
        loader = trainer.get_train_dataloader()  # its order depends on the last seed that was set
        twin = model_of()
        other = optimizer(twin)
        for epoch in range(opt.gradient_steps // len(loader) + 1):
            loader.set_epoch(epoch)
            for batch in loader:
                if other.gradient_steps < opt.gradient_steps:
                    twin(**batch)["loss"].backward()
                    clip_grad_norm_(twin.parameters(), 1.0)
                    other.step()
                    other.zero_grad()
        other.finish()
        return vector(model), vector(twin), opt.clock, opt.gradient_steps, opt.synced, trainer.state


@pytest.mark.parametrize("steps", [21, 29])
def test_a_run_that_ends_within_a_round_ends_synced_after_equally_many_iterations(
    world, tmp_path, steps
):
    found = world.run(cut_short, workers=2, folder=tmp_path, steps=steps)
    for got, want, clock, taken, synced, state in found:
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got, found[0][0])
        assert abs(clock - steps) <= 2
        assert taken == found[0][3] == state.global_step < steps
        assert synced
    plan = palsgd.round_plan(
        seed=3, worker=0, round=steps // 8, sync_every=8, mix_prob=0.25, draws="balanced"
    )
    before = sum(
        palsgd.round_plan(
            seed=3, worker=0, round=r, sync_every=8, mix_prob=0.25, draws="balanced"
        ).count(False)
        for r in range(steps // 8)
    )
    assert found[0][3] == before + plan[: steps % 8].count(False)


class Rates(TrainerCallback):
    """Notes the learning rate at every clock that an iteration ends with."""

    def __init__(self, opt):
        self.opt, self.found = opt, {}

    def on_step_end(self, *args, **kwargs):
        self.found[self.opt.clock] = self.opt.param_groups[0]["lr"]


def by_data(folder):
    with launched():
        model = model_of()
        opt = optimizer(model)
        rates = Rates(opt)
        trainer_of(folder, model, opt, rates, max_steps=-1, num_train_epochs=3).train()
    return vector(model), opt.gradient_steps, opt.synced, rates.found


def test_epochs_are_whole_passes_and_the_schedule_ends_with_them(world, tmp_path):
    """40 examples, two workers and batches of two are 30 batches in three passes. With a quarter
    of the steps without data, that is 40 steps of the clock."""
    found = world.run(by_data, workers=2, folder=tmp_path)
    for weights, taken, synced, rates in found:
        np.testing.assert_array_equal(weights, found[0][0])
        assert (taken, synced) == (30, True)
        for clock, rate in rates.items():
            assert rate == pytest.approx(0.02 * (1 - min(clock * 30 // 40, 30) / 30))


# -- evaluations and files -------------------------------------------------------------------------


class Seen(TrainerCallback):
    """Notes what evaluations find."""

    def __init__(self):
        self.losses = {}

    def on_evaluate(self, args, state, control, metrics, **_):
        self.losses[state.global_step] = metrics["eval_loss"]


def evaluated(folder):
    """Evaluations and files in the middle of a round, beside the global model of the plain loop."""
    seen = Seen()
    with launched():
        _, model, opt = trained(
            folder, seen, lr_scheduler_type="constant", eval_strategy="steps", eval_steps=4,
            save_strategy="steps", save_steps=5,
        )  # fmt: skip
        loader = trainer_of(folder, model, opt).get_train_dataloader()
        twin = model_of()
        other, wanted, rows = optimizer(twin), {}, examples(8)
        x, labels = (torch.stack([row[name] for row in rows]) for name in ("x", "labels"))
        for batch in palsgd.until(loader, other, steps=24):
            twin(**batch)["loss"].backward()
            clip_grad_norm_(twin.parameters(), 1.0)
            other.step()
            other.zero_grad()
            with other.anchor_weights(), torch.no_grad():
                wanted[other.gradient_steps] = vector(twin), float(twin(x, labels)["loss"])
    dist.barrier()
    saved = {
        int(path.parent.name.split("-")[1]): load_file(path)
        for path in Path(folder).glob("checkpoint-*/model.safetensors")
    }
    files = {
        step: torch.cat([tensors[name].reshape(-1) for name, _ in model.named_parameters()])
        for step, tensors in saved.items()
    }
    return seen.losses, {step: found.double().numpy() for step, found in files.items()}, wanted


def test_trainer_evaluates_and_saves_the_global_model_within_a_round(world, tmp_path):
    for losses, files, wanted in world.run(evaluated, workers=2, folder=tmp_path):
        assert {4, 8, 12} <= set(losses)
        assert {5, 10, 15} <= set(files)
        for step, loss in losses.items():
            assert loss == pytest.approx(wanted[step][1], rel=1e-6)
        for step, weights in files.items():
            np.testing.assert_array_equal(weights, wanted[step][0])


def resumed(folder, elsewhere, moved=False, **rules):
    """A run that goes on from the middle of a round, beside one that was never stopped."""
    given = dict(save_strategy="steps", save_steps=5, save_total_limit=None)
    ends = []
    with launched():
        _, model, opt = trained(folder, model=model_of(dropout=0.2), rules=rules, **given)
        ends.append((vector(model), opt.clock, opt.gradient_steps, opt.ledger.bytes_sent))
        last = Path(folder) / "checkpoint-5"
        _, model, opt = trained(
            elsewhere if moved else folder, model=model_of(seed=9, dropout=0.2), rules=rules,
            resume=str(last), resume_from=last if moved else None, **given,
        )  # fmt: skip
        ends.append((vector(model), opt.clock, opt.gradient_steps, opt.ledger.bytes_sent))
    return ends, sorted(path.name for path in last.iterdir())


@pytest.mark.parametrize(
    "how", [{}, dict(delay=2, compress="int8"), dict(warmup_steps=7), dict(moved=True)], ids=str
)
def test_a_run_resumed_by_trainer_within_a_round_ends_bit_for_bit(world, tmp_path, how):
    places = dict(folder=tmp_path / "run", elsewhere=tmp_path / "other")
    for (one, other), files in world.run(resumed, workers=2, **places, **how):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1:] == other[1:]
        assert {"palsgd", "model.safetensors", "trainer_state.json"} <= set(files)


def resumed_at_the_end(folder):
    with launched():
        given = dict(save_strategy="steps", save_steps=500)
        trainer, *_ = trained(folder, **given)
        last = Path(folder) / f"checkpoint-{trainer.state.global_step}"
        _, model, opt = trained(folder, resume=str(last), **given)
    return vector(model), opt.clock, opt.synced


def test_a_run_that_is_resumed_at_its_end_ends_synced_too(world, tmp_path):
    """Trainer takes one iteration before it looks whether there is anything left to do."""
    found = world.run(resumed_at_the_end, workers=2, folder=tmp_path)
    for weights, clock, synced in found:
        np.testing.assert_array_equal(weights, found[0][0])
        assert 24 < clock < 28
        assert synced


def resumed_wrongly(folder, elsewhere, other):
    """The output folder has a checkpoint of the same iteration, of another run, or none."""
    given = dict(save_strategy="steps", save_steps=5, max_steps=8)
    with launched():
        trained(folder, **given)
        if other:
            trained(elsewhere, model=model_of(seed=1), **given)
        trained(elsewhere, resume=str(Path(folder) / "checkpoint-5"), **given)


@pytest.mark.parametrize(
    ("other", "said"),
    [(True, "of another checkpoint than the model"), (False, "no checkpoint of worker")],
)
def test_the_files_of_another_run_are_refused(world, tmp_path, other, said):
    places = dict(folder=tmp_path / "run", elsewhere=tmp_path / "other")
    for outcome in world.outcomes(resumed_wrongly, workers=2, other=other, **places):
        assert outcome.error == "ValueError", outcome.trace
        assert said in outcome.message
        assert "resume_from=" in outcome.message


def best_kept(folder):
    """A learning rate with which the loss grows, so that the first evaluation is the best one."""
    with launched():
        trainer, model, opt = trained(
            folder, EarlyStoppingCallback(early_stopping_patience=2), rules=dict(lr=1.0),
            eval_strategy="steps", save_strategy="steps", eval_steps=3, save_steps=3,
            load_best_model_at_end=True, lr_scheduler_type="constant", max_steps=48,
        )  # fmt: skip
        after = trainer.evaluate()["eval_loss"]
        best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    same = all(torch.equal(best[name], p) for name, p in model.named_parameters())
    return same, after == pytest.approx(trainer.state.best_metric), opt.clock, opt.unsynced_steps


def test_the_best_model_stays_when_a_callback_stops_training_early(world, tmp_path):
    for same, evaluated_again, clock, left in world.run(best_kept, workers=2, folder=tmp_path):
        assert same
        assert evaluated_again
        assert clock < 48
        assert left == 0


class Leaver(TrainerCallback):
    """One worker is asked to leave, as by SIGTERM."""

    def __init__(self, opt):
        self.opt = opt

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and dist.get_rank() == 1:
            self.opt.leave()


def left(folder):
    given = dict(save_strategy="steps", save_steps=500, lr_scheduler_type="linear")
    with launched():
        _, whole, _ = trained(Path(folder) / "whole", **given)
        model = model_of()
        opt = optimizer(model)
        trainer = trainer_of(folder, model, opt, Leaver(opt), **given)
        trainer.train()
        stopped = opt.clock, opt.leaving
        last = Path(folder) / f"checkpoint-{trainer.state.global_step}"
        _, again, _ = trained(folder, model=model_of(seed=9), resume=str(last), **given)
    return stopped, vector(whole), vector(again)


def test_a_worker_that_must_leave_has_all_save_and_stop_and_the_run_goes_on(world, tmp_path):
    for stopped, whole, again in world.run(left, workers=2, folder=tmp_path):
        assert stopped == (8, True)
        np.testing.assert_array_equal(whole, again)


# -- what is exchanged -----------------------------------------------------------------------------


class Wide(Net):
    def __init__(self):
        super().__init__(width=512)
        self.layers.insert(1, nn.Linear(512, 512))


class Meter(TrainerCallback):
    """The bytes of the training, which begins when the model has been sent to all workers."""

    def on_train_begin(self, *args, **kwargs):
        dist.barrier()
        self.began = bytes_so_far()

    def on_train_end(self, *args, **kwargs):
        dist.barrier()
        self.sent = bytes_so_far() - self.began


def sent(folder, local, accumulate=1, kind=Wide):
    meter, model = Meter(), model_of(kind=kind)
    with launched():
        args = dict(max_steps=40, gradient_accumulation_steps=accumulate, logging_strategy="steps")
        if local:
            opt = optimizer(model, warmup_steps=0)
            trainer = trainer_of(folder, model, opt, **args)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            trainer = Trainer(
                model, arguments(folder, **args), train_dataset=examples(), optimizers=(opt, None)
            )
        trainer.add_callback(meter)
        trainer.train()
        own = torch.tensor([float(opt.ledger.bytes_on_the_wire) if local else 0.0])
    dist.all_reduce(own)
    return meter.sent, own.item(), trainer.state.global_step


@needs_namespaces
def test_trainer_sends_what_the_ledger_says_and_not_every_gradient(tmp_path):
    """40 steps are 5 syncs, so an eighth of what DDP sends for as many."""
    with world_alone() as alone:
        for accumulate in (1, 2):
            given = dict(folder=tmp_path, accumulate=accumulate)
            (ddp, *_), _ = alone.run(sent, workers=2, local=False, **given)
            (ours, ledger, taken), _ = alone.run(sent, workers=2, local=True, **given)
            assert taken < 40
            assert ours < ddp / 7
            assert ledger == pytest.approx(ours, rel=0.1)


def counted_tokens(folder, ask):
    with launched(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer, *_ = trained(
            folder, model=model_of(kind=Counting), average_tokens_across_devices=ask
        )
    return trainer.args.average_tokens_across_devices, [str(each.message) for each in told]


def test_no_number_of_tokens_is_exchanged_in_every_step_after_one_warning(world, tmp_path):
    for ask in (True, False):
        for left_on, told in world.run(counted_tokens, workers=2, folder=tmp_path, ask=ask):
            assert not left_on
            said = [text for text in told if "average_tokens_across_devices" in text]
            assert len(said) == ask


# -- other ways in, and refusals -------------------------------------------------------------------


class OwnTrainer(Trainer):
    """Trainer's own optimizer inside, with its groups and its learning rate."""

    def create_optimizer(self, *model):  # older releases pass none
        if self.optimizer is None:
            inner = super().create_optimizer(*model)
            self.optimizer = palsgd_mixing(self.model, inner, **RULES)
            self.add_callback(LocalTrainingCallback(self.optimizer))
        return self.optimizer


def built_by_trainer(folder):
    with launched():
        model = model_of()
        trainer = OwnTrainer(model, arguments(folder), train_dataset=examples())
        trainer.train()
        opt = trainer.optimizer.optimizer
    return vector(model), opt.clock, opt.synced, len(opt.param_groups), opt.param_groups[0]["lr"]


def test_a_trainer_may_build_the_optimizer_itself(world, tmp_path):
    found = world.run(built_by_trainer, workers=2, folder=tmp_path)
    for weights, clock, synced, groups, rate in found:
        np.testing.assert_array_equal(weights, found[0][0])
        assert (clock, synced, groups, rate) == (24, True, 2, 0.0)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from examples()


def refused(folder, kind):
    with launched():
        model = model_of()
        opt = optimizer(model, draws="independent" if kind == "draws" else "balanced")
        other = torch.optim.AdamW(model.parameters()) if kind == "other" else opt
        data = Stream() if kind == "stream" else examples()
        callbacks = [LocalTrainingCallback(opt)]
        if kind == "late":
            callbacks.append(Late())
        if kind == "alone":
            os.environ |= {"WORLD_SIZE": "1"}
            del os.environ["LOCAL_RANK"]
        trainer = Trainer(
            model, arguments(folder), train_dataset=data, optimizers=(other, None),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()


class Late(TrainerCallback):
    """Asks for a save after all others."""

    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == 3


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("draws", "ValueError", "use draws='balanced'"),
        ("other", "ValueError", "give both the same palsgd optimizer"),
        ("stream", "ValueError", "'dispatch_batches': False"),
        ("alone", "ValueError", "TrainingArguments(use_cpu=True)"),
        ("late", "RuntimeError", "give LocalTrainingCallback last"),
    ],
)
def test_what_would_not_train_locally_is_refused_with_the_remedy(
    world, tmp_path, kind, error, said
):
    for outcome in world.outcomes(refused, workers=2, folder=tmp_path, kind=kind):
        assert outcome.error == error, outcome.trace
        assert said in outcome.message


def test_the_callback_wants_a_palsgd_optimizer():
    with pytest.raises(ValueError, match="give it the palsgd optimizer"):
        LocalTrainingCallback(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


# -- loops that go their own ways ------------------------------------------------------------------


def in_bf16(folder):
    """Trainer's mixed precision, and the same by hand."""
    with launched():
        trainer, model, opt = trained(folder, bf16=True, lr_scheduler_type="constant")
        loader = trainer.get_train_dataloader()  # its order depends on the last seed that was set
        twin = DistributedDataParallel(model_of())
        other = optimizer(twin)
        for batch in palsgd.until(loader, other, steps=24):
            with torch.autocast("cpu", torch.bfloat16):
                loss = twin(**batch)["loss"]
            loss.backward()
            clip_grad_norm_(twin.parameters(), 1.0)
            other.step()
            other.zero_grad()
    return vector(model), vector(twin), opt.synced


def test_mixed_precision_ends_at_the_weights_of_the_plain_loop(world, tmp_path):
    for got, want, synced in world.run(in_bf16, workers=2, folder=tmp_path):
        np.testing.assert_array_equal(got, want)
        assert synced


class Meddler(TrainerCallback):
    """Steps the scheduler by itself, as some callbacks do."""

    def on_step_end(self, *args, lr_scheduler, **kwargs):
        lr_scheduler.step()


def meddled(folder):
    given = dict(lr_scheduler_type="linear")
    with launched():
        _, quiet, _ = trained(folder, **given)
        _, other, opt = trained(folder, Meddler(), **given)
    return vector(quiet), vector(other), opt.param_groups[0]["lr"]


def test_a_callback_that_steps_the_scheduler_changes_nothing(world, tmp_path):
    for quiet, other, rate in world.run(meddled, workers=2, folder=tmp_path):
        np.testing.assert_array_equal(quiet, other)
        assert rate == 0


def twice(folder):
    """Two calls of train(), and predictions after each."""
    found = []
    with launched():
        model = model_of()
        opt = optimizer(model)
        trainer = trainer_of(folder, model, opt, lr_scheduler_type="constant")
        for _ in range(2):
            trainer.train()
            asked = trainer.predict(examples(8)).predictions
            rows = torch.stack([row["x"] for row in examples(8)])
            with torch.no_grad():
                found.append((opt.clock, opt.synced, asked, model.layers(rows).numpy()))
    return found


def test_train_may_be_called_again_and_predictions_are_of_the_global_model(world, tmp_path):
    one, other = world.run(twice, workers=2, folder=tmp_path)
    for (clock, synced, asked, wanted), theirs in zip(one, other, strict=True):
        assert synced
        np.testing.assert_allclose(asked, wanted, rtol=1e-6)
        np.testing.assert_array_equal(asked, theirs[2])
        assert clock == theirs[0]
    assert [clock for clock, *_ in one] == [24, 48]


def accumulated_epochs(folder):
    """Ten batches in a pass, three in a step: the last step of a pass has one."""
    with launched():
        trainer, model, opt = trained(
            folder, max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=3,
            rules=dict(sync_every=16),
        )  # fmt: skip
    return vector(model), trainer.state.global_step, opt.gradient_steps, opt.synced, opt.rounds


def test_epochs_shorter_than_a_round_whose_last_step_has_fewer_batches_end_synced(world, tmp_path):
    found = world.run(accumulated_epochs, workers=2, folder=tmp_path)
    for weights, iterations, taken, synced, rounds in found:
        np.testing.assert_array_equal(weights, found[0][0])
        assert (iterations, taken, synced, rounds) == (12, 12, True, 1)


def uneven(folder, even):
    """37 examples in batches of two: one worker has a batch less, unless it is filled up."""
    with launched():
        model = model_of()
        opt = optimizer(model)
        trainer = Trainer(
            model, arguments(folder, max_steps=-1, num_train_epochs=2,
                             accelerator_config={"even_batches": even}),
            train_dataset=examples(37), optimizers=(opt, None),
            callbacks=[LocalTrainingCallback(opt)],
        )  # fmt: skip
        trainer.train()
    return vector(model), opt.gradient_steps, opt.synced


def test_batches_that_do_not_divide_are_filled_up_by_trainer_or_refused(world, tmp_path):
    found = world.run(uneven, workers=2, folder=tmp_path, even=True)
    for weights, taken, synced in found:
        np.testing.assert_array_equal(weights, found[0][0])
        assert (taken, synced) == (20, True)
    for outcome in world.outcomes(uneven, workers=2, folder=tmp_path, even=False):
        assert outcome.error == "ValueError", outcome.trace
        assert "the number of batches in an epoch differs" in outcome.message


def stopped_by_ctrl_c(folder):
    """Both workers are stopped within a round, and the run goes on from the last checkpoint."""
    given = dict(save_strategy="steps", save_steps=5, lr_scheduler_type="linear")
    with launched():
        _, whole, _ = trained(Path(folder) / "whole", **given)
        warnings.filterwarnings("ignore", ".*unsynced.*")
        with pytest.raises(KeyboardInterrupt):
            trained(folder, Stop(), **given)
        last = Path(folder) / "checkpoint-5"
        _, again, _ = trained(folder, model=model_of(seed=9), resume=str(last), **given)
    return vector(whole), vector(again)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 7:
            raise KeyboardInterrupt


def test_a_run_stopped_by_ctrl_c_goes_on_from_its_last_checkpoint(world, tmp_path):
    for whole, again in world.run(stopped_by_ctrl_c, workers=2, folder=tmp_path):
        np.testing.assert_array_equal(whole, again)


def begun(folder):
    with launched():
        trained(folder, save_strategy="steps", save_steps=5, max_steps=8)


def gone_on(folder):
    with launched():
        trained(folder, resume=str(Path(folder) / "checkpoint-5"), max_steps=8)


def test_a_checkpoint_of_another_number_of_workers_is_refused(world, tmp_path):
    world.run(begun, workers=2, folder=tmp_path)
    for outcome in world.outcomes(gone_on, workers=3, folder=tmp_path):
        assert outcome.error == "ValueError", outcome.trace
        assert "of 2 workers, and there are 3" in outcome.message


def misasked(folder, kind):
    with launched():
        model = model_of()
        opt = optimizer(model)
        given = dict(fsdp="full_shard") if kind == "fsdp" else {}
        trainer = trainer_of(folder, model, opt, **given)
        trainer.args.fp16 = kind == "fp16"  # on a CPU Trainer itself refuses it
        trainer.train()


@pytest.mark.parametrize(("kind", "said"), [("fsdp", "leave it out"), ("fp16", "use bf16=True")])
def test_arguments_that_leave_no_workers_or_skip_steps_are_refused(world, tmp_path, kind, said):
    for outcome in world.outcomes(misasked, workers=2, folder=tmp_path, kind=kind):
        assert outcome.error == "ValueError", outcome.trace
        assert said in outcome.message
