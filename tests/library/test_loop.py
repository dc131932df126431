"""The training loop around the optimizer: its end, AMP, clipping."""

import gc
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.core_access import core_of
from support.problems import batches, global_vector, linear, mse, train, vector
from support.stepping import build, sgd, take_step

# -- the end of training ---------------------------------------------------------------------------


def unequal_job(lengths, steps, **rules):
    model, opt = build(**rules)
    data = batches()[: lengths[dist.get_rank()]]
    train(model, opt, data, steps)
    return global_vector(model, opt), opt.clock, opt.gradient_steps, opt.rounds


@pytest.mark.parametrize("steps", [60, 62])
def test_unequal_loaders_and_gradient_counts_end_on_the_same_clock(world, steps):
    got = world.run(unequal_job, workers=3, lengths=[1, 3, 5], steps=steps, draws="independent")
    assert {clock for _, clock, _, _ in got} == {steps}
    assert {rounds for *_, rounds in got} == {math.ceil(steps / 6)}
    assert len({gradients for _, _, gradients, _ in got}) > 1
    for other in got[1:]:
        np.testing.assert_array_equal(got[0][0], other[0])


class Epochs:
    """A loader that shuffles by an epoch it must be told."""

    def __init__(self, data, attribute):
        self.data, self.told, self.passes = data, [], 0
        setattr(self, attribute, self)

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        self.passes += 1
        return iter(self.data)


@pytest.mark.parametrize("attribute", ["sampler", "batch_sampler"])
@pytest.mark.usefixtures("alone")
def test_until_goes_over_the_loader_again_and_tells_its_sampler_the_epoch(attribute):
    model, opt = build(mix_prob=0.0)
    loader = Epochs(batches()[:4], attribute)
    train(model, opt, loader, 14)
    assert loader.told == [0, 1, 2, 3]
    assert loader.passes == 4
    assert opt.gradient_steps == 14


@pytest.mark.usefixtures("alone")
def test_until_feeds_a_distributed_sampler_of_torch():
    data = torch.utils.data.TensorDataset(*batches()[0])
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=4)
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)
    model, opt = build(mix_prob=0.0)
    train(model, opt, loader, 6)
    assert sampler.epoch == 2


@pytest.mark.usefixtures("alone")
def test_steps_that_cut_a_round_short_end_with_one_shorter_round():
    model, opt = build(warmup_steps=4)
    train(model, opt, batches(), 4 + 6 * 3 + 2)
    assert opt.clock == 24
    assert opt.synced
    assert [entry["steps"] for entry in opt.ledger.history] == [6, 6, 6, 2]
    assert [entry["clock"] for entry in opt.ledger.history] == [10, 16, 22, 24]


@pytest.mark.usefixtures("alone")
def test_until_stops_at_once_when_the_clock_is_there():
    model, opt = build()
    train(model, opt, batches(), 12)
    assert list(palsgd.until(batches(), opt, steps=12)) == []
    assert list(palsgd.until([], opt, steps=0)) == []


@pytest.mark.usefixtures("alone")
def test_a_loader_that_runs_dry_is_named_with_the_clock():
    model, opt = build(mix_prob=0.0)
    with pytest.raises(ValueError, match=r"ran dry at clock 5 of 20 .*can be iterated again"):
        train(model, opt, iter(batches()), 20)
    model, opt = build()
    with pytest.raises(ValueError, match="ran dry at clock 0 of 20"):
        train(model, opt, [], 20)


@pytest.mark.parametrize("steps", [-1, 2.5, None])
@pytest.mark.usefixtures("alone")
def test_until_refuses_steps_that_are_not_a_whole_number(steps):
    _, opt = build()
    with pytest.raises(ValueError, match=f"steps={steps!r}"):
        next(palsgd.until(batches(), opt, steps=steps))


# -- the data --------------------------------------------------------------------------------------


def sampled(samples=100, batch_size=10, seed=4):
    """A loader of numbered samples that a DistributedSampler shuffles by the epoch."""
    data = torch.utils.data.TensorDataset(torch.arange(samples))
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=seed)
    return torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler)


def seen_until(loader, opt, ends, **rules):
    """The samples that a run sees whose stages end at these clocks."""
    seen = []
    for end in ends:
        for (numbers,) in palsgd.until(loader, opt, steps=end):
            seen += numbers.tolist()
            opt.model.weight.grad = torch.zeros_like(opt.model.weight)
            opt.step()
    return seen


def one_worker(**rules):
    model = nn.Linear(2, 1, bias=False)
    return palsgd.LocalSGD(model, sgd(model), transport=palsgd.Alone(), **rules)


@pytest.mark.parametrize("ends", [[3, 7, 10, 15, 25], [25], [10, 20, 25]])
def test_stages_go_on_in_the_data_where_the_last_one_ended(ends):
    opt = one_worker()
    seen = seen_until(sampled(), opt, ends)
    assert sorted(seen[:100]) == sorted(seen[100:200]) == list(range(100))
    assert seen[:100] != seen[100:200]
    assert seen == seen_until(sampled(), one_worker(), [25])
    assert core_of(opt).at.epoch == 2


def test_a_stage_with_another_loader_begins_a_new_epoch():
    opt, first, second = one_worker(), sampled(), sampled()
    seen = seen_until(first, opt, [3]) + seen_until(second, opt, [6])
    assert (first.sampler.epoch, second.sampler.epoch) == (0, 1)
    assert seen[:30] != seen[30:]


class TellsEpoch:
    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


class Shuffled(TellsEpoch, torch.utils.data.RandomSampler):
    """A sampler of torch's that shuffles by the epoch."""

    def __init__(self, data):
        TellsEpoch.__init__(self)
        torch.utils.data.RandomSampler.__init__(self, data)


class Numbers(TellsEpoch, torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(index)


class Loader(TellsEpoch, torch.utils.data.DataLoader):
    def __init__(self, *args, **settings):
        TellsEpoch.__init__(self)
        torch.utils.data.DataLoader.__init__(self, *args, **settings)


def test_every_part_of_a_loader_is_told_the_epoch_once():
    data = Numbers()
    sampler = Shuffled(data)
    inside = torch.utils.data.BatchSampler(sampler, 2, drop_last=True)
    inside.told, inside.set_epoch = [], lambda epoch: inside.told.append(epoch)
    loader = Loader(data, batch_sampler=inside)
    opt = one_worker()
    for _ in palsgd.until(loader, opt, steps=7):
        opt.model.weight.grad = torch.zeros_like(opt.model.weight)
        opt.step()
    for part in (loader, data, sampler, inside):
        assert part.told == [0, 1, 2]


class Wrapped:
    """What a progress bar or a prefetcher is: it keeps a loader, and has its length and batches."""

    def __init__(self, loader):
        self.iterable, self.kind = loader, TellsEpoch  # a class that one keeps is not told

    def __len__(self):
        return len(self.iterable)

    def __iter__(self):
        return iter(self.iterable)


def test_a_loader_inside_others_is_dealt_anew_each_epoch():
    """DistributedSampler deals by the epoch that it is told, else every epoch alike."""
    data = Numbers()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    loader = Wrapped(Wrapped(torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)))
    opt, seen = one_worker(), []
    for batch in palsgd.until(loader, opt, steps=9):
        seen.append(batch.tolist())
        opt.model.weight.grad = torch.zeros_like(opt.model.weight)
        opt.step()
    assert data.told == [0, 1, 2]
    assert sampler.epoch == 2
    assert seen[:3] != seen[3:6] != seen[6:]


def test_a_loop_that_never_steps_is_told_so_once():
    opt = one_worker()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number, _ in enumerate(palsgd.until([1, 2, 3], opt, steps=9)):
            if number == 600:
                break
    (line,) = [str(each.message) for each in said]
    assert line.startswith("the clock is still at 0 after 257 batches, more than a whole pass over")


def test_a_loop_that_steps_less_than_once_a_pass_is_let_be():
    opt = one_worker()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, _ in enumerate(palsgd.until([1, 2, 3], opt, steps=9)):
            if number % 50 == 49:
                opt.model.weight.grad = torch.zeros_like(opt.model.weight)
                opt.step()
    assert opt.clock == 9


class Stateful:
    """A loader with a state of its own, by the protocol of torchdata's StatefulDataLoader: a state
    that is loaded holds for the next pass."""

    def __init__(self, items):
        self.items, self.next, self.loaded = items, 0, None

    def __iter__(self):
        self.next, self.loaded = self.loaded or 0, None
        while self.next < len(self.items):
            self.next += 1
            yield self.items[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.loaded = state["next"]


@pytest.mark.parametrize("stop", [3, 4, 5, 7])
def test_a_loader_with_a_state_of_its_own_is_resumed_with_the_optimizer(stop):
    items = [(torch.tensor([float(i)]),) for i in range(5)]
    opt = one_worker()
    seen = seen_until(Stateful(items), opt, [stop])
    resumed = one_worker()
    resumed.load_state_dict(opt.state_dict())
    seen += seen_until(Stateful(items), resumed, [12])
    assert seen == [float(i % 5) for i in range(12)]


def test_a_loader_without_a_state_resumes_at_the_start_of_its_epoch():
    opt = one_worker()
    seen_until(sampled(), opt, [13])
    resumed, loader = one_worker(), sampled()
    resumed.load_state_dict(opt.state_dict())
    seen = seen_until(loader, resumed, [20])
    assert loader.sampler.epoch == 1
    assert seen == seen_until(sampled(), one_worker(), [20])[100:170]


@pytest.mark.parametrize(
    ("epochs", "length", "warmup", "p", "clock"),
    [
        (1, 90, 0, 0.1, 100),
        (2, 45, 0, 0.1, 100),
        (1.5, 60, 9, 0.1, 99),
        (1, 8, 10, 0.5, 8),
        (3, 5, 5, 0.0, 15),
        (1, 10, 0, 0.25, 14),
        (0, 10, 0, 0.25, 0),
        (1, 63, 0, 0.3, 90),
    ],
)
def test_epochs_are_the_warm_up_and_the_other_batches_over_1_minus_p(
    epochs, length, warmup, p, clock
):
    model, opt = build(mix_prob=p, mix_rate=None, warmup_steps=warmup, transport=palsgd.Alone())
    data = (batches(0) * 30)[:length]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the warm-up lasts")
        for batch in palsgd.until(data, opt, epochs=epochs):
            take_step(model, opt, batch)
    assert opt.clock == clock


def epochs_job(lengths):
    model, opt = build()
    for batch in palsgd.until((batches() * 3)[: lengths[dist.get_rank()]], opt, epochs=1):
        take_step(model, opt, batch)
    return opt.clock, vector(model)


def test_epochs_end_at_one_clock_on_all_workers(world):
    (clock, first), (other, second) = world.run(epochs_job, workers=2, lengths=[14, 14])
    assert clock == other == 20
    np.testing.assert_array_equal(first, second)


def test_epochs_of_loaders_of_unequal_length_are_refused_on_all_workers(world):
    for got in world.outcomes(epochs_job, workers=2, timeout=8, lengths=[14, 12]):
        assert got.error == "ValueError", got.trace
        assert "len(loader) differs between workers: rank 1 has 12, rank 0 has 14" in got.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(steps=4, epochs=1), "steps=4 and epochs=1 are both given; give one of them"),
        ({}, "steps=None must be a whole number"),
        (dict(epochs=-1), "epochs=-1 must be a number >= 0"),
        (dict(epochs="2"), "epochs='2' must be a number >= 0"),
    ],
)
def test_until_needs_one_of_steps_and_epochs(given, message):
    with pytest.raises(ValueError, match=message):
        palsgd.until([1], one_worker(), **given)


def test_epochs_need_a_loader_with_a_length():
    endless = (batch for batch in [1, 2])
    with pytest.raises(ValueError, match=r"generator has not; give steps= instead"):
        next(palsgd.until(endless, one_worker(), epochs=1))


class Proxy:
    """As frameworks wrap an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_until_takes_the_optimizer_out_of_a_frameworks_proxy():
    opt = one_worker()
    seen_until(sampled(), opt, [2])
    assert len(list(zip(range(3), palsgd.until(sampled(), Proxy(opt), steps=9), strict=False))) == 3


# -- the inner optimizer ---------------------------------------------------------------------------


def parts_of(model):
    return [torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)]


@pytest.mark.parametrize("which", [0, 1])
def test_no_part_of_a_list_of_inner_optimizers_may_be_stepped_by_hand(which):
    model = linear()
    inner = parts_of(model)
    opt = palsgd.LocalSGD(model, inner, transport=palsgd.Alone())
    take_step(model, opt, batches(0)[0])
    before = vector(model)
    with pytest.raises(RuntimeError, match=r"own step\(\) was called"):
        inner[which].step()
    np.testing.assert_array_equal(vector(model), before)


def test_the_step_by_which_torch_makes_an_optimizers_state_is_allowed():
    """With learning rates of 0 and no state yet, as get_optimizer_state_dict does it."""
    model = linear()
    inner = torch.optim.AdamW(model.parameters(), lr=0.0)
    opt = palsgd.LocalSGD(model, inner, transport=palsgd.Alone())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    inner.step()
    assert len(inner.state) == 2
    assert opt.clock == 0
    with pytest.raises(RuntimeError, match=r"own step\(\) was called"):
        inner.step()


def test_an_inner_optimizer_is_free_again_when_the_last_palsgd_optimizer_is_gone():
    model = linear()
    inner = sgd(model)
    opts = [palsgd.LocalSGD(model, inner, transport=palsgd.Alone()) for _ in range(2)]
    mse(model, batches(0)[0]).backward()
    opts.pop().step()
    gc.collect()
    with pytest.raises(RuntimeError, match=r"own step\(\) was called"):
        inner.step()
    opts.pop().step()
    gc.collect()
    inner.step()


# -- AMP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.usefixtures("alone")
def test_a_step_that_the_grad_scaler_skips_leaves_clock_and_model_untouched(warmup):
    model, opt = build(linear(torch.float32), warmup_steps=warmup)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for i, batch in enumerate(batches(dtype=torch.float32)):
        opt.zero_grad()
        scaler.scale(mse(model, batch) * (math.inf if i in (0, 3) else 1)).backward()
        before, clock = vector(model), opt.clock
        scaler.step(opt)
        scaler.update()
        if i in (0, 3):
            assert opt.clock == clock
            np.testing.assert_array_equal(vector(model), before)
        else:
            assert opt.clock > clock
            assert (vector(model) != before).any()
    assert opt.gradient_steps == 3
    assert scaler.get_scale() == 2.0


@pytest.mark.usefixtures("alone")
def test_scaled_training_equals_unscaled_training():
    ends = []
    for enabled in (True, False):
        model, opt = build(linear(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=18):
            opt.zero_grad()
            scaler.scale(mse(model, batch)).backward()
            scaler.step(opt)
            scaler.update()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)  # a power of two costs no bits


# -- clipping --------------------------------------------------------------------------------------


def clipped_job(steps, max_norm):
    ours, twin = linear(), DistributedDataParallel(linear())
    opt = palsgd.DDP(ours, sgd(ours, momentum=0.9), max_norm=max_norm)
    bare = sgd(twin, momentum=0.9)
    clipped = 0
    for batch in batches() * (steps // 5):
        take_step(ours, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        clipped += int(nn.utils.clip_grad_norm_(twin.parameters(), max_norm) > max_norm)
        bare.step()
    return vector(ours), vector(twin), clipped


@pytest.mark.parametrize("workers", [2, 3])
def test_max_norm_clips_the_averaged_gradient_as_torch_ddp_and_clip_grad_norm_do(world, workers):
    for ours, twin, clipped in world.run(clipped_job, workers=workers, steps=10, max_norm=0.5):
        np.testing.assert_allclose(ours, twin, rtol=1e-12)
        assert clipped >= 3


@pytest.mark.usefixtures("alone")
def test_max_norm_clips_the_local_gradient_in_the_local_phase():
    model, opt = build(mix_prob=0.0, sync_every=100, max_norm=0.5)
    twin = linear()
    bare = sgd(twin, momentum=0.9)
    for batch in batches():
        take_step(model, opt, batch)
        bare.zero_grad()
        mse(twin, batch).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        bare.step()
    np.testing.assert_array_equal(vector(model), vector(twin))
