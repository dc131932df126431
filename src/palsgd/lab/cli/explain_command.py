"""`palsgd explain`: what a setting will do."""

from typing import Annotated

import typer

from palsgd.lab.cli.common_options import (
    Changes,
    MethodName,
    MixProb,
    MixRate,
    Pull,
    Recipe,
    Seed,
    Steps,
    SyncEvery,
    Workers,
    settings_from,
)


def explain(
    recipe: Recipe,
    changes: Changes = None,
    method: MethodName = None,
    workers: Workers = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to show.")] = 2,
    first_round: Annotated[int, typer.Option(min=0, help="The first round to show.")] = 0,
) -> None:
    """Show what a setting will do.

    That is who mixes when, how many gradients and bytes there are, beta, and warnings.

    Example: palsgd explain stories --sync-every 64 --mix-prob 0.1
    """
    from rich.console import Console

    from palsgd.lab.explain import explain as explained
    from palsgd.lab.run_set import check_method

    settings = settings_from(
        recipe, changes, method=method, workers=workers, steps=steps, sync_every=sync_every,
        mix_prob=mix_prob, mix_rate=mix_rate, pull=pull, seed=seed,
    )  # fmt: skip
    check_method(settings)
    console = Console()
    for part in explained(settings, rounds=rounds, first_round=first_round):
        console.print(part)
