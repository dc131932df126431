"""What a run says about Theorem 2, in a few sentences for a reader of the paper."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from palsgd.theory.bound_terms import BOUND
from palsgd.theory.inequality import FAILS, HOLDS
from palsgd.theory.lemmas import ALGORITHM
from palsgd.theory.studies import MARGIN, RATES, WORTH_MARGIN, WORTHS, Worth, times
from palsgd.theory.verdicts import LEVEL, Verdict

if TYPE_CHECKING:
    from palsgd.theory.results import Results


def conclusion(results: "Results") -> list[str]:
    sentences = [_bound(results), _rates(results), *_eta(results), *_proof(results)]
    return [*sentences, _confidence(results)]


def _bound(results: "Results") -> str:
    (study, *_), (bound,) = results.studies, [c for c in results.checks if c.claim == BOUND]
    verdict, line = bound.verdict(results.family), study.lines[0]
    last, measured = line.x[-1], line.measured[-1]
    assert line.bound is not None
    if verdict.word != HOLDS:
        said = "fails" if verdict.word == FAILS else str(verdict)
        return f"The bound: {said}, at {bound.where}: {bound.left:.3g} beside {bound.right:.3g}."
    half, loose = measured.half(results.family.doubt), times(line.bound[-1], measured.mean)
    low = times(line.bound[-1], measured.mean + half)
    high = times(line.bound[-1], max(0.0, measured.mean - half))
    return (
        f"The bound holds at every T that was measured, and is {loose} times the error at "
        f"T = {last:,.0f} ({low} to {high})."
    )


def _rates(results: "Results") -> str:
    """All exponents, by verdict."""
    groups: dict[str, list[str]] = {}
    for each in results.exponents:
        verdict = each.verdict(results.family)
        text = f"{each.claim}: {each.measured.mean:.2f} ± {verdict.half:.2f}"
        groups.setdefault(str(verdict), []).append(text)
    if not groups:
        return "Rates: none was measured."
    order = sorted(groups, key=lambda word: word != RATES.within)
    found = (f"{word.capitalize()}: {'; '.join(groups[word])}." for word in order)
    return " ".join(["Rates.", *found])


def _eta(results: "Results") -> Iterator[str]:
    verdicts = [(each, each.verdict(results.family)) for each in results.worths]
    for alpha, opponent in (
        (False, "of the same alpha (equal steps, same coins and data)"),
        (True, "of a smaller alpha that is as slow"),
    ):
        found = [each for each in verdicts if (each[0].alpha != 1) == alpha]
        if found:
            stated = _joined(_worth(*each) for each in found if each[0].times == 1)
            yield f"eta of Theorem 2, in units of the error of eta = 0 {opponent}: {stated}."
    if verdicts:
        yield _reward([each for each in verdicts if each[0].alpha != 1])


def _reward(verdicts: list[tuple[Worth, Verdict]]) -> str:
    """Does any eta gain against the smaller alpha? Against the same alpha it gains in a floor as a
    smaller alpha does, which is no merit of mixing."""
    gains = [_at(*each) for each in verdicts if each[1].word == WORTHS.below]
    unknown = [_at(*each) for each in verdicts if not each[1].decided]
    if gains:
        said = f"Mixing is rewarded beyond what a smaller alpha gives in the {_joined(gains)}"
    elif unknown:
        said = f"No reward for mixing was found; undecided in the {_joined(unknown)}"
    else:
        said = (
            "Nothing in this theory rewards mixing: in no regime has an eta > 0 less error than "
            "eta = 0 with a smaller alpha"
        )
    return f"{said}."


def _worth(worth: Worth, verdict: Verdict) -> str:
    return f"{worth.ratio.mean:.3f} ± {verdict.half:.3f} in the {worth.regime} ({verdict})"


def _at(worth: Worth, verdict: Verdict) -> str:
    return f"{worth.regime} at {worth.times:g} eta ({worth.ratio.mean:.2f} ± {verdict.half:.2f})"


def _proof(results: "Results") -> Iterator[str]:
    """Statements as the paper prints them; those in the algorithm's own form stand beside them."""
    failing: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for check in results.checks:
        if check.verdict(results.family).word == FAILS:
            name = check.claim + (f" [{check.where}]" if check.form == ALGORITHM else "")
            failing[check.form != ALGORITHM][name] = None
    printed, own = failing[True], failing[False]
    yield f"As printed, {len(printed)} statements fail: {'; '.join(printed) or 'none'}."
    yield (
        "In the form that the algorithm has, "
        + (f"all hold but: {'; '.join(own)}." if own else "all that were decided hold.")
    )


def _confidence(results: "Results") -> str:
    undecided = sum(not each.decided for each in results.verdicts)
    return (
        f"{results.family.statements} statements were judged together: the chance that any word "
        f"above is wrong is at most {LEVEL:.0%} (Bonferroni). An exponent is as claimed within "
        f"{MARGIN:g}, an eta makes no difference within {WORTH_MARGIN:.0%}. "
        + (f"Undecided: {undecided}, named in the tables." if undecided else "None is undecided.")
    )


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)
