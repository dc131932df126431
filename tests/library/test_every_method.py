"""One table of all methods; every shared property runs over it. A new method is a new row."""

import io
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd.tensors import mix_
from support.core_access import anchor_of
from support.problems import batches, global_vector, linear, mse, net, train, vector

H, STEPS = 4, 18  # four rounds and half of one


@dataclass(frozen=True, kw_only=True)
class Proximal(palsgd.Method):
    """FedProx's local rule: after each gradient step, a pull towards the last global model."""

    pull: float

    def after_gradient(self, w, rate, mixing):
        mix_(w.local, w.anchor, self.pull)


class FedProx(palsgd.LocalOptimizer):
    """A method from outside the library, made of its public parts."""

    def __init__(self, model, inner, *, sync_every, pull, warmup_steps=0, **shared):
        outer = palsgd.nesterov(lr=0.7, momentum=0.5)
        shared |= dict(sync_every=sync_every, warmup_steps=warmup_steps)
        super().__init__(model, inner, Proximal(pull=pull), outer, **shared)


def palsgd_with(draws):
    def build(model, inner, **shared):
        return palsgd.PALSGD(
            model, inner, sync_every=H, mix_prob=0.25, mix_rate=1.0, draws=draws, seed=3,
            warmup_steps=2, outer=palsgd.nesterov(lr=0.7, momentum=0.5), **shared,
        )  # fmt: skip

    return build


METHODS = {
    "DDP": palsgd.DDP,
    "LocalSGD": lambda model, inner, **kw: palsgd.LocalSGD(model, inner, sync_every=H, **kw),
    "DiLoCo": lambda model, inner, **kw: palsgd.DiLoCo(
        model, inner, sync_every=H, outer=palsgd.nesterov(lr=0.7, momentum=0.5), **kw
    ),
    "PALSGD balanced": palsgd_with("balanced"),
    "PALSGD independent": palsgd_with("independent"),
    "PALSGD shared": palsgd_with("shared"),
    "FedProx": lambda model, inner, **kw: FedProx(
        model, inner, sync_every=H, pull=0.1, warmup_steps=2, **kw
    ),
}

every_method = pytest.mark.parametrize("name", METHODS)


def adamw(model, lr=0.02):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def global_loss(model, opt):
    """Of the global model over the data of both workers."""
    with opt.anchor_weights(), torch.no_grad():
        return sum(mse(model, batch).item() for k in range(2) for batch in batches(k))


# -- training ----------------------------------------------------------------------------------


def loss_job(name):
    model = linear()
    opt = METHODS[name](model, adamw(model, lr=0.05))
    before = global_loss(model, opt)
    train(model, opt, batches(), steps=60)
    return before, global_loss(model, opt), vector(model), global_vector(model, opt), opt.clock


@every_method
def test_the_loss_goes_down_and_all_workers_end_with_the_same_global_model(world, name):
    got = world.run(loss_job, workers=2, name=name)
    for before, after, local, anchor, clock in got:
        assert after < 0.8 * before
        assert clock == 60
        np.testing.assert_array_equal(local, anchor)  # training ends on a sync
        np.testing.assert_array_equal(anchor, got[0][3])


def drift_job(name):
    model = linear()
    opt = METHODS[name](model, adamw(model))
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
        np.testing.assert_array_equal(a, b)
    apart = [e[1] for e in one if not e[0]][-1], [e[1] for e in other if not e[0]][-1]
    assert not np.array_equal(*apart)


def clock_job(name):
    model = linear()
    opt = METHODS[name](model, adamw(model))
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
    state = [v for s in opt.inner.state_dict()["state"].values() for v in s.values()]
    outer = opt.outer.state_dict()["state"].values() if opt.outer else []
    state += [v for s in outer for v in s.values() if v is not None]
    buffers = [b.double().reshape(-1) for b in model.buffers()]
    return np.concatenate([vector(model), *buffers, *[v.double().reshape(-1) for v in state]])


def resume_job(name, through):
    def build(seed):
        model = net(seed)
        return model, METHODS[name](model, adamw(model))

    data, saved = batches(dtype=torch.float32), []
    model, opt = build(seed=0)

    def save():
        middle = opt.gradient_steps == 9 if name == "DDP" else opt.rounds == 2 and not opt.synced
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
    state = pickle.loads(blob) if through == "pickle" else torch.load(io.BytesIO(blob))
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


# -- the model ---------------------------------------------------------------------------------


def bf16_job(name):
    model = net(dtype=torch.bfloat16)
    opt = METHODS[name](model, adamw(model))
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
        np.testing.assert_array_equal(weights, got[0][2])


def in_place_job(name):
    model = net()
    opt = METHODS[name](model, adamw(model))
    tensors = [*model.parameters(), *model.buffers()]
    places = [(id(t), t.data_ptr()) for t in tensors]
    train(model, opt, batches(dtype=torch.float32), STEPS)
    with opt.anchor_weights():
        inside = [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    after = [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    ours = {type(v).__module__.split(".")[0] for s in opt.inner.state.values() for v in s.values()}
    keys = {key for state in opt.inner.state.values() for key in state}
    return places == inside == after, ours, keys


@every_method
def test_parameters_are_updated_in_place_and_the_inner_state_holds_torchs_own_only(world, name):
    for kept, modules, keys in world.run(in_place_job, workers=2, name=name):
        assert kept
        assert modules == {"torch"}
        assert keys == {"step", "exp_avg", "exp_avg_sq"}


def zero_grad_job(name):
    model = linear()
    opt = METHODS[name](model, adamw(model))
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
    opt = METHODS[name](model, adamw(model))
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
        np.testing.assert_array_equal(weights, got[0][3])


def group_job(name, rates):
    model = linear()
    groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
    opt = METHODS[name](model, torch.optim.SGD(groups, momentum=0.9))
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
    opt = METHODS[name](model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
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
            assert 16 * 8 <= size <= (16 + 2 * 4) * 8  # one weight, and the roll call
        np.testing.assert_array_equal(weights, got[0][0])


# -- what the methods have in common -----------------------------------------------------------


def toy_twin_job(pull):
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    if pull is None:
        outer = palsgd.nesterov(lr=0.7, momentum=0.5)
        opt = palsgd.DiLoCo(model, inner, sync_every=H, outer=outer, warmup_steps=2)
    else:
        opt = FedProx(model, inner, sync_every=H, pull=pull, warmup_steps=2)
    train(model, opt, batches(), STEPS)
    return vector(model)


def test_fedprox_without_a_pull_is_diloco(world):
    """That the toy method's own rule is really called is seen from a pull that is not 0."""
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
