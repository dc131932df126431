"""The clocks at which a run is evaluated."""

from palsgd.schedule import Schedule


def evaluation_is_due(schedule: Schedule, every: int, clock: int) -> bool:
    """True at the first change of the global model at or after each multiple of `every`. Between
    two changes the global model stays the same."""
    if not schedule.changes_model(clock):
        return False
    return clock // every > schedule.last_change(clock) // every
