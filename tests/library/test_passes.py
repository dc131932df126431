"""Fewer passes over memory give the bits of the plain operations, and are taken where they may."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import palsgd
from palsgd import passes
from palsgd.digest import digest, folded, sum_of_words
from palsgd.flat import Bucket, FlatModel, Layout
from palsgd.outer import plain_average
from palsgd.passes import can_divide, displaced, divided_step
from palsgd.transports import Message, ProcessGroupTransport
from support.core_access import anchor_of
from support.problems import batches, mse, net, vector

SHAPES = [(), (0,), (1,), (3,), (64,), (65,), (2, 3, 4, 5), (16, 31), (300,), (0, 4)]
CPU = torch.device("cpu")


# -- the displacement, its norm and the digest -----------------------------------------------------


def tensor(shape, kind, dtype):
    """A tensor in the usual order, in channels-last order, or one with gaps in its memory."""
    made = torch.randn(shape, dtype=dtype)
    if kind == "channels last" and made.dim() == 4:
        return made.to(memory_format=torch.channels_last)
    if kind == "gaps" and made.dim():
        return torch.stack([made, made], dim=-1)[..., 0]
    return made


@st.composite
def filled_buckets(draw):
    """A bucket anywhere in a flat model, and local tensors."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    kinds = st.sampled_from(["usual", "channels last", "gaps"])
    shapes = draw(st.lists(st.tuples(st.sampled_from(SHAPES), kinds), min_size=1, max_size=7))
    torch.manual_seed(draw(st.integers(0, 99)))
    local = [tensor(shape, kind, dtype) for shape, kind in shapes]
    layout = Layout(local)
    low = draw(st.integers(0, layout.size)) // 2 * 2
    high = draw(st.integers(low, layout.size))
    anchor = FlatModel(layout, [range(low, high)], dtype=dtype, device=CPU)
    anchor.flat.normal_()
    return Bucket(layout, low, torch.full((high - low,), 9.0, dtype=dtype)), anchor, local


@settings(max_examples=200, deadline=None)
@given(filled_buckets(), st.sampled_from([1, 2, 7, 64, 10_000]))
def test_pieces_give_the_bits_of_the_plain_subtraction_and_the_plain_digest(found, width):
    bucket, anchor, local = found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PIECE", width)
        got = displaced(bucket, anchor, local, with_digest=True, with_moved=True)
    values = bucket.flat.clone()
    bucket.flat.fill_(7.0)
    bucket.subtract(anchor.flat, anchor.views, local)
    assert torch.equal(values, bucket.flat)
    assert got.digest == digest(anchor.part(0))
    assert got.moved == folded(int(sum_of_words(values)))
    plain = torch.linalg.vector_norm(values).square()
    torch.testing.assert_close(got.squares, plain, rtol=1e-5, atol=0)
    if width >= len(values):
        assert torch.equal(got.squares, plain)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 70, 199])
def test_a_value_that_is_not_finite_shows_in_the_squares_of_all_pieces(monkeypatch, value, place):
    monkeypatch.setattr(passes, "PIECE", 50)
    local = [torch.zeros(200)]
    local[0][place] = value
    layout = Layout(local)
    anchor = FlatModel(layout, [range(200)], dtype=torch.float32, device=CPU)
    bucket = Bucket(layout, 0, torch.empty(200))
    found = displaced(bucket, anchor, local, with_digest=False)
    assert not found.squares.isfinite()
    assert found.digest is None


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the sizes that sums and norms are taken of."""

    def __init__(self):
        super().__init__()
        self.sizes = {"sum": [], "linalg_vector_norm": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.sizes:
            self.sizes[name].append(args[0].numel() * args[0].itemsize)
        return func(*args, **(kwargs or {}))


def test_norm_and_digest_never_read_more_than_two_pieces_at_once():
    sizes = [3 * passes.PIECE + 5, 100, passes.PIECE, 7, passes.PIECE - 1]
    local = [torch.zeros(size) for size in sizes]
    layout = Layout(local)
    anchor = FlatModel(layout, [range(layout.size)], dtype=torch.float32, device=CPU)
    bucket = Bucket(layout, 0, torch.empty(layout.size))
    anchor.flat.normal_(generator=torch.Generator().manual_seed(1))
    with Counting() as counting:
        found = displaced(bucket, anchor, local, with_digest=True, with_moved=True)
    assert found.digest == digest(anchor.flat)
    assert found.moved == folded(int(sum_of_words(bucket.flat)))
    norms = counting.sizes["linalg_vector_norm"]
    assert sum(norms) == 4 * layout.size
    assert max(norms) <= 2 * 4 * passes.PIECE
    assert max(counting.sizes["sum"]) <= 2 * 4 * passes.PIECE


# -- the division ----------------------------------------------------------------------------------


def parameters(sizes, seed):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(size)) for size in sizes]


OUTERS = {
    "nesterov": palsgd.nesterov(0.7, 0.9),
    "slow nesterov": palsgd.nesterov(0.2, 0.5),
    "average": plain_average(),
}


@settings(max_examples=60, deadline=None)
@given(
    outer=st.sampled_from(sorted(OUTERS)),
    sizes=st.lists(st.sampled_from([*SHAPES, (70_001,)]), min_size=1, max_size=5),
    divisor=st.integers(2, 9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_step_that_divides_gives_the_bits_of_a_division_and_a_step(
    outer, sizes, divisor, seed, dtype
):
    """The first step, which has no momentum yet, and two more; with tiny gradients too."""
    ours, plain = ([nn.Parameter(p.to(dtype)) for p in parameters(sizes, seed)] for _ in range(2))
    fast, slow = OUTERS[outer](ours), OUTERS[outer](plain)
    for scale in (1.0, 1e-39, 1e3):
        for x, y in zip(ours, plain, strict=True):
            total = torch.randn_like(x) * scale
            x.grad, y.grad = total.clone(), total.clone().div_(divisor)
        with divided_step(fast, divisor):
            fast.step()
        slow.step()
        for x, y in zip(ours, plain, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x.grad, y.grad)
    mine, theirs = fast.state_dict(), slow.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for i, entry in theirs["state"].items():
        assert mine["state"][i].keys() == entry.keys()
        assert all(torch.equal(mine["state"][i][k], v) for k, v in entry.items() if v is not None)


def test_a_step_after_a_divided_one_divides_no_more_even_if_that_one_failed():
    (p,) = params = parameters([4], 0)
    outer = plain_average()(params)
    with pytest.raises(KeyError), divided_step(outer, 3):
        raise KeyError
    before, p.grad = p.detach().clone(), torch.ones(4)
    outer.step()
    assert torch.equal(p, before - 1)
    assert can_divide(outer)


@pytest.mark.parametrize("make", OUTERS.values(), ids=OUTERS)
def test_the_outer_optimizers_of_the_library_divide(make):
    assert can_divide(make(parameters([4], 0)))


class OwnSGD(torch.optim.SGD):
    """A user's."""


def with_hook(register):
    def make(params):
        outer = palsgd.nesterov()(params)
        getattr(outer, register)(lambda *_: None)
        return outer

    return make


def with_group(**settings):
    def make(params):
        outer = palsgd.nesterov()(params)
        outer.param_groups[0].update(settings)
        return outer

    return make


def with_scale(params):
    outer = palsgd.nesterov()(params)
    outer.grad_scale = torch.tensor(2.0)
    return outer


UNUSUAL = {
    "adam": lambda params: torch.optim.Adam(params, fused=True),
    "a kind of SGD": lambda params: OwnSGD(params, lr=1.0, fused=True),
    "not fused": lambda params: torch.optim.SGD(params, lr=1.0),
    "pre hook": with_hook("register_step_pre_hook"),
    "post hook": with_hook("register_step_post_hook"),
    "weight decay": with_group(weight_decay=0.1),
    "maximize": with_group(maximize=True),
    "dampening": with_group(dampening=0.1, nesterov=False),
    "fused no more": with_group(fused=False),
    "scale of its own": with_scale,
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_any_other_outer_optimizer_finds_the_mean_in_its_gradients(make):
    assert not can_divide(make(parameters([4], 0)))


def test_a_hook_on_all_optimizers_finds_the_mean_in_the_gradients():
    outer = palsgd.nesterov()(parameters([4], 0))
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not can_divide(outer)
    finally:
        handle.remove()
    assert can_divide(outer)


def mean_job(takes_sum):
    message = Message(torch.full((3,), 1.0 + dist.get_rank()), takes_sum=takes_sum)
    ProcessGroupTransport().exchange(message)
    found = message.values.tolist(), message.divisor
    message.divide()
    message.divide()
    return *found, message.values.tolist(), message.divisor


@pytest.mark.parametrize(("takes_sum", "left"), [(True, ([6.0] * 3, 3)), (False, ([2.0] * 3, 1))])
def test_a_sum_is_left_only_to_a_message_that_takes_it(world, takes_sum, left):
    for got in world.run(mean_job, workers=3, takes_sum=takes_sum):
        assert got == (*left, [2.0] * 3, 1)


# -- whole syncs -----------------------------------------------------------------------------------


class Watched(ProcessGroupTransport):
    """Keeps what each message was left to be divided by."""

    def mean(self, message):
        super().mean(message)
        self.divisors = [*getattr(self, "divisors", []), message.divisor]


def plain_momentum(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def trained(options, *, hooked, broken, steps=12):
    model, transport = net(), Watched()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = palsgd.DiLoCo(model, inner, sync_every=4, transport=transport, **options)
    if hooked:  # a hook takes the plain way
        opt.outer.register_step_pre_hook(lambda *_: None)
    data = batches(dtype=torch.float32)
    while opt.clock < steps:
        opt.zero_grad()
        mse(model, data[(opt.clock + dist.get_rank()) % len(data)]).backward()
        if opt.clock == broken and dist.get_rank() == 1:
            next(model.parameters()).grad.fill_(torch.nan)
        opt.step()
    state = copy.deepcopy(opt.outer.state_dict()["state"])
    return vector(model), anchor_of(opt).numpy(), state, transport.divisors


def both_ways(options, broken):
    return [trained(options, hooked=hooked, broken=broken) for hooked in (False, True)]


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({}, True),
        ({"fragments": 3}, True),
        ({"on_nonfinite": "skip"}, True),
        ({"bucket_mb": 40 / 2**20}, False),
        ({"compress": "bf16"}, False),
        ({"delay": 2}, False),
        ({"outer": plain_momentum}, False),
    ],
    ids=["plain", "fragments", "left out", "buckets", "compressed", "delayed", "own outer"],
)
def test_a_sync_whose_outer_step_divides_gives_the_bits_of_one_that_finds_the_mean(
    world, options, sums
):
    broken = 5 if "on_nonfinite" in options else None
    for fast, plain in world.run(both_ways, workers=3, options=options, broken=broken):
        assert (fast[0] == plain[0]).all()
        assert (fast[1] == plain[1]).all()
        for i, entry in plain[2].items():
            assert torch.equal(fast[2][i]["momentum_buffer"], entry["momentum_buffer"])
        assert (3 in fast[3]) == sums
        assert set(plain[3]) == {1}


def changed_between(place):
    """The anchor is changed after one sync and before the next, in one of many pieces."""
    passes.PIECE, kept = 8, passes.PIECE
    try:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        opt = palsgd.DiLoCo(model, inner, sync_every=1)
        with pytest.warns(UserWarning, match="no parameter has a gradient"):
            opt.step()
        if dist.get_rank() == 1:
            anchor_of(opt)[place] += 1e-3
        before = anchor_of(opt).clone()
        with pytest.raises(palsgd.ConsensusError, match="worker 1 of 3"):
            opt.step()
        return torch.equal(before, anchor_of(opt))
    finally:
        passes.PIECE = kept


@pytest.mark.parametrize("place", [0, 8, 41, 72])
def test_an_anchor_that_was_changed_since_the_last_sync_is_found_in_any_piece(world, place):
    assert all(world.run(changed_between, workers=3, place=place))
