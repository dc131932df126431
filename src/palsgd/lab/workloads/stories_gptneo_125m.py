"""The stories of the grammar and the paper's GPT-Neo-125M: its settings on text without an end."""

from dataclasses import replace

from torch import nn

from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.workloads import stories_gptneo_8m as small
from palsgd.lab.workloads.stories import Stories

RECIPES = {
    "stories-gptneo-125m": replace(
        small.RECIPES["stories-gptneo-8m-h16"], workload="stories-gptneo-125m"
    )
}
GRIDS: dict[str, dict[str, list]] = {}
SEARCH = small.SEARCH


class StoriesGPTNeo125M(Stories):
    name = "stories-gptneo-125m"

    def model(self) -> nn.Module:
        return GPTNeo(vocab=50257, positions=1024, hidden=768, heads=12, layers=12)
