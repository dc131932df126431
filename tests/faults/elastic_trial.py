"""Faults of elastic runs: the others go on, and the lost worker's last round alone is missing.

The weights are those of a run whose worker ended right at the beginning of that round.
"""

import functools
from typing import Any

from faults import crew, notes
from faults.crew import Ended
from faults.elastic_run import STORE, Order
from faults.fault import ELASTIC_WORKERS, Fault
from faults.library_run import STEPS
from faults.scenario import LIMIT_S, TIMEOUT_S, free_port, fresh, last_words, waking
from support.patience import patient

_DEADLINE_S = 3.0
Lines = list[list[dict[str, Any]]]


def judged(fault: Fault) -> tuple[str, float, int, str]:
    """Outcome, seconds to the end, steps lost and a remark."""
    ended, lines, errors = _run(fault=fault)
    struck = [line for line in lines[fault.victim] if line["what"] == "struck"]
    if not struck:
        return "unclean error", 0.0, 0, f"the fault did not come: {errors}"
    lost = fault.kind != "stop"
    living = [worker for worker in range(ELASTIC_WORKERS) if worker != fault.victim or not lost]
    seconds = max(lines[worker][-1]["at"] for worker in living if lines[worker]) - struck[0]["at"]
    if ended.hung:
        return "hang", seconds, 0, f"exit codes {ended.codes}; {errors}"
    said = [errors[worker] for worker in living if errors[worker]]
    if said:
        return "stopped", seconds, 0, "; ".join(said)
    done = [lines[worker][-1] for worker in living]
    if any(line["clock"] != STEPS for line in done):
        return "steps lost", seconds, 0, f"ended at {[line['clock'] for line in done]}"
    outcome, missing, remark = _compared(fault, done, struck[0]["round"], lost=lost)
    return outcome, seconds, missing, remark


def _compared(
    fault: Fault, done: list[dict[str, Any]], struck: int, *, lost: bool
) -> tuple[str, int, str]:
    """Outcome, steps lost and a remark of a run whose workers have all come to their end. The fault
    came in the round `struck`."""
    if len({line["digest"] for line in done}) > 1:
        return "wrong weights", 0, "the workers that are left differ"
    sizes = done[0]["workers"]
    left = sizes.index(ELASTIC_WORKERS - 1) if lost and ELASTIC_WORKERS - 1 in sizes else None
    if left is not None and left < struck:
        return "steps lost", struck - left, f"left out since round {left}, lost in {struck}"
    if done[0]["digest"] != twin(None if left is None else (fault.victim, left)):
        return "wrong weights", 0, f"workers of the rounds: {sizes}"
    return "survived", 0, "" if left is None else f"without it since round {left}"


@functools.cache
def twin(leaves: tuple[int, int] | None) -> str:
    """The weights of the others where a worker leaves at the beginning of a round, or none does."""
    _, lines, errors = _run(leaves=leaves)
    gone = None if leaves is None else leaves[0]
    done = [lines[worker][-1] for worker in range(ELASTIC_WORKERS) if worker != gone]
    digests = {line.get("digest") for line in done}
    if len(digests) > 1 or None in digests:
        raise AssertionError(f"the undisturbed elastic run failed: {errors}")
    return digests.pop()


def _run(
    fault: Fault | None = None, leaves: tuple[int, int] | None = None
) -> tuple[Ended, Lines, list[str]]:
    with fresh() as (noted, _):
        # A process that is stopped is there, for the kernel; only a deadline leaves it out.
        waits = fault is None or fault.kind != "stop for good"
        deadline = None if waits else patient(_DEADLINE_S)
        order = Order(noted, patient(TIMEOUT_S), free_port(), fault, deadline, leaves)
        store = crew.start(order, [STORE])
        try:
            workers = crew.start(order, range(ELASTIC_WORKERS))
            ended = crew.wait(workers, limit_s=patient(LIMIT_S), when_stopped=waking(fault))
        finally:
            crew.end(store)
        lines = [notes.read(noted, worker) for worker in range(ELASTIC_WORKERS)]
        errors = [last_words(noted, worker, lines[worker]) for worker in range(ELASTIC_WORKERS)]
    return ended, lines, errors
