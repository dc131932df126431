"""The demo: a slow link, gain and loss in its first line, a seed in real processes beside the
simulated one, and nothing left behind."""

import contextlib
import html
import inspect
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from palsgd.lab import demo, run_set
from palsgd.lab.cli import demo_command
from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import group
from palsgd.lab.headline import headline, link_in_words
from palsgd.lab.links.kernel import NAMESPACES
from palsgd.lab.report.time_panels import timelines
from palsgd.lab.run_folder import find_runs
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.timing.record import Session, Timed
from support import runs
from support.commands import palsgd, started, wait_for
from support.namespaces import needs_namespaces
from support.patience import patient

STEPS = 100
LINK = "100mbit,20ms"


def made_up(folder, *, worse=1.0, ddp_s=0.4, own_s=0.1, gradients=1.0, spread=0.01,
            tuned="a file", link=LINK, twin=None):  # fmt: skip
    """Losses fall by straight lines; those of palsgd are `worse` times DDP's, and those of real
    processes `twin` times the simulated ones."""
    for seed in (1, 2, 3):
        for method, factor, share in (("ddp", 1.0, 1.0), ("palsgd", worse, gradients)):
            lines = [
                runs.line(step, metric=0.5, loss=factor * (1 - 0.009 * step) * (1 + spread * seed),
                          gradient_steps=round(share * step),
                          bytes_sent=(1000 if method == "ddp" else 100) * step)
                for step in range(0, STEPS + 1, 10)
            ]  # fmt: skip
            settings = Settings(workload="digits", method=method, steps=STEPS, seed=seed,
                                tuned=tuned)  # fmt: skip
            name = f"{method},seed={seed}"
            written(folder / name, settings, lines)
            if twin is not None and seed == 1:
                lines = [line | {"loss": twin * line["loss"]} for line in lines]
                written(folder / f"{name},processes", settings, lines, link=link, twin_of=name)

    def timed(method, seconds):
        rows = [[seconds, 0.0, 0.0, 0.0]] * 3
        ddp = method == "ddp"
        names = (*(f"{method},seed={seed}" for seed in (1, 2, 3)), f"{method},seed=1,processes")
        return Timed(runs=names, step_s=[0.01] * 3,
                     warmup=None if ddp else 0, averaging=rows if ddp else None,
                     local=None if ddp else rows, mixing_s=0.0,
                     spans=[span("gradient", 0.0, 0.1), span("sync", 0.1, 0.1 + seconds)],
                     )  # fmt: skip

    def span(kind, start, end):
        return {"worker": 0, "kind": kind, "start_s": start, "end_s": end}

    programs = timed("ddp", ddp_s), timed("palsgd", own_s)
    record.add(folder, Session(link=link, backend="gloo", machine="a machine", repetitions=3,
                               programs=programs))  # fmt: skip
    return Comparison(group(find_runs([folder])))


def written(place, settings, lines, **more):
    runs.write_files(place, runs.config(settings, simulated="twin_of" not in more) | more, lines)
    (place / "summary.json").write_text(json.dumps(runs.summary_of(settings, lines)))


def test_the_headline_states_speed_up_bytes_and_the_difference_of_the_ends_with_its_word(tmp_path):
    # the target is DDP's final loss plus 1%: palsgd, 0.4% above DDP's curve, needs a little longer
    found = headline(made_up(tmp_path, worse=1.004))
    assert found.startswith("Over 100 Mbit/s with 20 ms PALSGD reaches DDP's loss 4")
    assert "faster, with 0.1 x the bytes" in found
    assert re.search(r"it ends 0\.4% \[[^]]+\] above DDP at equal examples: equivalent", found)
    assert found.endswith("(3 paired seeds, margin 1%).")


def test_equal_curves_have_a_speed_up_of_the_ratio_of_their_steps_seconds(tmp_path):
    found = headline(made_up(tmp_path, worse=1 + 1e-9, ddp_s=0.6, own_s=0.1))
    assert "reaches DDP's loss 6 x [6, 6] faster" in found


def test_a_loss_is_said_as_plainly_as_a_gain(tmp_path):
    slower = headline(made_up(tmp_path / "slower", worse=1 + 1e-9, ddp_s=0.1, own_s=0.2))
    assert "2 x slower (speed-up 0.5 [0.5, 0.5])" in slower
    worse = headline(made_up(tmp_path / "worse", worse=1.2, gradients=0.9))
    assert "PALSGD does not reach DDP's loss in 100 steps" in worse
    # its own final loss is 0.12 (1 + s/100), and 1% above that DDP is after 97.6 of its 100 steps
    assert "its own final loss + 1%, 0.124, it reaches 3.9 x" in worse
    assert re.search(r"ends 20% \[[^]]+\] above DDP with 0\.9 x the gradients: worse", worse)


@pytest.mark.parametrize("worse", [1.1, 1.13, 1.17, 1.2, 1.23, 1.37])
def test_a_method_that_does_not_reach_the_baseline_reaches_its_own_end_whatever_the_rounding(
    tmp_path, worse
):
    found = headline(made_up(tmp_path, worse=worse, spread=0.013))
    assert re.search(r"its own final loss \+ 1%, [\d.]+, it reaches [\d.]+ x \[", found), found


def test_a_speed_up_without_an_upper_bound_says_so(tmp_path):
    # the target is DDP's mean over seeds: of the seeds drawn again some never end that low
    found = headline(made_up(tmp_path, worse=0.9, spread=0.1))
    assert re.search(r"reaches DDP's loss [\d.]+ x \[[\d.]+, no bound\] faster", found)


def test_there_is_no_headline_without_a_link_and_no_word_for_what_is_untuned(tmp_path):
    assert made_up(tmp_path / "no link", worse=1.1, link=None).headline is None
    untuned = made_up(tmp_path / "untuned", worse=1.1, tuned=None).headline
    assert untuned.endswith("above DDP at equal examples: untuned, no verdict (3 paired seeds).")


def test_the_headline_is_the_first_line_of_terminal_and_page(tmp_path):
    found = made_up(tmp_path, worse=1.004).headline
    said = palsgd("report", tmp_path, "--out", tmp_path / "page.html")
    assert said.code == 0, said.err
    assert said.out.startswith(found)
    page = html.unescape((tmp_path / "page.html").read_text())
    assert f'<p class="headline">{found}</p>' in page
    assert page.index('headline">') < page.index("<h1>")


def test_what_was_recorded_over_the_link_is_shown_of_all_methods_on_one_axis(tmp_path):
    groups = made_up(tmp_path, worse=1.1).groups
    drawn = {}

    def plot(draw, name, title, methods):
        drawn.update(methods)
        return draw(name, title, methods, None)

    panel = timelines(groups, plot)
    assert f"over a link of {LINK}" in panel.caption
    assert list(drawn) == [
        "ddp: 1 steps, an exchange at each",
        "palsgd: 1 syncs, 64 steps apart",
    ]
    assert [bars[0][-1][2] for bars in drawn.values()] == pytest.approx([0.5, 0.2])


def test_runs_that_are_equal_line_by_line_are_said_to_be_the_same_program(tmp_path):
    assert "PALSGD is the same program as DDP" in headline(made_up(tmp_path))


# -- a seed in real processes beside the simulated one ---------------------------------------------


def about_processes(comparison):
    (found,) = [each for each in comparison.verdicts if "in real processes" in each]
    return found


def test_what_real_processes_trained_is_no_further_seed(tmp_path):
    alone, beside = made_up(tmp_path / "a"), made_up(tmp_path / "b", twin=2.0)
    assert [each.label for each in beside.groups] == ["ddp", "palsgd"]
    for one, other in zip(alone.finals(), beside.finals(), strict=True):
        assert (one.loss, one.totals) == (other.loss, other.totals)
    assert alone.headline == beside.headline
    assert len(beside.twins) == 2


def test_how_far_real_processes_and_the_simulator_are_apart_is_held_to_the_margin(tmp_path):
    found = about_processes(made_up(tmp_path / "a", worse=1.1, twin=1 + 2e-6))
    assert found.startswith(f"Seed 1 in real processes over a link of {LINK}: ")
    assert "ddp ended at loss 0.101, the simulator at 0.101; palsgd ended at loss 0.1111" in found
    assert found.endswith("at most 0.0002% apart at any evaluation, within the margin of 1%.")
    other = about_processes(made_up(tmp_path / "b", twin=1.02, link=None))
    assert other.startswith("Seed 1 in real processes over this machine's own network, no link: ")
    assert other.endswith("at most 2% apart at any evaluation, BEYOND the margin of 1%.")


def test_real_processes_show_their_own_seconds_and_bytes_beside_the_projected_ones(tmp_path):
    # its clock shows 10 s; by the blocks its 100 steps take 40 s (ddp) and 10 s (palsgd)
    made_up(tmp_path, twin=1 + 2e-6)
    said = palsgd("report", tmp_path, "--out", tmp_path / "page.html")
    assert said.code == 0, said.err
    table = said.out[said.out.index("in processes") :].replace("\u00a0", " ")
    assert re.search(r"ddp +0\.101000 +0\.101000 +100 kB +100 kB +10 s +40 s", table)
    assert re.search(r"palsgd +0\.101000 +0\.101000 +10 kB +10 kB +10 s +10 s", table)
    page = html.unescape((tmp_path / "page.html").read_text()).replace("\u00a0", " ")
    section = page[page.index('aria-label="In real processes"') :]
    cells = re.findall(r'data-name="(\w+)"><span>(.*?)</span>', section)
    assert cells[1] == ("loss", "0.101000<small>0.101000 simulated</small>")
    assert cells[4:6] == [
        ("bytes", "100 kB<small>100 kB simulated</small>"),
        ("time", "10 s<small>40 s by timed steps</small>"),
    ]


def test_a_run_in_real_processes_whose_simulated_one_is_not_there_is_a_run_as_any_other(tmp_path):
    made_up(tmp_path, twin=1.0)
    (alone,) = group(find_runs([tmp_path / "ddp,seed=1,processes"]))
    assert (len(alone.runs), alone.repeats) == (1, [])


def test_runs_that_claim_to_be_twins_of_each_other_or_of_themselves_are_shown(tmp_path):
    settings, lines = Settings(workload="digits", steps=10), [runs.line(10, metric=0.5)]
    for name, other in (("a", "b"), ("b", "a"), ("c", "c")):
        written(tmp_path / name, settings, lines, twin_of=other)
    (found,) = group(find_runs([tmp_path]))
    assert len(found.runs) + len(found.repeats) == 3


# -- the link --------------------------------------------------------------------------------------


def test_a_link_is_said_with_its_rate_first():
    assert link_in_words("100mbit,20ms") == "100 Mbit/s with 20 ms"
    assert link_in_words("1gbit") == "1 Gbit/s"
    assert link_in_words("500kbit, 1s") == "500 kbit/s with 1 s"
    assert link_in_words("2.5gbit,20ms,step=50ms") == "2.5 Gbit/s with 20 ms, step=50ms"


def test_the_command_has_the_link_of_the_demo():
    assert inspect.signature(demo_command.demo).parameters["link"].default == demo.LINK


def test_the_demo_fixes_seeds_and_tuned_settings():
    found = demo.demo_runs()
    assert len(found) == 4 * demo.SEEDS
    assert {each.seed for each in found.values()} == {
        demo.FIRST_SEED + more for more in range(demo.SEEDS)
    }
    assert {each.split for each in found.values()} == {"test"}
    assert all(each.tuned for each in found.values())


def test_a_link_that_cannot_be_emulated_is_refused_before_anything_is_written(tmp_path):
    said = palsgd("demo", "--link", "100mbit,20ms,step=50ms", "--out", tmp_path / "out")
    assert said.code == 2
    assert "'step=50ms' in link '100mbit,20ms,step=50ms' cannot be emulated" in said.line
    assert not (tmp_path / "out").exists()


def small(seeds=2):
    tiny = {"steps": 16, "workers": 2, "warmup_steps": 2, "evaluate_every": 8, "sync_every": 4}
    return {
        name: each.changed(tiny)
        for name, each in demo.demo_runs().items()
        if each.method in ("ddp", "palsgd") and each.seed < demo.FIRST_SEED + seeds
    }


def test_where_no_link_can_be_emulated_the_measured_steps_are_projected_and_it_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(demo, "unavailable", lambda: "no root here")
    reason = demo.run_demo(tmp_path / "out", "10mbit,5ms", run_set.Options(quiet=True), small())
    assert reason == "no root here"
    (session,) = record.read(tmp_path / "out")
    assert session.link is None
    found = Comparison(group(find_runs([tmp_path / "out"])), "10mbit,5ms")
    assert {pace.kind for pace in found.paces.values()} == {"projected"}
    assert headline(found).startswith("Over 10 Mbit/s with 5 ms PALSGD")
    assert "no link: ddp ended at loss" in about_processes(found)
    assert about_processes(found).endswith("within the margin of 1%.")


@needs_namespaces
def test_over_an_emulated_link_all_runs_are_timed_one_is_trained_and_all_are_simulated(tmp_path):
    reason = demo.run_demo(tmp_path / "out", "10mbit,5ms", run_set.Options(quiet=True), small())
    assert reason is None
    (session,) = record.read(tmp_path / "out")
    assert session.link == "10mbit,5ms"
    found = Comparison(group(find_runs([tmp_path / "out"])))
    assert {pace.kind for pace in found.paces.values()} == {"measured"}
    assert {len(each.finished) for each in found.groups} == {2}
    # DDP sends at every step, each of at least a round trip, and that is what its workers did
    ddp = next(pace for each, pace in found.paces.items() if each.is_baseline)
    assert ddp.seconds(1) > 0.01
    for name in ("ddp,seed=1", "palsgd,seed=1"):
        spans = session.program(name).spans
        assert {span["worker"] for span in spans} == {0, 1}
        assert min(span["start_s"] for span in spans) >= 0
    exchanging = [s["end_s"] - s["start_s"] for s in session.program("ddp,seed=1").spans
                  if s["kind"] == "sync"]  # fmt: skip
    assert min(exchanging) > 0.005
    check_twins(found.twins)


def check_twins(twins):
    """The first seed of each method was trained by processes over the link, to the simulator's
    losses at every evaluation, and took what its messages must take."""
    assert [twin.simulated.folder.path.name for twin in twins] == ["ddp,seed=1", "palsgd,seed=1"]
    for twin in twins:
        config, lines = twin.real.config, twin.real.evaluations
        assert (config["engine"], config["link"]) == ("processes", "10mbit,5ms")
        assert [line["step"] for line in lines] == [
            line["step"] for line in twin.simulated.evaluations
        ]
        assert twin.apart < 1e-5
        real, simulated = twin.ends("bytes_sent")
        # simulated workers send a header with the gradients that they average, DDP's buckets none
        assert 0.99 * simulated < real <= simulated
        # between two workers an exchange is two hops of 5 ms at least
        assert lines[-1]["time_s"] > 0.01 * lines[-1]["syncs"]
        assert twin.timed_s > 0.01 * lines[-1]["syncs"]


@needs_namespaces
def test_a_demo_that_is_forced_is_timed_and_trained_anew_and_a_resumed_one_is_not(tmp_path):
    out = tmp_path / "out"
    quiet = run_set.Options(quiet=True)
    demo.run_demo(out, "10mbit,5ms", quiet, small(seeds=1))
    files = [out / "timing.json", out / "ddp,seed=1,processes" / "metrics.jsonl"]
    before = [path.read_bytes() for path in files]
    demo.run_demo(out, "10mbit,5ms", replace(quiet, resume=True), small(seeds=1))
    assert [path.read_bytes() for path in files] == before
    with pytest.raises(ValueError, match="over --link 10mbit,5ms, now it is --link 9mbit; use"):
        demo.run_demo(out, "9mbit", replace(quiet, resume=True), small(seeds=1))
    demo.run_demo(out, "10mbit,5ms", replace(quiet, force=True), small(seeds=1))
    for path, text in zip(files, before, strict=True):
        assert path.read_bytes() != text


def offspring() -> list[int]:
    """Running processes that this test started, and those that they started."""
    mark, found = os.environ["PYTEST_CURRENT_TEST"].encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@needs_namespaces
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_or_twice_leaves_no_namespace_and_no_process_behind(tmp_path, times):
    words = ("demo", "--quiet", "--link", "10mbit,5ms", "--out", tmp_path / "out")
    with started(*words, fresh=True) as process:  # `offspring` looks for its environment
        mine = f"palsgd-{process.pid}-*"
        wait_for(lambda: len(offspring()) > 4, process=process)  # the workers have started
        assert list(NAMESPACES.glob(mine))
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=patient(60)) == 130
        assert not list(NAMESPACES.glob(mine))
        assert offspring() == []
        assert "Traceback" not in process.stderr.read()
