"""Which tensors are touched, how, and in what precision."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import palsgd
from palsgd.flat import Buckets, Layout
from support.core_access import fields_of
from support.problems import batches, global_vector, mse, net, train, vector

RULES = dict(sync_every=4, mix_prob=0.3, mix_rate=1.0, seed=11)


def build(model, inner=None, **rules):
    inner = inner or torch.optim.SGD(model.parameters(), lr=0.05)
    return palsgd.PALSGD(model, inner, **(RULES | rules))


def seed_with(start, **rules):
    """The first seed whose first round begins like this."""
    rules = RULES | rules
    shape = {k: rules[k] for k in ("sync_every", "mix_prob")}
    for seed in range(10_000):
        plan = palsgd.round_plan(seed=seed, worker=0, round=0, draws="balanced", **shape)
        if plan[: len(start)] == list(start):
            return seed
    raise AssertionError("no such seed")


def set_gradients(model, seed):
    """Any gradient will do: what is tested is what becomes of it."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def walk(model, opt, steps, worker=0):
    """`steps` calls of step() with gradients of the worker's own."""
    for i in range(steps):
        set_gradients(model, 1000 * worker + i)
        opt.step()


def tensors(model):
    return [p.detach().clone() for p in model.parameters()]


class Bag(nn.Module):
    """Parameters of any kind and nothing else."""

    def __init__(self, *params):
        super().__init__()
        self.params = nn.ParameterList(params)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- in place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_mb", [128, 1e-5])
@pytest.mark.usefixtures("alone")
def test_parameters_stay_the_same_objects_at_the_same_address(bucket_mb):
    model = net()
    opt = build(model, warmup_steps=2, bucket_mb=bucket_mb)
    places = lambda: [(id(t), t.data_ptr()) for t in model.state_dict(keep_vars=True).values()]  # noqa: E731
    before, start = places(), vector(model)
    for batch in palsgd.until(batches(dtype=torch.float32), opt, steps=22):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        with opt.anchor_weights():
            assert places() == before
        assert places() == before
    assert opt.rounds == 5
    assert opt.ledger.mixing_steps > 0
    assert (vector(model) != start).any()


@pytest.mark.usefixtures("alone")
def test_a_view_of_a_parameter_sees_every_update():
    model = net()
    view = model[0].weight.detach().view(-1)
    opt = build(model, warmup_steps=2)
    train(model, opt, batches(dtype=torch.float32), 22)
    assert torch.equal(view, model[0].weight.detach().view(-1))


# -- the inner optimizer -----------------------------------------------------------------------

INNER = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "muon": partial(torch.optim.Muon, lr=0.02),
}


def matrices():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))


@pytest.mark.parametrize("name", INNER)
@pytest.mark.usefixtures("alone")
def test_between_syncs_one_worker_is_the_bare_inner_optimizer_bit_for_bit(name):
    ours, twin = matrices(), matrices()
    inner, bare = INNER[name](ours.parameters()), INNER[name](twin.parameters())
    opt = build(ours, inner, mix_prob=0.0, sync_every=1000)
    for batch in batches(dtype=torch.float32) * 4:
        for model, optimizer in ((ours, opt), (twin, bare)):
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
    np.testing.assert_array_equal(vector(ours), vector(twin))
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        assert set(inner.state[mine]) == set(bare.state[theirs])  # nothing of ours is in it
        for key, value in bare.state[theirs].items():
            torch.testing.assert_close(inner.state[mine][key], value, rtol=0, atol=0)
    assert [set(g) for g in inner.param_groups] == [set(g) for g in bare.param_groups]


@pytest.mark.parametrize("name", INNER)
@pytest.mark.usefixtures("alone")
def test_inner_state_is_not_touched_by_mixing_and_syncs(name):
    model = matrices()
    inner = INNER[name](model.parameters())
    opt = build(model, inner, mix_rate=0.5)
    after_inner = []
    inner.register_step_post_hook(
        lambda *_: after_inner.append(
            [v.clone() if isinstance(v, torch.Tensor) else v for v in state_values(inner)]
        )
    )
    train(model, opt, batches(dtype=torch.float32), 16)
    assert opt.rounds == 4
    torch.testing.assert_close(state_values(inner), after_inner[-1], rtol=0, atol=0)


def state_values(inner):
    return [value for state in inner.state.values() for value in state.values()]


# -- precision ---------------------------------------------------------------------------------


def round_by_hand(local, anchor, plan, seeds, *, lr, eta, p, outer_lr):
    """One round of one worker with plain SGD; what concerns the anchor in the anchor's dtype."""
    beta, mixed = lr * eta / p, 0
    for mixing in plan:
        if mixing:
            mixed += 1
            continue
        pull(local, anchor, beta, mixed)
        mixed = 0
        generator = torch.Generator().manual_seed(next(seeds))
        for x in local:
            x.add_(torch.randn(x.shape, generator=generator).to(x.dtype), alpha=-lr / (1 - p))
    pull(local, anchor, beta, mixed)
    for x, a in zip(local, anchor, strict=True):
        a.sub_(outer_lr * (a - x.to(a.dtype)))
        x.copy_(a)


def pull(local, anchor, beta, steps):
    for x, a in zip(local, anchor, strict=True):
        if steps:
            x.copy_(a + (1 - beta) ** steps * (x.to(a.dtype) - a))


@pytest.mark.parametrize(
    ("dtypes", "anchor_dtype"),
    [
        ([torch.bfloat16, torch.bfloat16], torch.float32),
        ([torch.float16, torch.float16], torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.float32, torch.float32], torch.float32),
        ([torch.float64, torch.float64], torch.float64),
        ([torch.float32, torch.float64], torch.float64),
    ],
)
@pytest.mark.usefixtures("alone")
def test_the_anchor_has_full_precision_whatever_the_models_dtype(dtypes, anchor_dtype):
    """The twin does three rounds by hand; from the second on, a low-precision model cannot
    hold the anchor it is pulled to."""
    model = Bag(*(nn.Parameter(random(5, 3, seed=i).to(d)) for i, d in enumerate(dtypes)))
    rules = dict(sync_every=12, seed=seed_with([False, True, True, False], sync_every=12))
    opt = build(model, outer=partial(torch.optim.SGD, lr=0.7), **rules)
    facts = palsgd.Facts(sync_every=12, seed=rules["seed"])
    local = tensors(model)
    anchor = [x.to(anchor_dtype, copy=True) for x in local]
    seeds = itertools.count()
    for round in range(3):
        plan = opt.method.plan(0, round, 12, facts)
        assert [False, True] in [plan[i : i + 2] for i in range(11)]
        round_by_hand(local, anchor, plan, seeds, lr=0.05, eta=1.0, p=0.3, outer_lr=0.7)
    walk(model, opt, next(seeds))
    assert (opt.clock, opt.rounds) == (36, 3)
    kept = list(fields_of(opt)["anchor"].values())
    # a pull in bf16 instead of fp32 would be off by 1e-3
    tight = dict(rtol=2e-6, atol=2e-6) if anchor_dtype == torch.float32 else {}
    torch.testing.assert_close(kept, anchor, **tight)
    for got, want in zip(tensors(model), kept, strict=True):
        assert torch.equal(got, want.to(got.dtype))
    assert [p.dtype for p in model.parameters()] == dtypes


@pytest.mark.usefixtures("alone")
def test_steps_too_small_for_bf16_add_up_in_the_anchor():
    """At 1.0 bf16 knows no number nearer than 2^-8 below; a quarter of that per sync is kept."""
    model = Bag(nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    inner = torch.optim.SGD(model.parameters(), lr=2**-7)
    outer = partial(torch.optim.SGD, lr=2**-3)
    opt = palsgd.DiLoCo(model, inner, sync_every=1, outer=outer)
    seen = []
    for _ in range(4):
        model.params[0].grad = torch.ones_like(model.params[0])
        opt.step()
        seen.append(model.params[0][0].item())
    assert seen[0] == 1.0  # 1 - 2^-10 is rounded away in the model, not in the anchor
    assert seen[-1] < 1.0


# -- which tensors -----------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


@pytest.mark.usefixtures("alone")
def test_tied_weights_are_mixed_once():
    model = Tied()
    opt = build(model, seed=seed_with([False, True, False]))
    (anchor,) = tensors(model)
    stepped = []
    opt.inner.register_step_post_hook(lambda *_: stepped.extend(tensors(model)))
    walk(model, opt, 1)
    assert opt.clock == 2
    beta = 0.05 * 1.0 / 0.3
    want = stepped[0] - beta * (stepped[0] - anchor)
    torch.testing.assert_close(tensors(model)[0], want, rtol=1e-6, atol=1e-7)
    assert model.out.weight is model.embed.weight
    assert list(fields_of(opt)["anchor"]) == ["embed.weight"]


def payload_job(make_model, steps, **rules):
    model = make_model()
    opt = build(model, outer=partial(torch.optim.SGD, lr=1.0), **rules)
    walk(model, opt, steps, worker=dist.get_rank())
    return tensors(model), [entry["bytes_sent"] for entry in opt.ledger.history]


def header(workers):
    return 4 * 9 * workers


def test_tied_weights_are_sent_once(world):
    for _, sent in world.run(payload_job, workers=2, make_model=Tied, steps=12):
        assert len(sent) >= 3
        assert set(sent) == {4 * 15 + header(2)}


def partly_frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


def frozen_job(steps, listed):
    model = partly_frozen()
    chosen = [p for p in model.parameters() if listed or p.requires_grad]
    opt = build(model, torch.optim.SGD(chosen, lr=0.05, weight_decay=0.1), warmup_steps=2)
    start = tensors(model)
    walk(model, opt, steps, worker=dist.get_rank())
    moved = [bool((a != b).any()) for a, b in zip(start, tensors(model), strict=True)]
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        moved,
        [e["bytes_sent"] for e in opt.ledger.history],
        elements,
        list(fields_of(opt)["anchor"]),
    )


@pytest.mark.parametrize("listed", [True, False])
def test_frozen_parameters_are_neither_changed_nor_sent_nor_kept(world, listed):
    for moved, sent, elements, kept in world.run(frozen_job, workers=2, steps=14, listed=listed):
        assert moved == [False, False, True, True, True, True]
        statistics = 2 * 7 + 4  # running mean and variance, and a counter of four pieces
        assert set(sent) == {4 * (elements + statistics) + header(2)}
        assert kept == ["1.weight", "1.bias", "3.weight", "3.bias"]


@pytest.mark.usefixtures("alone")
def test_two_groups_keep_their_settings_and_cover_the_model():
    ours, twin = net(), net()
    groups = lambda m: [  # noqa: E731
        {"params": [p for p in m.parameters() if p.dim() > 1], "lr": 0.03, "weight_decay": 0.1},
        {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 0.01},
    ]
    inner, bare = (torch.optim.AdamW(groups(m), weight_decay=0.0) for m in (ours, twin))
    opt = build(ours, inner, mix_prob=0.0, sync_every=1000)
    for batch in batches(dtype=torch.float32):
        for model, optimizer in ((ours, opt), (twin, bare)):
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
    np.testing.assert_array_equal(vector(ours), vector(twin))


# -- shapes and strides ------------------------------------------------------------------------


def odd_shapes():
    """Empty and one-element tensors among others; sizes that no bucket divides."""
    shapes = [(0,), (3, 0), (), (1,), (1, 1, 1), (5,), (4, 4), (0, 2), (7, 3)]
    return Bag(*(nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)))


def reordered():
    """Channels-last and transposed weights: memory without holes, in another order."""
    torch.manual_seed(1)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    one_channel = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
    transposed = nn.Parameter(random(6, 5).t())
    permuted = nn.Parameter(random(2, 3, 4).permute(2, 0, 1))
    return Bag(*conv.parameters(), *one_channel.parameters(), transposed, permuted)


def sliced():
    """Parameters that are windows on larger tensors: memory with holes."""
    return Bag(
        nn.Parameter(random(4, 9)[:, 1:6]),
        nn.Parameter(random(5)),
        nn.Parameter(random(12, seed=2)[::3]),
        nn.Parameter(random(3, 8, seed=3).t()[::2]),
    )


def made_plain(make_model):
    return Bag(*(nn.Parameter(p.detach().clone().contiguous()) for p in make_model().parameters()))


def low_precision():
    return odd_shapes().to(torch.bfloat16)


@pytest.mark.usefixtures("alone")
def test_the_odd_shapes_are_odd():
    conv, *_, transposed, permuted = reordered().params
    assert conv.is_contiguous(memory_format=torch.channels_last)
    holes = sliced().params
    assert not any(
        p.is_contiguous() for p in (conv, transposed, permuted, holes[0], holes[2], holes[3])
    )
    assert {p.numel() for p in odd_shapes().parameters()} >= {0, 1, 5}


def trained_job(make_model, steps, **rules):
    model = make_model()
    opt = build(model, outer=palsgd.nesterov(lr=0.5), **rules)
    strides = [p.stride() for p in model.parameters()]
    walk(model, opt, steps, worker=dist.get_rank())
    assert [p.stride() for p in model.parameters()] == strides
    assert opt.rounds >= 3
    with opt.anchor_weights():
        return [p.detach().clone().contiguous() for p in model.parameters()], opt.ledger.messages


@pytest.mark.parametrize("bucket_mb", [128, 100 / 2**20])
@pytest.mark.parametrize("make_model", [reordered, sliced])
def test_strided_parameters_train_as_contiguous_ones_do(world, make_model, bucket_mb):
    """To rounding: loops over other strides may fuse a multiplication with an addition."""
    rules = dict(steps=14, warmup_steps=3, bucket_mb=bucket_mb, mix_rate=0.5)
    odd = world.run(trained_job, workers=2, make_model=make_model, **rules)
    plain = world.run(trained_job, workers=2, make_model=partial(made_plain, make_model), **rules)
    for (ours, _), (twin, _) in zip(odd, plain, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make_model", [net, odd_shapes, reordered, sliced, low_precision])
@pytest.mark.parametrize("bucket", [1, 7, 16])
def test_buckets_that_cut_through_tensors_give_the_bits_of_one_bucket(world, make_model, bucket):
    """At K = 2: a sum of two does not depend on where it is cut."""
    rules = dict(steps=14, warmup_steps=3, mix_rate=0.5)
    small = dict(rules, bucket_mb=4 * bucket / 2**20)
    whole = world.run(trained_job, workers=2, make_model=make_model, **rules)
    cut = world.run(trained_job, workers=2, make_model=make_model, **small)
    for (one, messages), (many, more) in zip(whole, cut, strict=True):
        assert more > messages
        for i, (a, b) in enumerate(zip(one, many, strict=True)):
            assert torch.equal(a, b), f"parameter {i}"
    for a, b in zip(whole[0][0], whole[1][0], strict=True):
        assert torch.equal(a, b)


def half_job(steps, bucket_mb):
    model = net(dtype=torch.bfloat16)
    opt = build(model, mix_rate=0.5, warmup_steps=2, bucket_mb=bucket_mb)
    train(model, opt, batches(dtype=torch.bfloat16), steps)
    return global_vector(model, opt)


def test_a_bf16_model_trains_alike_with_one_bucket_and_with_many(world):
    whole, cut = (
        world.run(half_job, workers=2, steps=18, bucket_mb=mb) for mb in (128, 12 / 2**20)
    )
    np.testing.assert_array_equal(whole[0], whole[1])
    np.testing.assert_array_equal(whole, cut)


# -- layout ------------------------------------------------------------------------------------


@st.composite
def strided(draw):
    """A tensor of any small shape in any memory order, with holes or without."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    holes = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    memory = [shape[d] + holes[d] for d in order]
    count = math.prod(memory)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    base = torch.arange(count, dtype=torch.float32).remainder(200).to(dtype).view(memory)
    base = base.permute([order.index(d) for d in range(len(shape))])
    for dim, size in enumerate(shape):
        base = base.narrow(dim, draw(st.integers(0, holes[dim])), size)
    assert list(base.shape) == shape
    return base


def cut(layout, size):
    width = max(1, min(size, layout.size))
    return Buckets(layout, range(layout.size), width, torch.empty(width + 3)).ranges


def read_all(layout, tensors, size):
    """Bucket by bucket, as it would be sent: all buckets use the same memory in turn."""
    parts = [torch.empty(0)]
    for bucket in cut(layout, size):
        bucket.flat.fill_(math.nan)
        bucket.read(tensors)
        parts.append(bucket.flat.clone())
    return torch.cat(parts)


def write_all(layout, tensors, size, everything):
    low = 0
    for bucket in cut(layout, size):
        bucket.flat.copy_(everything[low : low + bucket.flat.numel()])
        bucket.write(tensors)
        low += bucket.flat.numel()
    assert low == layout.size


many = st.lists(strided(), max_size=5)
sizes = st.integers(1, 50)


@settings(deadline=None)
@given(many, sizes, sizes)
def test_tensors_of_any_shape_and_stride_go_through_buckets_of_any_size(given_, size, other):
    layout = Layout(given_)
    assert layout.size == sum(t.numel() for t in given_)
    everything = read_all(layout, given_, size)
    assert everything.numel() == layout.size
    assert not everything.isnan().any()  # no element left out
    for view, tensor in zip(layout.views(everything), given_, strict=True):
        assert torch.equal(view, tensor.float())
    back = [torch.full_like(t, -1) for t in given_]
    write_all(layout, back, other, everything)
    for tensor, original in zip(back, given_, strict=True):
        assert torch.equal(tensor, original)


@settings(deadline=None)
@given(many, sizes)
def test_no_bucket_is_larger_than_asked_and_none_is_empty(given_, size):
    layout = Layout(given_)
    lengths = [bucket.flat.numel() for bucket in cut(layout, size)]
    assert max(lengths) <= size
    assert min(lengths) > 0 or lengths == [0]  # an empty model still has its header to send
    assert len(lengths) == max(1, math.ceil(layout.size / size))


@settings(deadline=None)
@given(many, sizes)
def test_writing_goes_through_the_strides_and_into_nothing_else(given_, size):
    """Tensors with holes: what lies in the holes belongs to someone else."""
    layout = Layout(given_)
    storages = [t.untyped_storage() for t in given_]
    bases = [
        torch.empty(0, dtype=t.dtype).set_(s, 0, (s.nbytes() // t.itemsize,))
        for t, s in zip(given_, storages, strict=True)
    ]
    want = [base.clone() for base in bases]
    for base, tensor in zip(want, given_, strict=True):
        base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(-3)
    write_all(layout, given_, size, torch.full((layout.size,), -3.0))
    for base, expected in zip(bases, want, strict=True):
        assert torch.equal(base, expected)


@settings(deadline=None)
@given(many, sizes)
def test_reading_and_writing_follow_the_layout_and_not_the_strides_at_hand(given_, size):
    """Gradients may lie in memory in another order than their parameters."""
    layout = Layout(given_)
    plain = [t.contiguous() for t in given_]
    everything = read_all(layout, plain, size)
    assert torch.equal(everything, read_all(layout, given_, size))
    back = [torch.full_like(t, -1) for t in plain]
    write_all(layout, back, size, everything)
    for tensor, original in zip(back, given_, strict=True):
        assert torch.equal(tensor, original)


@settings(deadline=None)
@given(many, sizes)
def test_subtract_is_the_difference_of_the_flat_vectors(given_, size):
    layout = Layout(given_)
    anchor = torch.arange(layout.size, dtype=torch.float32) * 0.37
    want, low = anchor - read_all(layout, given_, max(layout.size, 1)), 0
    for bucket in cut(layout, size):
        bucket.flat.fill_(math.nan)
        bucket.subtract(anchor, layout.views(anchor), given_)
        assert torch.equal(bucket.flat, want[low : low + bucket.flat.numel()])
        low += bucket.flat.numel()
    assert low == layout.size
