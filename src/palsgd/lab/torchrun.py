"""What the launcher of this process has put into its environment. Nothing here imports torch."""

import os


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def restarted() -> bool:
    """Were these workers started again, after others that failed? Both launchers count in the same
    variable."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def first_rank() -> bool:
    """Is this the process that writes and prints for all: rank 0 under torchrun, or the
    launcher?"""
    return not under_torchrun() or os.environ["RANK"] == "0"


def first_of_machine() -> bool:
    """Is this the process that speaks for all of its machine that torchrun has started?"""
    return not under_torchrun() or os.environ.get("LOCAL_RANK", "0") == "0"
