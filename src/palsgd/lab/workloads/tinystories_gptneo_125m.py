"""TinyStories and GPT-Neo-125M."""

from dataclasses import replace

from torch import nn

from palsgd.lab.language import TinyStories
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.workloads import tinystories_gptneo_8m as small

RECIPES = {
    "tinystories-gptneo-125m": replace(
        small.RECIPES["tinystories-gptneo-8m-h16"], workload="tinystories-gptneo-125m"
    )
}
GRIDS = {"tinystories-gptneo-125m/lr": {"outer_lr": [0.1, 0.2]}}
SEARCH = small.SEARCH


class TinyStoriesGPTNeo125M(TinyStories):
    name = "tinystories-gptneo-125m"
    context = 1024  # rows of 300 tokens, as the paper's released code has them, cost a third

    def model(self) -> nn.Module:
        return GPTNeo(vocab=50257, positions=1024, hidden=768, heads=12, layers=12)
