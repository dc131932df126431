"""The two engines of the simulator, for every method and every option of a sync."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import palsgd
from palsgd import events, registry
from palsgd.composed import composed
from palsgd.payload import payload_size
from support.core_access import anchor_of, core_of
from support.engines import check
from support.methods import METHODS as SMALL
from support.problems import batches, linear, mse, net, vector

H = 8
MIXING = dict(mix_prob=0.3, mix_rate=2.0, seed=11)
OUTER = dict(outer=palsgd.nesterov(lr=0.5))
METHODS = {
    "localsgd": palsgd.LocalSGD,
    "diloco": partial(palsgd.DiLoCo, **OUTER),
    "balanced": partial(palsgd.PALSGD, draws="balanced", **MIXING, **OUTER),
    "independent": partial(palsgd.PALSGD, draws="independent", **MIXING, **OUTER),
    "shared": partial(palsgd.PALSGD, draws="shared", **MIXING, **OUTER),
}
SYNCS = {
    "plain": {},
    "int8": dict(compress="int8"),
    "int4": dict(compress="int4"),
    "topk": dict(compress="topk:0.2"),
    "delay": dict(delay=3),
    "longest delay": dict(delay=H),
    "fragments": dict(fragments=3),
    "fragments and delay": dict(fragments=2, delay=4),
    "all": dict(fragments=3, delay=2, compress="int8"),
    "all, small buckets": dict(fragments=2, compress="int4", bucket_mb=20 * 8 / 2**20),
}
KINDS = (events.Averaged, events.Mixed, events.Sent, events.Synced)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def smooth(dtype=torch.float64):
    return net(dtype=dtype)


def both(build, *, model=smooth, workers=3, steps=45, data=batches, loss=mse, **more):
    """The same simulation in both engines."""
    return [
        palsgd.simulate(
            workers=workers, steps=steps, model=model, loss=loss, data=data, method=build,
            vectorize=vectorize, seed=3, **more,
        )
        for vectorize in (True, False)
    ]  # fmt: skip


def agree(fast, exact, rtol=1e-10, atol=1e-10):
    check(fast, exact, rtol=rtol, atol=atol)
    for mine, theirs in zip(fast.ledgers, exact.ledgers, strict=True):
        assert mine.bytes_on_the_wire == theirs.bytes_on_the_wire
        assert mine.realised_p == theirs.realised_p
    for mine, theirs in zip(fast.history, exact.history, strict=True):
        assert {k: mine[k] for k in ("round", "gradient_steps", "syncs")} == {
            k: theirs[k] for k in ("round", "gradient_steps", "syncs")
        }
        if "metric" in theirs:
            np.testing.assert_allclose(mine["metric"], theirs["metric"], rtol=rtol, atol=atol)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("method", METHODS)
def test_both_engines_agree_on_every_option_of_a_sync(method, sync):
    def build(model):
        return METHODS[method](model, momentum(model), sync_every=H, warmup_steps=4, **SYNCS[sync])

    agree(*both(build, evaluate=lambda model: vector(model).sum()))


@pytest.mark.parametrize("sync", ["plain", "delay", "fragments", "all"])
def test_both_engines_agree_without_a_warm_up_for_one_worker_and_for_four(sync):
    for workers in (1, 4):

        def build(model):
            return METHODS["independent"](model, momentum(model), sync_every=H, **SYNCS[sync])

        agree(*both(build, workers=workers, steps=33))


@pytest.mark.parametrize("sync", ["plain", "delay", "fragments", "all"])
@pytest.mark.parametrize("method", ["diloco", "independent"])
def test_low_precision_models_mix_and_sync_in_the_precision_of_the_anchor(method, sync):
    def build(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return METHODS[method](model, inner, sync_every=H, warmup_steps=2, **SYNCS[sync])

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()

    fast, exact = both(build, model=model, data=partial(batches, dtype=torch.bfloat16))
    agree(fast, exact, rtol=0.05, atol=0.02)
    changed = np.abs(vector(exact.model) - vector(model())).max()
    assert changed > 0.1  # or the tolerance would say nothing


@pytest.mark.parametrize("sync", ["plain", "fragments", "all"])
def test_a_schedule_and_two_parameter_groups_of_which_one_is_frozen(sync):
    def build(model):
        model[3].bias.requires_grad_(False)
        groups = [
            {"params": [*model[0].parameters(), model[3].weight], "lr": 0.03},
            {"params": [model[3].bias]},
            {"params": model[1].parameters()},
        ]
        inner = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        decay = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + 0.1 * t))
        return METHODS["independent"](model, inner, sync_every=H, scheduler=decay, **SYNCS[sync])

    agree(*both(build))


@pytest.mark.parametrize("sync", ["plain", "int8", "fragments and delay", "all"])
def test_channels_last_weights_travel_in_the_same_order_in_both_engines(sync):
    def model():
        torch.manual_seed(2)
        built = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)
        )
        return built.double().to(memory_format=torch.channels_last)

    def data(worker):
        rng = torch.Generator().manual_seed(worker)
        draw = partial(torch.randn, generator=rng, dtype=torch.float64)
        return [(draw(6, 2, 4, 4), draw(6, 5)) for _ in range(7)]

    def build(m):
        assert not m[0].weight.is_contiguous()
        return METHODS["independent"](m, momentum(m), sync_every=H, **SYNCS[sync])

    agree(*both(build, model=model, data=data, steps=30))


@pytest.mark.parametrize("sync", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_stacked_adamw_is_torchs_in_any_precision(dtype, sync):
    def build(model):
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return METHODS["balanced"](model, inner, sync_every=H, warmup_steps=2, **SYNCS[sync])

    fast, exact = both(build, model=partial(linear, dtype), data=partial(batches, dtype=dtype))
    loose = dict(rtol=0.05, atol=0.05) if dtype == torch.bfloat16 else {}
    agree(fast, exact, **loose)


def broken(worker):
    found = batches(worker)
    return found if worker != 1 else [*found[:3], (found[3][0] * float("inf"), found[3][1])]


@pytest.mark.parametrize("sync", ["plain", "int8", "delay", "fragments", "all"])
@pytest.mark.parametrize("name", ["balanced", "remembering", "gather", "weighted", "distance"])
def test_a_worker_that_is_left_out_comes_back_alike_in_both_engines(name, sync):
    def build(model):
        options = dict(sync_every=H, on_nonfinite="skip", **SYNCS[sync])
        if name in METHODS:
            return METHODS[name](model, momentum(model), **options)
        return palsgd.LocalOptimizer(model, momentum(model), SMALL[name](3), **options)

    fast, exact = both(build, model=linear, data=broken, steps=30)
    agree(fast, exact)
    assert np.isfinite(vector(fast.model)).all()
    assert not all(np.isfinite(entry["distance"][1]) for entry in exact.history)


def allowed(name, sync):
    """Does the method refuse none of the options of a sync?"""
    return not set(composed(SMALL[name](3)).refusals()) & set(SYNCS[sync])


FEW = ("plain", "int8", "delay", "fragments", "all")


@pytest.mark.parametrize(("name", "sync"), [(n, s) for n in SMALL for s in FEW if allowed(n, s)])
def test_methods_that_use_the_rest_of_the_contract_agree(name, sync):
    def build(model):
        return palsgd.LocalOptimizer(
            model, momentum(model), SMALL[name](3), sync_every=6, warmup_steps=3, **SYNCS[sync]
        )

    agree(*both(build, evaluate=lambda model: vector(model).sum(), evaluate_every=2))


FAMILY = [row for row in registry.rows() if row.rounds]


def own_settings(row):
    return dict(mix_prob=0.3, mix_rate=2.0, draws="independent") if row.mixes else {}


def family_cases():
    for row in FAMILY:
        refused = row.method(**{k: 0.3 for k in row.settings() if k.startswith("mix")}).refusals()
        yield from ((row, sync) for sync in FEW if not set(refused) & set(SYNCS[sync]))


@pytest.mark.parametrize(
    ("row", "sync"), [pytest.param(r, s, id=f"{r.name}-{s}") for r, s in family_cases()]
)
def test_every_method_of_the_library_agrees_in_both_engines(row, sync):
    def build(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.02)
        decay = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + 0.1 * t))
        return getattr(palsgd.methods, row.title)(
            model, inner, sync_every=H, warmup_steps=3, scheduler=decay, on_nonfinite="skip",
            **own_settings(row), **SYNCS[sync],
        )  # fmt: skip

    agree(*both(build, evaluate=lambda model: vector(model).sum()))
    agree(*both(build, model=linear, data=broken, steps=30))


@pytest.mark.parametrize("name", ["ring", "halfway"])
def test_the_global_model_is_returned_where_no_worker_holds_it(name):
    def build(model):
        return palsgd.LocalOptimizer(model, momentum(model), SMALL[name](3), sync_every=6)

    fast, exact = both(build, model=linear, steps=20)
    opts = exact.optimizers
    expected = torch.stack([anchor_of(opt) for opt in opts]).mean(0)
    for result in (fast, exact):
        weight, bias = result.model.parameters()
        found = torch.cat([weight.detach().flatten(), bias.detach()])
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert not np.allclose(vector(opts[0].model), expected)


@pytest.mark.parametrize(
    ("name", "sync"),
    [
        *((n, s) for n in ("balanced", "independent") for s in FEW if s != "int8"),
        ("ring", "plain"),
        ("ring", "fragments"),
    ],
)
def test_listeners_hear_the_same_of_every_worker_in_both_engines(name, sync):
    heard = [[], []]

    def run(vectorize):
        def build(model):
            options = dict(sync_every=H, warmup_steps=3, **SYNCS[sync])
            if name in METHODS:
                opt = METHODS[name](model, momentum(model), **options)
            else:
                opt = palsgd.LocalOptimizer(model, momentum(model), SMALL[name](3), **options)
            for kind in KINDS:
                opt.on(kind, heard[vectorize].append)
            return opt

        palsgd.simulate(
            workers=3, steps=30, model=linear, loss=mse, data=batches, method=build,
            vectorize=bool(vectorize),
        )  # fmt: skip

    for vectorize in (0, 1):
        run(vectorize)
    exact, fast = ([_facts(event) for event in found] for found in heard)
    assert len(exact) == len(fast) > 20
    assert Counter(exact) == Counter(fast)


def _facts(event):
    exactly = {k: v for k, v in vars(event).items() if k != "distance"}
    return type(event).__name__, *sorted(exactly.items())


def test_step_hooks_run_in_the_exact_engine_and_keep_workers_from_being_stacked(caplog):
    calls = []

    def build(model):
        opt = palsgd.LocalSGD(model, momentum(model), sync_every=4)
        opt.register_step_post_hook(lambda *_: calls.append(1))
        return opt

    result = palsgd.simulate(workers=2, steps=8, model=linear, loss=mse, data=batches, method=build)
    assert result.engine == "exact"
    assert "the optimizer has step hooks" in caplog.text
    assert len(calls) == 16


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_overridden_step_is_refused_by_both_engines(vectorize):
    class Mine(palsgd.LocalSGD):
        def step(self, closure=None):
            return super().step(closure)

    with pytest.raises(ValueError, match="overrides step"):
        palsgd.simulate(
            workers=2, steps=8, model=linear, loss=mse, data=batches, vectorize=vectorize,
            method=lambda m: Mine(m, momentum(m), sync_every=4),
        )  # fmt: skip


def test_runs_of_different_methods_share_a_program_and_those_of_varying_length_do_not(caplog):
    def run(method, outer=None):
        return {
            "method": lambda m: palsgd.LocalOptimizer(m, momentum(m), method, outer, sync_every=6)
        }

    names = ("remembering", "halfway", "weighted", "ring", "growing")
    runs = [run(SMALL[name](3)) for name in names]
    runs.append({"method": lambda m: METHODS["independent"](m, momentum(m), sync_every=6)})
    common = dict(workers=3, steps=31, model=linear, loss=mse, data=batches)
    together = palsgd.simulate_many(runs, **common, vectorize=True)
    assert "2 programs, because runs differ in the lengths of their rounds" in caplog.text
    for plan, result in zip(runs, together, strict=True):
        agree(result, palsgd.simulate(**common, **plan, vectorize=False))


BATCHNORM = partial(net, dtype=torch.float32)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(compress="int8"),
        dict(compress="topk:0.1"),
        dict(compress="int4", bucket_mb=20 * 4 / 2**20),
        dict(bucket_mb=20 * 4 / 2**20),
        dict(fragments=3),
        dict(fragments=2, delay=2, compress="bf16"),
    ],
)
def test_sizes_of_messages_are_those_of_real_exchanges(options, workers):
    def build(model):
        return palsgd.LocalSGD(model, momentum(model), sync_every=6, warmup_steps=3, **options)

    result = palsgd.simulate(
        workers=workers, steps=21, model=BATCHNORM, loss=mse, method=build, vectorize=False,
        data=partial(batches, dtype=torch.float32),
    )  # fmt: skip
    opt = result.optimizers[0]
    size = payload_size(core_of(opt))
    messages = size.warmup() * 3 + size.start()
    history = []
    for clock, due in opt.schedule.exchanges(21):
        for kind, fragment in due:
            if kind in ("send", "sync"):
                history.append(size.sync(fragment, opt.schedule.round_of(clock - 1)))
                messages += history[-1]
    assert opt.ledger.bytes_sent == sum(messages)
    assert opt.ledger.messages == len(messages)
    assert [entry["bytes_sent"] for entry in opt.ledger.history] == [sum(s) for s in history]
