"""The stories of the grammar and a GPT-Neo of a million parameters: its messages weigh 4 MB."""

from dataclasses import replace

from torch import nn

from palsgd.lab.data.stories import GRAMMAR
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.workloads import stories

RECIPES = {"stories-1m": replace(stories.RECIPES["stories"], workload="stories-1m", lr=1e-3)}
GRIDS: dict[str, dict[str, list]] = {}
SEARCH = stories.SEARCH | {"lr": (3e-4, 6e-3)}


class Stories1M(stories.Stories):
    name = "stories-1m"

    def model(self) -> nn.Module:
        words = len(GRAMMAR.vocabulary)
        return GPTNeo(vocab=words, positions=GRAMMAR.longest, hidden=160, heads=4, layers=3)
