"""One table of all methods; every shared property runs over it. A new method is a new row."""

import io
import pickle
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd import registry
from palsgd.tensors import mix_
from support.core_access import anchor_of, method_states
from support.problems import batches, global_vector, linear, mse, net, train, vector

H, STEPS = 4, 18  # four rounds and half of one


@dataclass(frozen=True, kw_only=True)
class Proximal(palsgd.Method):
    """After each gradient step, a pull towards the last global model."""

    pull: float

    def after_gradient(self, w, rate, mixing):
        if rate is not None:
            mix_(w.local, w.anchor, self.pull)


def own_method(model, inner, *, pull=0.1, **options):
    """A method from outside the library, made of its public parts."""
    outer = palsgd.nesterov(lr=0.7, momentum=0.5)
    return palsgd.LocalOptimizer(
        model, inner, Proximal(pull=pull), outer, sync_every=H, warmup_steps=2, **options
    )


def palsgd_with(draws):
    return partial(
        palsgd.PALSGD, sync_every=H, mix_prob=0.25, mix_rate=1.0, draws=draws, seed=3,
        warmup_steps=2, outer=palsgd.nesterov(lr=0.7, momentum=0.5),
    )  # fmt: skip


# Rows of the library are found by themselves. One that has settings without a default, or whose
# defaults do not show enough in a few steps, is set here; so is what differs by nature.
SETTINGS = {
    "DiLoCo": dict(outer=palsgd.nesterov(lr=0.7, momentum=0.5)),
    "FedProx": dict(mu=0.5),
    "SlowMo": dict(warmup_steps=2),
    "AnchorDecay": dict(decay=0.1, warmup_steps=2),
}
SGD_INSIDE = ("SCAFFOLD",)  # refuses other inner optimizers, and momentum
OWN_MODELS = ("EASGD",)  # whose workers keep models of their own at a sync
COPIES = {"SCAFFOLD": 2}  # of the model in a message, if not one


def built(row):
    rounds = dict(sync_every=H) if row.rounds else {}
    return partial(getattr(palsgd.methods, row.title), **rounds, **SETTINGS.get(row.title, {}))


METHODS = {row.title: built(row) for row in registry.rows() if not row.mixes} | {
    "PALSGD balanced": palsgd_with("balanced"),
    "PALSGD independent": palsgd_with("independent"),
    "PALSGD shared": palsgd_with("shared"),
    "a user's own": own_method,
}

every_method = pytest.mark.parametrize("name", METHODS)


def test_every_row_of_the_library_is_in_the_table():
    assert {row.title for row in registry.rows()} <= {name.split()[0] for name in METHODS}


def inner_of(name, model, lr=0.02):
    if name in SGD_INSIDE:
        return torch.optim.SGD(model.parameters(), lr=4 * lr)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def momentum(name):
    return 0.0 if name in SGD_INSIDE else 0.9


def global_loss(model, opt):
    """Of the global model over the data of both workers."""
    with opt.anchor_weights(), torch.no_grad():
        return sum(mse(model, batch).item() for k in range(2) for batch in batches(k))


# -- training ----------------------------------------------------------------------------------


def loss_job(name):
    model = linear()
    opt = METHODS[name](model, inner_of(name, model, lr=0.05))
    before = global_loss(model, opt)
    train(model, opt, batches(), steps=60)
    return before, global_loss(model, opt), vector(model), global_vector(model, opt), opt.clock


@every_method
def test_the_loss_goes_down_and_all_workers_end_with_the_same_global_model(world, name):
    got = world.run(loss_job, workers=2, name=name)
    for before, after, local, anchor, clock in got:
        assert after < 0.8 * before
        assert clock == 60
        if name not in OWN_MODELS:
            np.testing.assert_array_equal(local, anchor)  # training ends on a sync
        np.testing.assert_array_equal(anchor, got[0][3])


def drift_job(name):
    model = linear()
    opt = METHODS[name](model, inner_of(name, model))
    seen = []
    train(model, opt, batches(), STEPS, on_step=lambda: seen.append((opt.synced, vector(model))))
    return seen


@every_method
def test_workers_differ_between_syncs_and_agree_at_them(world, name):
    """DDP has no rounds: its workers never differ."""
    one, other = world.run(drift_job, workers=2, name=name)
    if name == "DDP":
        for (_, a), (_, b) in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
        return
    for (_, a), (_, b) in zip([e for e in one if e[0]], [e for e in other if e[0]], strict=True):
        assert np.array_equal(a, b) == (name not in OWN_MODELS)
    apart = [e[1] for e in one if not e[0]][-1], [e[1] for e in other if not e[0]][-1]
    assert not np.array_equal(*apart)


def clock_job(name):
    model = linear()
    opt = METHODS[name](model, inner_of(name, model))
    calls, clocks = [], []
    train(model, opt, batches(), STEPS, on_step=lambda: calls.append(clocks.append(opt.clock)))
    ledger = opt.ledger
    return (
        clocks, len(calls), opt.gradient_steps, ledger.gradient_steps, ledger.mixing_steps,
        opt.rounds, len(ledger.history), ledger.syncs, ledger.warmup_steps, ledger.realised_p,
    )  # fmt: skip


@every_method
def test_the_clock_counts_every_step(world, name):
    for got in world.run(clock_job, workers=2, name=name):
        clocks, calls, gradients, booked, mixing, rounds, entries, syncs, warmup, share = got
        assert clocks == sorted(clocks)
        assert clocks[-1] == STEPS == gradients + mixing
        assert gradients == booked
        # A round of mixing alone needs no gradient and so no call; there is none in these plans.
        assert calls == gradients
        assert rounds == entries
        assert rounds == (0 if name == "DDP" else -(-(STEPS - warmup) // H))
        assert syncs == rounds + warmup
        assert share == (pytest.approx(mixing / (STEPS - warmup)) if mixing else 0)
        assert (mixing > 0) == name.startswith("PALSGD")


# -- state -------------------------------------------------------------------------------------


def numbers(model, opt):
    inner = opt.inner.state_dict()["state"].values()
    state = [v for s in inner for v in s.values() if v is not None]
    outer = opt.outer.state_dict()["state"].values() if opt.outer else []
    state += [v for s in outer for v in s.values() if v is not None]
    state += [] if opt.outer is None else method_states(opt).values()
    buffers = [b.double().reshape(-1) for b in model.buffers()]
    return np.concatenate([vector(model), *buffers, *[v.double().reshape(-1) for v in state]])


def resume_job(name, through, dtype=torch.float32, after=2, **options):
    def build(seed):
        model = net(seed, dtype)
        return model, METHODS[name](model, inner_of(name, model), **options)

    data, saved = batches(dtype=dtype), []
    model, opt = build(seed=0)

    def save():
        middle = opt.gradient_steps == 9 if name == "DDP" else opt.rounds == after
        middle = middle and (name == "DDP" or not opt.synced)
        if middle and not saved:
            state = {"model": model.state_dict(), "opt": opt.state_dict()}
            if through == "pickle":
                saved.append(pickle.dumps(state))
            else:
                torch.save(state, file := io.BytesIO())
                saved.append(file.getvalue())

    train(model, opt, data, STEPS, on_step=save)
    want = numbers(model, opt), opt.clock, opt.gradient_steps, opt.rounds, opt.ledger.bytes_sent
    (blob,) = saved
    if through == "pickle":
        state = pickle.loads(blob)
    else:
        state = torch.load(io.BytesIO(blob), weights_only=True)
    model, opt = build(seed=9)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    assert opt.clock < STEPS
    assert not opt.synced
    rest = [data[(opt.gradient_steps + i) % len(data)] for i in range(STEPS)]
    train(model, opt, rest, STEPS)
    got = numbers(model, opt), opt.clock, opt.gradient_steps, opt.rounds, opt.ledger.bytes_sent
    return want, got


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
@every_method
def test_a_run_resumed_mid_round_equals_the_uninterrupted_one(world, name, through):
    for want, got in world.run(resume_job, workers=2, name=name, through=through):
        np.testing.assert_array_equal(got[0], want[0])
        assert got[1:] == want[1:]


ROUNDS = [name for name in METHODS if name != "DDP"]


@pytest.mark.parametrize("name", ROUNDS)
def test_a_run_with_fragments_resumed_mid_round_equals_the_uninterrupted_one(world, name):
    given = dict(name=name, through="torch.save", fragments=2, after=1)
    for want, got in world.run(resume_job, workers=2, **given):
        np.testing.assert_array_equal(got[0], want[0])
        assert got[1:] == want[1:]


@every_method
def test_a_bf16_run_resumed_mid_round_equals_the_uninterrupted_one(world, name):
    given = dict(name=name, through="torch.save", dtype=torch.bfloat16)
    for want, got in world.run(resume_job, workers=2, **given):
        np.testing.assert_array_equal(got[0], want[0])
        assert got[1:] == want[1:]


# -- the model ---------------------------------------------------------------------------------


def alone_job(name):
    model = linear()
    opt = METHODS[name](model, inner_of(name, model, lr=0.05))

    def loss():
        with opt.anchor_weights(), torch.no_grad():
            return sum(mse(model, batch).item() for batch in batches())

    before = loss()
    train(model, opt, batches(), steps=60)
    return before, loss(), opt.clock


@every_method
def test_one_worker_alone_trains(world, name):
    ((before, after, clock),) = world.run(alone_job, workers=1, name=name)
    assert after < 0.8 * before
    assert clock == 60


def layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_job(name, shards):
    """A worker of `shards` ranks; its ranks see the same batches, whose mean gradient is one's."""
    model, worker = layers(), dist.get_rank() // shards
    if shards > 1:
        mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("worker", "shard"))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    opt = METHODS[name](model, inner_of(name, model))
    train(model, opt, batches(worker), STEPS)
    with opt.anchor_weights():
        return np.concatenate([whole(p.detach()).numpy().ravel() for p in model.parameters()])


@every_method
def test_sharded_workers_train_as_whole_ones_do(world, name):
    want = world.run(sharded_job, workers=2, name=name, shards=1)
    for found in world.run(sharded_job, workers=4, name=name, shards=2):
        np.testing.assert_allclose(found, want[0], rtol=1e-9, atol=1e-12)


def bf16_job(name):
    model = net(dtype=torch.bfloat16)
    opt = METHODS[name](model, inner_of(name, model))
    data = batches(dtype=torch.bfloat16)

    def loss():
        with torch.no_grad():
            return sum(mse(model, batch).item() for batch in data)

    before = loss()
    train(model, opt, data, steps=50)
    kinds = {p.dtype for p in model.parameters()}
    anchor = None if opt.outer is None else anchor_of(opt).dtype
    return before, loss(), vector(model), kinds, anchor


@every_method
def test_a_bf16_model_trains_with_a_full_precision_anchor(world, name):
    got = world.run(bf16_job, workers=2, name=name)
    for before, after, weights, kinds, anchor in got:
        assert after < before
        assert kinds == {torch.bfloat16}
        assert anchor == (None if name == "DDP" else torch.float32)
        if name not in OWN_MODELS:
            np.testing.assert_array_equal(weights, got[0][2])


def in_place_job(name):
    model = net()
    opt = METHODS[name](model, inner_of(name, model))
    tensors = [*model.parameters(), *model.buffers()]
    places = [(id(t), t.data_ptr()) for t in tensors]
    train(model, opt, batches(dtype=torch.float32), STEPS)
    with opt.anchor_weights():
        inside = [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    after = [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    entries = [entry for s in opt.inner.state.values() for entry in s.items()]
    ours = {type(v).__module__.split(".")[0] for _, v in entries if v is not None}
    keys = {key for key, _ in entries}
    return places == inside == after, ours, keys


@every_method
def test_parameters_are_updated_in_place_and_the_inner_state_holds_torchs_own_only(world, name):
    for kept, modules, keys in world.run(in_place_job, workers=2, name=name):
        assert kept
        assert modules <= {"torch"}
        adamw = {"step", "exp_avg", "exp_avg_sq"}
        assert keys <= {"momentum_buffer"} if name in SGD_INSIDE else keys == adamw


def zero_grad_job(name):
    model = linear()
    opt = METHODS[name](model, inner_of(name, model))
    mse(model, batches()[0]).backward()
    opt.zero_grad(set_to_none=False)
    zeroed = all(float(p.grad.abs().sum()) == 0 for p in model.parameters())
    opt.zero_grad()
    return zeroed, all(p.grad is None for p in model.parameters())


@every_method
def test_zero_grad_clears_the_gradients(world, name):
    assert world.run(zero_grad_job, workers=2, name=name) == [(True, True)] * 2


def anchor_job(name):
    model = net()
    opt = METHODS[name](model, inner_of(name, model))
    data, same = batches(dtype=torch.float32), []

    def look():
        before = vector(model)
        with opt.anchor_weights() as shown:
            same.append((shown is model, vector(model)))
            with torch.no_grad():
                model[0].weight.zero_()  # what is done inside is undone
        assert np.array_equal(before, vector(model))

    train(model, opt, data, STEPS, on_step=look)
    return same


@every_method
def test_anchor_weights_shows_every_worker_the_same_model(world, name):
    one, other = world.run(anchor_job, workers=2, name=name)
    assert all(shown for shown, _ in one)
    if name != "PALSGD independent":  # whose workers take their steps at other clocks
        for (_, a), (_, b) in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one[-1][1], other[-1][1])


# -- learning rates ----------------------------------------------------------------------------


def scheduler_job(name, by_clock):
    """`LambdaLR(opt, lambda _: f(opt.clock))` stepped by the loop; the rate each step was taken
    with; and the rate in the groups after it."""
    model = linear()
    opt = METHODS[name](model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = LambdaLR(opt, (lambda _: 0.9**opt.clock) if by_clock else (lambda t: 0.9**t))
    used, left = [], []
    opt.inner.register_step_pre_hook(lambda *_: used.append(opt.inner.param_groups[0]["lr"]))
    clocks = [0]
    warnings.filterwarnings("ignore", "LambdaLR was stepped")  # it counts gradients by intention
    for batch in palsgd.until(batches(), opt, steps=STEPS):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        left.append(opt.param_groups[0]["lr"])
        scheduler.step()
        clocks.append(opt.clock)
    return used, left, clocks, vector(model), opt.ledger.warmup_steps, opt.method.gradient_share


@pytest.mark.parametrize("by_clock", [True, False])
@every_method
def test_a_torch_scheduler_on_the_optimizer_sets_the_rate_of_the_inner_steps(world, name, by_clock):
    got = world.run(scheduler_job, workers=2, name=name, by_clock=by_clock)
    for used, left, clocks, weights, warmup, share in got:
        want = [0.1 * 0.9 ** (clocks[i] if by_clock else i) for i in range(len(used))]
        np.testing.assert_allclose(left, want)  # the scaled rate is put back after each step
        scale = [1.0 if i < warmup else share for i in range(len(used))]
        np.testing.assert_allclose(used, np.array(want) / scale)
        if name not in OWN_MODELS:
            np.testing.assert_array_equal(weights, got[0][3])


def group_job(name, rates):
    model = linear()
    groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
    opt = METHODS[name](model, torch.optim.SGD(groups, momentum=momentum(name)))
    start = model.bias.detach().clone()
    train(model, opt, batches(), STEPS)
    assert opt.param_groups is opt.inner.param_groups
    return vector(model), torch.equal(start, model.bias), [g["lr"] for g in opt.param_groups]


@every_method
def test_two_parameter_groups_keep_their_own_rates(world, name):
    """With equal rates they are one group; at rate 0 nothing moves, whatever the method."""
    both = world.run(group_job, workers=2, name=name, rates=(0.05, 0.05))
    one = world.run(one_group_job, workers=2, name=name)
    for (weights, still, _), twin in zip(both, one, strict=True):
        np.testing.assert_allclose(weights, twin, rtol=1e-12)
        assert not still
    for _, still, rates in world.run(group_job, workers=2, name=name, rates=(0.05, 0.0)):
        assert still
        assert rates == [0.05, 0.0]


def one_group_job(name):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum(name))
    opt = METHODS[name](model, inner)
    train(model, opt, batches(), STEPS)
    return vector(model)


def tied_job(name):
    """A weight used twice, and a frozen one."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    frozen = nn.Linear(4, 3)
    frozen.requires_grad_(False)
    model = nn.Sequential(first, nn.Tanh(), second, frozen).double()
    before = frozen.weight.detach().clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = METHODS[name](model, torch.optim.SGD(trained, lr=0.05))
    train(model, opt, batches(), STEPS)
    sizes = [entry["bytes_sent"] for entry in opt.ledger.history]
    kept = torch.equal(before, frozen.weight) and second.weight is first.weight
    return vector(model), kept, sizes


@every_method
def test_tied_weights_are_sent_once_and_frozen_ones_never(world, name):
    got = world.run(tied_job, workers=2, name=name)
    for weights, kept, sizes in got:
        assert kept
        for size in sizes:
            values = 16 * COPIES.get(name, 1)  # of one weight
            assert values * 8 <= size <= (values + 2 * 9) * 8  # and the header
        if name not in OWN_MODELS:
            np.testing.assert_array_equal(weights, got[0][0])


# -- what the methods have in common -----------------------------------------------------------


def toy_twin_job(pull):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    if pull is None:
        outer = palsgd.nesterov(lr=0.7, momentum=0.5)
        opt = palsgd.DiLoCo(model, inner, sync_every=H, outer=outer, warmup_steps=2)
    else:
        opt = own_method(model, inner, pull=pull)
    train(model, opt, batches(), STEPS)
    return vector(model)


def test_a_method_without_its_pull_is_diloco(world):
    """That the method's own rule is really called is seen from a pull that is not 0."""
    diloco = world.run(toy_twin_job, workers=2, pull=None)
    np.testing.assert_array_equal(world.run(toy_twin_job, workers=2, pull=0.0), diloco)
    assert not np.allclose(world.run(toy_twin_job, workers=2, pull=0.5), diloco)


@pytest.mark.slow
def test_importing_palsgd_brings_in_torch_and_numpy_only():
    """Nothing of the lab, and nothing that torch itself does not import."""
    code = (
        "import sys; import torch, numpy, torch.distributed.checkpoint, torch.distributed.tensor\n"
        "import torch.distributed.fsdp, torch.nn.parallel\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import palsgd\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - before))\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new, loaded = (set(eval(line)) for line in done.stdout.splitlines())
    assert {name for name in new if name not in sys.stdlib_module_names} == {"palsgd"}
    lab = {"sklearn", "torchvision", "typer", "rich", "matplotlib", "pandas", "transformers"}
    assert not lab & loaded


def test_importing_palsgd_leaves_what_only_sharded_runs_and_checkpoints_need_unimported():
    """They take seconds. All public names are asked for, as they are imported when first used."""
    script = (
        "import sys, palsgd\n"
        "[getattr(palsgd, name) for name in palsgd.__all__]\n"
        "late = ['tensor', 'fsdp', 'checkpoint']\n"
        "print([name for name in late if f'torch.distributed.{name}' in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
