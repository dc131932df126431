"""`python -m support.exact_engine WORDS`: `palsgd WORDS` with the exact engine, which the command
line by itself takes only for models that cannot be stacked."""

from palsgd.lab import cli, run_set


def use_exact_engine(patch=setattr) -> None:
    """`patch` sets an attribute: pytest's sets it back."""
    simulate = run_set.simulate_runs

    def exact(runs, *, vectorize, **options):
        simulate(runs, vectorize=False if vectorize == "auto" else vectorize, **options)

    patch(run_set, "simulate_runs", exact)


if __name__ == "__main__":
    use_exact_engine()
    cli.main()
