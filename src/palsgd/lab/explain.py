"""`palsgd explain`: shows what a run will do before it starts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from palsgd import references
from palsgd.checks import check_int
from palsgd.lab.factory import learning_rate, outer_momentum
from palsgd.lab.forecast import Forecast, forecast
from palsgd.lab.methods import plain_local, takes_outer
from palsgd.lab.report import formats
from palsgd.lab.settings import Settings
from palsgd.methods.palsgd import DEFAULT_PULL, WEAK, PALSGDMethod, round_pull
from palsgd.schedule import MOST_RAISED, paced_gradients

MOST_ROWS = 16  # workers shown of a round


def explain(
    settings: Settings,
    *,
    rounds: int = 2,
    first_round: int = 0,
    examples: int | None = None,
    parameters: int | None = None,
) -> list[RenderableType]:
    """The plan of some rounds, the figures of the run, and what is odd about its settings.

    `examples` and `parameters` are those of the workload as it was loaded; without them, of the
    published data and of its model, as far as that can be built without data.
    """
    check_int("rounds", rounds)
    check_int("first_round", first_round)
    ahead = forecast(settings, examples=examples, parameters=parameters)
    if first_round and first_round >= ahead.rounds:
        raise ValueError(
            f"first_round={first_round} is behind the end: the run has "
            f"{_count(ahead.rounds, 'round')}, counted from 0; use a smaller one"
        )
    shown = range(first_round, min(first_round + rounds, ahead.rounds))
    parts: list[RenderableType] = [headline(ahead)]
    parts += [*(RoundPlan(ahead, round) for round in shown), Text(), figures(ahead)]
    parts += [Text(f"\n{text}") for text in pull(ahead)]
    return parts + [Text(f"! {remark}", style="yellow") for remark in remarks(ahead)]


def headline(ahead: Forecast) -> Text:
    settings = ahead.settings
    phases = []
    if ahead.warmup:
        name = "warm-up, " if ahead.row.rounds else ""
        phases.append(f"{_count(ahead.warmup, 'step')} of {name}DDP (each an all-reduce)")
    if ahead.rounds:
        phases.append(f"{_count(ahead.rounds, 'round')} of {_lengths(ahead)} ({_sync(settings)})")
    who, on = references.short(settings.method), references.short(settings.workload)
    what = f"{who} on {on}, {_count(settings.workers, 'worker')}"
    text = f"{what}, {_count(ahead.steps, 'step')}: {', then '.join(phases)}"
    return Text(text, style="bold")


def _lengths(ahead: Forecast) -> str:
    """H, or between which numbers it changes."""
    lengths = [span.length for span in ahead.schedule.spans]
    if len(lengths) == 1:
        return f"{lengths[0]:,}"
    rule = ahead.settings.sync_every
    return f"{min(lengths):,} to {max(lengths):,} steps by sync_every={rule}"


def _sync(settings: Settings) -> str:
    parts = settings.fragments
    words = "a sync at the end of each" if parts == 1 else f"synced in {parts} parts, one by one"
    if settings.delay:
        words += f", applied {_count(settings.delay, 'step')} later"
    if settings.compress not in (None, "none"):
        words += f", sent as {settings.compress}"
    return words


@dataclass(frozen=True)
class RoundPlan:
    """A round: a row for each worker, a character for each step, or for some in a long round."""

    ahead: Forecast
    round: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        steps, workers = self.ahead.steps_of(self.round), self.ahead.settings.workers
        label, tally = len(f"worker {workers - 1}"), len(f"{len(steps)}")
        room = max(8, options.max_width - label - tally - 3)
        per_mark = math.ceil(len(steps) / room)
        dull, full = (".", "m") if options.ascii_only else ("·", "█")
        yield Text(f"\nround {self.round}: steps {steps[0]:,} to {steps[-1]:,}, then a sync")
        yield Text(f"  {self._legend(per_mark, dull, full)}", style="dim")
        for worker in range(min(workers, MOST_ROWS)):
            plan = self.ahead.plan(worker, self.round)
            row = Text(f"{f'worker {worker}':<{label}} ")
            row.append(_marks(plan, per_mark, dull, full), style="cyan")
            yield row.append(f"  {plan.count(False):>{tally}}")
        if workers > MOST_ROWS:
            yield Text(f"and {_count(workers - MOST_ROWS, 'more worker')}", style="dim")

    def _legend(self, per_mark: int, dull: str, full: str) -> str:
        if per_mark == 1:
            marks = [f"{dull} gradient step", f"{full} mixing step"]
        else:
            among = f"1-9 mixing steps among {per_mark} (+ more)"
            marks = [f"{dull} {per_mark} gradient steps", among]
        return ", ".join([*marks[: 1 + bool(self.ahead.mix_prob)], "on the right gradients in all"])


def _marks(plan: list[bool], per_mark: int, dull: str, full: str) -> str:
    counts = [sum(plan[i : i + per_mark]) for i in range(0, len(plan), per_mark)]
    if per_mark == 1:
        return "".join(full if count else dull for count in counts)
    return "".join(dull if not n else str(n) if n < 10 else "+" for n in counts)


def figures(ahead: Forecast) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("expected for each worker")
    H = ahead.sync_every
    for name in (f"{H} steps" if ahead.row.rounds else "a step", "the run"):
        table.add_column(name, justify="right")
    gradients = ahead.gradients(H), ahead.warmup + ahead.gradients(ahead.local)
    table.add_row("gradients computed", *(_figure(value) for value in gradients))
    if ahead.mix_prob:
        mixed = H * ahead.mix_prob, ahead.local * ahead.mix_prob
        table.add_row("mixing steps", *(_figure(value) for value in mixed))
        most = f"+{100 * ahead.excess:.1f}%"
        table.add_row("slowest worker over the mean, independent draws", most, "")
        table.add_row("slowest worker over the mean, balanced or shared", "+0%", "")
    if ahead.settings.workers > 1:
        _add_bytes(table, ahead)
    return table


def _add_bytes(table: Table, ahead: Forecast) -> None:
    """Add the bytes that each worker hands over. A ring sends each byte nearly twice."""
    step, run = ahead.ddp_step.bytes_sent, ahead.run.bytes_sent
    ddp = ahead.sync_every * step, ahead.steps * step
    own = (ahead.round.bytes_sent if ahead.row.rounds else step), run
    if ahead.model is not None:
        table.add_row("bytes sent", *(_bytes(sent) for sent in own))
    if ahead.row.rounds:
        if ahead.model is not None:
            table.add_row("bytes sent by DDP", *(_bytes(sent) for sent in ddp))
        shares = (_share(ours / theirs) for theirs, ours in zip(ddp, own, strict=True))
        table.add_row("of DDP's bytes", *shares)


def pull(ahead: Forecast) -> Iterator[str]:
    """Sentences about the effect of a mixing step."""
    if not isinstance(ahead.method, PALSGDMethod):
        return
    if not ahead.mix_prob or not ahead.local or not ahead.learning_rates[1]:
        return
    low, high = ahead.betas
    pull = ahead.method.pull
    if callable(pull) or callable(ahead.method.mix_rate):
        yield _changing_pull(ahead)
        return
    if pull is not None:
        yield (
            f"beta = 1 - (1 - pull)^(1 / (mix_prob * {ahead.sync_every})) = {high:.3g}: the share "
            "of the way back to the last global model that a mixing step goes, so that the mixing "
            f"steps of a round together go {100 * pull:.3g}% of it"
        )
        return
    later = "" if low == high else f" at its highest, {low:.2g} at its lowest"
    yield (
        f"beta = lr * mix_rate / mix_prob = {high:.3g}{later}: the share of the way back to the "
        "last global model that a mixing step goes; it must not exceed 1, so mix_rate must not "
        f"exceed {ahead.mix_prob / ahead.learning_rates[1]:.4g}"
    )


def _changing_pull(ahead: Forecast) -> str:
    assert isinstance(ahead.method, PALSGDMethod)
    name = "mix_rate" if ahead.method.pull is None else "pull"
    beta = {
        "mix_rate": "lr * mix_rate / mix_prob",
        "pull": "1 - (1 - pull)^(1 / (mix_prob * H))",
    }[name]
    clocks = (ahead.warmup, ahead.steepest, ahead.steps - 1)
    values = ", ".join(f"{ahead.beta_at[c]:.3g} at step {c:,}" for c in sorted(set(clocks)))
    return (
        f"{name}={getattr(ahead.settings, name)} changes with the clock. beta = {beta} is "
        f"{values}, {ahead.betas[1]:.3g} at most: the share of the way back to the last global "
        "model that a mixing step goes; it must not exceed 1"
    )


def remarks(ahead: Forecast) -> list[str]:
    """What is refused, useless or odd about the settings, a line each."""
    if not ahead.row.rounds:
        return []
    if not ahead.local:
        return [
            f"warmup_steps={ahead.settings.warmup_steps} covers the whole run of {ahead.steps} "
            "steps, which is plain DDP; use fewer, or more steps"
        ]
    mixes = ahead.mix_prob and isinstance(ahead.method, PALSGDMethod)
    paced = ahead.settings.draws == "paced" and ahead.settings.workers > 1
    return [
        *_about_rounds(ahead),
        *(_about_mixing(ahead) if mixes else ()),
        *(_about_pacing(ahead) if paced else ()),
    ]


def _about_rounds(ahead: Forecast) -> Iterator[str]:
    settings, H = ahead.settings, ahead.sync_every
    if settings.workers == 1:
        yield "workers=1: there is nobody to sync with; use 2 or more"
    if ahead.local < H:
        yield (
            f"sync_every={H} is longer than the local phase of {ahead.local} steps: one sync, at "
            f"the end; use sync_every <= {ahead.local // 2 or 1}"
        )
        return
    if (rest := ahead.local % H) and not settings.rounds_differ:
        differ = ", of which some workers may mix in more than others" if ahead.mix_prob else ""
        yield (
            f"steps={ahead.steps} is not warmup_steps plus a multiple of sync_every={H}: the last "
            f"round has {_count(rest, 'step')}{differ}; use steps={ahead.steps - rest + H}"
        )
    momentum = outer_momentum(settings)
    needed = round(3 / (1 - momentum)) if 0 < momentum < 1 else 0
    if takes_outer(ahead.row) and ahead.rounds < needed:
        yield (
            f"{_count(ahead.rounds, 'round')} for outer_momentum={momentum:g}, which takes about "
            f"{1 / (1 - momentum):.0f} to build up: the global model lags behind; use {needed} or "
            f"more rounds (sync_every <= {ahead.local // needed or 1}) or less momentum"
        )


def _about_mixing(ahead: Forecast) -> Iterator[str]:
    settings, p, clock = ahead.settings, ahead.mix_prob, ahead.steepest
    assert isinstance(ahead.method, PALSGDMethod)
    H, beta = ahead.schedule.length(clock), ahead.beta_at[clock]
    lr = learning_rate(settings, ahead.steps, clock)
    in_a_round, name = round_pull(beta, p, H), "mix_rate" if ahead.method.pull is None else "pull"
    better = f"{0.2 * p / lr:.2g}" if name == "mix_rate" and lr else f"{DEFAULT_PULL:g}"
    try:
        ahead.method.check_step([lr], clock, H)
    except ValueError as refusal:
        yield f"refused: {refusal}"
    else:
        if beta >= 0.9:
            yield (
                f"beta={beta:.3g} is near 1: a mixing step undoes nearly all that a worker learned "
                f"since the sync; use a smaller {name}, such as {better}"
            )
        elif in_a_round < WEAK:
            yield (
                f"beta={beta:.2g} is near 0: all the mixing of a round pulls a worker back by "
                f"{100 * in_a_round:.2g}%, at the price of {100 * p:.3g}% of its gradients; use a "
                f"larger {name}, or {plain_local().name}"
            )
    if p >= 0.25:
        yield f"mix_prob={p:g}: from 0.25 on the paper trains faster but worse; try 0.05 to 0.1"
    if settings.draws == "independent" and settings.workers > 1:
        yield (
            f"draws=independent: in a round the slowest of {settings.workers} workers computes "
            f"{100 * ahead.excess:.1f}% more gradients than the mean, and all wait for it; "
            "balanced draws are the same to each worker and nobody waits"
        )
    if settings.draws == "shared" and settings.workers > 1:
        yield (
            "draws=shared: all workers mix at the same steps, as in the paper's released code, so "
            "their mixing does not average out; use balanced, where nobody waits either"
        )


def _about_pacing(ahead: Forecast) -> Iterator[str]:
    speeds = ahead.speeds
    if len(set(speeds)) == 1:
        yield (
            "draws=paced with equal speeds is balanced; processes measure their speeds in the "
            "first rounds, a simulation takes those of speeds="
        )
        return
    gradients = paced_gradients(round(ahead.gradients(ahead.sync_every)), speeds)
    slowest = int(gradients.argmin())
    raised = min(ahead.sync_every / int(gradients[slowest]), MOST_RAISED)
    yield (
        f"draws=paced: in a round worker {slowest} takes about {gradients[slowest]} gradients and "
        f"the fastest {gradients.max()}, at {raised:.2g} times the learning rate; nobody waits"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.1f}"


def _share(share: float) -> str:
    return f"1/{1 / share:.3g}" if share > 0.01 else f"1/{1 / share:,.0f}"


def _bytes(sent: float) -> str:
    return formats.size(sent).replace(formats.GAP, " ")
