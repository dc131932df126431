"""What a run says about Theorem 2, in a few sentences for a reader of the paper."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from palsgd.theory.bound_terms import BOUND
from palsgd.theory.inequality import FAILS, HOLDS
from palsgd.theory.lemmas import ALGORITHM
from palsgd.theory.studies import MARGIN, RATES, WORTH_MARGIN, WORTHS, Worth, times
from palsgd.theory.verdicts import LEVEL, Verdict

if TYPE_CHECKING:
    from palsgd.theory.results import Results


def conclusion(results: "Results") -> list[str]:
    parts = [_bound(results), _rates(results), _eta(results), _proof(results), _confidence(results)]
    return [part for part in parts if part]


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


def _eta(results: "Results") -> str:
    verdicts = [(each, each.verdict(results.family)) for each in results.worths]
    same = [each for each in verdicts if each[0].alpha == 1]
    slower = [each for each in verdicts if each[0].alpha != 1]
    if not verdicts:
        return ""
    return (
        "eta of Theorem 2, its error in units of that of eta = 0 with equal steps, coins and data: "
        f"{_stated(same)}; with a smaller alpha for eta = 0, as slow as the pull makes it: "
        f"{_stated(slower)}. {_reward(slower)}"
    )


def _stated(verdicts: list[tuple[Worth, Verdict]]) -> str:
    return _joined(_worth(*each) for each in verdicts if each[0].times == 1)


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


def _proof(results: "Results") -> str:
    """Each statement once, with the first place where it fails: as the paper prints it, and in the
    form that the algorithm has."""
    printed: dict[str, str] = {}
    own: dict[str, str] = {}
    for each in results.lemmas:
        if each.verdict(results.family).word == FAILS:
            (own if each.form == ALGORITHM else printed).setdefault(each.claim, each.where)
    return (
        f"Of the proof, {len(printed)} statements fail as printed{_places(printed)}. In the form "
        f"that the algorithm has, {len(own) or 'none'} fails{_places(own)}."
    )


def _places(failing: dict[str, str]) -> str:
    named = "; ".join(f"{claim} ({where})" for claim, where in failing.items())
    return f": {named}" if named else ""


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
