"""Strongly convex problems with known L, mu, sigma and x*, for many runs and workers at once.

Points are tensors (..., dim) in float64. What one data point does to a gradient is a *sample*;
samples are drawn for all runs and workers together. Every f(x, sample) is mu-strongly convex with
an L-Lipschitz gradient, as the theorem asks of each data point and not only of their mean.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from palsgd.checks import check_choice, check_int

SPECTRA = ("geometric", "linear", "ends")


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    name: str
    mu: float
    smoothness: float  # L
    sigma: float  # sqrt of E |grad f(x*, sample)|^2
    optimum: Tensor  # x*

    @property
    def condition(self) -> float:
        return self.smoothness / self.mu

    @property
    def dim(self) -> int:
        return self.optimum.numel()

    @abstractmethod
    def excess(self, x: Tensor) -> Tensor:
        """F(x) - F*."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of F."""

    @abstractmethod
    def draw(self, runs: int, workers: int, generator: Generator) -> Any:
        """A sample for each run and worker."""

    @abstractmethod
    def noisy_gradient(self, x: Tensor, sample: Any) -> Tensor:
        """The gradient of f(x, sample)."""

    def start(self, distance: float) -> Tensor:
        """A point so far from x*, equally in all coordinates."""
        return self.optimum + distance / math.sqrt(self.dim)


class AdditiveNoise(Problem):
    """f(x, sample) = F(x) + <sample, x>, with Gaussian samples."""

    def draw(self, runs: int, workers: int, generator: Generator) -> Tensor:
        # Single precision draws are five times as fast; as noise, 24 random bits are enough.
        normal = torch.randn(runs, workers, self.dim, generator=generator, device=generator.device)
        return normal.double().mul_(self.sigma / math.sqrt(self.dim))

    def noisy_gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        return self.gradient(x) + sample


@dataclass(frozen=True, kw_only=True)
class Quadratic(AdditiveNoise):
    """F(x) = 1/2 sum_i c_i (x_i - x*_i)^2. A rotation would change nothing: SGD and mixing commute
    with it, and so does the law of the noise."""

    curvatures: Tensor

    @classmethod
    def of(
        cls, curvatures: Tensor, sigma: float, device: torch.device | str = "cpu"
    ) -> "Quadratic":
        curvatures = curvatures.to(device, torch.float64)
        low, high = curvatures.min().item(), curvatures.max().item()
        check_constants(low, high, sigma)
        return cls(
            name="quadratic", mu=low, smoothness=high, sigma=sigma,
            optimum=torch.zeros_like(curvatures), curvatures=curvatures,
        )  # fmt: skip

    def excess(self, x: Tensor) -> Tensor:
        return 0.5 * ((x - self.optimum).square() * self.curvatures).sum(-1)

    def gradient(self, x: Tensor) -> Tensor:
        return (x - self.optimum) * self.curvatures


@dataclass(frozen=True, kw_only=True)
class Bent(AdditiveNoise):
    """F(x) = 1/2 sum_i c(x_i) x_i^2, with c = L to the right of the optimum and mu to the left.

    The gradient bends at x*, so its mean over scattered workers is not the gradient at their mean:
    the drift that the H^2/T^2 term of the theorem bounds. A quadratic has none of it.
    """

    @classmethod
    def of(
        cls, dim: int, mu: float, smoothness: float, sigma: float,
        device: torch.device | str = "cpu",
    ) -> "Bent":  # fmt: skip
        check_constants(mu, smoothness, sigma)
        optimum = torch.zeros(check_int("dim", dim, least=1), dtype=torch.float64, device=device)
        return cls(name="bent", mu=mu, smoothness=smoothness, sigma=sigma, optimum=optimum)

    def excess(self, x: Tensor) -> Tensor:
        return 0.5 * (self.gradient(x) * (x - self.optimum)).sum(-1)

    def gradient(self, x: Tensor) -> Tensor:
        # leaky_relu, with another slope to the right
        return self.smoothness * torch.nn.functional.leaky_relu(
            x - self.optimum, self.mu / self.smoothness
        )


@dataclass(frozen=True, kw_only=True)
class Logistic(Problem):
    """f(x, i) = log(1 + exp(-<row_i, x>)) + mu/2 |x|^2, a row being the label times the inputs.

    All rows have the length that makes L what was asked for: |row|^2 / 4 + mu.
    """

    rows: Tensor
    floor: float  # F*

    @classmethod
    def of(
        cls, dim: int, mu: float, smoothness: float, *, rows: int = 64, seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> "Logistic":  # fmt: skip
        check_constants(mu, smoothness, 0.0)
        if mu == smoothness:
            raise ValueError(
                f"mu={mu:g} must be below L={smoothness:g} for logistic regression: "
                "the rest of L is the data's"
            )
        rng = np.random.default_rng(seed)
        inputs = rng.normal(size=(rows, check_int("dim", dim, least=1)))
        inputs *= 2 * math.sqrt(smoothness - mu) / np.linalg.norm(inputs, axis=1, keepdims=True)
        odds = inputs @ rng.normal(size=dim)
        labels = np.where(rng.random(rows) < 1 / (1 + np.exp(-odds)), 1.0, -1.0)
        data = torch.tensor(labels[:, None] * inputs, device=device)
        optimum = minimize_logistic(data, mu)
        at_optimum = -torch.sigmoid(-data @ optimum)[:, None] * data + mu * optimum
        return cls(
            name="logistic", mu=mu, smoothness=smoothness,
            sigma=at_optimum.square().sum(1).mean().sqrt().item(),
            optimum=optimum, rows=data, floor=_logistic(optimum, data, mu).item(),
        )  # fmt: skip

    def excess(self, x: Tensor) -> Tensor:
        return _logistic(x, self.rows, self.mu) - self.floor

    def gradient(self, x: Tensor) -> Tensor:
        return self.mu * x - torch.sigmoid(-x @ self.rows.T) @ self.rows / len(self.rows)

    def draw(self, runs: int, workers: int, generator: Generator) -> Tensor:
        return torch.randint(
            len(self.rows), (runs, workers), generator=generator, device=generator.device
        )

    def noisy_gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        rows = self.rows[sample]
        return self.mu * x - torch.sigmoid(-(x * rows).sum(-1, keepdim=True)) * rows


@dataclass(frozen=True, kw_only=True)
class Noiseless(Problem):
    """Another problem with its exact gradients: sigma = 0."""

    of: Problem

    @classmethod
    def like(cls, problem: Problem) -> "Noiseless":
        return cls(
            name=f"{problem.name} without noise", mu=problem.mu, smoothness=problem.smoothness,
            sigma=0.0, optimum=problem.optimum, of=problem,
        )  # fmt: skip

    def excess(self, x: Tensor) -> Tensor:
        return self.of.excess(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.of.gradient(x)

    def draw(self, runs: int, workers: int, generator: Generator) -> None:
        return None

    def noisy_gradient(self, x: Tensor, sample: None) -> Tensor:
        return self.of.gradient(x)


def spectrum(kind: str, dim: int, mu: float, smoothness: float) -> Tensor:
    """The curvatures of a quadratic, from mu to L."""
    check_choice("spectrum", kind, SPECTRA)
    check_constants(mu, smoothness, 0.0)
    if check_int("dim", dim, least=1) == 1 and mu != smoothness:
        raise ValueError(f"dim=1 has one curvature, so mu={mu:g} must equal L={smoothness:g}")
    along = torch.linspace(0, 1, dim, dtype=torch.float64)
    found = {
        "geometric": mu * (smoothness / mu) ** along,
        "linear": mu + (smoothness - mu) * along,
        "ends": mu + (smoothness - mu) * (along >= 0.5).double(),
    }[kind]
    found[0], found[-1] = mu, smoothness  # without rounding
    return found.clamp(mu, smoothness)


def minimize_logistic(rows: Tensor, mu: float) -> Tensor:
    """The minimum by Newton's method, which converges to rounding in far fewer steps than are
    allowed."""
    x = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    eye = torch.eye(rows.shape[1], dtype=torch.float64, device=rows.device)
    for _ in range(100):
        miss = torch.sigmoid(-rows @ x)
        gradient = mu * x - miss @ rows / len(rows)
        hessian = (rows.T * (miss * (1 - miss))) @ rows / len(rows) + mu * eye
        newton = torch.linalg.solve(hessian, gradient)
        # The step is halved until F falls, as a full step far from the optimum may increase F.
        value, size = _logistic(x, rows, mu), 1.0
        while _logistic(x - size * newton, rows, mu) > value and size > 1e-6:
            size /= 2
        x = x - size * newton
        if newton.abs().max() < 1e-15 * (1 + x.abs().max()):
            break
    return x


def check_constants(mu: float, smoothness: float, sigma: float) -> None:
    if not 0 < smoothness < math.inf:
        raise ValueError(f"L={smoothness:g} must be a finite number > 0")
    if not 0 < mu <= smoothness:
        raise ValueError(f"mu={mu:g} must be in (0, L], here (0, {smoothness:g}]")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma={sigma:g} must be a finite number >= 0")


def _logistic(x: Tensor, rows: Tensor, mu: float) -> Tensor:
    fit = torch.nn.functional.softplus(-x @ rows.T).mean(-1)
    return fit + 0.5 * mu * x.square().sum(-1)
