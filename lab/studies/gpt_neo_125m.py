"""GPT-Neo-125M: steps to the loss that DDP reaches, at H = 16.

A shortened run on endless stories: 256 stories a step in place of 2,048, 512 steps with 256 of
warm-up. All methods have the same. With the paper's learning rate and so few stories DDP is not
stable (lab/records/2026-11-17-gpt-neo-125m), so that a third of it is tried too, at which its loss
still jumps with one seed of two (lab/records/2026-11-19-gpt-neo-125m-gentle).
"""

from calls import Call, Compare
from estimates import STORY
from gpt_neo_8m import OF_CORPUS
from hardware import links
from readings import ends, to_target
from study import Claim, Part, Study, main

from palsgd.lab.plan.paper import GPT_125M, B, of_stories

METHODS = ("ddp", "diloco", "palsgd")
FULL: dict[str, object] = {"batch_size": 32, "steps": 512, "warmup_steps": 256}
SHORT: dict[str, object] = {
    "workers": 2, "steps": 24, "warmup_steps": 8, "batch_size": 4, "sync_every": 4,
    "evaluate_every": 12,
}  # fmt: skip


def parts(tiny: bool) -> list[Part]:
    recipe, size = ("stories", SHORT) if tiny else ("stories-gptneo-125m", FULL)

    def compared(**more: object) -> list[Call]:
        return [Compare(name="H16", recipe=recipe, methods=METHODS, settings=size | more,
                        controls=OF_CORPUS, seeds=2 if tiny else 1, together=False)]  # fmt: skip

    return [
        Part("main", "How many steps to the loss that DDP ends with, at the paper's H and p?",
             compared()),
        Part("gentle", "The same with a third of the paper's learning rate?",
             compared(lr=3.3e-4)),
    ]  # fmt: skip


STUDY = Study(
    name="gpt_neo_125m",
    title="GPT-Neo-125M, K = 8, H = 16, on endless stories, shortened",
    parts=parts,
    claims=[
        Claim("PALSGD needs 24.4% less time and 15.8% fewer steps than DDP to its final loss; "
              "DiLoCo misses it", "main", to_target("diloco", "palsgd")),
        Claim("DiLoCo fails, PALSGD does not", "main", ends(*METHODS)),
        Claim("none at another learning rate: steps", "gentle", to_target("diloco", "palsgd")),
        Claim("none at another learning rate: losses", "gentle", ends(*METHODS)),
    ],
    links=links(B, 8, of_stories(GPT_125M, 32, STORY)),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
