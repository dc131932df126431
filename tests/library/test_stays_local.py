"""After the warm-up nothing averages behind the optimizer's back, or every worker is told."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.problems import batches, linear, mse, net, train, vector
from support.stepping import build, mean_of, sgd, take_step

WIDE = dict(mix_prob=0.0, sync_every=50)


def is_own(model, batch, plain):
    """Is the gradient that backward leaves this worker's own, and not the mean?"""
    plain.load_state_dict(model.module.state_dict())
    plain.zero_grad()
    mse(plain, batch).backward()
    own = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    got = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert not torch.allclose(own, mean_of(own))
    return torch.equal(own, got)


# -- a flag that is set again ----------------------------------------------------------------------


def flag_job(make=linear, wrap=None, hook=None, broadcasts=None, **rules):
    """A loop that sets DDP's flag before every backward pass. Its warnings, and whose gradients it
    saw."""
    model = DistributedDataParallel(make(dtype=torch.float64), **(wrap or {}))
    if broadcasts is not None:  # the argument has another name in newer releases of torch
        model.broadcast_buffers = broadcasts
    if hook == "before":
        model.register_comm_hook(None, mean_hook)
    model, opt = build(model, **(WIDE | rules))
    plain, found = make(dtype=torch.float64), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches():
            opt.zero_grad()
            model.require_backward_grad_sync = True
            mse(model, batch).backward()
            found.append(is_own(model, batch, plain) if make is linear else None)
            opt.step()
            assert opt.gradient_steps < rules.get("warmup_steps", 0) or not (
                model.require_backward_grad_sync or model.require_forward_param_sync
            )
    return found, [str(w.message) for w in told], opt.ledger.bytes_sent


def mean_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_loop_that_sets_the_flag_at_every_step_trains_locally_after_one_warning(world, warmup):
    for own, told, _ in world.run(flag_job, workers=2, warmup_steps=warmup):
        assert own == [False] * warmup + [True] * (5 - warmup)
        assert len(told) == 1
        assert "kept the gradients local" in told[0]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        (dict(make=net), "buffers=False"),
        (dict(wrap=dict(find_unused_parameters=True)), "find_unused_parameters=False"),
        (dict(hook="before"), "a communication hook of your own"),
    ],
)
def test_a_flag_that_is_set_again_raises_where_something_was_exchanged(world, setting, named):
    for outcome in world.outcomes(flag_job, workers=2, **setting):
        assert outcome.error == "RuntimeError"
        assert named in outcome.message
        assert "require_backward_grad_sync" in outcome.message


def test_batch_norm_without_broadcasts_stays_local_under_a_flag(world):
    for _, told, _ in world.run(flag_job, workers=2, make=net, broadcasts=False):
        assert len(told) == 1


def sent_anyway_job():
    """What the ledger says when a hook of the user's has averaged."""
    model = DistributedDataParallel(linear())
    model.register_comm_hook(None, mean_hook)
    model, opt = build(model, **WIDE)
    take_step(model, opt, batches()[0])
    before = opt.ledger.bytes_sent
    model.require_backward_grad_sync = True
    with pytest.raises(RuntimeError):
        take_step(model, opt, batches()[1])
    return opt.ledger.bytes_sent - before


def test_the_ledger_counts_what_was_averaged_anyway(world):
    assert world.run(sent_anyway_job, workers=2) == [15 * 8, 15 * 8]


class Partly(nn.Module):
    """Half of its parameters have no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.used(x)


def uneven_job(kind):
    """Worker 1 computes twice as many gradients as worker 0."""
    if kind == "BatchNorm":
        model = DistributedDataParallel(net(dtype=torch.float64))
    else:
        model = DistributedDataParallel(Partly(), find_unused_parameters=True)
    model, opt = build(model, warmup_steps=2, mix_prob=0.0, sync_every=4)
    data = batches() * 4
    for step, batch in enumerate(data[:10]):
        for _ in range(1 + dist.get_rank() * (step >= 2)):
            mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return opt.rounds


@pytest.mark.parametrize("kind", ["BatchNorm", "unused parameters"])
def test_workers_may_compute_different_numbers_of_gradients(world, kind):
    assert world.run(uneven_job, workers=2, kind=kind) == [2, 2]


# -- hooks -----------------------------------------------------------------------------------------


def users_hook_job(when):
    model = DistributedDataParallel(linear())
    if when == "before":
        model.register_comm_hook(None, mean_hook)
    model, opt = build(model, **WIDE)
    if when == "after":
        with pytest.raises(RuntimeError, match="once"):
            model.register_comm_hook(None, mean_hook)
    found = []
    for batch in batches():
        opt.zero_grad()
        mse(model, batch).backward()
        found.append(is_own(model, batch, linear()))
        opt.step()
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_stay_local_beside_a_hook_of_the_users(world, when):
    for found in world.run(users_hook_job, workers=2, when=when):
        assert found == [True] * 5


def hook_bits_job(**wrap):
    """Three steps of the warm-up, and of torch's DDP without any hook."""
    data, found = batches(), []
    for ours in (True, False):
        model = DistributedDataParallel(linear(), **wrap)
        opt = palsgd.DDP(model, sgd(model)) if ours else sgd(model)
        for batch in data[:3]:
            opt.zero_grad()
            mse(model, batch).backward()
            opt.step()
        found.append(vector(model))
    return found


def test_the_hook_averages_by_the_operations_of_torch(world):
    for ours, theirs in world.run(hook_bits_job, workers=3):
        assert (ours == theirs).all()


def copied_job():
    """A copy of a wrapped model gets a hook of its own."""
    model, _ = build(DistributedDataParallel(linear()), **WIDE)
    twin, opt = build(copy.deepcopy(model), **WIDE)
    twin.require_backward_grad_sync = True
    mse(twin, batches()[0]).backward()
    own = is_own(twin, batches()[0], linear())
    with pytest.warns(UserWarning, match="kept the gradients local"):
        opt.step()
    return own


def test_a_copy_of_a_wrapped_model_stays_local_too(world):
    assert world.run(copied_job, workers=2) == [True, True]


def static_job(hook=False):
    model = DistributedDataParallel(linear(), static_graph=True)
    if hook:
        model.register_comm_hook(None, mean_hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, opt = build(model, **WIDE)
        found = []
        for batch in batches():
            opt.zero_grad()
            mse(model, batch).backward()
            found.append(is_own(model, batch, linear()))
            opt.step()
    return found


def test_a_static_graph_is_local_from_the_first_step_on(world):
    for found in world.run(static_job, workers=2):
        assert found == [True] * 5


def test_a_static_graph_with_a_hook_of_the_users_needs_one_step_of_warmup(world):
    for outcome in world.outcomes(static_job, workers=2, hook=True):
        assert outcome.error == "ValueError"
        assert "warmup_steps=1" in outcome.message


# -- a wrapper that came later ---------------------------------------------------------------------


def later_job(attach, warmup=0, steps=12):
    net = linear()
    _, opt = build(net, warmup_steps=warmup, sync_every=6, mix_prob=0.0)
    model = DistributedDataParallel(net)
    for _ in range(2 * attach):  # the second call changes nothing
        opt.attach(model)
    own = []
    for batch in palsgd.until(batches(), opt, steps=steps):
        opt.zero_grad()
        mse(model, batch).backward()
        own.append(is_own(model, batch, linear()))
        opt.step()
    return own


def test_a_wrapper_that_came_later_is_told_of_at_the_first_sync_on_every_worker(world):
    for outcome in world.outcomes(later_job, workers=2, attach=False):
        assert outcome.error == "ConsensusError"
        assert "opt.attach(model)" in outcome.message
        assert "workers 0, 1 of 2" in outcome.message
        assert "(clock 6)" in outcome.message


@pytest.mark.parametrize("warmup", [0, 3])
def test_attach_keeps_a_later_wrapper_local_after_the_warmup(world, warmup):
    for own in world.run(later_job, workers=2, attach=True, warmup=warmup):
        assert own == [False] * warmup + [True] * (12 - warmup)


def attach_midway_job():
    """The wrapper and attach() in the middle of a round."""
    net = linear()
    _, opt = build(net, sync_every=6, mix_prob=0.0)
    for batch in batches()[:3]:
        take_step(net, opt, batch)
    model = DistributedDataParallel(net, init_sync=False)
    opt.attach(model)
    train(model, opt, batches(), steps=12)
    return opt.rounds


def test_attach_works_in_the_middle_of_a_round(world):
    assert world.run(attach_midway_job, workers=2) == [2, 2]


def bad_attach_job(kind):
    net = linear()
    _, opt = build(net, **WIDE)
    if kind == "plain":
        opt.attach(net)
    elif kind == "other":
        opt.attach(DistributedDataParallel(linear()))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        opt.attach(fully_shard(linear(), mesh=mesh))
    return type(opt).__name__


def test_attach_refuses_other_models_and_sharded_ones(world):
    for outcome in world.outcomes(bad_attach_job, workers=2, kind="other"):
        assert outcome.error == "ValueError"
        assert "other parameters" in outcome.message
    for outcome in world.outcomes(bad_attach_job, workers=2, kind="sharded"):
        assert outcome.error == "ValueError"
        assert "needs none" in outcome.message
    world.run(bad_attach_job, workers=2, kind="plain")


# -- inner optimizers that communicate -------------------------------------------------------------


def communicating_job(kind):
    model = linear()
    if kind == "zero":
        inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    else:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        inner = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=4, warmup_steps=0))
    palsgd.DiLoCo(model, inner, sync_every=8)


@pytest.mark.parametrize("kind", ["zero", "post"])
def test_torchs_optimizers_that_communicate_are_refused(world, kind):
    for outcome in world.outcomes(communicating_job, workers=2, kind=kind):
        assert outcome.error == "ValueError"
        assert "communicates in every step" in outcome.message


class AveragingSGD(torch.optim.SGD):
    """An optimizer of somebody's that averages the parameters after its step."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.data.copy_(mean_of(param.detach()))


def averaging_job(dtype=torch.float64, **rules):
    model = linear(dtype)
    inner = AveragingSGD(model.parameters(), lr=0.1)
    _, opt = build(model, inner, mix_prob=0.0, **rules)
    train(model, opt, batches(dtype=dtype), steps=12)


@pytest.mark.parametrize(
    "rules",
    [{}, dict(fragments=2), dict(delay=2), dict(bucket_mb=4e-5), dict(dtype=torch.bfloat16)],
    ids=str,
)
def test_an_unknown_optimizer_that_averages_is_told_by_equal_models(world, rules):
    """The gradients differ, the models do not."""
    for outcome in world.outcomes(averaging_job, workers=2, **rules):
        assert outcome.error == "ConsensusError"
        assert "workers 0, 1 of 2 have the same local model" in outcome.message
        assert "no inner optimizer that communicates" in outcome.message


# -- the same data ---------------------------------------------------------------------------------


def simulated(data=0, workers=3, vectorize=False, model=linear, steps=12, **rules):
    """A run whose workers have the data of worker `data`, or each its own."""
    rules = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0) | rules
    inner = rules.pop("inner", sgd)

    def shard(worker):
        if callable(data):
            return data(worker)
        return batches(worker if data is None else data, dtype=torch.float32)

    return palsgd.simulate(
        workers=workers,
        steps=steps,
        model=lambda: model(dtype=torch.float32),
        loss=mse,
        data=shard,
        method=lambda m: palsgd.PALSGD(m, inner(m), **rules),
        vectorize=vectorize,
    )


def clocks(result):
    """Of all exchanges: a run that is ended has fewer."""
    return [entry["clock"] for entry in result.history]


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("rules", [{}, dict(fragments=2), dict(delay=2), dict(compress="int8")])
def test_the_same_data_on_all_workers_is_told_at_the_first_sync(rules, vectorize):
    with pytest.raises(palsgd.ConsensusError, match="same first gradient") as found:
        simulated(vectorize=vectorize, **rules)
    assert "DistributedSampler" in str(found.value)
    assert "same_data=True" in str(found.value)
    assert "workers 0, 1, 2 of 3" in str(found.value)


@pytest.mark.parametrize("vectorize", [False, True])
def test_same_data_goes_on_where_it_is_meant(vectorize):
    found = simulated(same_data=True, vectorize=vectorize, mix_prob=0.0)
    assert clocks(found) == [6, 12]
    assert len({distance for entry in found.history for distance in entry["distance"]}) == 2


@pytest.mark.parametrize("vectorize", [False, True])
def test_models_that_become_equal_later_are_told_by_their_own_digest(vectorize):
    with pytest.raises(palsgd.ConsensusError, match="same local model at the sync of round 2"):
        simulated(data=late, vectorize=vectorize, mix_prob=0.0, steps=24, workers=2)


def late(worker):
    """The first twelve batches are each worker's own, the others are the same."""
    own, common = batches(worker, dtype=torch.float32), batches(0, dtype=torch.float32)
    return (own * 3)[:12] + common * 3


def test_one_worker_has_nobody_to_compare_with():
    assert clocks(simulated(workers=1)) == [6, 12]


@pytest.mark.parametrize("vectorize", [False, True])
def test_workers_with_data_of_their_own_are_told_nothing(vectorize):
    for rules, wanted in (
        ({}, [6, 12]),
        (dict(fragments=2), [3, 6, 9, 12]),
        (dict(delay=2), [8, 12]),
        (dict(mix_prob=0.0), [6, 12]),
    ):
        assert clocks(simulated(data=None, vectorize=vectorize, **rules)) == wanted, rules


def standing(model):
    """A learning rate of zero: no local model ever leaves the anchor."""
    return sgd(model, lr=0.0)


@pytest.mark.parametrize("vectorize", [False, True])
def test_models_that_did_not_move_are_told_nothing(vectorize):
    found = simulated(data=None, inner=standing, mix_prob=0.0, vectorize=vectorize)
    assert [entry["distance"] for entry in found.history] == [[0.0] * 3] * 2


def halves_job(lr):
    model = linear(torch.float32).to(torch.bfloat16)
    _, opt = build(model, sgd(model, lr=lr), mix_prob=0.0, sync_every=3)
    for batch in palsgd.until(batches(dtype=torch.bfloat16), opt, steps=9):
        take_step(model, opt, batch)
        if opt.synced:  # the anchor then has more digits than the model
            for param in opt.outer.param_groups[0]["params"]:
                param.data.add_(1e-6)
    return opt.rounds


def test_low_precision_models_that_did_not_move_are_told_nothing(world):
    assert world.run(halves_job, workers=2, lr=0.0) == [3, 3]


class Flat(nn.Module):
    """Its gradient is zero on every worker."""

    def __init__(self, dtype):
        super().__init__()
        self.inside = linear(dtype)

    def forward(self, x):
        return self.inside(x) * -0.0


def test_gradients_of_zero_are_told_nothing():
    found = simulated(model=Flat, mix_prob=0.0)
    assert [entry["distance"] for entry in found.history] == [[0.0] * 3] * 2


def test_a_setting_that_differs_between_workers_is_named(world):
    for outcome in world.outcomes(differing_job, workers=2):
        assert outcome.error == "ValueError"
        assert "same_data differs between workers" in outcome.message


def differing_job():
    build(same_data=dist.get_rank() == 0)


def pause_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [torch.randn(4, 4, generator=draw) for _ in range(40)]
    opt = palsgd.PALSGD(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        sync_every=8,
        delay=2,
        scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: not 20 < t < 60),
    )
    for batch in palsgd.until(batches, opt, steps=80):
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return opt.rounds


def test_a_learning_rate_of_0_in_mid_run_is_no_work_in_common(world):
    assert world.run(pause_job, workers=2) == [10, 10]
