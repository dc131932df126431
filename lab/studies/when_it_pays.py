"""When does it pay? What skipping gradients and pulling to the anchor add to DiLoCo, over H, p,
pull, learning rate and outer step; and how much room each method leaves for its settings.

Two tasks: endless stories with a GPT-Neo of a million weights, and handwritten digits, which a CPU
does in minutes. `vision` asks the same of pictures in colour.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from calls import ACCURACY, OF_TEXTS, Call, Controls, Sweep, tuned_comparison
from grid import Grid, grid_comparison
from hardware import assumed
from readings import along, ends
from study import Claim, Part, Study, main

METHODS = ("ddp", "localsgd", "diloco", "palsgd", "anchordecay")
CONTROLS = ("palsgd-no-pull", "diloco-equal-gradients", "diloco-same-settings", "diloco-raised-lr")
LINKS = assumed("50ms")
LOW = 3e-3  # a learning rate at which the largest of the paper's etas does not overshoot the anchor
P, PULL = 0.125, 0.5  # a mixing step in eight, and half of the way back in a round
OUTER = {"outer_lr": (0.4, 0.8), "outer_momentum": (0.5, 0.9)}  # 0.4 with 0.9 moves 4 times as far


@dataclass(frozen=True, kw_only=True)
class Task:
    """A workload, its length, and how many seeds it takes."""

    recipe: str
    size: dict[str, Any]
    intervals: dict[str, int]  # H by the name of its part: those of 64, 16 and 4 rounds
    map: str  # the name of the part that maps p and pull
    rates: tuple[float, ...]
    tried: int  # seeds of each point of a grid
    seeds: int  # of the comparison at the best points
    mapped: int  # of each point of the map of p and pull
    usual: dict[str, Any] = field(default_factory=dict)  # in the map, where the recipe has others

    def parts(self) -> list[Part]:
        return [
            *(Part(name, f"Each method at its best, H = {h}: what do skipping and pulling add?",
                   self.tuned(h)) for name, h in self.intervals.items()),
            Part(self.map, "How strong should the pull be, and how often, at each H?",
                 self.strength()),
        ]  # fmt: skip

    def tuned(self, h: int) -> list[Call]:
        """A grid for each method, and then fresh seeds at the best of it."""
        rates = {"lr": self.rates}
        mixed = rates | OUTER | {"mix_prob": (P,)}
        methods = {"ddp": rates, "localsgd": rates, "diloco": rates | OUTER,
                   "palsgd": mixed | {"pull": (PULL,)}, "anchordecay": rates | OUTER}  # fmt: skip
        return grid_comparison(
            f"H{h}", self.recipe, methods,
            beside={"palsgd-no-pull": mixed | {"method": ("palsgd",), "pull": (0.0,)}},
            tried=self.tried, seeds=self.seeds, controls=OF_TEXTS, sync_every=h, **self.size,
        )  # fmt: skip

    def strength(
        self, ps: tuple[float, ...] = (0.05, 0.1, 0.25),
        pulls: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75), times: int = 1, **more: Any,
    ) -> list[Call]:  # fmt: skip
        """p and pull at one outer step, over H; DiLoCo at the same settings, at the raised learning
        rate, and with as many gradients in as many rounds. `times`: as many seeds."""
        plain = self.size | self.usual | {"sync_every": list(self.intervals.values())} | more
        grid = {"mix_prob": ps, "pull": pulls}
        common: dict[str, Any] = dict(recipe=self.recipe, seeds=times * self.mapped)
        mixing = Sweep(name="palsgd", settings=plain | grid, **common)
        return [
            mixing,
            Sweep(name="diloco", settings=plain | {"method": ["diloco"]}, **common),
            Controls(name="controls", of=mixing, wanted=("raised-lr", "equal-gradients"), **common),
        ]


# After 64 steps of warm-up DDP has twice the least loss. A step of all workers has 32 stories.
# Longer runs end at the least loss, whatever the method, and would tell nothing.
STORIES = Task(
    recipe="stories-1m", intervals={"H16": 16, "H64": 64, "H256": 256}, map="strength",
    rates=(5e-4, 1e-3, 2e-3, 4e-3),
    size={"workers": 8, "batch_size": 4, "warmup_steps": 64, "steps": 64 + 1024,
          "precision": "bf16"},
    tried=3, seeds=6, mapped=3,
)  # fmt: skip
DIGITS = Task(
    recipe="digits", intervals={"digits-H8": 8, "digits-H32": 32, "digits-H128": 128},
    map="digits-strength", rates=(3e-3, 1e-2, 3e-2, 1e-1),
    size={"workers": 8, "batch_size": 16, "warmup_steps": 32, "steps": 32 + 512,
          "schedule": "cosine", "weight_decay": 0.1},
    usual={"lr": 1e-2, "outer_lr": 0.7, "outer_momentum": 0.5},
    tried=2, seeds=12, mapped=12,
)  # fmt: skip
LONGEST = replace(
    STORIES, intervals={"H1024": 1024}, size=STORIES.size | {"steps": 64 + 4 * 1024}, tried=1
)


def shards(task: Task) -> list[Call]:
    """The same where shards differ, at three learning rates, with equal settings for all."""
    grid = {
        "sharding": ("reshuffled", "dirichlet:1", "dirichlet:0.1"),
        "sync_every": list(task.intervals.values())[1:],
        "lr": task.rates[:3],
    }
    size = {key: value for key, value in (task.size | task.usual).items() if key != "lr"}
    mixed = {"mix_prob": 0.1, "pull": (0.0, 0.25, 0.5)}
    local = {"method": ("localsgd", "diloco", "anchordecay")}
    seeds = task.seeds // 2
    return [
        Sweep(name="palsgd", recipe=task.recipe, settings=size | grid | mixed, seeds=seeds),
        Sweep(name="others", recipe=task.recipe, settings=size | grid | local, seeds=seeds),
    ]


def outer_step(task: Task) -> list[Call]:
    """p, pull and the outer step, with an outer momentum at which steps overshoot: does the pull do
    what a smaller outer step does? DiLoCo has the raised learning rate of the gradient steps too,
    so that skipping is told apart from it."""
    p, rates = 0.25, task.rates[1:3]
    size = task.size | task.usual | {"outer_momentum": 0.9}

    def sweep(name: str, rates: tuple[float, ...], **more: Any) -> Call:
        grid = {
            "sync_every": list(task.intervals.values())[1:],
            "lr": rates,
            "outer_lr": (0.1, 0.2, 0.4, 0.7, 1.0),
        }
        own = {key: value for key, value in size.items() if key not in grid}
        return Sweep(name=name, recipe=task.recipe, settings=own | grid | more,
                     seeds=task.seeds // 2)  # fmt: skip

    return [
        sweep("palsgd", rates, mix_prob=p, pull=(0.0, 0.25, 0.5, 0.75)),
        sweep("diloco", rates, method=["diloco"]),
        sweep("raised", tuple(round(lr / (1 - p), 6) for lr in rates), method=["diloco"]),
    ]


def optimizers(task: Task) -> list[Call]:
    """Which inner and outer optimizers go together? Every pair has equally many points: three
    learning rates of the inner and five of the outer one. Decay of weights is AdamW's alone, which
    is Adam without it."""
    adam = task.rates[:3]
    rates = {"sgd": tuple(10 * lr for lr in adam), "adam": adam, "adamw": adam}
    size = {**task.size, "sync_every": list(task.intervals.values())[1],
            "mix_prob": 0.1, "pull": 0.25, "outer_momentum": 0.5}  # fmt: skip
    grid = {"outer": ("sgd", "sgd_m", "nesterov", "adamw"), "outer_lr": (1, 0.3, 0.1, 0.01, 0.001)}
    decay = {"adamw": size.get("weight_decay", 0.01)}
    return [
        Sweep(name=inner, recipe=task.recipe, seeds=task.seeds // 2,
              settings=size | grid | {"inner": inner, "lr": each,
                                      "weight_decay": decay.get(inner, 0.0)})
        for inner, each in rates.items()
    ]  # fmt: skip


def few_evaluations(task: Task) -> dict[str, Any]:
    """For parts of which the ends alone are judged: on a CPU they are most of a run's time."""
    return {"evaluate_every": task.size["steps"] // 4}


def room(task: Task) -> list[Call]:
    """The robustness map: how much of one grid of learning rate, outer step, outer momentum and H
    trains well, with equal seeds for every method, and equal points for every pull and decay; Local
    SGD has no outer step to vary. Nothing is chosen from it."""
    grid = {"sync_every": list(task.intervals.values()), "lr": task.rates}
    outer = grid | {"outer_lr": (0.4, 0.8), "outer_momentum": (0.0, 0.5, 0.9)}
    size = task.size | few_evaluations(task)

    def sweep(name: str, **more: Any) -> Call:
        return Sweep(name=name, recipe=task.recipe, settings=size | {"method": [name]} | more,
                     seeds=task.seeds // 2)  # fmt: skip

    return [
        sweep("palsgd", **outer, mix_prob=0.1, pull=(0.0, 0.25, 0.5)),
        sweep("diloco", **outer),
        sweep("anchordecay", **outer, decay=(0.003, 0.01)),
        sweep("localsgd", **grid),
    ]


def decided(task: Task) -> list[Call]:
    """The map at two learning rates, with as many seeds as a margin of 1% takes."""
    return task.strength(ps=(0.1, 0.25), pulls=(0.0, 0.25, 0.5), times=4, lr=task.rates[1:3],
                         **few_evaluations(task))  # fmt: skip


def best(task: Task, h: int) -> list[Call]:
    """Each method at its best, with the strength of its pull or decay searched too. Settings are
    chosen by the images that are judged, with other seeds: what was best on images of other
    writers was not the best on these, for any method with an outer step."""
    outer = {"lr": task.rates} | OUTER
    methods = {
        "ddp": {"lr": task.rates},
        "localsgd": {"lr": task.rates},
        "diloco": outer,
        "palsgd": outer | {"mix_prob": (0.1,), "pull": (0.0, 0.25, 0.5)},
        "anchordecay": outer | {"decay": (0.003, 0.01)},
    }
    grid, comparison = grid_comparison(
        f"best-H{h}", task.recipe, methods, beside={}, tried=2 * task.tried,
        seeds=4 * task.seeds, controls=OF_TEXTS, sync_every=h, **task.size,
    )  # fmt: skip
    assert isinstance(grid, Grid)
    few = {**grid.settings, **few_evaluations(task)}
    return [replace(grid, split="test", settings=few), comparison]


def as_published(task: Task) -> list[Call]:
    """The figures of the paper's ablations: eta at one p, and p at one eta, in the paper's numbers.
    At the higher learning rate the largest of them would overshoot the anchor."""
    size = {key: value for key, value in (task.size | task.usual).items() if key != "lr"}
    every = {"sync_every": list(task.intervals.values())} | few_evaluations(task)
    etas = (0, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
    usual = 1e-2

    def sweep(name: str, **more: Any) -> Call:
        return Sweep(name=name, recipe=task.recipe, settings=size | every | more, seeds=task.seeds)

    return [
        sweep("eta-low", lr=LOW, mix_prob=0.1, mix_rate=etas),
        sweep("eta", lr=usual, mix_prob=0.1, mix_rate=[eta for eta in etas if usual * eta <= 0.1]),
        sweep("p", lr=LOW, mix_prob=(0.025, 0.05, 0.25, 0.5), mix_rate=4),
        sweep("diloco", method=["diloco"], lr=(LOW, usual)),
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


def tiny_task(task: Task) -> Task:
    """The same parts with a few steps of the smallest workloads."""
    size = {"workers": 2, "warmup_steps": 0, "steps": 16, "batch_size": 4, "evaluate_every": 16}
    recipe = "digits" if task is DIGITS else "stories"
    intervals = {name: 2 ** (i + 1) for i, name in enumerate(task.intervals)}
    return replace(task, recipe=recipe, size=size, intervals=intervals, rates=(1e-3, 3e-3), tried=1,
                   seeds=2, mapped=1)  # fmt: skip


def parts(tiny: bool) -> list[Part]:
    stories, digits, longest = (tiny_task(each) if tiny else each
                                for each in (STORIES, DIGITS, LONGEST))  # fmt: skip
    return [
        *stories.parts(),
        *digits.parts(),
        Part("digits-shards", "Does an anchor matter where shards differ?", shards(digits)),
        Part(
            "digits-outer", "Does the pull do what a smaller outer step does?", outer_step(digits)
        ),
        Part(
            "digits-optimizers", "Which inner and outer optimizers go together?", optimizers(digits)
        ),
        Part("digits-room", "How much of one grid of settings trains well?", room(digits)),
        Part("digits-eta", "What do eta and p do, varied as the paper does?", as_published(digits)),
        Part(
            "digits-decided",
            "What are skipping and pulling worth, with a margin of 1%?",
            decided(digits),
        ),
        *(
            Part(
                name.replace("digits-", "digits-best-"),
                f"With pull and decay searched too, and more seeds, H = {h}: is PALSGD ahead?",
                best(digits, h),
            )
            for name, h in digits.intervals.items()
        ),
        longest.parts()[0],
        Part("vision", "The same question on pictures in colour", vision(tiny)),
    ]


STUDY = Study(
    name="when_it_pays",
    title="When does it pay? Endless stories, 1 M GPT-Neo, K = 8; digits; and the small CNN",
    parts=parts,
    claims=[
        Claim("p of about 0.05 is best, p >= 0.25 trains faster but worse", "strength",
              along("mix_prob", "palsgd")),
        Claim("none: what skipping and pulling are worth", "H64", ends(*METHODS, *CONTROLS)),
        Claim("AdamW inside with Nesterov or momentum outside is best; outer AdamW is much worse",
              "digits-optimizers", along("outer", "palsgd")),
        Claim("an eta below 4 changes little, a larger one costs", "digits-eta",
              along("mix_rate", "palsgd", lr=LOW, mix_prob=0.1)),
    ],
    links=LINKS,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
