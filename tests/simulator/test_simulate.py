"""Simulated workers against real processes."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import palsgd
from support.engines import METHODS
from support.problems import batches, linear, mse, net, vector

STEPS = 27  # a last round cut short


def dropout_net():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3)
    )


MODELS = {"batch norm": net, "dropout": dropout_net, "double": linear}


def dtype_of(name):
    return torch.float64 if name == "double" else torch.float32


def build(model, method):
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    return METHODS[method](model, inner)


def snapshot(model, opt):
    """Everything that must be equal, as plain arrays."""
    inner = {k: v for p in opt.inner.state_dict()["state"].values() for k, v in p.items()}
    kept = opt.outer.state_dict()["state"] if opt.outer else {}
    outer = [t for p in kept.values() for t in p.values()]
    counts = ("gradient_steps", "mixing_steps", "syncs", "messages", "bytes_sent", "distance")
    return {
        "weights": vector(model),
        "buffers": [b.double().numpy().copy() for b in model.buffers()],
        "inner": [np.asarray(v).copy() for v in inner.values()],
        "outer": [np.asarray(t.detach()).copy() for t in outer if isinstance(t, torch.Tensor)],
        "ledger": {name: getattr(opt.ledger, name) for name in counts},
        "history": [entry["distance"] for entry in opt.ledger.history],
    }


def real_process(name, method, steps):
    model = MODELS[name]()
    opt = build(model, method)
    torch.manual_seed(3 + dist.get_rank())
    for batch in palsgd.until(batches(dtype=dtype_of(name)), opt, steps=steps):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return snapshot(model, opt)


def simulated(name, method, steps, workers, **options):
    return palsgd.simulate(
        workers=workers,
        steps=steps,
        model=MODELS[name],
        loss=mse,
        data=lambda worker: batches(worker, dtype=dtype_of(name)),
        method=lambda model: build(model, method),
        vectorize=False,
        seed=3,
        **options,
    )


def check_equal(real, made, check):
    for key in ("weights", "buffers", "inner", "outer"):
        for a, b in zip(real[key], made[key], strict=True):
            check(a, b)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_two_simulated_workers_are_bit_equal_to_two_processes(world, name, method):
    real = world.run(real_process, workers=2, name=name, method=method, steps=STEPS)
    result = simulated(name, method, STEPS, workers=2)
    for k, opt in enumerate(result.optimizers):
        made = snapshot(opt.model, opt)
        check_equal(real[k], made, np.testing.assert_array_equal)
        assert real[k]["ledger"] == made["ledger"]
        assert real[k]["history"] == made["history"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 4, 8])
@pytest.mark.parametrize("method", ["ddp", "balanced", "independent"])
def test_more_simulated_workers_equal_processes_up_to_the_order_of_the_sum(world, workers, method):
    real = world.run(real_process, workers=workers, name="double", method=method, steps=STEPS)
    result = simulated("double", method, STEPS, workers=workers)
    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    for k, opt in enumerate(result.optimizers):
        made = snapshot(opt.model, opt)
        check_equal(real[k], made, close)
        distance = made["ledger"].pop("distance")
        assert distance == pytest.approx(real[k]["ledger"].pop("distance"))
        assert real[k]["ledger"] == made["ledger"]


def test_the_result_has_the_global_model_a_history_and_a_ledger():
    result = simulated(
        "batch norm", "balanced", STEPS, workers=3, evaluate=lambda m: vector(m).sum()
    )
    opts = result.optimizers
    np.testing.assert_array_equal(vector(result.model), vector(opts[2].model))
    assert result.ledger.bytes_sent == opts[0].ledger.bytes_sent > 0
    clocks = [entry["clock"] for entry in result.history]
    assert clocks == [1, 2, 3, 4, 9, 14, 19, 24, 27]
    last = result.history[-1]
    assert last["distance"] == [opt.ledger.distance for opt in opts]
    assert len(last["losses"]) == 3
    assert last["metric"] == pytest.approx(vector(result.model).sum())


def test_dropout_does_not_leak_between_workers():
    """Worker 0 draws the same numbers whatever the others do."""
    losses = [
        [entry["losses"][0] for entry in simulated("dropout", "localsgd", 9, k).history]
        for k in (1, 2)
    ]
    assert losses[0][0] == losses[1][0]


def test_a_simulation_leaves_the_random_state_of_its_caller_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    simulated("dropout", "balanced", 6, workers=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_data_that_runs_dry_names_the_worker():
    def data(worker):
        return iter(batches(1)[:4]) if worker == 1 else batches(worker)

    with pytest.raises(ValueError, match="data of worker 1 ran dry after 4 batches"):
        palsgd.simulate(
            workers=2, steps=20, model=linear, loss=mse, data=data,
            method=lambda m: build(m, "localsgd"),
        )  # fmt: skip


def test_a_loss_that_is_not_one_number_names_worker_and_step():
    with pytest.raises(ValueError, match=r"worker 0 at gradient step 0 .* shape \(6,\)"):
        palsgd.simulate(
            workers=2, steps=5, model=linear, data=batches, vectorize=False,
            loss=lambda m, b: (m(b[0]) - b[1]).square().mean(dim=1),
            method=lambda m: build(m, "localsgd"),
        )  # fmt: skip


def test_a_nan_in_one_worker_names_worker_and_step():
    def data(worker):
        found = batches(worker)
        if worker == 2:
            found[3] = (found[3][0] * float("nan"), found[3][1])
        return found

    with pytest.raises(palsgd.SyncError, match=r"worker 2"):
        palsgd.simulate(
            workers=3, steps=20, model=linear, loss=mse, data=data,
            method=lambda m: build(m, "localsgd"),
        )  # fmt: skip


def test_settings_that_differ_between_simulated_workers_are_refused():
    counter = itertools.count(4)

    def method(model):
        return palsgd.LocalSGD(
            model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=next(counter)
        )

    with pytest.raises(ValueError, match=r"sync_every differs .* worker 1 has 5, worker 0 has 4"):
        palsgd.simulate(
            workers=2, steps=20, model=linear, loss=mse, data=batches, method=method,
            vectorize=False,
        )  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("workers", 0), ("steps", 0), ("seed", -1)])
def test_impossible_numbers_are_refused_by_name(name, value):
    arguments = dict(workers=2, steps=5, seed=0) | {name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        palsgd.simulate(
            model=linear, loss=mse, data=batches, method=lambda m: build(m, "ddp"), **arguments
        )
