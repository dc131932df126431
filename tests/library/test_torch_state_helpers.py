"""torch.distributed.checkpoint.state_dict carries the whole state of an optimizer, parameter by
parameter, and training goes on from it bit for bit."""

import copy
import warnings
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import palsgd
from palsgd.sharding import local_tensor
from support.core_access import anchor_of, fields_of, pending_sync, residues_of
from support.problems import batches, mse, net

STEPS, STOPS = 30, (2, 11, 14, 17)


def helpers():
    from torch.distributed.checkpoint import state_dict

    return state_dict


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def stateless(model):
    return torch.optim.SGD(model.parameters(), lr=0.02)


def chained(model):
    params = list(model.parameters())
    halves = params[:2], params[2:]
    return [torch.optim.AdamW(halves[0], lr=0.02), torch.optim.SGD(halves[1], 0.02, momentum=0.9)]


def fed_adam(params):
    return torch.optim.Adam(params, lr=0.05)


NESTEROV = palsgd.nesterov(0.5, 0.8)
CASES = {
    "palsgd": (
        palsgd.PALSGD,
        adamw,
        dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, warmup_steps=4),
    ),
    "delay": (palsgd.DiLoCo, adamw, dict(sync_every=6, delay=3, outer=NESTEROV)),
    "fragments": (palsgd.DiLoCo, adamw, dict(sync_every=6, fragments=3, outer=NESTEROV)),
    "int8": (palsgd.DiLoCo, adamw, dict(sync_every=6, compress="int8", outer=NESTEROV)),
    "top-k": (palsgd.DiLoCo, adamw, dict(sync_every=6, compress="topk:0.3", outer=NESTEROV)),
    "delayed int8": (palsgd.DiLoCo, stateless, dict(sync_every=6, compress="int8", delay=3)),
    "scaffold": (palsgd.methods.SCAFFOLD, stateless, dict(sync_every=6)),
    "two inner optimizers": (palsgd.DiLoCo, chained, dict(sync_every=6)),
    "ddp": (palsgd.DDP, adamw, {}),
    "outer adam": (palsgd.DiLoCo, stateless, dict(sync_every=6, fragments=2, outer=fed_adam)),
}


def build(case, wrap=lambda model: model, seed=0):
    kind, inner, rules = CASES[case]
    model = wrap(net(seed))
    return model, kind(model, inner(model), **rules)


def train(model, opt, steps, on_step=lambda: None):
    data = batches(opt.transport.worker, dtype=torch.float32)
    feed = [data[(opt.gradient_steps + i) % len(data)] for i in range(steps + 1)]
    for batch in palsgd.until(feed, opt, steps=STEPS):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        on_step()
        if opt.clock >= steps:
            break


def finger(model, opt):
    fields = fields_of(opt)
    anchor = [] if opt.outer is None else anchor_of(opt).numpy().copy()
    ledger = {k: v for k, v in fields["ledger"].items() if not k.endswith("_s") and k != "history"}
    weights = [local_tensor(p.detach()).numpy().copy() for p in model.parameters()]
    return weights, anchor, opt.clock, opt.gradient_steps, ledger


def through(options, case, wrap, stop):
    """A run that is saved by torch's helpers and goes on in new objects, and one that just goes
    on."""
    lib = helpers()
    options = lib.StateDictOptions(**options)  # torch loads no state that is full and flattened
    model, opt = build(case, wrap)
    train(model, opt, stop)
    assert opt.clock < STEPS
    under_way = opt.outer is not None and pending_sync(opt)
    unsent = opt.outer is not None and len(residues_of(opt))
    clock = opt.clock
    weights = lib.get_model_state_dict(model, options=options)
    state = lib.get_optimizer_state_dict(model, opt, options=options)
    assert opt.clock == clock
    weights, state = copy.deepcopy((weights, state))
    train(model, opt, STEPS)
    again, resumed = build(case, wrap, seed=9)
    lib.set_model_state_dict(again, weights, options=options)
    lib.set_optimizer_state_dict(again, resumed, state, options=options)
    assert resumed.clock == clock
    assert all(p.grad is None for p in again.parameters())
    train(again, resumed, STEPS)
    return finger(model, opt), finger(again, resumed), under_way, unsent


def wrapped(model):
    return DistributedDataParallel(model)


def every_stop(options, case, wrap):
    return [through(options, case, wrap, stop) for stop in STOPS]


FORMS = {
    "plain": {},
    "flattened": dict(flatten_optimizer_state_dict=True),
    "full": dict(full_state_dict=True),
}


def same(a, b):
    np.testing.assert_equal(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_torchs_helpers_resume_a_run_bit_for_bit_within_a_round(world, case, form):
    wrap = wrapped if case in ("palsgd", "fragments", "ddp") else nn.Module.train
    for found in world.run(every_stop, workers=2, options=FORMS[form], case=case, wrap=wrap):
        for whole, resumed, *_ in found:
            same(resumed, whole)
        if "delay" in case:
            assert any(under_way for _, _, under_way, _ in found)
        if "int8" in case or case == "top-k":
            assert any(unsent for *_, unsent in found)


# -- shards ------------------------------------------------------------------------------------


def plain_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded(seed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
    # over both axes torch would take the workers for copies, and a full state for that of all
    return fully_shard(plain_net(seed), mesh=mesh["inside"]), mesh["workers"].get_group()


SHARDED = {
    "palsgd": dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, warmup_steps=4),
    "delay": dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, delay=3),
    "int8": dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, compress="int8"),
}


def sharded_through(options, case, stop, folder=None):
    lib = helpers()
    options = lib.StateDictOptions(**options)
    model, group = sharded(0)
    opt = palsgd.PALSGD(model, adamw(model), outer=NESTEROV, group=group, **SHARDED[case])
    train(model, opt, stop)
    weights = lib.get_model_state_dict(model, options=options)
    state = copy.deepcopy(lib.get_optimizer_state_dict(model, opt, options=options))
    weights = copy.deepcopy(weights)
    train(model, opt, STEPS)
    again, group = sharded(9)
    resumed = palsgd.PALSGD(again, adamw(again), outer=NESTEROV, group=group, **SHARDED[case])
    lib.set_model_state_dict(again, weights, options=options)
    lib.set_optimizer_state_dict(again, resumed, state, options=options)
    train(again, resumed, STEPS)
    return finger(model, opt), finger(again, resumed)


SHARDED_FORMS = [
    *((case, form) for case in SHARDED for form in ("plain", "flattened")),
    ("palsgd", "full"),
    ("delay", "full"),
    ("int8", "full"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "form"), SHARDED_FORMS)
@pytest.mark.parametrize("stop", [2, 14])
def test_torchs_helpers_resume_a_sharded_run_bit_for_bit(world, case, form, stop):
    got = world.run(sharded_through, workers=4, options=FORMS[form], case=case, stop=stop)
    for whole, resumed in got:
        same(resumed, whole)


# -- files -------------------------------------------------------------------------------------


@contextmanager
def quiet():
    """Without torch's warning that a worker of one rank saves alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def through_files(folder, case, flatten, stop):
    """As torchtitan does: a new optimizer's state is the place that a checkpoint is read into."""
    import torch.distributed.checkpoint as dcp

    lib = helpers()
    options = lib.StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, opt = build(case)
    train(model, opt, stop)
    place, alone = f"{folder}/{dist.get_rank()}", dict(no_dist=True)
    weights, state = lib.get_state_dict(model, opt, options=options)
    with quiet():
        dcp.save({"model": weights, "opt": state}, checkpoint_id=place, **alone)
    train(model, opt, STEPS)
    again, resumed = build(case, seed=9)
    weights, state = lib.get_state_dict(again, resumed, options=options)
    assert resumed.clock == 0
    found = {"model": weights, "opt": state}
    with quiet():
        dcp.load(found, checkpoint_id=place, **alone)
    lib.set_state_dict(
        again, resumed, model_state_dict=found["model"], optim_state_dict=found["opt"],
        options=options,
    )  # fmt: skip
    train(again, resumed, STEPS)
    return finger(model, opt), finger(again, resumed)


FILED = ["palsgd", "delay", "int8", "top-k", "fragments", "outer adam", "scaffold", "ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("stop", [2, 14])
@pytest.mark.parametrize("case", FILED)
def test_a_checkpoint_of_torchs_helpers_is_read_into_a_new_optimizer(
    world, tmp_path, case, flatten, stop
):
    job = dict(folder=str(tmp_path), case=case, flatten=flatten, stop=stop)
    for whole, resumed in world.run(through_files, workers=2, **job):
        same(resumed, whole)


# -- a step that only makes state --------------------------------------------------------------


def test_a_step_that_torch_makes_state_with_neither_ticks_nor_sends():
    model, opt = build_alone()
    before = [p.clone() for p in model.parameters()]
    helpers().get_optimizer_state_dict(model, opt)
    assert (opt.clock, opt.gradient_steps, opt.ledger.messages) == (0, 0, 0)
    assert all("exp_avg" in entry for entry in opt.inner.state.values())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def build_alone(**rules):
    model = net()
    rules = dict(sync_every=4, transport=palsgd.Alone()) | rules
    return model, palsgd.DiLoCo(model, adamw(model), **rules)


def test_a_first_step_of_a_schedule_that_begins_with_0_ticks():
    warm = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: t / 10)
    model, opt = build_alone(scheduler=warm)
    assert opt.param_groups[0]["lr"] == 0
    mse(model, batches(0, torch.float32)[0]).backward()
    opt.step()
    assert opt.clock == 1


def test_the_live_state_is_the_inner_optimizers():
    model, opt = build_alone()
    mse(model, batches(0, torch.float32)[0]).backward()
    opt.step()
    first = next(model.parameters())
    assert opt.state[first].keys() == opt.inner.state[first].keys()
    assert all(a is b for a, b in zip(opt.state.values(), opt.inner.state.values(), strict=True))
    opt.state[first]["exp_avg"] = torch.zeros_like(first)
    assert not opt.inner.state[first]["exp_avg"].any()
    opt.state[first] = {name: value + 1 for name, value in opt.state[first].items()}
    assert set(opt.inner.state[first]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "palsgd" not in opt.inner.state[first]
