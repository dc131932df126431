"""One worker's steps, with a gradient and without data: what they change in the local model, the
counts and the clock."""

from typing import Any

import torch

from palsgd.bookkeeping import Bookkeeping
from palsgd.course import Course
from palsgd.events import Mixed
from palsgd.inner import InnerStep
from palsgd.method_view import MethodView


class Steps:
    def __init__(
        self, course: Course, inner: InnerStep, view: MethodView | None, books: Bookkeeping
    ):
        self._course, self._inner, self._books = course, inner, books
        self._method, self._view = course.method, view  # there is no view without rounds (DDP)

    def gradient(self, share: float) -> list[float]:
        """Take the inner step with the present gradient. Returns the learning rates, undivided."""
        at = self._course.at
        self._inner.clip()
        if at.has_anchor and self._method.overrides("before_gradient"):
            self.before_gradient()
        rates = self._inner.step(share)
        self._books.meter.gradient_done()
        self._count_gradient(rates, share)
        return rates

    def pass_gradient(self) -> None:
        """Count a gradient step of the warm-up that an engine has taken elsewhere."""
        self._count_gradient(self._inner.rates(), 1.0)

    def _count_gradient(self, rates: list[float], share: float) -> None:
        at = self._course.at
        at.gradient_steps += 1
        at.rates = rates
        at.rate_sums = [total + rate / share for total, rate in zip(at.rate_sums, rates)]  # noqa: B905
        self._books.ledger.gradient_steps += 1
        self._tick()

    def skip(self) -> None:
        """Count a step whose gradient is not finite, without taking it."""
        self._books.meter.gradient_done()
        self._course.at.gradient_steps += 1
        self._books.ledger.gradient_steps += 1
        self._books.ledger.skipped_steps += 1
        self._tick()

    def mix(self, rate: list[float] | None, steps: int) -> None:
        """Count steps without data and run the rule for them. If the method refuses one of them,
        the steps before it are done and counted, and it is not. `rate` has the learning rates of
        the gradient step that was just taken, if any."""
        mixing, refusal = self._without_data(steps)
        self.after_gradient(rate, mixing)
        if refusal is not None:
            raise refusal

    def count_without_data(self, steps: int) -> None:
        """Count steps without data that change nothing."""
        _, refusal = self._without_data(steps)
        if refusal is not None:
            raise refusal

    def _without_data(self, steps: int) -> tuple[list[list[float]], ValueError | None]:
        """Count steps without data, up to one that the method refuses. Returns the learning rates
        at each of them, and the refusal."""
        rates: list[list[float]] = []
        for _ in range(steps):
            now, clock = self._inner.rates(), self._course.at.clock
            try:
                self._method.check_step(now, clock, self._course.schedule.length(clock))
            except ValueError as refusal:
                return rates, refusal
            self._course.at.rates = now
            rates.append(now)
            self._books.ledger.mixing_steps += 1
            self._tick()
        return rates, None

    def _tick(self) -> None:
        self._course.at.clock += 1
        self._inner.tick()

    def passed(
        self, clock: int, *, rates: list[list[float]], last: list[float], mixing_steps: int
    ) -> None:
        """Count the steps up to this clock, which an engine has taken for many workers at once.
        `rates` has the divided learning rates of each gradient step. `last` has the undivided rates
        of the last step, with a gradient or without."""
        at = self._course.at
        at.clock, at.synced, at.rates = clock, False, list(last)
        at.gradient_steps += len(rates)
        at.rate_sums = [sum(group) for group in zip(at.rate_sums, *rates, strict=True)]
        self._books.ledger.gradient_steps += len(rates)
        self._books.ledger.mixing_steps += mixing_steps

    # -- the rules of the method ---------------------------------------------------------------

    @torch.no_grad()
    def before_gradient(self) -> None:
        """The rule before the inner step that begins now."""
        assert self._view is not None
        for w in self._view.gradients_everywhere(**self._when(self._course.at.clock)):
            if w.grad:  # torch's functions on lists refuse empty ones
                self._method.before_gradient(w)
            self._view.states.keep_scalars(w)

    def after_gradient(self, rate: list[float] | None, mixing: list[list[float]]) -> None:
        """The rule after an inner step and the steps without data that end now."""
        if not self._method.acts_after_gradient(mixing):
            return
        weights = self._rule_after_gradient(rate, mixing)
        if weights is not None:
            low, high = map(float, weights)
            self._books.ledger.saw_betas(low, high)
            self._books.meter.mixing_done()
            self._books.tell(Mixed, steps=len(mixing), weight_min=low, weight_max=high)

    @torch.no_grad()
    def _rule_after_gradient(
        self, rate: list[float] | None, mixing: list[list[float]]
    ) -> tuple[Any, Any] | None:
        assert self._view is not None
        powers, when = self._course.pull_powers(len(mixing)), self._when(self._course.at.clock - 1)
        for w in self._view.everywhere(**when, pull_powers=powers):
            weights = self._method.after_gradient(w, rate, mixing)  # equal in all windows
            self._view.states.keep_scalars(w)
        return weights

    def _when(self, step: int) -> dict[str, int]:
        """What a rule is told of the time, for a step that begins or began at this clock."""
        round, length = self._course.schedule.round_of(step), self._course.schedule.length(step)
        return {"round": round, "length": length, "clock": self._course.at.clock}
