"""The stories of the grammar and the paper's GPT-Neo-8M: its settings on text without an end."""

from dataclasses import replace

from torch import nn

from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.workloads import tinystories_gptneo_8m as paper
from palsgd.lab.workloads.stories import Stories

# The paper's settings but for the length, which leaves 32 rounds of H = 64 after its warm-up. Few
# of the 50,257 words occur; all of them are mixed and sent.
_PAPER = replace(
    paper.RECIPES["tinystories-gptneo-8m"], workload="stories-gptneo-8m", epochs=None, steps=3072,
    whole_rounds=False,
)  # fmt: skip
RECIPES = {
    "stories-gptneo-8m": _PAPER,
    "stories-gptneo-8m-h16": replace(_PAPER, sync_every=16),
    "stories-gptneo-8m-k4": replace(_PAPER, workers=4, batch_size=512, sync_every=16),
}
GRIDS: dict[str, dict[str, list]] = {}
SEARCH = paper.SEARCH


class StoriesGPTNeo8M(Stories):
    name = "stories-gptneo-8m"

    def model(self) -> nn.Module:
        return GPTNeo(vocab=50257, positions=300, hidden=128, heads=8, layers=8)
