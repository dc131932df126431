"""VGG-16 on CIFAR-10: accuracy against H at K = 4, and against K at fixed epochs.

Against H 52 epochs in place of the paper's 200, with all of its 2,049 steps of warm-up: a fifth of
them leaves this model at 16% to 39%, and which it is decides the rest
(lab/records/2026-11-18-vgg16). A twelfth of the epochs where settings are tuned, a half against K,
as 32 workers have few rounds; warm-ups are shortened alike there. Products are in bf16.
"""

from typing import Any

from calls import ACCURACY, Call, Compare, Sweep, tuned_comparison
from hardware import VGG_16, links
from readings import along, ends
from study import Claim, Part, Study, main

from palsgd.lab.plan.paper import C

METHODS = ("ddp", "localsgd", "diloco", "palsgd", "anchordecay")
FULL: dict[str, Any] = {"precision": "bf16", **ACCURACY}
# Three rounds of 1,024 after the warm-up: whole rounds of every H.
WHOLE = FULL | {"epochs": None, "whole_rounds": False, "warmup_steps": 2049,
                "lr_warmup_epochs": 2.5, "steps": 2049 + 3 * 1024,
                "evaluate_every": 348}  # fmt: skip
SHORT: dict[str, object] = {
    "steps": 96, "batch_size": 16, "warmup_steps": 16, "pull": 0.5, **ACCURACY,
}  # fmt: skip


def sweep(tiny: bool, name: str, *methods: str, seeds: int = 1, **more: object) -> Call:
    recipe, size = ("digits", SHORT) if tiny else ("cifar10-vgg16", WHOLE)
    return Sweep(name=name, recipe=recipe, settings={**size, "method": list(methods), **more},
                 seeds=seeds)  # fmt: skip


def interval(tiny: bool) -> list[Call]:
    """At the middle of the paper's learning rates, which are the same for every H. DDP's seeds say
    how far apart chance alone puts two runs. Methods are in one call, so that they start from one
    warm-up; the ends of the range come first."""
    lengths = [8, 32] if tiny else [1024, 32, 256, 128, 512, 64]
    return [
        sweep(tiny, "H", "palsgd", "diloco", "localsgd", sync_every=lengths),
        sweep(tiny, "ddp", "ddp", seeds=2 if tiny else 3),
    ]


def calm(tiny: bool) -> list[Call]:
    """Few rounds are too few for an outer momentum of 0.9, which the paper does not name: where H
    is long, the last steps overshoot (lab/records/2026-11-18-vgg16)."""
    lengths = [8, 32] if tiny else [1024, 32, 512, 128]
    return [sweep(tiny, "outer", "palsgd", "diloco", sync_every=lengths, outer_momentum=0.5)]


def shortened(tiny: bool, share: float, calls: list[Call]) -> list[Call]:
    return calls if tiny else [call.shortened(share) for call in calls]


def tuned(tiny: bool) -> list[Call]:
    if tiny:
        return tuned_comparison("H16", "digits", METHODS, controls=True, trials=2, seeds=2,
                                steps=96, batch_size=16, **ACCURACY)  # fmt: skip
    calls = tuned_comparison("H128", "cifar10-vgg16", METHODS, controls=("no-pull",), trials=4,
                             seeds=2, sync_every=128, **FULL)  # fmt: skip
    return shortened(tiny, 1 / 12, calls)


def scaling(tiny: bool) -> list[Call]:
    if tiny:
        return [Compare(name=f"K{k}", recipe="digits", methods=("ddp", "diloco", "palsgd"),
                        settings={**SHORT, "steps": 192 // k, "workers": k, "sync_every": 8})
                for k in (2, 4)]  # fmt: skip
    calls: list[Call] = [
        Compare(name=f"K{k}", recipe=f"cifar10-vgg16-k{k}", settings=FULL,
                methods=("ddp", "diloco", "palsgd"))
        for k in (4, 8, 16, 32)
    ]  # fmt: skip
    return shortened(tiny, 0.5, calls)


def parts(tiny: bool) -> list[Part]:
    """Tiny: the handwritten digits in place of CIFAR-10, and a net of two layers."""
    return [
        Part("interval", "What do accuracy and loss lose with a longer interval, at K = 4?",
             interval(tiny)),
        Part("calm", "The same with an outer momentum of 0.5?", calm(tiny)),
        Part("tuned", "Which method is ahead at H = 128 if each has its own settings?",
             tuned(tiny)),
        Part("scaling", "What does accuracy lose with more workers at fixed epochs?",
             scaling(tiny), links=links(C, 4, 256 * VGG_16)),
    ]  # fmt: skip


STUDY = Study(
    name="vgg16",
    title="VGG-16 on CIFAR-10, K = 4 with H = 32 to 1024, and K = 4 to 32",
    parts=parts,
    claims=[
        Claim("from H = 32 to 1024 PALSGD loses 0.058% of accuracy", "interval",
              along("sync_every", "localsgd", "diloco", "palsgd")),
        Claim("the same, as the outer momentum is not named", "calm",
              along("sync_every", "diloco", "palsgd")),
        Claim("none at one H with settings of each method's own", "tuned", ends(*METHODS)),
        Claim("from 4 to 16 workers DDP loses 4%, over 15% at 32; PALSGD above DiLoCo, both above "
              "DDP at every K", "scaling", along("workers", "ddp", "diloco", "palsgd")),
    ],
    links=links(C, 4, 128 * VGG_16),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
