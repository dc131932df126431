"""Two levels: workers of several ranks, against workers of one rank that see the joint batch."""

import time
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.core_access import anchor_of
from support.problems import batches, mse

WARMUP, H = 2, 4
STEPS = WARMUP + 2 * H + 1  # the last round is cut short
RULES = dict(sync_every=H, mix_prob=0.3, mix_rate=2.0, warmup_steps=WARMUP, seed=6)
OUTER = palsgd.nesterov(lr=0.3, momentum=0.8)
# Sums over the ranks of a worker are added up in another order than those over a joint batch.
CLOSE = dict(rtol=1e-9, atol=1e-11)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normed(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


MODELS = {"small": small, "normed": normed}


def part_of(worker, rank, ranks):
    """One rank's part of each batch of a worker. Parts have equally many rows, so that the mean of
    their mean losses is the mean loss of the batch."""
    rows = slice(6 * rank // ranks, 6 * (rank + 1) // ranks)
    return [(a[rows], y[rows]) for a, y in batches(worker)]


def wrapped(net, inside, style):
    """The module that the loop calls, and the one that the optimizer is given."""
    if style == "fully_shard":
        for layer in net.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=inside)
        sharded = fully_shard(net, mesh=inside)
        return sharded, sharded
    ddp = DistributedDataParallel(net, process_group=inside.get_group())
    return ddp, net if style == "DDP, net given" else ddp


def two_levels(ranks, style="DDP", kind="small", make=palsgd.PALSGD, seed=0, **rules):
    """The module that the loop calls, the optimizer, and this rank's data."""
    mesh = palsgd.worker_groups(ranks)
    worker, rank = divmod(dist.get_rank(), ranks)
    called, given = wrapped(MODELS[kind](seed), mesh["inside"], style)
    opt = build(given, make, group=mesh["workers"].get_group(), **rules)
    return called, opt, part_of(worker, rank, ranks)


def one_level(kind="small", make=palsgd.PALSGD, **rules):
    net = MODELS[kind]()
    return net, build(net, make, **rules), batches(dist.get_rank())


def build(model, make, **rules):
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    own = ("mix_prob", "mix_rate") if make is not palsgd.PALSGD else ()
    chosen = {name: value for name, value in (RULES | rules).items() if name not in own}
    return make(model, inner, **(dict(outer=OUTER) | chosen))


def train(model, opt, data, steps=STEPS):
    """Train to the clock `steps`; returns the local model before each step."""
    path = []
    feed = [data[(opt.gradient_steps + i) % len(data)] for i in range(steps)]
    for batch in palsgd.until(feed, opt, steps=steps):
        mse(model, batch).backward()
        path.append(vector(model))
        opt.step()
        opt.zero_grad()
    return np.array(path)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vector(model):
    return torch.cat([whole(p.detach()).reshape(-1) for p in model.parameters()]).numpy().copy()


def outcome(model, opt, path):
    with opt.anchor_weights():
        anchor = vector(model)
    return dict(anchor=anchor, path=path, clock=opt.clock, gradient_steps=opt.gradient_steps)


def two_level_run(**settings):
    model, opt, data = two_levels(**settings)
    return outcome(model, opt, train(model, opt, data))


def one_level_run(**settings):
    model, opt, data = one_level(**settings)
    return outcome(model, opt, train(model, opt, data))


def check_equal(world, ranks, style, workers=2, close=CLOSE, **settings):
    got = world.run(
        two_level_run, workers=workers * ranks, timeout=120, ranks=ranks, style=style, **settings
    )
    want = world.run(one_level_run, workers=workers, **settings)
    for rank, found in enumerate(got):
        twin = want[rank // ranks]
        assert (found["clock"], found["gradient_steps"]) == (twin["clock"], twin["gradient_steps"])
        np.testing.assert_allclose(found["path"], twin["path"], **close)
        np.testing.assert_allclose(found["anchor"], twin["anchor"], **close)
        np.testing.assert_array_equal(found["path"], got[rank // ranks * ranks]["path"])
    assert not np.array_equal(got[0]["path"], got[ranks]["path"])  # workers differ between syncs
    return got


# -- the same as workers of one rank ------------------------------------------------------------


@pytest.mark.parametrize("style", ["DDP", "DDP, net given", "fully_shard"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_workers_of_several_ranks_equal_workers_of_one_with_the_joint_batch(world, ranks, style):
    check_equal(world, ranks, style)


def test_three_workers_of_two_ranks_equal_three_of_one(world):
    check_equal(world, 2, "DDP", workers=3)


@pytest.mark.parametrize(
    "rules",
    [
        dict(draws="independent"),
        dict(make=palsgd.DiLoCo),
        dict(delay=2),
        dict(fragments=2),
        dict(fragments=2, delay=2),
        dict(max_norm=0.05),
        dict(bucket_mb=80 / 2**20),
        dict(warmup_steps=0),
    ],
    ids=str,
)
def test_every_setting_works_with_ddp_inside(world, rules):
    check_equal(world, 2, "DDP", **rules)


@pytest.mark.parametrize("codec", ["int8", "topk:0.5"])
def test_coded_syncs_with_ddp_inside_equal_those_of_one_rank(world, codec):
    """A value at the border of two codes may be coded differently, which moves it by one code."""
    check_equal(world, 2, "DDP", compress=codec, close=dict(rtol=1e-4, atol=1e-4))


def ddp_method(model, inner, group=None, **rules):
    return palsgd.DDP(model, inner, group=group)


def ddp_run(two):
    model, opt, data = two_levels(2, make=ddp_method) if two else one_level(make=ddp_method)
    return train(model, opt, data, steps=6)


def test_ddp_between_workers_that_have_ddp_inside_is_ddp_over_all_ranks(world):
    got = world.run(ddp_run, workers=4, two=True)
    want = world.run(ddp_run, workers=2, two=False)
    for path in got:
        np.testing.assert_allclose(path, want[0], **CLOSE)
        np.testing.assert_array_equal(path, got[0])


def ranks_of_one(wraps):
    """Workers of one rank through `worker_groups`, or one level as without it."""
    if not wraps:
        return train(*one_level())
    model, opt, data = two_levels(1)
    assert (opt.transport.worker, opt.transport.inside) == (dist.get_rank(), None)
    return train(model, opt, data)


def test_workers_of_one_rank_are_one_level_bit_for_bit(world):
    got, want = (world.run(ranks_of_one, workers=2, wraps=wraps) for wraps in (True, False))
    np.testing.assert_array_equal(got, want)


def one_worker():
    model, opt, data = two_levels(2, warmup_steps=0)
    return opt.transport.workers, train(model, opt, data)


def test_a_single_worker_of_two_ranks_keeps_its_ranks_equal(world):
    (count, first), (_, second) = world.run(one_worker, workers=2)
    assert count == 1
    np.testing.assert_array_equal(first, second)


def scaled_run(two):
    """With a GradScaler. In one step the gradient of worker 1 overflows, on its last rank."""
    rules = dict(warmup_steps=0, draws="shared")
    model, opt, data = two_levels(2, **rules) if two else one_level(**rules)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    path, skipped, last = [], [], dist.get_rank() == dist.get_world_size() - 1
    feed = [data[i % len(data)] for i in range(STEPS)]
    for i, batch in enumerate(palsgd.until(feed, opt, steps=STEPS)):
        overflow = torch.inf if i == 2 and last else 1.0
        scaler.scale(mse(model, batch) * overflow).backward()
        before = opt.clock
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        skipped.append(opt.clock == before)
        path.append(vector(model))
    return path, skipped


def test_a_step_that_a_grad_scaler_skips_is_skipped_on_all_ranks_of_its_worker(world):
    got, want = (world.run(scaled_run, workers=n, two=n > 2) for n in (4, 2))
    assert [sum(skipped) for _, skipped in got] == [0, 0, 1, 1]
    for rank, (path, skipped) in enumerate(got):
        twin = want[rank // 2]
        assert skipped == twin[1]
        np.testing.assert_allclose(path, twin[0], **CLOSE)


def intervals(style):
    """H that is chosen from measured seconds, which differ between ranks."""
    model, opt, data = two_levels(2, style, make=palsgd.DiLoCo, warmup_steps=0, sync_every="auto")
    feed = [data[i % len(data)] for i in range(400)]
    for batch in palsgd.until(feed, opt, steps=400):
        if dist.get_rank() == 1:
            time.sleep(1e-4)
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return [tuple(span) for span in opt.schedule.spans]


@pytest.mark.parametrize("style", ["DDP", "fully_shard"])
def test_all_ranks_choose_the_same_interval_from_what_they_measure(world, style):
    got = world.run(intervals, workers=4, style=style)
    assert len(got[0]) > 1
    assert all(found == got[0] for found in got)


# -- what is sent -------------------------------------------------------------------------------


def bytes_of(two, **rules):
    model, opt, data = two_levels(2, **rules) if two else one_level(**rules)
    train(model, opt, data)
    return opt.ledger.bytes_sent, opt.ledger.messages


def test_the_ranks_of_a_worker_send_its_model_once_together(world):
    got = world.run(bytes_of, workers=4, two=True)
    want = world.run(bytes_of, workers=2, two=False)
    assert got[0][0] + got[1][0] == want[0][0]
    assert got[0][1] == want[0][1]


# -- buffers ------------------------------------------------------------------------------------


def buffers_of(style, **rules):
    model, opt, data = two_levels(2, style, "normed", **rules)
    local, shared = [], []

    def look(event):
        with opt.anchor_weights():
            shared.append([b.clone().numpy() for b in model.buffers()])
        local.append([b.clone().numpy() for b in model.buffers()])

    opt.on(palsgd.events.Synced, look)
    opt.on(palsgd.events.Averaged, look)
    path = train(model, opt, data)
    return local, shared, path


@pytest.mark.parametrize("style", ["DDP", "DDP, net given", "fully_shard"])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_batch_norm_statistics_are_the_same_on_all_ranks_after_every_sync(world, style, compress):
    got = world.run(buffers_of, workers=4, style=style, compress=compress)
    for local, shared, _ in got:
        assert len(local) == WARMUP + 3
        np.testing.assert_equal(shared, got[0][1])
        np.testing.assert_equal(local, got[0][0])
    np.testing.assert_array_equal(got[0][2], got[1][2])  # and the ranks of a worker agree
    assert np.abs(got[0][0][-1][0]).max() > 0


# -- resuming -----------------------------------------------------------------------------------


def everything(model, opt):
    states = [
        whole(value).double().numpy().copy()
        for optimizer in (opt.inner, opt.outer)
        for entry in optimizer.state_dict()["state"].values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    counts = (opt.clock, opt.gradient_steps, opt.rounds)
    return vector(model), anchor_of(opt).numpy().copy(), states, counts


def resumed_runs(folder, style, **rules):
    """A run that saves in two ways after every second step, and the ends of runs that resume."""
    model, opt, data = two_levels(2, style, **rules)
    saved = []
    feed = [data[i % len(data)] for i in range(STEPS)]
    for i, batch in enumerate(palsgd.until(feed, opt, steps=STEPS)):
        if i % 2:
            place = None if folder is None else f"{folder}/{i}"
            if place is not None:
                palsgd.checkpoint.save(place, model, opt)
            weights = {name: w.clone() for name, w in model.state_dict().items()}
            saved.append((place, weights, deepcopy(opt.state_dict())))
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    want, ends = everything(model, opt), []
    for place, weights, state in saved:
        model, opt, data = two_levels(2, style, seed=9, **rules)
        if place is None:
            model.load_state_dict(weights)
            opt.load_state_dict(state)
        else:
            palsgd.checkpoint.load(place, model, opt)
        train(model, opt, data)
        ends.append(everything(model, opt))
    return want, ends


def check_resumed(got):
    for want, ends in got:
        assert len(ends) >= 3
        for end in ends:
            np.testing.assert_equal(end, want)


@pytest.mark.parametrize(
    "rules", [{}, dict(compress="int8", delay=2, draws="shared")], ids=["plain", "coded, delayed"]
)
def test_a_two_level_run_goes_on_from_the_state_of_each_rank_bit_for_bit(world, rules):
    check_resumed(world.run(resumed_runs, workers=4, folder=None, style="DDP", **rules))


@pytest.mark.slow
@pytest.mark.parametrize("style", ["DDP", "DDP, net given", "fully_shard"])
def test_a_two_level_run_goes_on_from_a_checkpoint_bit_for_bit(world, tmp_path, style):
    check_resumed(
        world.run(resumed_runs, workers=4, timeout=120, folder=str(tmp_path), style=style)
    )


def saved_at_a_sync(folder, ranks, **settings):
    model, opt, data = two_levels(ranks, **settings) if ranks else one_level(**settings)
    train(model, opt, data, steps=WARMUP + H)
    palsgd.checkpoint.save(f"{folder}/{opt.transport.worker}", model, opt)


def goes_on_elastically(folder, ranks, **settings):
    model, opt, data = two_levels(ranks, **settings) if ranks else one_level(**settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        palsgd.checkpoint.load(f"{folder}/{opt.transport.worker}", model, opt, elastic=True)
    train(model, opt, data)
    return global_vector(model, opt), [str(each.message) for each in said]


def global_vector(model, opt):
    with opt.anchor_weights():
        return vector(model)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["DDP", "fully_shard"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_workers_of_two_ranks_is_one_of_workers_of_one_rank(
    world, tmp_path, before, after, style
):
    """Every worker has a disk of its own, so one that joins is sent what it loads."""
    ends = []
    for ranks, settings in ((0, {}), (2, dict(style=style))):
        job = dict(folder=str(tmp_path / str(ranks)), ranks=ranks, **settings)
        world.run(saved_at_a_sync, workers=before * (ranks or 1), timeout=120, **job)
        got = world.run(goes_on_elastically, workers=after * (ranks or 1), timeout=120, **job)
        for _, said in got:
            assert f"{before} workers saved step-6, {after} go on" in said[0]
        ends.append([end for end, _ in got])
    for end in ends[1]:
        np.testing.assert_allclose(end, ends[0][0], **CLOSE)


def loaded_by_other_ranks(folder, ranks):
    model, opt, _ = two_levels(ranks)
    palsgd.checkpoint.load(folder, model, opt, elastic=True)


def test_workers_of_other_ranks_than_saved_are_refused_with_both_numbers(world, tmp_path):
    world.run(saved_at_a_sync, workers=2, folder=str(tmp_path), ranks=0)
    for got in world.outcomes(loaded_by_other_ranks, workers=2, folder=f"{tmp_path}/0", ranks=2):
        assert got.error == "ValueError"
        assert "saved by workers of 1 ranks, and these have 2" in got.message


# -- a wrapper that comes later ------------------------------------------------------------------


def attached_run(made_by_hand):
    """The optimizer is built first, the model is wrapped then."""
    worker, rank = divmod(dist.get_rank(), 2)
    if made_by_hand:
        inside, across = groups_of((0, 1), (2, 3)), groups_of((0, 2), (1, 3))
    else:
        mesh = palsgd.worker_groups(2)
        inside, across = mesh["inside"].get_group(), mesh["workers"].get_group()
    net = small()
    opt = build(net, palsgd.PALSGD, group=across)
    model = DistributedDataParallel(net, process_group=inside)
    opt.attach(model)
    return outcome(model, opt, train(model, opt, part_of(worker, rank, 2)))


@pytest.mark.parametrize("made_by_hand", [True, False])
def test_a_wrapper_inside_a_worker_that_is_attached_later_keeps_averaging(world, made_by_hand):
    got = world.run(attached_run, workers=4, made_by_hand=made_by_hand)
    want = world.run(one_level_run, workers=2)
    for rank, found in enumerate(got):
        np.testing.assert_allclose(found["path"], want[rank // 2]["path"], **CLOSE)


def attached_over_all():
    net = small()
    opt = build(net, palsgd.PALSGD, group=palsgd.worker_groups(2)["workers"].get_group())
    opt.attach(DistributedDataParallel(net))


def test_a_wrapper_around_several_workers_that_is_attached_later_is_refused(world):
    for found in world.outcomes(attached_over_all, workers=4, timeout=20):
        assert found.error == "ValueError"
        assert "averages over the ranks 0, 1, 2, 3, and group= has the ranks" in found.message


# -- what is noticed ----------------------------------------------------------------------------


def disturbed(rank, what):
    """One of four ranks changes its model behind the optimizer's back in the second round."""
    model, opt, data = two_levels(2, make=palsgd.DiLoCo, warmup_steps=0)
    feed = [data[i % len(data)] for i in range(4 * H)]
    for batch in palsgd.until(feed, opt, steps=4 * H):
        mse(model, batch).backward()
        if opt.clock == H + 1 and dist.get_rank() == rank:
            if what == "anchor":
                anchor_of(opt)[1] += 1e-9
            else:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = torch.nan if what == "nan" else 1.0
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("what", ["anchor", "model"])
def test_a_rank_that_differs_from_its_worker_is_told_on_all_ranks(world, what, rank):
    for found in world.outcomes(disturbed, workers=4, timeout=20, rank=rank, what=what):
        assert found.error == "ConsensusError"
        assert f"the ranks of worker {rank // 2} of 2 hold different models" in found.message
        assert 'process_group=m["inside"].get_group()' in found.message


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_not_finite_is_told_on_all_ranks(world, rank):
    for found in world.outcomes(disturbed, workers=4, timeout=20, rank=rank, what="nan"):
        assert found.error == "NonFiniteError"
        assert f"worker {rank // 2} of 2" in found.message


def without_wrapper():
    """The ranks of a worker train on data of their own, and nothing averages between them."""
    mesh, net = palsgd.worker_groups(2), small()
    opt = build(net, palsgd.PALSGD, group=mesh["workers"].get_group())
    train(net, opt, batches(dist.get_rank()), steps=40)


def test_ranks_of_a_worker_that_nobody_averages_are_told(world):
    for found in world.outcomes(without_wrapper, workers=4, timeout=20):
        assert found.error == "ConsensusError"
        assert "the ranks of workers 0, 1 of 2 hold different models" in found.message


def averaged_by_somebody_else(group, style):
    """Other code averages the gradients of several workers after backward."""
    model, opt, data = two_levels(2, style, warmup_steps=0)
    mesh = palsgd.worker_groups(2)
    group = None if group == "all" else mesh[group].get_group()
    feed = [data[i % len(data)] for i in range(2 * H)]
    for batch in palsgd.until(feed, opt, steps=2 * H):
        mse(model, batch).backward()
        for param in model.parameters():
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            dist.all_reduce(grad, group=group)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize(
    ("group", "style"), [("all", "DDP"), ("workers", "DDP"), ("workers", "fully_shard")]
)
def test_workers_that_somebody_else_averages_are_told_on_all_ranks(world, group, style):
    job = averaged_by_somebody_else
    for found in world.outcomes(job, workers=4, timeout=20, group=group, style=style):
        assert found.error == "ConsensusError"
        assert "workers 0, 1 of 2 had the same first gradient in the local phase" in found.message


def other_seed():
    """One rank of four is given another seed."""
    mesh = palsgd.worker_groups(2)
    model = DistributedDataParallel(small(), process_group=mesh["inside"].get_group())
    seed = 7 if dist.get_rank() == 3 else 6
    build(model, palsgd.PALSGD, group=mesh["workers"].get_group(), seed=seed)


def test_another_setting_on_one_rank_is_told_on_all_ranks(world):
    for found in world.outcomes(other_seed, workers=4, timeout=20):
        assert found.error == "ValueError"
        assert "seed differs between workers: rank 3 has 7" in found.message


# -- groups that do not fit together ------------------------------------------------------------


def groups_of(*members):
    """The group among `members` that has this rank."""
    made = [dist.new_group(list(ranks)) for ranks in members]
    return next(g for g, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks)


def refused(case):
    mesh, net = palsgd.worker_groups(2), small()
    inside, workers = mesh["inside"].get_group(), mesh["workers"].get_group()
    ddp = DistributedDataParallel
    if case == "no group":
        build(ddp(net, process_group=inside), palsgd.PALSGD)
    elif case == "group inside":
        build(ddp(net, process_group=inside), palsgd.PALSGD, group=inside)
    elif case == "group inside, net given":
        build(net, palsgd.PALSGD, group=inside)
    elif case == "DDP over all":
        build(ddp(net), palsgd.PALSGD, group=workers)
    elif case == "DDP between workers":
        build(ddp(net, process_group=workers), palsgd.PALSGD, group=workers)
    elif case == "overlap":
        group = groups_of((0, 1, 2), (3,))
        build(ddp(net, process_group=inside), palsgd.PALSGD, group=group)
    elif case == "unequal workers":
        build(ddp(net, process_group=groups_of((0, 1, 2), (3,))), palsgd.PALSGD)
    elif case == "HSDP and group":
        build(fully_shard(net, mesh=mesh), palsgd.PALSGD, group=workers)
    elif case == "sharded over the group":
        build(fully_shard(net, mesh=mesh["inside"]), palsgd.PALSGD, group=inside)
    elif case == "sharded over workers":
        build(fully_shard(net, mesh=mesh["workers"]), palsgd.PALSGD, group=workers)
    elif case == "several meshes":
        fully_shard(net[0], mesh=mesh["inside"])
        fully_shard(net[2], mesh=mesh["workers"])
        build(net, palsgd.PALSGD, group=workers)
    elif case == "does not divide":
        palsgd.worker_groups(3)
    else:
        palsgd.worker_groups(0)


WRONG = {
    "no group": ("averages over the ranks 0, 1 of 4 only", "group=", "worker_groups"),
    "group inside": ("of one worker", 'group=m["workers"].get_group()'),
    "group inside, net given": ("of one worker", 'group=m["workers"].get_group()'),
    "DDP over all": ("averages over the ranks 0, 1, 2, 3, and group= has the ranks 0, 2",),
    "DDP between workers": ("averages over the ranks 0, 2, and group= has the ranks 0, 2",),
    "overlap": ("DistributedDataParallel averages over the ranks 0, 1, and group= has",),
    "unequal workers": ("averages over the ranks 0, 1, 2 of 4 only",),
    "HSDP and group": ("leave out group=", '["inside"]'),
    "sharded over the group": ("of one worker", 'group=m["workers"].get_group()'),
    "sharded over workers": ("fully_shard averages over the ranks 0, 2, and group= has",),
    "several meshes": ("several device meshes", "shard them over one mesh"),
    "does not divide": ("ranks_per_worker=3 does not divide the 4 ranks", "1, 2, 4"),
    "no ranks": ("ranks_per_worker=0 must be a whole number >= 1",),
}


@pytest.mark.parametrize("case", WRONG)
def test_groups_that_do_not_fit_are_refused_on_all_ranks_with_the_fix(world, case):
    found = world.outcomes(refused, workers=4, timeout=20, case=case)
    assert [each.error for each in found] == ["ValueError"] * 4, [e.trace for e in found]
    assert all("\n" not in each.message for each in found)
    for words in WRONG[case]:
        assert words in found[0].message


def test_without_torch_distributed_the_remedy_is_named():
    with pytest.raises(ValueError, match="init_process_group"):
        palsgd.worker_groups(2)


def handmade_groups():
    """Groups that were not made by `worker_groups`, with another order of ranks."""
    inside, across = groups_of((0, 2), (1, 3)), groups_of((0, 1), (2, 3))
    worker, rank = dist.get_rank() % 2, dist.get_rank() // 2
    ddp = DistributedDataParallel(small(), process_group=inside)
    opt = build(ddp, palsgd.PALSGD, group=across)
    return outcome(ddp, opt, train(ddp, opt, part_of(worker, rank, 2)))


def test_groups_made_by_hand_are_two_levels_too(world):
    got = world.run(handmade_groups, workers=4)
    want = world.run(one_level_run, workers=2)
    for rank, found in enumerate(got):
        np.testing.assert_allclose(found["path"], want[rank % 2]["path"], **CLOSE)


def axes():
    mesh = palsgd.worker_groups(2)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
    return mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.device_type, mesh == named


def test_the_mesh_has_the_two_axes_and_ranks_of_a_worker_follow_one_another(world):
    for found in world.run(axes, workers=4):
        assert found == (("workers", "inside"), [[0, 1], [2, 3]], "cpu", True)
