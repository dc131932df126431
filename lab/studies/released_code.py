"""What the released code really did: only the first tensor mixed, one coin for all workers, batches
that mixing steps throw away. Beside it PALSGD of the whole model, and Algorithm 1 as it is printed,
which never sets the local models to the global one (released_methods.py has both).

Does the published advantage come from mixing the embedding alone? It is the first tensor of
GPT-Neo, and four fifths of GPT-Neo-8M.
"""

from calls import Call, Compare
from gpt_neo_8m import REAL
from hardware import TINY_STORY, of_gpt_neo_8m
from readings import ends, to_target
from released_methods import FIRST_TENSOR, PRINTED, RELEASED
from study import Claim, Part, Study, main
from when_it_pays import DIGITS, LINKS, STORIES

SHORT: dict[str, object] = {
    "workers": 2, "steps": 24, "warmup_steps": 8, "batch_size": 4, "sync_every": 8,
    "evaluate_every": 12,
}  # fmt: skip


def readings(recipe: str, settings: dict[str, object], seeds: int) -> list[Call]:
    """The code's data and coins are tried with its mixing and with ours."""

    def call(name: str, methods: tuple[str, ...], **more: object) -> Compare:
        return Compare(name=name, recipe=recipe, methods=methods, settings={**settings, **more},
                       seeds=seeds)  # fmt: skip

    return [
        call("paper", ("ddp", "diloco", "palsgd", PRINTED)),
        call("first-tensor", (FIRST_TENSOR,)),
        call("released", (FIRST_TENSOR, "palsgd"), **RELEASED),
    ]


def paper(tiny: bool) -> list[Call]:
    """The paper's settings on real stories, as gpt_neo_8m.py has them."""
    if tiny:
        return readings("stories", SHORT, seeds=2)
    return readings("tinystories-gptneo-8m", REAL, seeds=3)


def gentle(tiny: bool) -> list[Call]:
    """The settings of when_it_pays.py's map, where the embedding is 4% of the weights."""
    if tiny:
        return readings("stories", SHORT | {"pull": 0.5}, seeds=2)
    return readings("stories-1m", STORIES.size | {"sync_every": 64, "pull": 0.5}, seeds=6)


def digits(tiny: bool) -> list[Call]:
    """The same on digits, where the first tensor is 85% of the weights. A CPU is enough."""
    if tiny:
        return readings("digits", SHORT | {"pull": 0.5}, seeds=2)
    return readings(
        "digits", DIGITS.size | DIGITS.usual | {"sync_every": 32, "pull": 0.5}, seeds=12
    )


def parts(tiny: bool) -> list[Part]:
    return [
        Part("paper", "At the paper's settings, what does mixing the first tensor alone do?",
             paper(tiny)),
        Part("gentle", "The same with a million weights, and settings at which all train",
             gentle(tiny), LINKS),
        Part("digits", "The same on digits", digits(tiny), LINKS),
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
        Claim("none: losses at the end, a million weights", "gentle", ends(*_ALL)),
        Claim("none: losses at the end, digits", "digits", ends(*_ALL)),
    ],
    links=of_gpt_neo_8m(16, tokens=TINY_STORY),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
