"""GPT-Neo-8M: steps and time to the loss that DDP reaches, and the paper's ablations.

The main record is on endless stories with the paper's H, p, eta, warm-up and batch, as few real
stories are at hand: a model of 8 M weights learns them by heart. Real stories stand beside it, with
a batch of 128 in place of 2,048 and the paper's share of warm-up, a fifteenth of the run.

Runs of the main part have 1,024 steps after the warm-up, 16 rounds of H = 64. With the paper's
batch its warm-up is 2 M stories, after which nearly all of this grammar is learned and methods have
little left to differ in (lab/records/2026-11-17-gpt-neo-8m-endless): that part has one seed. The
others on endless stories have an eighth of the batch (tuned: a sixteenth) and a quarter of the
warm-up, which leaves them something to learn and makes three seeds affordable.
"""

from calls import Call, Compare, Sweep, tuned_comparison
from hardware import TINY_STORY, of_gpt_neo_8m
from readings import along, ends, mean_and_variance, to_target
from study import Claim, Part, Study, main

METHODS = ("ddp", "localsgd", "diloco", "palsgd", "anchordecay")
OF_CORPUS = ("no-pull", "equal-gradients")
PAPER = ("ddp", "diloco", "palsgd")
MAIN: dict[str, object] = {"warmup_steps": 1024, "steps": 1024 + 1024}
ABLATION: dict[str, object] = {"batch_size": 32, "warmup_steps": 256, "steps": 256 + 1024}
SEED = 2022  # the paper's are 2022, 2023 and 2024
# A few steps of a tiny model on the same stories. Evaluations take longer than they do.
SHORT = {"workers": 2, "steps": 24, "warmup_steps": 8, "batch_size": 4, "sync_every": 8,
         "evaluate_every": 12}  # fmt: skip


def recipe(tiny: bool, name: str) -> tuple[str, dict[str, object]]:
    return ("stories", dict(SHORT)) if tiny else (name, {})


def compared(
    tiny: bool, name: str, length: dict[str, object], *, seeds: int = 3,
    methods: tuple[str, ...] = PAPER, controls: tuple[str, ...] = OF_CORPUS,
) -> Compare:  # fmt: skip
    base, size = recipe(tiny, name)
    return Compare(
        name=name, recipe=base, methods=methods, settings={**(size or length), "seed": SEED},
        seeds=min(seeds, 2) if tiny else seeds, controls=controls, together=False,
    )  # fmt: skip


def swept(tiny: bool, name: str, seeds: int = 3, **grid: list) -> list[Call]:
    """One call for each seed, as about a dozen runs fit into memory together."""
    base, size = recipe(tiny, "stories-gptneo-8m")
    few = {key: values[:2] for key, values in grid.items()} if tiny else grid
    return [
        Sweep(name=f"{name}-{seed}", recipe=base,
              settings={**(size or ABLATION), "seed": seed, **few})
        for seed in range(SEED, SEED + (1 if tiny else seeds))
    ]  # fmt: skip


def tuned(tiny: bool) -> list[Call]:
    base, size = recipe(tiny, "stories-gptneo-8m")
    many: dict[str, int] = dict(trials=2, seeds=2) if tiny else dict(trials=4, seeds=3)
    half = ABLATION | {"batch_size": 16}  # twice as many runs fit into memory
    return tuned_comparison("H64", base, METHODS, **many, **(size or half))  # type: ignore[arg-type]


# Five epochs of the 25,443 stories at hand, 128 stories a step, with the paper's share of warm-up.
REAL: dict[str, object] = {
    "batch_size": 16, "warmup_steps": 66, "steps": 66 + 14 * 64, "epochs": None,
    "whole_rounds": False, "seed": SEED,
}  # fmt: skip


def corpus(tiny: bool) -> list[Call]:
    base, size = recipe(tiny, "tinystories-gptneo-8m")
    return [Compare(name="tinystories", recipe=base, methods=(*PAPER, "anchordecay"),
                    controls=OF_CORPUS, settings=size if tiny else REAL,
                    seeds=2 if tiny else 3)]  # fmt: skip


def parts(tiny: bool) -> list[Part]:
    return [
        Part("main", "How many steps to the loss that DDP ends with, at the paper's settings?",
             [compared(tiny, "stories-gptneo-8m", MAIN, seeds=1,
                       methods=(*PAPER, "anchordecay"))]),
        Part("seeds", "The same where the warm-up leaves something to learn, with three seeds?",
             [compared(tiny, "stories-gptneo-8m", ABLATION, methods=(*PAPER, "anchordecay"))],
             of_gpt_neo_8m(32)),
        Part("figure", "The same at H = 16, as in the paper's figures?",
             [compared(tiny, "stories-gptneo-8m-h16", ABLATION, controls=("no-pull",))],
             of_gpt_neo_8m(32)),
        Part("figure-k4", "The same with K = 4?",
             [compared(tiny, "stories-gptneo-8m-k4", ABLATION | {"batch_size": 64},
                       controls=("no-pull",))], of_gpt_neo_8m(64, workers=4)),
        Part("tuned", "Which method is ahead if each has its own settings?", tuned(tiny),
             of_gpt_neo_8m(16)),
        Part("corpus", "Is it the same on real stories, with the batch scaled to their number?",
             corpus(tiny), of_gpt_neo_8m(16, tokens=TINY_STORY)),
        Part("eta", "What does the strength of mixing do to the loss?",
             swept(tiny, "eta", mix_rate=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]),
             of_gpt_neo_8m(32)),
        Part("p", "What does the share of mixing steps do to the loss?",
             swept(tiny, "p", mix_prob=[0.025, 0.05, 0.1, 0.25, 0.5]), of_gpt_neo_8m(32)),
        Part("H", "What does the interval do to the loss?",
             swept(tiny, "H", sync_every=[4, 8] if tiny else [32, 64, 128, 256],
                   method=["diloco", "palsgd"]), of_gpt_neo_8m(32)),
        Part("optimizers", "Which inner and outer optimizers go together?",
             swept(tiny, "optimizers", seeds=1, inner=["sgd", "adam", "adamw"],
                   outer=["sgd", "sgd_m", "nesterov", "adamw"], outer_lr=[1.0, 0.2, 1e-3]),
             of_gpt_neo_8m(32)),
    ]  # fmt: skip


STUDY = Study(
    name="gpt_neo_8m",
    title="GPT-Neo-8M, K = 8 and 4, H = 64 and 16, on endless stories and on TinyStories",
    parts=parts,
    claims=[
        Claim("K = 8: PALSGD needs 21.1% less time than DDP to its final loss, in nearly the same "
              "steps; DiLoCo misses it", "main", to_target("diloco", "palsgd")),
        Claim("the losses there: DDP 1.1247, PALSGD 1.1273, DiLoCo 1.1646", "main", ends(*PAPER)),
        Claim("K = 8 at H = 16", "figure", to_target("diloco", "palsgd")),
        Claim("K = 4: PALSGD 23.0% less time than DDP, DiLoCo 7.9%", "figure-k4",
              to_target("diloco", "palsgd")),
        Claim("K = 8: PALSGD needs 21.1% less time than DDP to its final loss, in nearly the same "
              "steps; DiLoCo misses it", "seeds", to_target("diloco", "palsgd")),
        Claim("mean and variance of three seeds: DDP 1.1247 (1.0e-5), PALSGD 1.1273 (5.8e-7), "
              "DiLoCo 1.1646 (4.7e-5)", "seeds", mean_and_variance("ddp", "palsgd", "diloco")),
        Claim("none: controls", "seeds",
              ends("palsgd-no-pull", "diloco-equal-gradients", "anchordecay")),
        Claim("the same on real stories, five epochs", "corpus",
              mean_and_variance("ddp", "palsgd", "diloco")),
        Claim("none: controls on real stories", "corpus",
              ends("palsgd-no-pull", "diloco-equal-gradients", "anchordecay")),
        Claim("eta below 4 changes nothing, above it the loss deteriorates", "eta",
              along("mix_rate", "palsgd")),
        Claim("p >= 0.25 trains faster but worse, about 0.05 is best", "p",
              along("mix_prob", "palsgd")),
        Claim("H = 32 to 256", "H", along("sync_every", "diloco", "palsgd")),
        Claim("AdamW inside with Nesterov or momentum outside is best; outer AdamW is much worse, "
              "outer SGD much slower", "optimizers", along("outer", "palsgd")),
    ],
    links=of_gpt_neo_8m(256),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
