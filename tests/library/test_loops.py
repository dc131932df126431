"""Training loops in the manner of known frameworks, between real processes whose bytes the kernel
counts: each trains locally, or says what to do."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.namespaces import bytes_so_far, may_make_namespaces, world_alone

WIDTH = 256  # four matrices of this width: one MiB in fp32
STEPS = 64
pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="only root makes namespaces")


@pytest.fixture(scope="module")
def alone():
    with world_alone() as world:
        yield world


def network(norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(WIDTH) if norm else nn.Tanh()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(layers[0], middle, layers[1], nn.Tanh(), layers[2], layers[3])


def data(count=8):
    numbers = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, WIDTH, generator=numbers) for _ in range(count)]


def loss_of(model, batch):
    return (model(batch) - batch).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def local_sgd(model, **rules):
    return palsgd.DiLoCo(model, sgd(model), **(dict(sync_every=16) | rules))


def counted(loop, **given):
    """What the kernel counts while a loop trains, and what the ledgers say. A loop calls its first
    argument when all is built, as a DistributedDataParallel sends the whole model when it is
    made."""
    began = []

    def begin():
        dist.barrier()
        began.append(bytes_so_far())

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt = loop(begin, **given)
    dist.barrier()
    by_kernel = bytes_so_far() - began[0]
    own = torch.tensor([float(opt.ledger.bytes_on_the_wire) if opt is not None else 0.0])
    dist.all_reduce(own)
    return by_kernel, float(own), [str(each.message) for each in told]


# -- the ledger and the kernel ---------------------------------------------------------------------


def plain_loop(begin, wrap=False, attach=False, method="diloco", norm=False, steps=STEPS, **rules):
    net = network(norm)
    model = DistributedDataParallel(net) if wrap else net
    opt = palsgd.DDP(model, sgd(model)) if method == "ddp" else local_sgd(model, **rules)
    if attach:
        model = DistributedDataParallel(net)
        opt.attach(model)
    begin()
    for batch in palsgd.until(data(), opt, steps=steps):
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return opt


@pytest.mark.parametrize(
    "given",
    [
        dict(method="ddp", steps=16),
        dict(method="ddp", wrap=True, steps=16),
        dict(wrap=True, warmup_steps=16, steps=48),
        dict(wrap=True, warmup_steps=16, steps=48, norm=True),
        dict(sync_every=4),
        dict(sync_every=16, wrap=True),
        dict(sync_every=8, attach=True, warmup_steps=8),
        dict(sync_every=16, compress="int8"),
        dict(sync_every=8, fragments=2, delay=1),
    ],
    ids=str,
)
def test_bytes_on_the_wire_are_within_a_tenth_of_what_the_kernel_counts(alone, given):
    for by_kernel, by_ledger, _ in alone.run(counted, workers=2, loop=plain_loop, **given):
        assert by_ledger == pytest.approx(by_kernel, rel=0.1)


# -- the manners of frameworks ---------------------------------------------------------------------


def nanogpt(begin, accumulate=1, ours=True):
    """Wraps first, and sets DDP's flag before the backward pass of every micro step."""
    model = DistributedDataParallel(network())
    opt = local_sgd(model) if ours else sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = iter(data(STEPS * accumulate))
    begin()
    for _ in range(STEPS):
        for micro in range(accumulate):
            model.require_backward_grad_sync = micro == accumulate - 1
            loss = loss_of(model, next(batches)) / accumulate
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
    return opt if ours else None


def trainer(begin, attach=True, ours=True):
    """Builds the optimizer on the bare model, and wraps the model when training begins. It steps a
    scheduler at every step, and ends with its data."""
    net = network()
    opt = local_sgd(net) if ours else sgd(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    model = DistributedDataParallel(net)
    if attach and ours:
        opt.attach(model)
    model.train()
    begin()
    for batch in data(STEPS):
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
        model.zero_grad()
    return opt if ours else None


class Proxy(torch.optim.Optimizer):
    """An optimizer around another, which is stepped only when gradients are synchronized."""

    def __init__(self, optimizer):
        self.optimizer, self.syncs = optimizer, True
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    def step(self, closure=None):
        if self.syncs:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        if self.syncs:
            self.optimizer.zero_grad(set_to_none)


def prepared(model, optimizer):
    """One call that wraps both."""
    return DistributedDataParallel(model), Proxy(optimizer)


def accelerated(begin, attach=True, ours=True, accumulate=2):
    net = network()
    opt = local_sgd(net) if ours else sgd(net)
    model, proxy = prepared(net, opt)
    if attach and ours:
        opt.attach(model)
    begin()
    for number, batch in enumerate(data(STEPS * accumulate)):
        proxy.syncs = (number + 1) % accumulate == 0
        with contextlib.nullcontext() if proxy.syncs else model.no_sync():
            (loss_of(model, batch) / accumulate).backward()
        proxy.step()
        proxy.zero_grad()
    return opt if ours else None


class Module(nn.Module):
    """A module that makes its optimizer of itself, and computes its loss in `forward`, as the
    strategy's wrapper calls it."""

    def __init__(self, ours):
        super().__init__()
        self.net, self.ours = network(), ours

    def forward(self, batch):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return local_sgd(self) if self.ours else sgd(self)


def lightning(begin, attach=True, ours=True):
    module = Module(ours)
    opt = module.configure_optimizers()
    model = DistributedDataParallel(module)
    if attach and ours:
        opt.attach(model)
    begin()
    for batch in data(STEPS):

        def closure(batch=batch):
            opt.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        opt.step(closure)
    return opt if ours else None


WRAP_LATER = [trainer, accelerated, lightning]


@pytest.mark.parametrize("loop", [nanogpt, *WRAP_LATER])
def test_a_loop_in_the_manner_of_a_framework_trains_locally(alone, loop):
    theirs = alone.run(counted, workers=2, loop=loop, ours=False)
    ours = alone.run(counted, workers=2, loop=loop)
    for (by_kernel, by_ledger, told), (by_ddp, _, _) in zip(ours, theirs, strict=True):
        assert by_kernel < 0.12 * by_ddp
        assert by_ledger == pytest.approx(by_kernel, rel=0.1)
        assert [text for text in told if "kept the gradients local" in text] == told
        assert len(told) == (loop is nanogpt)


@pytest.mark.parametrize("loop", WRAP_LATER)
def test_a_loop_that_wraps_later_and_attaches_nothing_is_told_to(alone, loop):
    for outcome in alone.outcomes(counted, workers=2, loop=loop, attach=False):
        assert outcome.error == "ConsensusError"
        assert "call opt.attach(model)" in outcome.message


def test_accumulation_that_sets_the_flag_in_its_last_micro_step_trains_locally(alone):
    for by_kernel, by_ledger, told in alone.run(counted, workers=2, loop=nanogpt, accumulate=3):
        assert by_ledger == pytest.approx(by_kernel, rel=0.1)
        assert len(told) == 1
