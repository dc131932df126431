"""What the released code really did: only the first tensor mixed, one coin for all workers, batches
that mixing steps throw away. Beside it PALSGD of the whole model, and Algorithm 1 as it is printed,
which never sets the local models to the global one (released_methods.py has both).

Does the published advantage come from mixing the embedding alone? It is the first tensor of
GPT-Neo, and four fifths of GPT-Neo-8M.
"""

from calls import Call, Compare, tuned_comparison
from readings import ends, to_target
from released_methods import RELEASED
from study import Claim, Part, Study, main

FIRST_TENSOR = "released_methods:ReleasedCode"
PRINTED = "released_methods:AsPrinted"
SHORT: dict[str, object] = {
    "workers": 2, "steps": 24, "warmup_steps": 8, "batch_size": 4, "sync_every": 8,
    "evaluate_every": 12,
}  # fmt: skip


def paper(tiny: bool) -> list[Call]:
    """The paper's settings. The code's data and coins are tried with its mixing and with ours."""
    recipe, size = ("stories", SHORT) if tiny else ("stories-gptneo-8m", {})
    seeds = 2 if tiny else 3

    def call(name: str, methods: tuple[str, ...], **settings: object) -> Compare:
        return Compare(name=name, recipe=recipe, methods=methods, settings={**size, **settings},
                       seeds=seeds, together=False)  # fmt: skip

    return [
        call("paper", ("ddp", "diloco", "palsgd", PRINTED)),
        call("first-tensor", (FIRST_TENSOR,)),
        call("released", (FIRST_TENSOR, "palsgd"), **RELEASED),
    ]


def tuned(tiny: bool) -> list[Call]:
    methods = ("ddp", "diloco", "palsgd", FIRST_TENSOR, PRINTED)
    if tiny:
        return tuned_comparison("H8", "stories", methods, trials=2, seeds=2, **SHORT)
    return tuned_comparison("H64", "stories-1m", methods, trials=8, tuning_seeds=2, seeds=6,
                            workers=8, batch_size=8, sync_every=64, steps=420 + 2048)  # fmt: skip


def parts(tiny: bool) -> list[Part]:
    return [
        Part("paper", "At the paper's settings, what does mixing the first tensor alone do?",
             paper(tiny)),
        Part("tuned", "Which reading is ahead if each has its own settings?", tuned(tiny)),
    ]  # fmt: skip


_ALL = ("ddp", "diloco", "palsgd", "ReleasedCode", "AsPrinted")
STUDY = Study(
    name="released_code",
    title="What the released code did: the first tensor mixed, shared coins, discarded batches",
    parts=parts,
    claims=[
        Claim("GPT-Neo-8M: PALSGD reaches DDP's loss in nearly the same steps, DiLoCo misses it",
              "paper", to_target("diloco", "palsgd", "ReleasedCode", "AsPrinted")),
        Claim("none: losses at the end, at the paper's settings", "paper", ends(*_ALL)),
        Claim("none: losses at the end, tuned", "tuned", ends(*_ALL)),
    ],
    links=("63gbit,15us,step=1.15s", "1gbit,1ms,step=1.15s"),  # as for gpt_neo_8m
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
