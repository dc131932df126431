"""The figures of the report show what the runs' lines say."""

import json
import math
import re
import sys

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import group
from palsgd.lab.report import find_runs, write_report
from palsgd.lab.report.ablations import ablations
from palsgd.lab.report.bars import draw_spent, draw_timelines
from palsgd.lab.report.canvas import log_ticks
from palsgd.lab.report.drawn import MOST, drawn, drawn_beside
from palsgd.lab.report.heat_maps import SHADES, best_of, heat_maps, in_words, shade_of
from palsgd.lab.report.speedups import QualityUnit, noise_line, speed_lines
from palsgd.lab.settings import Settings
from support import runs


def write(folder, losses, *, simulated=False, spent=1.0, every=10, finished=True, **chosen):
    """A run that has these losses after every 10 steps, and sends `spent` bytes in a step."""
    own = Settings(**{"workload": "digits", "steps": every * len(losses), **chosen})
    lines = [
        runs.line(
            every * (at + 1), metric=max(0.0, 1 - loss), loss=loss,
            bytes_sent=spent * every * (at + 1), time_s=None if simulated else at + 1.0,
        )
        for at, loss in enumerate(losses)
    ]  # fmt: skip
    runs.write_files(folder, runs.config(own, simulated=simulated), lines)
    if finished:
        (folder / "summary.json").write_text(json.dumps(runs.summary_of(own, lines)))
    return folder


def falling(end, number=20, start=1.0):
    """Losses that fall along a straight line."""
    return np.linspace(start, end, number).tolist()


def comparison(folder):
    return Comparison(group(find_runs([folder])))


def lines_of(folder, axis="step"):
    found = comparison(folder)
    return {
        line.group.label: line
        for line in speed_lines(found, found.groups, axis, QualityUnit(found))
    }


def page_of(folder, **options):
    return write_report([folder], folder / "report.html", figures=False, **options).read_text()


# --- speed-up against quality


def test_a_method_that_needs_half_of_the_steps_is_ahead_by_two_at_every_level(tmp_path):
    steps = np.arange(1, 21)
    write(tmp_path / "ddp", (1 - 0.04 * steps).tolist(), method="ddp")
    write(tmp_path / "palsgd", (1 - 0.08 * steps[:10]).tolist(), method="palsgd", steps=100)
    curve = lines_of(tmp_path)["palsgd"].curve
    np.testing.assert_allclose(curve.mean[1:], 2.0, rtol=1e-6)
    assert curve.x["level"][-1] == pytest.approx(0.2), "to the best of the baseline"
    assert curve.x["level"][0] == pytest.approx(0.92), "from where both were evaluated"


def test_a_line_ends_where_the_method_stops(tmp_path):
    write(tmp_path / "ddp", falling(0.2), method="ddp")
    write(tmp_path / "diloco", falling(0.5), method="diloco")
    line = lines_of(tmp_path)["diloco"]
    assert line.stops
    assert line.curve.x["level"].min() >= 0.5
    write(tmp_path / "palsgd", falling(0.1), method="palsgd")
    assert not lines_of(tmp_path)["palsgd"].stops


def test_each_axis_has_its_own_speed_up(tmp_path):
    write(tmp_path / "ddp", falling(0.2), method="ddp", spent=64)
    write(tmp_path / "palsgd", falling(0.2, start=0.999), method="palsgd", spent=1)
    by_step, by_byte = (lines_of(tmp_path, axis)["palsgd"].curve for axis in ("step", "bytes_sent"))
    np.testing.assert_allclose(by_step.mean, 1, rtol=0.03)
    np.testing.assert_allclose(by_byte.mean, 64 * by_step.mean)


def test_a_program_is_not_compared_with_itself(tmp_path):
    for method in ("ddp", "localsgd"):
        write(tmp_path / method, falling(0.2), method=method)
    assert lines_of(tmp_path) == {}


def test_bands_are_of_pairs_of_seeds_and_the_noise_floor_of_the_baseline_alone(tmp_path):
    for seed, end in enumerate((0.2, 0.3, 0.1)):
        write(tmp_path / f"ddp,seed={seed}", falling(end), method="ddp", seed=seed)
        write(tmp_path / f"palsgd,seed={seed}", falling(end / 2), method="palsgd", seed=seed)
    found = comparison(tmp_path)
    unit = QualityUnit(found)
    (line,) = speed_lines(found, found.groups, "step", unit)
    assert line.curve.n == 3
    assert np.all(line.curve.low <= line.curve.mean)
    assert np.any(line.curve.low < line.curve.high)
    noise = noise_line(found, found.groups[0], "step", line.curve.x["level"], unit)
    assert np.all((noise.low <= 1) & (noise.high >= 1))
    assert line.curve.x["level"].min() <= noise.x["level"].min()


def test_an_accuracy_is_shown_as_an_error(tmp_path):
    for method, end in (("ddp", 0.1), ("palsgd", 0.05)):
        write(tmp_path / method, falling(end), method=method, target_on="metric")
    found = comparison(tmp_path)
    unit = QualityUnit(found)
    assert (unit.name, unit.falling) == ("error (1 - accuracy)", True)
    assert unit.shown(np.array(-0.9)) == pytest.approx(0.1)
    assert lines_of(tmp_path)["palsgd"].curve.x["level"][-1] == pytest.approx(0.1)


# --- many settings


def write_settings(folder, number):
    """Of three methods, the first of which ends lowest with all of its settings."""
    for at in range(number):
        for method, least in (("anchordecay", 0.1), ("diloco", 0.4), ("localsgd", 0.8)):
            write(folder / f"{method}{at}", [1.0, least + at / 100], method=method, lr=0.1 + at)


def test_of_more_settings_than_can_be_told_apart_the_best_are_drawn(tmp_path):
    write_settings(tmp_path, 20)
    found = comparison(tmp_path)
    ends = {each.label: next(iter(found.final_losses(each).values())) for each in drawn(found)}
    assert len(ends) == MOST
    best = {"anchordecay lr=0.1", "diloco lr=0.1", "localsgd lr=0.1"}
    assert best < set(ends), "the best of each method, however far behind"
    rest = sorted(value for label, value in ends.items() if label not in best)
    assert rest == pytest.approx([*(0.1 + at / 100 for at in range(1, 20)), 0.41, 0.42])


def test_a_page_with_lines_of_some_settings_says_so_and_has_buttons_for_these(
    tmp_path, monkeypatch
):
    write_settings(tmp_path, 2)
    assert "settings: the best of each method" not in page_of(tmp_path)
    monkeypatch.setattr(sys.modules[drawn.__module__], "MOST", 4)
    page = page_of(tmp_path)
    assert "Lines of 4 of 6 settings: the best of each method" in page
    buttons, lines = (set(re.findall(rf'<{tag} [^>]*data-line="(\d+)"', page))
                      for tag in ("button", "g"))  # fmt: skip
    assert len(buttons) == 4
    assert lines == buttons


def test_lines_include_all_that_verdicts_are_of_and_what_they_are_measured_against(
    tmp_path, monkeypatch
):
    for workers in (2, 4, 8):  # with more workers losses are higher, for a reason of its own
        for at, method in enumerate(("ddp", "localsgd", "diloco")):
            write(tmp_path / f"{method}{workers}", [1.0, workers / 10 - at / 100], method=method,
                  workers=workers)  # fmt: skip
        for lr in range(4):
            write(tmp_path / f"{workers}more{lr}", [1.0, workers / 10 + lr / 100], method="diloco",
                  workers=workers, lr=1.0 + lr)  # fmt: skip
    monkeypatch.setattr(sys.modules[drawn.__module__], "MOST", 4)
    scales = [(each.method, each.settings["workers"]) for each in drawn(comparison(tmp_path))]
    assert sorted(scales) == [(m, k) for m in ("ddp", "diloco", "localsgd") for k in (2, 4, 8)]
    monkeypatch.setattr(sys.modules[drawn.__module__], "MOST", 12)
    rest = [each.settings["workers"] for each in drawn(comparison(tmp_path))
            if each.settings.get("lr", 0) >= 1.0]  # fmt: skip
    assert sorted(rest) == [2, 4, 8], "the best of each number of workers, not the three of 2"


def test_a_setting_of_which_a_seed_diverged_is_not_the_best(tmp_path, monkeypatch):
    for seed, end in ((1, 0.1), (2, math.inf)):
        write(tmp_path / f"hot{seed}", [1.0, end], method="diloco", lr=9.0, seed=seed)
        write(tmp_path / f"calm{seed}", [1.0, 0.5], method="diloco", lr=1.0, seed=seed)
        write(tmp_path / f"fair{seed}", [1.0, 0.55], method="diloco", lr=2.0, seed=seed)
        write(tmp_path / f"ddp{seed}", [1.0, 0.6], method="ddp", seed=seed)
    found = comparison(tmp_path)
    monkeypatch.setattr(sys.modules[drawn.__module__], "MOST", 3)
    chosen = [each.settings["lr"] for each in drawn(found) if each.method == "diloco"]
    assert chosen == [1.0, 2.0]
    (by_lr,) = [each for each in ablations(found.groups) if each.field == "lr"]
    (bundle,) = by_lr.bundles
    curve = by_lr.curve(bundle, "loss")
    assert curve.x["value"].tolist() == [1.0, 2.0], "no point where a seed diverged"


def write_controls(folder, points):
    """PALSGD at these learning rates, each with a control that ends higher than all of them."""
    for at in range(points):
        write(folder / f"lr={at + 1}", [1.0, 0.2 + at / 1000], lr=at + 1.0, method="palsgd")
        name = f"diloco-raised-lr,lr={at + 1}"
        write(folder / name, [1.0, 0.5 + at / 1000], lr=at + 1.5, method="diloco")


def test_of_controls_of_many_points_the_best_is_drawn(tmp_path):
    write_controls(tmp_path, 20)
    chosen = drawn(comparison(tmp_path))
    assert len(chosen) == MOST
    assert [each.label for each in chosen if each.kind == "diloco-raised-lr"][:1] == [
        "diloco-raised-lr,lr=1"
    ]
    assert sum(each.method == "palsgd" for each in chosen) == 20


def test_a_control_that_is_a_setting_of_its_own_too_is_no_control(tmp_path):
    write_controls(tmp_path, 2)
    write(tmp_path / "lr=1.5", [1.0, 0.5], lr=1.5, method="diloco")
    names = {each.settings["lr"]: each.given_name for each in comparison(tmp_path).groups}
    assert names == {1.0: None, 2.0: None, 1.5: None, 2.5: "diloco-raised-lr,lr=2"}


def test_controls_of_one_name_are_told_apart_by_the_settings_in_which_they_differ(tmp_path):
    """As the collections of a study have them, one for each H. A name that is alone says enough."""
    for h in (32, 64):
        for name, method in (("palsgd", "palsgd"), ("palsgd-no-pull", "palsgd")):
            pull = {"pull": 0.0} if "no-pull" in name else {}
            write(tmp_path / f"H{h}" / name, [1.0, 0.5], method=method, sync_every=h, **pull)
    write(tmp_path / "H32" / "diloco-raised-lr", [1.0, 0.5], method="diloco", sync_every=32)
    labels = [each.label for each in comparison(tmp_path).groups]
    assert labels == [
        "palsgd H=32", "palsgd H=64", "diloco-raised-lr", "palsgd-no-pull H=32",
        "palsgd-no-pull H=64",
    ]  # fmt: skip


def test_flat_lines_of_many_settings_are_those_of_what_a_line_is_like(tmp_path):
    for lr in (0.1, 0.2):
        for h in (4, 8, 16, 32):
            end = lr + h / 100
            write(tmp_path / f"diloco{lr}{h}", [1.0, end], method="diloco", lr=lr, sync_every=h)
            for eta in (0.5, 1.0) if lr == 0.2 else ():
                write(tmp_path / f"palsgd{h}{eta}", [1.0, end], method="palsgd", lr=lr,
                      sync_every=h, mix_rate=eta)  # fmt: skip
    found = comparison(tmp_path)
    (by_eta,) = [each for each in ablations(found.groups) if each.field == "mix_rate"]
    assert len(by_eta.beside) == 8
    flat = drawn_beside(found, by_eta)
    assert [each.settings["lr"] for each in flat] == [0.2] * 4, "not the lower ends at 0.1"
    assert "Flat lines of 4 of 8: of what a line is like, those that end at" in page_of(tmp_path)


# --- robustness maps


def write_grid(folder, method, losses, **more):
    """`losses` by (lr, outer_lr)."""
    for (lr, outer_lr), loss in losses.items():
        chosen = {"method": method, "lr": lr, "outer_lr": outer_lr, **more}
        write(folder / f"{method},lr={lr},outer={outer_lr}", [1.0, loss], **chosen)


GRID = {(0.1, 0.5): 0.30, (0.2, 0.5): 0.20, (0.4, 0.5): 0.204, (0.1, 1.0): 0.25, (0.2, 1.0): 0.39,
        (0.4, 1.0): 0.41}  # fmt: skip


def test_a_grid_is_a_map_per_method_with_the_same_columns(tmp_path):
    write_grid(tmp_path, "diloco", GRID)
    for lr in (0.1, 0.2):
        write(tmp_path / f"ddp{lr}", [1.0, lr], method="ddp", lr=lr)
    ddp, diloco = heat_maps(group(find_runs([tmp_path])))
    assert ddp.columns == diloco.columns == [0.1, 0.2, 0.4]
    assert diloco.rows == [(("outer_lr", 0.5),), (("outer_lr", 1.0),)]
    assert diloco.cells[1, 2].point.loss == 0.41
    assert (ddp.rows, len(ddp.cells)) == ([()], 2), "the outer step has no effect on it"
    assert best_of([ddp, diloco]) == 0.1


def test_the_caption_of_a_map_is_worked_out_by_hand(tmp_path):
    write_grid(tmp_path, "diloco", GRID, outer_momentum=0.0, sync_every=10)
    (own,) = heat_maps(group(find_runs([tmp_path])))
    text = in_words(own, best=0.199)
    near = "2 of 6 settings end within 3% of its best, 0.2; 2 of 6 within 3% of the best of all"
    assert text.startswith(f"Means over n = 1 seed. {near}, 0.199. ")
    # 0.41 is above twice the best; of 0.4 x 0.5 and 0.2 x 1.0, which are as hot, the worse counts
    assert text.endswith("Hottest that trains: lr 0.2, outer lr 1, loss 0.39.")


def test_colours_are_by_the_best_of_all_methods():
    words = [words for _, words, _ in SHADES]
    shades = [shade_of(loss, 1.0) for loss in (1.0, 1.05, 1.2, 1.9, 4.0, 6.0, math.inf)]
    assert shades == list(range(len(words)))


def test_a_run_that_failed_is_on_the_map_and_one_that_is_not_finished_is_not(tmp_path):
    write_grid(tmp_path, "diloco", GRID)
    failed, open_ = tmp_path / "diloco,lr=0.4,outer=1.0", tmp_path / "diloco,lr=0.1,outer=1.0"
    for folder in (failed, open_):
        (folder / "summary.json").unlink()
    (failed / "failed.txt").write_text("the loss is not finite\n")
    (own,) = heat_maps(group(find_runs([tmp_path])))
    assert own.cells[1, 2].point.loss == math.inf
    assert (1, 0) not in own.cells
    page = page_of(tmp_path)
    assert "Robustness map" in page
    assert "did not end with a finite loss" in page


def test_random_points_are_no_grid(tmp_path):
    rng = np.random.default_rng(0)
    for at in range(9):
        lr, outer = rng.uniform(0.1, 1, 2).tolist()
        write(tmp_path / str(at), [1.0, 0.5], method="diloco", lr=lr, outer_lr=outer)
    assert heat_maps(group(find_runs([tmp_path]))) == []


def test_settings_beside_the_grid_have_maps_of_their_own(tmp_path):
    for p in (0.1, 0.2):
        write_grid(tmp_path / str(p), "palsgd", GRID, mix_prob=p, mix_rate=0.5)
    labels = [own.label for own in heat_maps(group(find_runs([tmp_path])))]
    assert labels == ["palsgd p=0.1", "palsgd p=0.2"]


# --- time


def test_all_timelines_have_one_axis_and_one_unit():
    methods = {
        "ddp": {0: [("gradient", 0.0, 0.4), ("wait", 0.4, 1.0)]},
        "palsgd": {0: [("gradient", 0.0, 0.5), ("sync", 0.5, 0.6)]},
    }
    rows = draw_timelines("t", "t", methods, None).reading["rows"]
    assert [row["title"] for row in rows] == ["ddp, worker 0", "palsgd, worker 0"]
    waiting, sync = rows[0]["cells"][1], rows[1]["cells"][1]
    left, right = rows[0]["cells"][0][0], waiting[1]
    assert (sync[1] - left) / (right - left) == pytest.approx(0.6, abs=1e-3)
    assert waiting[2:] == ["wait", "0.6\N{NO-BREAK SPACE}s, from 0.4\N{NO-BREAK SPACE}s", "wait"]


def test_a_bar_of_seconds_is_stacked_from_its_parts():
    parts = {"computing": 2.0, "mixing": 0.0, "waiting": 1.0, "exchanging": 1.0}
    (row,) = draw_spent("s", "s", {"ddp": parts}, None).reading["rows"]
    assert [cell[2] for cell in row["cells"]] == ["computing", "waiting", "exchanging"]
    widths = [cell[1] - cell[0] for cell in row["cells"]]
    np.testing.assert_allclose(np.array(widths) / sum(widths), [0.5, 0.25, 0.25], atol=1e-3)
    assert "(50.0\N{NO-BREAK SPACE}%)" in row["cells"][0][3]


def test_simulated_runs_have_no_axis_of_time_until_a_link_is_given(tmp_path):
    for method, end in (("ddp", 0.2), ("palsgd", 0.15)):
        write(tmp_path / method, falling(end), method=method, simulated=True)
    page = page_of(tmp_path)
    assert 'value="time_s"' not in page
    assert "No seconds are known: give --link to project." in page
    page = page_of(tmp_path, link="100mbit,20ms,step=50ms")
    first = page.split('type="radio"')[1]
    assert 'value="time_s" checked' in first
    assert "Where the time goes" in page


# --- what the page says


def test_the_page_opens_with_the_verdicts_then_the_main_figure(tmp_path):
    write(tmp_path / "ddp", falling(0.2), method="ddp")
    for interval in (8, 16, 32, 64):
        write(tmp_path / f"H={interval}", falling(0.3), method="diloco", sync_every=interval)
    page = page_of(tmp_path)
    verdicts = comparison(tmp_path).verdicts
    assert verdicts
    places = [page.index(mark) for mark in ('<ul class="findings">', "Speed-up against loss")]
    assert places == sorted(places)
    assert page.index("Validation loss") > places[1]
    assert page.count("<li>") >= len(verdicts), "five groups have findings as well"
    assert "missed" not in page


def test_n_and_the_kind_of_interval_are_said(tmp_path):
    for seed in (1, 2, 3):
        write(tmp_path / f"ddp{seed}", falling(0.2 + seed / 100), method="ddp", seed=seed)
        write(tmp_path / f"d{seed}", falling(0.1 + seed / 100), method="diloco", seed=seed)
    page = page_of(tmp_path)
    assert "Means over n = 3 seeds; bands: 95% t interval of the mean." in page
    assert "95% bootstrap over pairs of seeds, n = 3 seeds; grey: one half of the baseline" in page


def test_one_seed_is_said_to_have_no_interval(tmp_path):
    write(tmp_path / "ddp", falling(0.2), method="ddp")
    assert "One seed: no interval." in page_of(tmp_path)


# --- odd values


def test_eleven_groups_of_which_one_sends_nothing_make_a_page(tmp_path):
    for workers in range(1, 12):
        spent = 0 if workers == 1 else 10.0**workers
        write(tmp_path / str(workers), falling(0.2), method="ddp", workers=workers, spent=spent)
    assert "bytes" in page_of(tmp_path)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.1), (3.0, 0.2), (1e-300, 1e300), (0.7, 40.0)])
def test_log_ticks_lie_inside_and_are_few(low, high):
    ticks = [tick for tick in log_ticks(low, high) if min(low, high) <= tick <= max(low, high)]
    assert 1 <= len(ticks) <= 10


odd = some.sampled_from([0.0, 0, 1.0, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, None])
odd_lines = some.lists(
    some.fixed_dictionaries(
        {"loss": odd, "metric": odd, "train_loss": odd, "agreement": odd, "time_s": odd},
        optional={"distance": some.lists(odd, max_size=2)},
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.mark.slow
# A page takes a second: the first that fails is as good as the smallest.
@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(lines=some.lists(odd_lines, min_size=2, max_size=4), spent=some.sampled_from([0, 1, 1e12]))
def test_whatever_figures_lines_hold_there_is_a_page(tmp_path_factory, lines, spent):
    folder = tmp_path_factory.mktemp("odd")
    for at, values in enumerate(lines):
        chosen = Settings(workload="digits", method="ddp" if at == 0 else "palsgd", seed=at % 2)
        path = folder / str(at)
        found = [
            {**runs.line(10 * (n + 1), bytes_sent=spent * n), **line}
            for n, line in enumerate(values)
        ]
        runs.write_files(path, runs.config(chosen), found)
        if at != 2:
            record = runs.summary_of(chosen, [{**found[-1], "metric": 0.0, "loss": None}])
            record["final_loss"] = values[-1]["loss"]
            (path / "summary.json").write_text(json.dumps(record))
    assert "</html>" in page_of(folder)


# --- the names of levels


def names_of_levels(folder, axis):
    """In the figure of the loss: the side that a name is at, and its height in pixels from the
    top."""
    write_report([folder], folder / "report.html")
    svg = (folder / "figures" / f"loss-{axis}.svg").read_text()
    return {
        name: ("left" if anchor == "start" else "right", float(y))
        for anchor, y, name in re.findall(
            r'<text style="[^"]*text-anchor: (\w+)[^"]*" x="[^"]*" y="([^"]*)"[^>]*>(target|floor)',
            svg,
        )
    }


def test_a_level_is_named_where_curves_are_far_from_it(tmp_path):
    """By steps that is at the left. By bytes it is at the right of runs that all send little but
    one, whose loss is far off there."""
    write(tmp_path / "ddp", falling(0.5), method="ddp", spent=100, target=0.2)
    write(tmp_path / "palsgd", falling(0.2), spent=20, target=0.2)
    by_step, by_byte = (names_of_levels(tmp_path, axis) for axis in ("step", "bytes_sent"))
    assert by_step["target"][0] == "left"
    assert by_byte["target"][0] == "right"


def test_names_of_two_levels_that_are_near_do_not_lie_over_each_other(tmp_path):
    for method in ("ddp", "palsgd"):
        folder = write(tmp_path / method, falling(0.1), method=method, target=0.101)
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("floor: null", "floor: 0.1"))
    names = names_of_levels(tmp_path, "step")
    assert names["floor"][1] - names["target"][1] > 7.4, "the size of the letters"
