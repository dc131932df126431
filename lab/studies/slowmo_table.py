"""A table that others published: Table 1 of SlowMo (CIFAR-10, ResNet-18, 32 workers, H = 12).

First its Local SGD, SlowMo and all-reduce rows; a row counts as reproduced within 0.4 points. Then
DiLoCo, PALSGD and AnchorDecay in the same setting. All methods have a learning rate of their own,
from one grid.

100 epochs in place of 200, two seeds in place of five, products in bf16; the same for all. Runs
that choose learning rates have 40 epochs: whole ones would take most of an hour. The next point of
the grid is three times as far, which is more than the best learning rate is expected to move with
the length. All have the table's five epochs of a growing learning rate, and its decays at the same
shares of the run.

Half of the epochs are probably too few (lab/records/2026-11-19-slowmo-table), so `whole` has all
200, with one seed.
"""

from typing import Any

from calls import ACCURACY, Call, Compare, Sweep
from grid import Grid
from hardware import assumed
from readings import ends
from study import Claim, Part, Study, main

ROWS = ("ddp", "localsgd", "slowmo")
OURS = ("diloco", "palsgd", "anchordecay")
TINY = "tiny_resnet:TinyResNet"
SEEDS = (2023, 2024)
SHORT: dict[str, Any] = dict(workers=4, batch_size=8, sync_every=12, steps=48, schedule="step",
                             schedule_at="0.5:0.75:0.875")  # fmt: skip


def table(tiny: bool, name: str, methods: tuple[str, ...]) -> list[Call]:
    """The same grid, seeds and lengths in both parts. One call for each seed, as a seed of three
    methods takes a GPU several minutes."""
    rates = {"lr": (0.02, 0.1) if tiny else (0.1, 0.3, 0.9)}
    size = SHORT if tiny else dict(precision="bf16")
    common: dict[str, Any] = dict(recipe=TINY if tiny else "cifar10-resnet18", together=tiny)
    tried, judged = ({}, {}) if tiny else ({"epochs": 40}, {"epochs": 100})
    settings: dict[str, Any] = size | ACCURACY
    return [
        Grid(**common, name=name, settings=settings | tried,
             methods=dict.fromkeys(methods, rates)),
        *(Compare(**common, name=f"{name}-{seed}", settings=settings | judged | {"seed": seed},
                  methods=methods, tuned_by=name) for seed in SEEDS),
    ]  # fmt: skip


def whole(tiny: bool) -> list[Call]:
    """At the learning rates that the grid chose. For the two that train in rounds it chose its
    lowest, so Local SGD has the next lower one too, and SlowMo a larger momentum of its range."""

    def runs(method: str, rates: list[float], **varied: list[float]) -> Call:
        size = SHORT if tiny else dict(precision="bf16", epochs=200)
        rates = [rate / 10 for rate in rates] if tiny else rates
        return Sweep(
            name=method, recipe=TINY if tiny else "cifar10-resnet18", together=tiny,
            settings={**size, **ACCURACY, "seed": SEEDS[0], "method": method, "lr": rates,
                      **{f"method.{key}": values for key, values in varied.items()}},
        )  # fmt: skip

    return [
        runs("ddp", [0.3]),
        runs("localsgd", [0.1, 0.03]),
        runs("slowmo", [0.1], momentum=[0.5, 0.7]),
    ]


def parts(tiny: bool) -> list[Part]:
    """Tiny: the handwritten digits and a net of two residual blocks with BatchNorm."""
    return [
        Part("published", "Are the published rows reproduced?", table(tiny, "published", ROWS)),
        Part("whole", "The same with all of the epochs?", whole(tiny)),
        Part("ours", "Where do the others stand?", table(tiny, "ours", OURS)),
    ]


STUDY = Study(
    name="slowmo_table",
    title="SlowMo's Table 1: CIFAR-10, ResNet-18, 32 workers, H = 12",
    parts=parts,
    claims=[
        Claim("all-reduce 92.66%, Local SGD 91.73%, SlowMo 93.20%", "published", ends(*ROWS)),
        Claim("all-reduce 92.66%, Local SGD 91.73%, SlowMo 93.20%", "whole", ends(*ROWS)),
        Claim("none", "ours", ends(*OURS)),
    ],
    # A gradient step of 50 ms is assumed.
    links=assumed("50ms"),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
