"""Where the times of a study are projected: on the cluster that the paper used, and on two slower
links between workers with the same GPUs."""

from estimates import STORY

from palsgd.lab.plan.paper import GPT_8M, A, B, Machine, of_stories

TINY_STORY = 300  # tokens of a row of TinyStories; STORY has those of endless stories
VGG_16 = 2.6e9  # operations of its gradient for a picture of 32 x 32, six for each product
SLOWER = ("1gbit,1ms", "100mbit,10ms")


def links(machine: Machine, workers: int, operations: float) -> tuple[str, ...]:
    """`operations` are those of a worker's gradient."""
    step = f"step={1e3 * machine.step_s(operations):.4g}ms"
    return machine.link(workers, operations), *(f"{link},{step}" for link in SLOWER)


def assumed(step: str) -> tuple[str, ...]:
    """Slower links alone, where the paper has no cluster, or another model."""
    return tuple(f"{link},step={step}" for link in SLOWER)


def of_gpt_neo_8m(stories: int, workers: int = 8, tokens: int = STORY) -> tuple[str, ...]:
    """The paper has eight workers on its cluster B and four on A; `stories` are a worker's."""
    return links(B if workers == 8 else A, workers, of_stories(GPT_8M, stories, tokens))
