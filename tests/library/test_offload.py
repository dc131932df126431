"""The global model in host memory: the same weights, and where everything lies."""

import numpy as np
import pytest
import torch
from torch import nn

import palsgd
from palsgd.offload import windows
from palsgd.replica import Replica
from support.core_access import anchor_of, windows_opened
from support.problems import batches, mse, vector

H = 4
SETTINGS = {
    "plain": {},
    "delay": {"delay": 2},
    "fragments": {"fragments": 3},
    "fragments and delay": {"fragments": 2, "delay": 1},
    "int8": {"compress": "int8"},
    "int4 and delay": {"compress": "int4", "delay": 2},
    "top-k and fragments": {"compress": "topk:0.1", "fragments": 2},
    "warm-up": {"warmup_steps": 3},
    "max_norm": {"max_norm": 0.1},
    "small messages": {"bucket_mb": 40 / 2**20},
    "recomputed buffers": {"buffers": "local"},
}
OUTER = {
    "nesterov": palsgd.nesterov(0.7, 0.5),
    "dampened": lambda ps: torch.optim.SGD(ps, 0.5, momentum=0.9, dampening=0.3),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "fused adam": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, 0.01, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.01),
}
METHODS = {
    "PALSGD": dict(mix_prob=0.4, mix_rate=3.0),
    "DiLoCo": {},
    "LocalSGD": {},
    "FedProx": dict(mu=0.1),
    "SlowMo": {},
    "AnchorDecay": {},
}


def wide_net():
    """Tensors of 4 to 400 elements, the large ones in several windows."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 97), nn.BatchNorm1d(97), nn.Tanh(), nn.Linear(97, 4), nn.Linear(4, 3)
    )


class Odd(nn.Module):
    """A channels-last convolution, a tied weight, a scalar, and a tensor with gaps in memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(4, 120), nn.Linear(4, 120)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.gaps = nn.Parameter(torch.randn(3, 8)[:, ::2])
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x):
        image = torch.relu(self.first(x) + self.second(x)).view(-1, 2, 6, 10)
        return (self.conv(image).mean((2, 3)) + x @ self.gaps.t()) * self.scale


def built(method, model, settings):
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    kind = getattr(palsgd, method, None) or getattr(palsgd.methods, method)
    return kind(model, inner, sync_every=H, **METHODS[method] | settings)


def offload_job(
    offload,
    method="PALSGD",
    make=wide_net,
    dtype=torch.float32,
    steps=18,
    outer_name=None,
    **settings,
):
    """The weights, and what the optimizer would save; windows of 64 elements."""
    torch.manual_seed(0)
    model = make().to(dtype)
    if outer_name is not None:
        settings["outer"] = OUTER[outer_name]
    opt = built(method, model, settings | {"offload": offload})
    with windows_opened(elements=64) as opened:
        for batch in palsgd.until(batches(dtype=dtype), opt, steps=18):
            mse(model, batch).backward()
            opt.step()
            opt.zero_grad()
    assert bool(opened) == offload
    with opt.anchor_weights():
        shown = vector(model)
    return vector(model), shown, anchor_of(opt).numpy(), state_of(opt), vars_of(opt.ledger)


def state_of(opt):
    """All tensors of the outer optimizer's state, and its numbers."""
    state = opt.outer.state_dict()["state"]
    entries = [state[index] for index in sorted(state)]
    return [torch.as_tensor(entry[name]).numpy() for entry in entries for name in sorted(entry)]


def vars_of(ledger):
    return ledger.bytes_sent, ledger.mixing_steps, ledger.syncs


def check_alike(world, **settings):
    kept = world.run(offload_job, workers=2, offload=False, **settings)
    away = world.run(offload_job, workers=2, offload=True, **settings)
    for mine, theirs in zip(away, kept, strict=True):
        for name, x, y in zip(("local", "shown", "anchor"), mine, theirs, strict=False):
            np.testing.assert_array_equal(x, y, err_msg=name)
        for x, y in zip(mine[3], theirs[3], strict=True):
            np.testing.assert_array_equal(x, y)
        assert mine[4] == theirs[4]


@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_are_those_of_a_run_without_offload(world, setting):
    check_alike(world, **SETTINGS[setting])


@pytest.mark.parametrize("outer", OUTER)
def test_every_elementwise_outer_optimizer_steps_in_windows_as_it_does_on_whole_tensors(
    world, outer
):
    check_alike(world, outer_name=outer)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "PALSGD"])
def test_methods_work_in_windows_as_on_whole_tensors(world, method):
    check_alike(world, method=method)


@pytest.mark.parametrize("setting", ["plain", "delay", "fragments", "int8"])
@pytest.mark.parametrize("method", ["PALSGD", "FedProx", "SlowMo"])
def test_strided_tied_scalar_and_unused_tensors_are_the_same_too(world, method, setting):
    check_alike(world, method=method, make=Odd, **SETTINGS[setting])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_precisions_are_the_same_too(world, dtype):
    check_alike(world, dtype=dtype, delay=1)


def alone(**settings):
    model = wide_net()
    settings = {"sync_every": H, "transport": palsgd.Alone(), "offload": True} | settings
    return palsgd.DiLoCo(model, torch.optim.SGD(model.parameters(), 0.1), **settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: alone(offload="cpu"), "offload='cpu'"),
        (
            lambda: alone(outer=lambda ps: torch.optim.Adafactor(ps)),
            "the outer step in pieces, and that of Adafactor is not elementwise; use",
        ),
        (
            lambda: palsgd.DDP(
                wide_net(), torch.optim.SGD(nn.Linear(1, 1).parameters()), offload=True
            ),
            "offload=True is about syncs, which DDP has none of",
        ),
        (
            lambda: palsgd.methods.SCAFFOLD(
                (model := wide_net()),
                torch.optim.SGD(model.parameters(), 0.1),
                sync_every=H,
                transport=palsgd.Alone(),
                offload=True,
            ),
            r"offload=True means nothing for SCAFFOLD: its \w+\(\) needs all tensors at once",
        ),
    ],
    ids=["a device", "Adafactor", "DDP", "SCAFFOLD"],
)
def test_what_cannot_be_offloaded_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_windows_cover_a_range_and_cut_tensors_at_whole_vectors_only():
    model = wide_net()
    layout = Replica(model, torch.optim.SGD(model.parameters())).layout
    with windows_opened(elements=100):
        found = [w.place for w in windows(layout, range(37, layout.size), torch.device("cpu"))]
    assert [i for place in found for i in place] == list(range(37, layout.size))
    assert all(len(place) <= 100 for place in found)
    for place in found[:-1]:
        start = max(37, layout.start_of(place.stop))
        assert (place.stop - start) % 64 == 0


def test_a_simulation_with_offload_runs_in_the_exact_engine():
    def run(**settings):
        def method(model):
            inner = torch.optim.SGD(model.parameters(), 0.05)
            return palsgd.DiLoCo(model, inner, sync_every=H, offload=True)

        return palsgd.simulate(
            workers=2,
            steps=8,
            model=wide_net,
            loss=mse,
            data=lambda worker: iter(batches(worker, dtype=torch.float32) * 9),
            method=method,
            progress=False,
            **settings,
        )

    assert run().ledger.syncs == 2
    with pytest.raises(ValueError, match="offload=True keeps the anchor off the device"):
        run(vectorize=True)
