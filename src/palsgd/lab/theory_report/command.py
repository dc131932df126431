"""What `palsgd theory` does with its options."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from palsgd.checks import check_choice, check_int
from palsgd.lab.device import chosen_device
from palsgd.lab.theory_report.page import write_results
from palsgd.progress import ProgressBar
from palsgd.theory.problems import Bent, Logistic, Problem, Quadratic, check_constants, spectrum
from palsgd.theory.results import STUDIES, Results, examine
from palsgd.theory.studies import StudyContext
from palsgd.theory.theorem import theorem_setting

PROBLEMS = ("quadratic", "logistic", "bent")
_SIGMA = 2.0  # where none is given: noise and drift show beside the transient


def problem_of(
    kind: str, *, dim: int, mu: float, smoothness: float, sigma: float | None, curvatures: str,
    device: str = "cpu",
) -> Problem:  # fmt: skip
    check_choice("problem", kind, PROBLEMS)
    check_constants(mu, smoothness, _SIGMA if sigma is None else sigma)
    if kind == "logistic":
        if sigma is not None:
            raise ValueError(
                f"sigma={sigma:g} cannot be chosen for logistic regression, whose data set it; "
                "leave it out, or use --problem quadratic"
            )
        return Logistic.of(dim, mu, smoothness, device=device)
    noise = _SIGMA if sigma is None else sigma
    if kind == "bent":
        return Bent.of(dim, mu, smoothness, noise, device)
    return Quadratic.of(spectrum(curvatures, dim, mu, smoothness), noise, device)


def run_theory(
    *, problem: str, dim: int, mu: float, smoothness: float, sigma: float | None, curvatures: str,
    distance: float, workers: int, steps: int, sync_every: int, mix_prob: float, lr: float | None,
    mix_rate: float | None, pull: float | None, draws: str, seeds: int, seed: int, device: str,
    out: Path, force: bool, quiet: bool,
) -> tuple[Results, Path]:  # fmt: skip
    """The results and the page they were written to."""
    device = chosen_device(device).type
    if not 0 < distance < float("inf"):
        raise ValueError(f"distance={distance:g} must be a finite number > 0")
    if (out / "theory.json").exists() and not force:
        raise ValueError(f"{out} holds a theory.json; add --force to overwrite, or another --out")
    subject = problem_of(
        problem, dim=dim, mu=mu, smoothness=smoothness, sigma=sigma, curvatures=curvatures,
        device=device,
    )  # fmt: skip
    setting = theorem_setting(
        subject, workers=workers, steps=steps, sync_every=sync_every, mix_prob=mix_prob,
        distance=distance, draws=draws, lr=lr, mix_rate=mix_rate, pull=pull,
    )  # fmt: skip
    context = StudyContext(
        problem=subject, setting=setting, distance=distance,
        runs=check_int("seeds", seeds, least=8), seed=check_int("seed", seed), device=device,
    )  # fmt: skip
    with _one_thread(), ProgressBar("theory", len(STUDIES) + 1, unit="parts", quiet=quiet) as bar:
        results = examine(context, bar.at)
    return results, write_results(results, out)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch uses one thread, as a second one makes operations on such small tensors
    slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
