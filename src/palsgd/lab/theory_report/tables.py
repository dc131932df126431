"""The tables, as text: the terminal and the page show the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from palsgd.theory.results import Results
from palsgd.theory.studies import times
from palsgd.theory.verdicts import LEVEL


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(results: Results) -> list[Table]:
    return [
        error_table(results), exponent_table(results), eta_table(results), lemma_table(results),
    ]  # fmt: skip


def error_table(results: Results) -> Table:
    line = results.studies[0].lines[0]
    assert line.bound is not None
    rows = [
        (f"{line.x[at]:,.0f}", _interval(line.measured[at].mean, line.measured[at].half()),
         f"{line.bound[at]:.3g}", times(line.bound[at], line.measured[at].mean))
        for at in _spread(len(line.x), 5)
    ]  # fmt: skip
    head = ("T", "E[F(xhat)] - F*", "bound", "bound / measured")
    return Table("Measured error and the explicit bound", head, rows)


def exponent_table(results: Results) -> Table:
    rows = []
    for each in results.exponents:
        verdict = each.verdict(results.family)
        rows.append((
            each.claim, f"{each.claimed:g}", _interval(each.measured.mean, verdict.half, 2),
            "" if each.bound is None else f"{each.bound:.2f}", str(verdict),
        ))  # fmt: skip
    head = ("exponent", "claimed", "measured", "of the bound", "verdict")
    return Table(f"Exponents ({_together(results)})", head, rows)


def eta_table(results: Results) -> Table:
    rows = []
    for each in results.worths:
        verdict = each.verdict(results.family)
        ratio = _interval(each.ratio.mean, verdict.half, 3)
        rows.append((each.regime, f"{each.times:g}", f"{each.alpha:.3g}", ratio, str(verdict)))
    head = (
        "regime", "eta / (p/(2 H alpha))", "opponent's alpha / alpha", "error / opponent's",
        "verdict",
    )  # fmt: skip
    return Table(
        f"What eta > 0 is worth against eta = 0, paired seeds ({_together(results)})", head, rows
    )


def lemma_table(results: Results) -> Table:
    head = ("inequality", "form", "checked", "left", "right", "margin", "verdict")
    rows = [
        (check.claim, check.form, check.where, f"{check.left:.4g}", f"{check.right:.4g}",
         "" if check.errors is None else f"{check.errors:,.0f} s.e.",
         str(check.verdict(results.family)))
        for check in sorted(results.checks, key=attrgetter("claim", "form"))
    ]  # fmt: skip
    return Table(f"Lemmas ({_together(results)})", head, rows)


def _together(results: Results) -> str:
    return f"all {results.family.statements} statements together at {1 - LEVEL:.0%}"


def _interval(mean: float, half: float, digits: int | None = None) -> str:
    if digits is not None:
        return f"{mean:.{digits}f} ± {half:.{digits}f}"
    return f"{mean:.3g} ± {half:.1g}"


def _spread(count: int, number: int) -> list[int]:
    """Indices from the first to the last."""
    return sorted({round(at * (count - 1) / (number - 1)) for at in range(number)})
