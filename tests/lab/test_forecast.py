"""What a forecast says that a run exchanges, beside the ledger of that run."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import palsgd
from palsgd import registry
from palsgd.lab.factory import build_optimizer
from palsgd.lab.forecast import forecast, schedule_of
from palsgd.lab.methods import method_of
from palsgd.lab.settings import Settings
from palsgd.payload import ModelSize

CODECS = (None, None, "bf16", "int8", "int4", "topk:0.1")
COUNTS = ("syncs", "messages", "bytes_sent", "bytes_on_the_wire")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def drawn(seed: int) -> Settings:
    """Any settings that the method they name does not refuse."""
    rng, names = random.Random(seed), registry.names()
    fragments = rng.choice((1, 1, 2, 3))
    length = rng.randint(fragments, 9)
    settings = Settings(
        workload="digits", method=names[seed % len(names)], workers=rng.randint(1, 4),
        steps=rng.randint(1, 30), sync_every=length, fragments=fragments,
        delay=rng.randint(0, length // fragments), compress=rng.choice(CODECS),
        warmup_steps=rng.choice((0, 0, 3, 7)), buffers=rng.choice(("average", "local")),
        mix_prob=rng.choice((0.0, 0.3)), draws=rng.choice(("balanced", "independent", "shared")),
        seed=seed, inner="sgd", momentum=0.0, lr=0.01,
    )  # fmt: skip
    refused = {"compress": None, "delay": 0, "fragments": 1}
    return replace(
        settings, **{k: v for k, v in refused.items() if k in method_of(settings).refusals()}
    )


def trained(settings: Settings) -> palsgd.Ledger:
    def batches(worker):
        while True:
            yield torch.linspace(-1, 1 + worker, 20).view(4, 5)

    return palsgd.simulate(
        workers=settings.workers, steps=settings.steps, model=build, data=batches,
        loss=lambda model, x: model(x).square().mean(), vectorize=False, progress=False,
        method=partial(build_optimizer, settings, settings.steps),
    ).ledger  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "paced"), [(seed, False) for seed in range(45)] + [(seed, True) for seed in range(9)]
)
def test_a_run_exchanges_what_was_forecast(seed, paced):
    settings = drawn(seed)
    if paced:
        speeds = ":".join(str(1 / (1 + k)) for k in range(settings.workers))
        settings = replace(settings, draws="paced", speeds=speeds)
    ahead = forecast(settings, model=ModelSize.of(build(), settings.buffers), simulated=True)
    ledger = trained(settings)
    assert {name: getattr(ahead.run, name) for name in COUNTS} == {
        name: getattr(ledger, name) for name in COUNTS
    }, settings


def test_the_schedule_of_settings_is_that_of_the_optimizer():
    for seed in range(20):
        settings = drawn(seed)
        with palsgd.transports.ambient(palsgd.Alone()):
            opt = build_optimizer(settings, settings.steps, build())
        expected = opt.schedule.with_end(settings.steps)
        got = schedule_of(settings, settings.steps)
        assert list(got.exchanges(settings.steps)) == list(expected.exchanges(settings.steps))


def test_a_long_run_is_forecast_at_once():
    settings = Settings(workload="digits", steps=10**6, sync_every=64, warmup_steps=500_000)
    assert forecast(settings).run.syncs == 500_000 + 7813
