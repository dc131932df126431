"""accelerate with a palsgd optimizer, between two real processes."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset

import palsgd
from palsgd.integrations.accelerate import prepare
from support.launched import launched
from support.namespaces import bytes_so_far, needs_namespaces, world_alone
from support.problems import global_vector, vector

pytestmark = pytest.mark.slow

RULES = dict(sync_every=8, mix_prob=0.25, seed=3)


def rows(count=40, width=4):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(5))


def network(seed=0, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def loss_of(model, batch):
    return (model(batch) - batch).square().mean()


def adamw(model, lr=0.02):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def prepared(seed=0, accumulate=1, schedule=None, **rules):
    """An accelerator, and what it has prepared."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, loader = network(seed), DataLoader(rows(), batch_size=2)
    inner = adamw(model)
    others = [loader] if schedule is None else [loader, schedule(inner)]
    return accelerator, *prepare(accelerator, model, inner, *others, **(RULES | rules))


def train(accelerator, model, opt, loader, *schedulers, steps, max_norm=1.0, on_step=None):
    """The loop that accelerate's own guide has, over until()."""
    for batch in palsgd.until(loader, opt, steps=steps):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            for scheduler in schedulers:
                scheduler.step()
            opt.zero_grad()
        if on_step is not None:
            on_step()


# -- the plain loop --------------------------------------------------------------------------------


def once_around(inner):
    return OneCycleLR(inner, max_lr=0.03, total_steps=25)


def beside_plain_loop(accumulate=1, max_norm=1.0, steps=24, **rules):
    with launched():
        accelerator, model, opt, loader, scheduler = prepared(
            accumulate=accumulate, schedule=once_around, **rules
        )
        train(accelerator, model, opt, loader, scheduler, steps=steps, max_norm=max_norm)
        twin = DistributedDataParallel(network())  # its gradients are clipped when averaged
        inner = adamw(twin)
        other = palsgd.PALSGD(twin, inner, scheduler=once_around(inner), **(RULES | rules))
        for place, batch in enumerate(palsgd.until(loader, other, steps=steps)):
            (loss_of(twin, batch) / accumulate).backward()
            if (place + 1) % accumulate == 0:
                clip_grad_norm_(twin.parameters(), max_norm)
                other.step()
                other.zero_grad()
    rates = [each.param_groups[0]["lr"] for each in (opt, other)]
    return vector(model), vector(twin), (opt.optimizer.clock, opt.optimizer.synced), rates


@pytest.mark.parametrize(
    "how",
    [{}, dict(accumulate=2, max_norm=0.05), dict(warmup_steps=5), dict(delay=2, fragments=2)],
    ids=str,
)
def test_accelerate_ends_at_the_weights_of_the_plain_loop(world, how):
    """Also with clipping and accumulation, and a scheduler that the loop steps as well."""
    for got, want, stands, rates in world.run(beside_plain_loop, workers=2, **how):
        np.testing.assert_array_equal(got, want)
        assert stands == (24, True)
        assert rates[0] == rates[1]


# -- evaluations and files -------------------------------------------------------------------------


def shown():
    """What eval() shows in the middle of a round, and what train() goes back to."""
    with launched():
        accelerator, model, opt, loader = prepared()
        found = []

        def look():
            local, wanted = vector(model), global_vector(model, opt.optimizer)
            opt.eval()
            during = vector(model)
            opt.train()
            found.append((local, wanted, during, vector(model), opt.optimizer.synced))

        train(accelerator, model, opt, loader, steps=24, on_step=look)
    return found


def test_eval_shows_the_global_model_and_train_goes_back(world):
    for found in world.run(shown, workers=2):
        apart = [not np.array_equal(local, wanted) for local, wanted, *_ in found]
        assert sum(apart) > len(found) / 2
        for local, wanted, during, after, _ in found:
            np.testing.assert_array_equal(during, wanted)
            np.testing.assert_array_equal(after, local)


def shrinking(inner):
    return LambdaLR(inner, lambda tick: 0.99**tick)


def resumed(folder, seed=9, **rules):
    """A run that goes on from save_state() within a round, beside one that was never stopped. Ten
    iterations are one pass over the data."""
    found = {}
    with launched():
        accelerator, model, opt, *others = prepared(schedule=shrinking, **rules)

        def save():
            if opt.optimizer.gradient_steps == 10 and not found:
                found["global"] = global_vector(model, opt.optimizer)
                found["synced"] = opt.optimizer.synced
                accelerator.save_state(folder)

        train(accelerator, model, opt, *others, steps=24, on_step=save)
        one = vector(model), opt.optimizer.clock, opt.optimizer.ledger.bytes_sent
    with launched():
        accelerator, model, opt, *others = prepared(seed=seed, schedule=shrinking, **rules)
        accelerator.load_state(folder)
        train(accelerator, model, opt, *others, steps=24)
        other = vector(model), opt.optimizer.clock, opt.optimizer.ledger.bytes_sent
    file = load_file(Path(folder) / "model.safetensors")
    inside = accelerator.unwrap_model(model)
    saved = torch.cat([file[name].reshape(-1) for name, _ in inside.named_parameters()])
    return one, other, found, saved.double().numpy()


@pytest.mark.parametrize(
    "how", [{}, dict(delay=2, compress="int8"), dict(warmup_steps=20)], ids=str
)
def test_a_run_resumed_by_load_state_within_a_round_ends_bit_for_bit(world, tmp_path, how):
    """And the model file that save_state() writes is the global model."""
    for one, other, found, saved in world.run(resumed, workers=2, folder=tmp_path, **how):
        assert not found["synced"]
        np.testing.assert_array_equal(saved, found["global"])
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1:] == other[1:]


def two_models(folder):
    """Two models under one accelerator, each with a palsgd optimizer of its own."""
    ends = []
    for again in (False, True):
        with launched():
            accelerator = Accelerator(cpu=True)
            pairs = []
            for seed in (0, 1):
                net = network(seed + 7 * again)
                pairs.append(prepare(accelerator, net, adamw(net), **RULES))
            if again:
                accelerator.load_state(folder)
            batches = rows()[dist.get_rank() :: 2].split(2) * 2
            for place in range(6 if again else 0, 12):
                for model, opt in pairs:
                    loss_of(model, batches[place]).backward()
                    opt.step()
                    opt.zero_grad()
                if place == 5:
                    accelerator.save_state(folder)
            for _, opt in pairs:
                opt.optimizer.finish()
            ends.append([vector(model) for model, _ in pairs])
    return ends, sorted(path.name for path in Path(folder).glob("palsgd*"))


def test_two_models_have_files_of_their_own(world, tmp_path):
    for (first, again), folders in world.run(two_models, workers=2, folder=tmp_path):
        np.testing.assert_array_equal(first, again)
        assert folders == ["palsgd", "palsgd_1"]


def from_plain(folder):
    """A checkpoint of a plain run under accelerate."""
    with launched():
        accelerator = Accelerator(cpu=True)
        net = network()
        model, opt = accelerator.prepare(net, adamw(net))
        for batch in rows().split(8):
            accelerator.backward(loss_of(model, batch))
            opt.step()
            opt.zero_grad()
        accelerator.save_state(folder)
        want = vector(net), opt.state_dict()["state"][0]["exp_avg"].clone()
    with launched():
        accelerator, model, opt, _ = prepared(seed=9)
        accelerator.load_state(folder)
        inner = opt.optimizer.inner.state_dict()["state"][0]["exp_avg"]
        return want, (vector(model), inner.clone()), opt.optimizer.clock


def test_the_checkpoint_of_a_plain_run_is_a_start(world, tmp_path):
    for want, got, clock in world.run(from_plain, workers=2, folder=tmp_path):
        np.testing.assert_array_equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        assert clock == 0


# -- loops that go their own ways ------------------------------------------------------------------


def by_epochs(accelerator, model, opt, loader, *, epochs, taken=0, on_step=None):
    """accelerate's own way to go on in the middle of a pass: the first batches are skipped."""
    begun, inside = divmod(taken, len(loader))
    for epoch in range(begun, epochs):
        skipped = accelerator.skip_first_batches(loader, inside) if epoch == begun else loader
        for batch in skipped:
            accelerator.backward(loss_of(model, batch))
            opt.step()
            opt.zero_grad()
            if on_step is not None:
                on_step()
    opt.optimizer.finish()


def skipped(folder):
    """A run that goes on in the middle of a pass and of a round, by skip_first_batches."""
    saved = []
    with launched():
        accelerator, model, opt, loader = prepared()

        def save():
            if opt.optimizer.gradient_steps == 14:
                saved.append(opt.optimizer.synced)
                accelerator.save_state(folder)

        by_epochs(accelerator, model, opt, loader, epochs=3, on_step=save)
        one = vector(model)
    with launched():
        accelerator, model, opt, loader = prepared(seed=9)
        accelerator.load_state(folder)
        by_epochs(accelerator, model, opt, loader, epochs=3, taken=opt.optimizer.gradient_steps)
    return one, vector(model), saved, opt.optimizer.gradient_steps


def test_a_run_goes_on_within_a_pass_by_skip_first_batches(world, tmp_path):
    for one, other, saved, taken in world.run(skipped, workers=2, folder=tmp_path):
        np.testing.assert_array_equal(one, other)
        assert saved == [False]
        assert taken == 30


def uneven():
    """Seven batches, in mixed precision: one worker has a batch more than the other in a pass."""
    with launched():
        even = DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", dataloader_config=even)
        net, loader = network(), DataLoader(rows(14), batch_size=2)
        model, opt, loader = prepare(accelerator, net, adamw(net), loader, **RULES)
        train(accelerator, model, opt, loader, steps=24)
        twin = network()
        other = palsgd.PALSGD(twin, adamw(twin), **RULES)
        for batch in palsgd.until(rows(14).split(2)[dist.get_rank() :: 2], other, steps=24):
            with torch.autocast("cpu", torch.bfloat16):
                found = twin(batch)
            (found.float() - batch).square().mean().backward()
            clip_grad_norm_(twin.parameters(), 1.0)
            other.step()
            other.zero_grad()
    return vector(model), vector(twin), len(loader)


def test_uneven_batches_in_mixed_precision_end_at_the_weights_of_the_plain_loop(world):
    found = world.run(uneven, workers=2)
    for got, want, _ in found:
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got, found[0][0])
    assert [length for *_, length in found] == [4, 3]


def saved_by_two(folder):
    with launched():
        accelerator, model, opt, loader = prepared()
        train(accelerator, model, opt, loader, steps=8)
        accelerator.save_state(folder)


def loaded_by_three(folder):
    with launched():
        prepared()[0].load_state(folder)


def test_a_folder_of_another_number_of_workers_is_refused(world, tmp_path):
    world.run(saved_by_two, workers=2, folder=str(tmp_path))
    for outcome in world.outcomes(loaded_by_three, workers=3, folder=str(tmp_path)):
        assert outcome.error == "ValueError", outcome.trace
        assert "2 workers" in outcome.message


# -- what is exchanged -----------------------------------------------------------------------------


def sent(local, accumulate=1):
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        net, loader = network(width=512), DataLoader(rows(40, 512), batch_size=2, shuffle=True)
        if local:
            model, opt, loader = prepare(accelerator, net, adamw(net), loader, **RULES)
        else:
            model, opt, loader = accelerator.prepare(net, adamw(net), loader)
        dist.barrier()
        began = bytes_so_far()
        if local:
            train(accelerator, model, opt, loader, steps=40)
        for batch in () if local else [each for _ in range(4 * accumulate) for each in loader]:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                opt.step()
                opt.zero_grad()
        dist.barrier()
        by_kernel = bytes_so_far() - began
        own = torch.tensor([float(opt.optimizer.ledger.bytes_on_the_wire) if local else 0.0])
    dist.all_reduce(own)
    return by_kernel, own.item()


@needs_namespaces
def test_accelerate_sends_what_the_ledger_says_and_not_every_gradient():
    """40 steps are 5 syncs, so an eighth of what DDP sends for as many."""
    with world_alone() as alone:
        for accumulate in (1, 2):
            (ddp, _), _ = alone.run(sent, workers=2, local=False, accumulate=accumulate)
            (ours, ledger), _ = alone.run(sent, workers=2, local=True, accumulate=accumulate)
            assert ours < ddp / 7
            assert ledger == pytest.approx(ours, rel=0.1)


def dealt_out():
    """Which rows each worker sees in each pass, without a word between the workers."""
    torch.manual_seed(0)
    with launched():
        accelerator, net = Accelerator(cpu=True), nn.Linear(1, 1)
        inner = torch.optim.SGD(net.parameters())
        torch.manual_seed(dist.get_rank())  # then the workers have nothing random in common
        loader = DataLoader(torch.arange(40.0)[:, None], batch_size=2, shuffle=True)
        *_, loader = prepare(accelerator, net, inner, loader, **RULES)
        with mock.patch.object(dist, "broadcast", side_effect=AssertionError("a broadcast")):
            return [torch.cat(list(loader)).flatten().tolist() for _ in range(3)]


def test_a_shuffled_loader_is_dealt_out_anew_in_every_pass_without_a_broadcast(world):
    one, other = world.run(dealt_out, workers=2)
    assert one[0] != one[1]
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(mine + theirs) == list(range(40))


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows()


def streamed():
    with launched():
        net = network()
        prepare(Accelerator(cpu=True), net, adamw(net), DataLoader(Stream()), **RULES)


def test_a_loader_that_sends_every_batch_is_refused(world):
    for outcome in world.outcomes(streamed, workers=2):
        assert outcome.error == "ValueError", outcome.trace
        assert "dispatch_batches=False" in outcome.message


@pytest.mark.parametrize(
    ("kind", "said"),
    [(DistributedType.DEEPSPEED, "cuts the model"), (DistributedType.NO, "Accelerator(cpu=True)")],
)
def test_accelerators_that_do_not_leave_each_process_its_model_are_refused(monkeypatch, kind, said):
    net = network()
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=1)
    with pytest.raises(ValueError, match=re.escape(said)):
        prepare(accelerator, net, adamw(net))
