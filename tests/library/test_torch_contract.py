"""What users rely on in torch.optim.Optimizer: hooks of states, copies, groups, sparse gradients,
schedulers."""

import copy
import io
import pickle
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

import palsgd
from support.core_access import core_of
from support.problems import batches, linear, vector
from support.stepping import build, sgd, take_step

MIXING = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11)


def alone(model=None, inner=None, kind=palsgd.PALSGD, **rules):
    model = linear() if model is None else model
    rules = (MIXING if kind is palsgd.PALSGD else {}) | dict(transport=palsgd.Alone()) | rules
    return model, kind(model, inner or sgd(model, momentum=0.9), **rules)


def walked(model, opt, steps=10, start=0):
    for batch in (batches(0) * 9)[start : start + steps]:
        take_step(model, opt, batch)
    return vector(model)


# -- hooks -----------------------------------------------------------------------------------------


def hooked_calls(opt):
    """The calls of all four kinds of hooks in one save and load, in order."""
    calls = []
    opt.register_state_dict_pre_hook(lambda o: calls.append(("save", o is opt)))
    opt.register_state_dict_post_hook(lambda o, s: calls.append(("saved", o is opt)))
    opt.register_state_dict_post_hook(lambda o, s: calls.append("first"), prepend=True)
    opt.register_load_state_dict_pre_hook(lambda o, s: calls.append(("load", o is opt)))
    opt.register_load_state_dict_post_hook(lambda o: calls.append(("loaded", o is opt)))
    opt.load_state_dict(opt.state_dict())
    return calls


def test_state_hooks_are_called_as_torchs_own_optimizer_calls_them():
    model, opt = alone()
    walked(model, opt, 2)
    assert hooked_calls(opt) == hooked_calls(opt.inner)


def test_a_state_hook_may_replace_the_state():
    model, opt = alone()
    walked(model, opt, 2)
    opt.register_state_dict_post_hook(lambda o, state: state | {"mine": 7})
    assert opt.state_dict()["mine"] == 7
    wanted, clock = copy.deepcopy(opt.state_dict()), opt.clock
    opt.register_load_state_dict_pre_hook(lambda o, state: wanted)
    walked(model, opt, 3)
    given = opt.state_dict()
    opt.load_state_dict(given)
    assert opt.clock == clock
    assert given["mine"] == 7  # the caller's dict is the caller's


@pytest.mark.parametrize("kind", [palsgd.DDP, palsgd.PALSGD])
def test_hooks_of_the_wrapper_run_once_per_step_and_global_ones_for_each_optimizer(kind):
    model, opt = alone(kind=kind)
    own, common = [], []
    opt.register_step_post_hook(lambda *_: own.append(1))
    handle = register_optimizer_step_post_hook(lambda o, *_: common.append(type(o)))
    try:
        walked(model, opt, 8)
    finally:
        handle.remove()
    assert len(own) == common.count(kind) == 8
    assert len(common) == 8 + 8 + opt.rounds  # the wrapper, the inner and the outer optimizer


# -- copies ----------------------------------------------------------------------------------------

KINDS = {
    "ddp": dict(kind=palsgd.DDP),
    "mixing": {},
    "delayed fragments": dict(fragments=2, delay=2),
    "coded": dict(compress="int8"),
}


@pytest.mark.parametrize("rules", KINDS.values(), ids=KINDS)
def test_a_copy_of_model_and_optimizer_trains_as_the_original_and_apart_from_it(rules):
    model, opt = alone(**rules)
    walked(model, opt, 7)
    before = vector(model)
    twin, copied = copy.deepcopy((model, opt))
    assert copied.model is twin
    end = walked(twin, copied, 9, start=7)
    np.testing.assert_array_equal(vector(model), before)
    np.testing.assert_array_equal(walked(model, opt, 9, start=7), end)
    assert (copied.clock, copied.rounds) == (opt.clock, opt.rounds)
    assert {k for k in vars(copied) if k[0] != "_"} == {k for k in vars(opt) if k[0] != "_"}


def test_a_copy_has_its_own_scheduler_inner_optimizers_and_end():
    model = linear()
    inner = [sgd_of(model.weight), torch.optim.AdamW([model.bias], lr=0.01)]
    model, opt = alone(model, inner, scheduler=lambda o: ExponentialLR(o, 0.9))
    walked(model, opt, 3)
    opt.run_until(20)
    twin, copied = copy.deepcopy((model, opt))
    walked(twin, copied, 4)
    rate = copied.param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * 0.9**copied.clock)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**opt.clock) != rate
    assert copied.schedule.end == 20
    assert {id(p) for p in copied.state} == {id(p) for p in twin.parameters()}


def sgd_of(*params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def test_a_copy_of_the_optimizer_alone_has_a_copy_of_the_model():
    model, opt = alone()
    walked(model, opt, 3)
    copied = copy.deepcopy(opt)
    np.testing.assert_array_equal(walked(copied.model, copied, 5), walked(model, opt, 5))


def test_a_copy_made_after_eval_is_of_the_training_state():
    model, opt = alone()
    walked(model, opt, 8)
    local = vector(model)
    opt.eval()
    twin, copied = copy.deepcopy((opt, model))[::-1]
    np.testing.assert_array_equal(vector(twin), local)
    copied.step()


def copying_job():
    _, opt = build()
    found = []
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError) as error:
            attempt(opt)
        found.append(str(error.value))
    return found


def test_an_optimizer_with_peers_says_why_it_is_not_copied(world):
    for deep, shallow, pickled in world.run(copying_job, workers=2):
        assert "of 2 workers cannot be copied" in deep
        assert "palsgd.checkpoint" in deep
        assert "cannot be pickled" in pickled == shallow
        assert "\n" not in deep + pickled


# -- groups and state ------------------------------------------------------------------------------


def test_assigned_groups_reach_the_inner_optimizer():
    model, opt = alone(kind=palsgd.LocalSGD, sync_every=9)
    walked(model, opt, 1)
    opt.param_groups = [dict(group, lr=0.0) for group in opt.param_groups]
    assert opt.param_groups is opt.inner.param_groups
    before = vector(model)
    walked(model, opt, 1)
    np.testing.assert_array_equal(vector(model), before)


def test_assigned_groups_reach_each_of_several_inner_optimizers():
    model = linear()
    inner = [sgd_of(model.weight), sgd_of(model.bias)]
    model, opt = alone(model, inner)
    opt.param_groups = [dict(group, lr=0.1 * i) for i, group in enumerate(opt.param_groups)]
    assert [each.param_groups[0]["lr"] for each in inner] == [0.0, 0.1]


def test_assigned_groups_of_other_parameters_are_refused():
    model, opt = alone()
    with pytest.raises(ValueError, match="other parameters"):
        opt.param_groups = [{"params": [model.weight], "lr": 0.1}]
    with pytest.raises(ValueError, match="other parameters"):
        opt.param_groups = []


def test_the_state_has_an_entry_for_each_parameter_of_several_inner_optimizers():
    model = linear()
    model, opt = alone(model, [sgd_of(model.weight), torch.optim.AdamW([model.bias], lr=0.01)])
    assert len(opt.state) == 0
    walked(model, opt, 1)
    assert set(opt.state) == set(model.parameters())
    assert "momentum_buffer" in opt.state[model.weight]
    assert "exp_avg" in opt.state[model.bias]


def test_a_parameter_in_two_inner_optimizers_is_refused():
    model = linear()
    with pytest.raises(ValueError, match="appear in two inner optimizers"):
        alone(model, [sgd(model), sgd_of(model.bias)])


def test_a_group_added_to_several_inner_optimizers_as_one_is_refused():
    model = linear()
    _, opt = alone(model, [sgd_of(model.weight), sgd_of(model.bias)])
    with pytest.raises(ValueError, match="add it to one of the optimizers in the list"):
        opt.inner.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_palsgd_optimizer_as_inner_of_another_is_refused():
    model, opt = alone()
    for inner in (opt, [opt]):
        with pytest.raises(ValueError, match="PALSGD is a palsgd optimizer itself"):
            alone(model, inner)


def test_numpy_numbers_as_settings_give_a_state_that_torch_loads():
    rules = dict(
        sync_every=np.int64(4), mix_prob=np.float64(0.25), mix_rate=np.float64(1.0),
        warmup_steps=np.int32(1), seed=np.int64(3), delay=np.int64(1), fragments=np.int64(2),
        max_norm=np.float32(1.0), blend=np.float32(0.5),
    )  # fmt: skip
    model, opt = alone(**rules)
    walked(model, opt, 9)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again, resumed = alone(**rules)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.clock == opt.clock
    walked(model, opt, 5)
    walked(again, resumed, 5)
    np.testing.assert_array_equal(vector(again), vector(model))


def test_a_step_in_inference_mode_is_refused_before_anything_changes():
    model, opt = alone()
    model(batches(0)[0][0]).sum().backward()
    before = vector(model)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="leave inference mode"):
        opt.step()
    np.testing.assert_array_equal(vector(model), before)
    assert opt.clock == 0


# -- schedulers ------------------------------------------------------------------------------------


class Plateau:
    """A scheduler of no class of torch's that needs a metric."""

    def step(self, metrics):
        raise AssertionError("not called")


@pytest.mark.parametrize(
    "scheduler",
    [
        ReduceLROnPlateau,
        lambda o: Plateau(),
        lambda o: chained(ExponentialLR(o, 0.9), Plateau()),
    ],
)
def test_a_scheduler_that_needs_a_metric_is_refused(scheduler):
    with pytest.raises(ValueError, match="needs a metric at every step"):
        alone(scheduler=scheduler)


def chained(first, second):
    found = ChainedScheduler([first])
    found._schedulers = [first, second]
    return found


@pytest.mark.filterwarnings("ignore:ExponentialLR was stepped")  # it counts gradient steps, as here
@pytest.mark.parametrize("several", [False, True])
def test_a_scheduler_stepped_in_a_hook_of_the_inner_step_acts_on_the_undivided_rate(several):
    model = linear()
    inner = [sgd_of(model.weight), sgd_of(model.bias)] if several else sgd(model)
    model, opt = alone(model, inner)
    for part in inner if several else [inner]:
        scheduler = ExponentialLR(part, 0.5)
        part.register_step_post_hook(lambda *_, s=scheduler: s.step())
    walked(model, opt, 4)
    assert [group["lr"] for group in opt.param_groups] == [0.05 / 16] * len(opt.param_groups)
    assert all(len(part._optimizer_step_post_hooks) == 1 for part in opt_parts(opt))


def opt_parts(opt):
    return getattr(opt.inner, "parts", [opt.inner])


def test_an_absolute_schedule_stepped_in_a_hook_is_kept():
    model = linear()
    inner = sgd(model)
    scheduler = LambdaLR(inner, lambda t: 1 / (1 + t))
    model, opt = alone(model, inner)
    inner.register_step_post_hook(lambda *_: scheduler.step())
    walked(model, opt, 3)
    assert inner.param_groups[0]["lr"] == 0.05 / 4


# -- sparse gradients ------------------------------------------------------------------------------


def embedding(sparse=True):
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(rows=nn.Embedding(7, 3, sparse=sparse))).double()


def sparse_job(inner, sparse, warmup, wrapped=False, **rules):
    """Worker 1 has no gradient in the third step."""
    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # of torch itself
    model = embedding(sparse)
    shown = nn.parallel.DistributedDataParallel(model) if wrapped else model
    optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.1)
    opt = palsgd.LocalSGD(shown, optimizer, sync_every=2, warmup_steps=warmup, **rules)
    rank = torch.distributed.get_rank()
    rng = np.random.default_rng(rank)
    for t in range(6):
        rows = torch.tensor(rng.integers(0, 7, size=3))
        opt.zero_grad()
        loss = (shown(rows) * (1 + t)).square().sum()
        if rank == 0 or t != 2 or wrapped:
            loss.backward()
        opt.step()
        if t < warmup and sparse:
            assert model.rows.weight.grad.is_sparse
    return vector(model)


@pytest.mark.parametrize("inner", ["SGD", "Adagrad"])
def test_sparse_gradients_are_averaged_in_the_warmup_as_dense_ones_are(world, inner):
    sparse = world.run(sparse_job, workers=2, inner=inner, sparse=True, warmup=4)
    dense = world.run(sparse_job, workers=2, inner=inner, sparse=False, warmup=4)
    np.testing.assert_allclose(sparse, dense, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(sparse[0], sparse[1])


@pytest.mark.parametrize("rules", [dict(bucket_mb=4e-5), dict(max_norm=0.5)])
def test_sparse_adam_takes_the_averaged_gradients(world, rules):
    got = world.run(sparse_job, workers=2, inner="SparseAdam", sparse=True, warmup=4, **rules)
    np.testing.assert_array_equal(got[0], got[1])


def test_a_wrapped_model_averages_its_sparse_gradients_itself(world):
    got = world.run(sparse_job, workers=2, inner="SGD", sparse=True, warmup=4, wrapped=True)
    np.testing.assert_array_equal(got[0], got[1])


def test_a_rule_on_the_gradient_takes_sparse_ones():
    ends = []
    for sparse in (True, False):
        model = embedding(sparse)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = palsgd.methods.FedProx(model, inner, mu=0.1, sync_every=3, transport=palsgd.Alone())
        for t in range(5):
            opt.zero_grad()
            model(torch.tensor([t, 6])).square().sum().backward()
            opt.step()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)


# -- what "auto" measures --------------------------------------------------------------------------


def test_a_run_resumed_while_auto_measures_counts_only_the_seconds_since_the_last_sync():
    def built():
        return alone(kind=palsgd.DiLoCo, sync_every=palsgd.Auto(least=4, rounds=3))

    model, opt = built()
    walked(model, opt, 3)
    core_of(opt).ledger.gradient_s += 1000.0  # a long first round, whose costs are not used
    walked(model, opt, 3, start=3)
    fresh, again = built()
    fresh.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    walked(fresh, again, 6, start=6)
    assert again.ledger.interval["step_s"] < 100.0


@pytest.mark.parametrize("what", ["step", "all"])
def test_a_training_step_that_torch_compiles_ends_where_one_that_it_does_not(what):
    """The compiler leaves the optimizer's step as it is, with its clock and its messages."""

    def trained(compiled):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        opt = palsgd.PALSGD(model, inner, sync_every=4, mix_prob=0.25, transport=palsgd.Alone())

        def step():
            opt.step()

        def train(x):
            model(x).square().mean().backward()
            own_step()
            opt.zero_grad()

        own_step = torch.compile(step, backend="eager") if compiled and what == "step" else step
        own_train = torch.compile(train, backend="eager") if compiled and what == "all" else train
        data = torch.randn(40, 6, 4, generator=torch.Generator().manual_seed(1))
        for x in data:
            own_train(x)
        return opt.clock, model.weight

    assert trained(compiled=True)[0] == trained(compiled=False)[0] > 40
    assert torch.equal(trained(compiled=True)[1], trained(compiled=False)[1])
