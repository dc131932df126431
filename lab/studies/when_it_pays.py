"""When does it pay? What skipping gradients and pulling to the anchor add to DiLoCo, over H, p,
pull, learning rate and outer step; and how much room each method leaves for its settings."""

from calls import ACCURACY, OF_TEXTS, Call, Sweep, tuned_comparison
from readings import along, ends
from study import Claim, Part, Study, main

METHODS = ("ddp", "localsgd", "diloco", "palsgd", "anchordecay")
CONTROLS = ("palsgd-no-pull", "diloco-equal-gradients", "diloco-same-settings", "diloco-raised-lr")
# The warm-up lasts until DDP has found the rules of the grammar, as seeds end apart otherwise. Then
# come 2,048 steps: whole rounds of every H. A step of all workers has 64 stories.
LONG = {"workers": 8, "batch_size": 8, "warmup_steps": 420, "steps": 420 + 2048}
SHORT = {"workers": 2, "warmup_steps": 0, "steps": 32, "batch_size": 4, "evaluate_every": 16}


def tuned(tiny: bool) -> list[Call]:
    size = (
        SHORT | dict(trials=2, seeds=2) if tiny else LONG | dict(trials=8, tuning_seeds=2, seeds=6)
    )
    found = []
    for h in (4, 16) if tiny else (16, 64, 256):
        found += tuned_comparison(
            f"H{h}", "stories" if tiny else "stories-1m", METHODS, controls=OF_TEXTS,
            sync_every=h, **size,
        )  # fmt: skip
    return found


def longest(tiny: bool) -> list[Call]:
    """Four rounds of 1,024 steps. Local SGD, which has no outer step, is left out to save time."""
    methods = ("ddp", "diloco", "palsgd", "anchordecay")
    if tiny:
        size = SHORT | dict(sync_every=32, trials=2, seeds=2)
    else:
        size = LONG | dict(sync_every=1024, steps=420 + 4096, trials=6, tuning_seeds=2, seeds=4)
    recipe = "stories" if tiny else "stories-1m"
    return tuned_comparison("H1024", recipe, methods, controls=OF_TEXTS, **size)


def strength(tiny: bool) -> list[Call]:
    """p and pull at one learning rate and outer step, over H."""
    recipe, size = ("stories", SHORT) if tiny else ("stories-1m", LONG)
    grid: dict[str, object] = dict(
        sync_every=[4, 16] if tiny else [16, 64, 256],
        mix_prob=[0.125, 0.25] if tiny else [0.05, 0.1, 0.25],
        pull=[0.0, 0.5] if tiny else [0.0, 0.25, 0.5, 0.75],
    )
    seeds = 1 if tiny else 3
    plain = {"sync_every": grid["sync_every"], "method": ["diloco"]}
    return [
        Sweep(name="palsgd", recipe=recipe, settings=size | grid, seeds=seeds),
        Sweep(name="diloco", recipe=recipe, settings=size | plain, seeds=seeds),
    ]


def room(tiny: bool) -> list[Call]:
    """A grid of learning rates and outer steps, over H: which of its points still train?"""
    recipe, size = ("stories", SHORT) if tiny else ("stories-1m", LONG)
    grid: dict[str, object] = dict(
        sync_every=[4, 16] if tiny else [16, 64, 256],
        lr=[3e-3, 1e-2] if tiny else [5e-4, 1e-3, 2e-3, 4e-3],
        outer_lr=[0.7] if tiny else [0.4, 1.0],
        outer_momentum=[0.0, 0.9] if tiny else [0.0, 0.5, 0.9],
    )
    without = {key: value for key, value in grid.items() if not key.startswith("outer")}
    common = dict(recipe=recipe, seeds=1)
    return [
        Sweep(name="diloco", settings=size | grid | {"method": ["diloco"]}, **common),
        Sweep(name="palsgd", settings=size | grid | {"pull": [0.0, 0.5]}, **common),
        Sweep(name="anchordecay", settings=size | grid | {"method": ["anchordecay"]}, **common),
        Sweep(name="localsgd", settings=size | without | {"method": ["localsgd"]}, **common),
    ]


def vision(tiny: bool) -> list[Call]:
    found = []
    for h in (8, 32) if tiny else (32, 128):
        size = dict(steps=96, trials=2, seeds=2) if tiny else dict(epochs=20, trials=8, seeds=4)
        found += tuned_comparison(
            f"H{h}", "digits" if tiny else "cifar10-cnn-k8", METHODS, controls=True,
            sync_every=h, **size, **ACCURACY,
        )  # fmt: skip
    return found


def parts(tiny: bool) -> list[Part]:
    return [
        Part("tuned", "Each method at its best: what do skipping and pulling add to DiLoCo?",
             tuned(tiny)),
        Part("longest", "The same with 1,024 steps between two syncs", longest(tiny)),
        Part("strength", "How strong should the pull be, and how often, at each H?",
             strength(tiny)),
        Part("room", "Which share of a grid of settings still trains, for each method?",
             room(tiny)),
        Part("vision", "The same question on pictures", vision(tiny)),
    ]  # fmt: skip


STUDY = Study(
    name="when_it_pays",
    title="When does it pay? Endless stories, 1 M GPT-Neo, K = 8; and the small CNN",
    parts=parts,
    claims=[
        Claim("p of about 0.05 is best, p >= 0.25 trains faster but worse", "strength",
              along("mix_prob", "palsgd")),
        Claim("the advantage over DiLoCo is stable convergence", "room",
              along("sync_every", "diloco", "palsgd", "anchordecay", "localsgd")),
        Claim("none: what skipping and pulling are worth", "tuned", ends(*METHODS, *CONTROLS)),
        Claim("none: the same at H = 1024", "longest", ends(*METHODS, *CONTROLS)),
        Claim("none: the same on pictures", "vision", ends(*METHODS, *CONTROLS)),
    ],
    # A gradient step of 50 ms is assumed.
    links=("100mbit,10ms,step=50ms", "1gbit,1ms,step=50ms"),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
