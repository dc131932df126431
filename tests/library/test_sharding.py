"""Sharded models (FSDP2): two replicas of two shards each, against two unsharded workers."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import palsgd
from support.core_access import anchor_of
from support.problems import batches, mse

WARMUP, H = 3, 4
STEPS = WARMUP + 3 * H + 1  # the last round is cut short
RULES = dict(sync_every=H, mix_prob=0.3, mix_rate=2.0, warmup_steps=WARMUP, seed=6)
OUTER = palsgd.nesterov(lr=0.3, momentum=0.8)


def even(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 3)).double()


def uneven(seed=0):
    """Seven rows over two ranks; and a parameter of one row, of which one rank has none."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 3)).double()


def one_row(seed=0):
    """All parameters have one row: the second rank of a replica holds nothing at all."""
    torch.manual_seed(seed)
    return nn.Linear(4, 1, bias=False).double()


MODELS = {"even": even, "uneven": uneven, "one_row": one_row}


def place():
    """Which replica and which shard this rank is, as the mesh below lays them out."""
    return divmod(dist.get_rank(), 2)


def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def sharded(kind, style, seed=0):
    """The model, and what palsgd must be told about its replicas."""
    model, whole = MODELS[kind](seed), mesh()
    if style == "2-D":
        layers, group = whole, {}
    else:
        layers, group = whole["shard"], dict(group=whole["replica"].get_group())
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=layers)
    return fully_shard(model, mesh=layers), group


def build(model, **rules):
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return palsgd.PALSGD(model, inner, **(dict(outer=OUTER) | RULES | rules))


def replica_batches(replica, half=None):
    """The replica's data; its two ranks see half of each batch, which have the same mean loss."""
    rows = slice(None) if half is None else slice(3 * half, 3 * half + 3)
    return [(a[rows], y[rows]) for a, y in batches(replica)]


def train_on(model, opt, data, steps=STEPS, on_step=None):
    feed = [data[(opt.gradient_steps + i) % len(data)] for i in range(steps)]
    for batch in palsgd.until(feed, opt, steps=steps):
        mse(model, batch).backward()
        if on_step:
            on_step()
        opt.step()
        opt.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vector(model):
    return torch.cat([whole(p.detach()).reshape(-1) for p in model.parameters()]).numpy().copy()


def report(model, opt):
    with opt.anchor_weights():
        anchor = vector(model)
    counts = dict(
        clock=opt.clock,
        gradient_steps=opt.gradient_steps,
        mixing_steps=opt.ledger.mixing_steps,
        rounds=opt.rounds,
        history=[(e["clock"], e["gradient_steps"]) for e in opt.ledger.history],
    )
    return anchor, counts


# -- the same as unsharded workers -------------------------------------------------------------


def sharded_run(kind, style, **rules):
    replica, shard = place()
    model, group = sharded(kind, style)
    opt = build(model, **group, **rules)
    path = []
    train_on(
        model, opt, replica_batches(replica, shard), on_step=lambda: path.append(vector(model))
    )
    return *report(model, opt), np.array(path)


def unsharded_run(kind, **rules):
    model = MODELS[kind]()
    opt = build(model, **rules)
    path = []
    data = replica_batches(dist.get_rank())
    train_on(model, opt, data, on_step=lambda: path.append(vector(model)))
    return *report(model, opt), np.array(path)


def check_equal(world, kind, style, **rules):
    got = world.run(sharded_run, workers=4, kind=kind, style=style, **rules)
    want = world.run(unsharded_run, workers=2, kind=kind, **rules)
    for rank, (anchor, counts, path) in enumerate(got):
        twin = want[rank // 2]
        assert counts == twin[1]  # draws are keyed by replica: two ranks, one plan
        np.testing.assert_allclose(path, twin[2], rtol=1e-9, atol=1e-12)  # local models too
        np.testing.assert_allclose(anchor, twin[0], rtol=1e-9, atol=1e-12)
    return got


@pytest.mark.parametrize("draws", ["independent", "balanced"])
@pytest.mark.parametrize("style", ["2-D", "1-D and group"])
def test_two_replicas_of_two_shards_equal_two_unsharded_workers(world, style, draws):
    got = check_equal(world, "even", style, draws=draws)
    assert not np.array_equal(got[0][2][-1], got[2][2][-1])  # replicas differ between syncs
    np.testing.assert_array_equal(got[0][2], got[1][2])  # the ranks of one replica do not


@pytest.mark.parametrize("style", ["2-D", "1-D and group"])
@pytest.mark.parametrize("kind", ["uneven", "one_row"])
def test_shards_of_unequal_length_and_of_none_equal_unsharded_workers(world, kind, style):
    check_equal(world, kind, style)


def test_many_buckets_give_the_same_sharded_model(world):
    one = world.run(sharded_run, workers=4, kind="even", style="2-D")
    many = world.run(sharded_run, workers=4, kind="even", style="2-D", bucket_mb=80 / 2**20)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_max_norm_clips_by_the_norm_of_the_whole_model(world):
    check_equal(world, "even", "1-D and group", max_norm=0.05)
    check_equal(world, "even", "2-D", max_norm=0.05)


@pytest.mark.parametrize("style", ["2-D", "1-D and group"])
@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_an_overlapped_sharded_model_equals_an_overlapped_unsharded_one(world, kind, style):
    check_equal(world, kind, style, delay=2)


def test_each_shard_is_compressed_with_its_like_in_the_other_replicas(world):
    plain = world.run(sharded_run, workers=4, kind="uneven", style="2-D", delay=2)
    coded = world.run(sharded_run, workers=4, kind="uneven", style="2-D", delay=2, compress="int8")
    for (anchor, _, _), (near, _, _) in zip(plain, coded, strict=True):
        np.testing.assert_array_equal(near, coded[0][0])
        assert 0 < np.abs(anchor - near).max() < 2e-3


def fragments_of_shards():
    model, group = sharded("even", "2-D")
    build(model, **group, fragments=2)


def test_fragments_of_a_sharded_model_are_refused(world):
    for outcome in world.outcomes(fragments_of_shards, workers=4):
        assert outcome.error == "ValueError"
        assert "use fragments=1" in outcome.message


# -- gradients ---------------------------------------------------------------------------------


def gradients(style):
    """The gradient the inner optimizer gets at each step, and what it is made of by hand."""
    replica, shard = place()
    model, group = sharded("even", style)
    opt = build(model, mix_prob=0.0, **group)
    twin, seen = even(), []

    def by_hand(whose, i):
        data = replica_batches(whose)
        twin.zero_grad()
        with torch.enable_grad():
            mse(twin, data[i % len(data)]).backward()
        return torch.cat([p.grad.reshape(-1) for p in twin.parameters()]).numpy().copy()

    def look(*_):
        i = opt.gradient_steps
        weights = torch.tensor(vector(model))
        nn.utils.vector_to_parameters(weights, twin.parameters())
        own = by_hand(replica, i)
        mean = (own + by_hand(1 - replica, i)) / 2
        got = torch.cat([whole(p.grad).reshape(-1) for p in model.parameters()]).numpy().copy()
        seen.append((got, own, mean))

    opt.inner.register_step_pre_hook(look)
    train_on(model, opt, replica_batches(replica, shard), steps=WARMUP + H)
    return seen


@pytest.mark.parametrize("style", ["2-D", "1-D and group"])
def test_replicas_average_gradients_in_the_warmup_and_not_after_it(world, style):
    got = world.run(gradients, workers=4, style=style)
    for seen in got:
        assert len(seen) == WARMUP + H
        for i, (gradient, own, mean) in enumerate(seen):
            want = mean if i < WARMUP else own
            np.testing.assert_allclose(gradient, want, rtol=1e-9, atol=1e-12)
            assert not np.allclose(own, mean)


# -- what is sent ------------------------------------------------------------------------------


def bytes_sent(kind, style):
    model, group = sharded(kind, style)
    opt = build(model, mix_prob=0.0, **group)
    train_on(model, opt, replica_batches(*place()), steps=WARMUP + 2 * H)
    held = sum(p.to_local().numel() for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    return held, total, [entry["bytes_sent"] for entry in opt.ledger.history]


@pytest.mark.parametrize("style", ["2-D", "1-D and group"])
@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_a_rank_sends_its_shard_and_no_more(world, kind, style):
    got = world.run(bytes_sent, workers=4, kind=kind, style=style)
    for held, total, sent in got:
        assert held < 0.7 * total
        for one in sent:
            assert 8 * held <= one <= 8 * (held + 9 * 2)  # and the header of two workers
    assert got[0][0] + got[1][0] == got[0][1]


# -- errors ------------------------------------------------------------------------------------


def fail_on(rank, what, style, policy="raise"):
    """At the sync of the second round, with one of the four ranks in trouble."""
    replica, shard = place()
    model, group = sharded("even", style)
    opt = build(model, warmup_steps=0, mix_prob=0.0, on_nonfinite=policy, **group)

    def trouble():
        if opt.clock == 2 * H - 1 and dist.get_rank() == rank:
            if what == "anchor":
                anchor_of(opt)[1] += 1e-9
            else:
                model[0].weight.grad.to_local()[0, 0] = torch.nan

    try:
        train_on(model, opt, replica_batches(replica, shard), on_step=trouble)
    except palsgd.SyncError as error:
        return type(error).__name__, str(error), opt.clock
    return None, "", opt.clock


@pytest.mark.parametrize("style", ["2-D", "1-D and group"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("what", "error"), [("anchor", "ConsensusError"), ("model", "NonFiniteError")]
)
def test_trouble_on_one_rank_is_raised_on_all_four_and_names_its_replica(
    world, what, error, rank, style
):
    for got in world.run(fail_on, workers=4, timeout=20, rank=rank, what=what, style=style):
        assert got[0] == error
        if what == "model" or rank == 3:  # of two anchors that differ, the first is believed
            assert f"worker {rank // 2} of 2" in got[1]
        assert got[2] == 2 * H


def start_elsewhere(style):
    model, group = sharded("even", style, seed=int(place()[0] == 1))
    opt = build(model, warmup_steps=0, **group)
    train_on(model, opt, replica_batches(*place()))


def test_replicas_that_start_from_other_weights_are_told_on_all_four_ranks(world):
    for got in world.outcomes(start_elsewhere, workers=4, style="2-D"):
        assert got.error == "ConsensusError"
        assert "worker 1 of 2" in got.message


def skip(rank):
    """`rank` breaks its shard; the whole replica must be left out of the mean."""
    replica, shard = place()
    model, _ = sharded("even", "2-D")
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = palsgd.LocalSGD(model, inner, sync_every=H, on_nonfinite="skip")
    before = []

    def trouble():
        if opt.clock == H - 1:
            rows = [p.detach() - 0.05 * p.grad for p in model.parameters()]
            before.append(torch.cat([whole(r).reshape(-1) for r in rows]).numpy().copy())
            if dist.get_rank() == rank:
                model[0].weight.grad.to_local()[0, 0] = torch.nan

    train_on(model, opt, replica_batches(replica, shard), steps=H, on_step=trouble)
    return before[0], vector(model)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_skip_leaves_out_every_shard_of_a_broken_replica(world, rank):
    got = world.run(skip, workers=4, rank=rank)
    sound = got[0 if rank > 1 else 2][0]  # the other replica's model is the mean of what is left
    for _, synced in got:
        np.testing.assert_allclose(synced, sound, rtol=1e-9, atol=1e-12)


def other_settings():
    """One rank of four is given another seed."""
    model, _ = sharded("even", "2-D")
    build(model, seed=7 if dist.get_rank() == 3 else 6)
    # An error on some ranks only would leave the others waiting here.
    dist.barrier()


def test_other_settings_on_one_rank_are_told_on_all_four(world):
    for got in world.outcomes(other_settings, workers=4, timeout=5):
        assert got.error == "ValueError"
        assert "seed" in got.message
        assert "7" in got.message
        assert "6" in got.message


def no_replica_axis():
    model = fully_shard(even(), mesh=init_device_mesh("cpu", (2,)))
    build(model)


def test_a_mesh_of_shards_without_a_group_for_the_replicas_is_refused_with_the_fix(world):
    for got in world.outcomes(no_replica_axis, workers=2):
        assert got.error == "ValueError"
        assert "2-D mesh" in got.message
        assert "group=" in got.message
        assert "\n" not in got.message


# -- checkpoints -------------------------------------------------------------------------------


def fingerprint(model, opt):
    def states(optimizer):
        return [
            whole(v).double().numpy().copy()
            for entry in optimizer.state_dict()["state"].values()
            for v in entry.values()
            if isinstance(v, torch.Tensor)
        ]

    return dict(
        weights=vector(model),
        inner=states(opt.inner),
        outer=states(opt.outer),
        anchor=anchor_of(opt).numpy().copy(),
        clock=(opt.clock, opt.gradient_steps, opt.rounds),
    )


def resume_from_checkpoints(folder, kind, style, **rules):
    replica, shard = place()
    data = replica_batches(replica, shard)
    model, group = sharded(kind, style)
    opt = build(model, **group, **rules)
    saved = {}
    feed = [data[i % len(data)] for i in range(STEPS)]
    for i, batch in enumerate(palsgd.until(feed, opt, steps=STEPS)):
        if i % 3 == 1:  # mid-round or not; the run then goes on
            palsgd.checkpoint.save(f"{folder}/{i}", model, opt)
            saved[i] = (opt.clock, vector(model))
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    want, resumed = fingerprint(model, opt), []
    for i, (clock, weights) in saved.items():
        model, group = sharded(kind, style, seed=9)
        opt = build(model, **group, **rules)
        palsgd.checkpoint.load(f"{folder}/{i}", model, opt)
        assert opt.clock == clock
        np.testing.assert_array_equal(vector(model), weights)
        train_on(model, opt, data)
        resumed.append(fingerprint(model, opt))
    return want, resumed, [weights for _, weights in saved.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "style"), [("even", "2-D"), ("uneven", "2-D"), ("uneven", "1-D and group")]
)
def test_a_sharded_run_resumed_from_a_checkpoint_equals_the_uninterrupted_one(
    world, tmp_path, kind, style
):
    got = world.run(
        resume_from_checkpoints, workers=4, timeout=30, folder=str(tmp_path), kind=kind, style=style
    )
    for want, resumed, _ in got:
        assert len(resumed) >= 3
        for one in resumed:
            np.testing.assert_equal(one, want)
    apart = [not np.array_equal(a, b) for a, b in zip(got[0][2], got[2][2], strict=True)]
    assert any(apart)  # some of them from the middle of a round, where replicas differ


@pytest.mark.slow
def test_every_rank_finds_what_its_shard_left_unsent_and_has_in_flight(world, tmp_path):
    got = world.run(
        resume_from_checkpoints, workers=4, timeout=30, folder=str(tmp_path), kind="uneven",
        style="2-D", delay=3, compress="int4", draws="shared",
    )  # fmt: skip
    for want, resumed, _ in got:
        for one in resumed:
            np.testing.assert_equal(one, want)


def ledger_through_a_checkpoint(folder):
    model, _ = sharded("uneven", "2-D")
    opt = build(model)
    train_on(model, opt, replica_batches(*place()), steps=WARMUP + 2 * H)
    palsgd.checkpoint.save(folder, model, opt)
    want = opt.ledger.as_dict()
    model, _ = sharded("uneven", "2-D", seed=9)
    opt = build(model)
    palsgd.checkpoint.load(folder, model, opt)
    return want, opt.ledger.as_dict()


def test_each_rank_finds_its_own_ledger_in_a_checkpoint(world, tmp_path):
    """The ranks of a replica hold shards of unequal length, so they send unequally much."""
    for want, got in world.run(ledger_through_a_checkpoint, workers=4, folder=str(tmp_path)):
        np.testing.assert_equal(got, want)


def train_after_saving():
    replica, shard = place()
    data = replica_batches(replica, shard)
    ends = []
    for looks in (False, True):
        model, _ = sharded("even", "2-D")
        opt = build(model)
        train_on(model, opt, data, steps=WARMUP + 2 * H)
        if looks:
            opt.state_dict()
        train_on(model, opt, data, steps=WARMUP + 4 * H)
        ends.append(vector(model))
    return ends


def test_taking_a_state_of_a_sharded_run_does_not_disturb_it(world):
    for plain, looked_at in world.run(train_after_saving, workers=4):
        np.testing.assert_array_equal(plain, looked_at)
