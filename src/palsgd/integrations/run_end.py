"""The end of a run in a loop whose framework exchanges by itself, for logs or evaluations.

All workers must take equally many iterations of such a loop: one that has none left would be in its
last sync while the others exchange something else. Balanced draws give all workers equally many
gradient steps up to every stop of the schedule. Between two stops the numbers differ.
"""

from palsgd.local_optimizer import LocalOptimizer
from palsgd.worker import Worker


class RunEnd:
    """Training ends at this clock if all workers get there in one iteration. Otherwise it ends,
    for all workers, with the iteration in which worker 0 gets there."""

    def __init__(self, opt: LocalOptimizer, clock: int):
        self._opt, self._clock = opt, clock
        self.together = _arrive_together(opt._worker, clock)
        if self.together:
            opt.run_until(clock)  # the last step syncs

    @property
    def synced(self) -> bool:
        """Has the last step synced? Every worker finds the same. A run that is resumed at its end
        may have taken further steps."""
        return self.together and self._opt.clock == self._clock

    def reached(self) -> bool:
        """Was this the last iteration? Every worker finds the same."""
        course, end = self._opt._worker.course, self._clock
        at, schedule = course.at, course.schedule
        if self.together or not at.has_anchor:
            return at.clock >= end
        round, offset = schedule.place(end)
        stop = max(each for each in (0, *schedule.stops(end)) if each <= offset)
        taken = at.clock - (end - offset + stop)  # steps since the last stop before the end
        if taken < 0:
            return False
        first, own = (course.plan_of(who, round, end)[stop:] for who in (0, course.number))
        return own[:taken].count(False) >= first[: offset - stop].count(False)


def _arrive_together(worker: Worker, clock: int) -> bool:
    """Do all workers come to this clock with equally many gradient steps?"""
    schedule = worker.schedule
    if worker.method.gradient_share == 1 or worker.facts.draws == "shared":
        return True
    if clock <= schedule.warmup:
        return True
    known = schedule.settled and worker.course.interval is None
    return known and schedule.place(clock)[1] in (0, *schedule.stops(clock))
