"""bench/link.py: figures are means over repeats, with intervals."""

import sys

import pytest

from support.places import BENCH


@pytest.fixture(scope="module")
def link():
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))
    import link

    yield link
    sys.path[:] = before


def test_a_figure_is_the_mean_over_repeats_with_students_interval(link):
    """By hand: 1, 2, 3 have the mean 2, the deviation 1, and t = 4.303 with two degrees of
    freedom."""
    half = 4.303 / 3**0.5
    assert (
        link.figure([1.0, 2.0, 3.0], "{:.2f} x") == f"2.00 x [{2 - half:.2f} x, {2 + half:.2f} x]"
    )


def test_a_single_repeat_and_equal_ones_have_no_interval(link):
    assert link.figure([1.5], "{:.1f}") == link.figure([1.5, 1.5, 1.5], "{:.1f}") == "1.5"
    assert link.figure([None, None], "{:.1f}") == ""


def test_speed_ups_are_taken_within_a_run(link):
    """Runs of which one was twice as slow for all: the times differ, the ratio does not."""
    run = {"step_s": 1.0, "projected_step_s": 1.0, "communicating": 0.5, "exchange_s": 1.0,
           "bytes_sent": 1e6, "kernel_bytes": None, "kernel_over_ring": None}  # fmt: skip
    repeats = [
        {
            "links_in_words": "a link",
            "methods": {"diloco": run | {"step_s": slow, "speedup_over_ddp": 4.0}},
        }
        for slow in (1.0, 2.0)
    ]
    ((_, name, step, *_, faster),) = link.rows(repeats)
    assert (name, faster) == ("diloco", "4.00 x")
    assert step.startswith("1500 [")
