"""The report says what the files say."""

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from scipy import stats

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import group
from palsgd.lab.report import find_runs, terminal_table, write_report, write_tensorboard
from palsgd.lab.report.ablations import ablations
from palsgd.lab.report.curves import average
from palsgd.lab.report.formats import GAP, NONE
from palsgd.lab.report.tables import settings_table
from palsgd.lab.report.timelines import bars
from palsgd.lab.settings import Settings
from palsgd.lab.timing import Pace
from support import runs


def write(folder, lines, *, finished=True, config=(), summary=(), **settings):
    """A run with exactly these lines."""
    chosen = Settings(**{"workload": "digits", "method": "palsgd", "steps": 300, **settings})
    runs.write_files(folder, runs.config(chosen) | dict(config), lines)
    if finished:
        record = runs.summary_of(chosen, lines) | dict(summary)
        (folder / "summary.json").write_text(json.dumps(record))
    return folder


def ddp_lines():
    return [runs.line(100, metric=0.5), runs.line(200, metric=0.8), runs.line(300, metric=0.9)]


def palsgd_lines():
    return [
        runs.line(100, metric=0.6, gradient_steps=90, time_s=7.5, bytes_sent=2000),
        runs.line(200, metric=0.91, gradient_steps=180, time_s=15.0, bytes_sent=4000),
        runs.line(300, metric=0.93, gradient_steps=270, time_s=22.5, bytes_sent=6000),
    ]


def write_three(folder, **settings):
    """DDP, a method that misses its target, and one that needs half of its time."""
    write(folder / "ddp", ddp_lines(), method="ddp", **settings)
    missing = [runs.line(step, metric=0.8) for step in (100, 200, 300)]
    write(folder / "diloco", missing, method="diloco", **settings)
    write(folder / "palsgd", palsgd_lines(), **settings)
    return folder


FINAL = "Final values, and what they cost"


def compare(*folders):
    return Comparison(group(find_runs(folders)))


def texts(table):
    """The table as label -> texts of its cells."""
    return {row.label: [cell.text.replace(GAP, " ") for cell in row.cells] for row in table.rows}


def notes(table):
    return {row.label: [cell.note.replace(GAP, " ") for cell in row.cells] for row in table.rows}


class Tables(HTMLParser):
    """The tables of a page: name -> rows of texts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.cell = {}, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.rows = self.found.setdefault(dict(attributes).get("aria-label"), [])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.cell = ""
        elif tag == "small":
            self.cell += " "

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell.strip().replace(GAP, " "))
            self.cell = None


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A report on three runs, and its folder."""
    folder = tmp_path_factory.mktemp("three")
    page = write_report([write_three(folder / "runs")], folder / "report.html")
    return page


# --- curves and groups


def test_seeds_are_drawn_as_their_mean_with_its_95_percent_interval(tmp_path):
    shifts = (0.0, 0.3, 0.1)
    for seed, shift in enumerate(shifts):
        lines = [
            runs.line(step, metric=metric + shift, bytes_sent=step * (1 + shift))
            for step, metric in ((100, 0.5), (200, 0.6))
        ]
        write(tmp_path / f"s{seed}", lines, seed=seed)
    curve = average(find_runs([tmp_path]), "metric", points=300)
    half = stats.t.ppf(0.975, 2) * stats.sem(shifts)
    mean = np.array([0.5, 0.6]) + np.mean(shifts)
    np.testing.assert_allclose(
        [curve.mean, curve.low, curve.high], [mean, mean - half, mean + half]
    )
    np.testing.assert_allclose(curve.x["bytes_sent"], np.array([100, 200]) * (1 + np.mean(shifts)))
    assert curve.n == 3


def test_an_error_is_what_is_missing_of_1(tmp_path):
    write(tmp_path / "ddp", ddp_lines(), method="ddp")
    curve = average(find_runs([tmp_path]), "error", points=300)
    np.testing.assert_allclose(curve.mean, [0.5, 0.2, 0.1])
    assert not curve.has_band, "one seed has no interval"


def test_seconds_are_those_of_the_pace_and_examples_those_of_all_workers(tmp_path):
    write(tmp_path / "palsgd", palsgd_lines(), workers=4, batch_size=8)
    pace = Pace(
        kind="projected", source="", warmup=100,
        averaging=np.array([[1.0, 0, 0, 0]]), local=np.array([[0.25, 0, 0, 0]]),
    )  # fmt: skip
    curve = average(find_runs([tmp_path]), "loss", points=300, pace=pace)
    np.testing.assert_allclose(curve.x["time_s"], [100, 125, 150])
    np.testing.assert_allclose(curve.x["examples"], np.array([90, 180, 270]) * 32)


def test_a_mean_over_seeds_ends_where_the_shortest_ends(tmp_path):
    write(tmp_path / "whole", ddp_lines(), seed=1)
    write(tmp_path / "killed", ddp_lines()[:2], seed=2, finished=False)
    curve = average(find_runs([tmp_path]), "metric", points=300)
    assert curve.x["step"].tolist() == [100, 200]


def test_thinning_keeps_both_ends_and_every_evaluation(tmp_path):
    lines = [runs.line(s, metric=0.5 if s % 50 == 0 else None) for s in range(1, 5001)]
    run = find_runs([write(tmp_path / "long", lines)])
    train = average(run, "train_loss", points=300)
    assert len(train.mean) == 300
    assert train.x["step"][[0, -1]].tolist() == [1, 5000]
    assert len(average(run, "metric", points=300).mean) == 100


def test_distance_is_a_mean_over_workers_and_starts_after_the_warm_up(tmp_path):
    lines = [runs.line(100), runs.line(200, distance=[1.0, 3.0])]
    curve = average(
        find_runs([write(tmp_path / "run", lines, finished=False)]), "distance", points=9
    )
    assert (curve.x["step"], curve.mean) == ([200], [2])


def test_settings_without_effect_do_not_tell_runs_apart(tmp_path):
    for interval in (16, 64):
        write(tmp_path / f"ddp{interval}", ddp_lines(), method="ddp", sync_every=interval)
        write(tmp_path / f"palsgd{interval}", palsgd_lines(), sync_every=interval)
    groups = group(find_runs([tmp_path]))
    assert [each.label for each in groups] == ["ddp", "palsgd H=16", "palsgd H=64"]
    cells = [row.cells[0].text for row in settings_table(groups).rows]
    assert cells == [NONE, "16", "64"]


def test_simulated_runs_are_not_averaged_with_real_ones(tmp_path):
    write(tmp_path / "real", palsgd_lines())
    write(tmp_path / "simulated", palsgd_lines(), config={"simulated": True})
    assert len(group(find_runs([tmp_path]))) == 2


# --- ablations


def test_an_ablation_has_a_line_per_method_and_a_level_for_those_without_the_setting(tmp_path):
    write(tmp_path / "ddp", ddp_lines(), method="ddp")
    for method in ("diloco", "palsgd"):
        for interval, metric in ((16, 0.7), (64, 0.9)):
            last = [runs.line(300, metric=metric)]
            write(tmp_path / f"{method}{interval}", last, method=method, sync_every=interval)
    (ablation,) = ablations(group(find_runs([tmp_path])))
    assert ablation.field == "sync_every"
    assert [bundle.label for bundle in ablation.bundles] == ["diloco", "palsgd"]
    assert [each.label for each in ablation.beside] == ["ddp"]
    curve = ablation.curve(ablation.bundles[0], "metric")
    assert curve.x["value"].tolist() == [16, 64]
    assert curve.mean.tolist() == [0.7, 0.9]


def test_a_grid_is_one_ablation_per_field_with_a_line_per_other_value(tmp_path):
    for inner in ("adamw", "sgd"):
        for p in (0.05, 0.1, 0.25):
            last = [runs.line(300, metric=p)]
            write(tmp_path / f"inner={inner},mix_prob={p}", last, inner=inner, mix_prob=p)
    by_field = {each.field: each for each in ablations(group(find_runs([tmp_path])))}
    assert set(by_field) == {"inner", "mix_prob"}
    assert by_field["inner"].ticks == ["adamw", "sgd"]
    assert len(by_field["inner"].bundles) == 3
    assert [b.label for b in by_field["mix_prob"].bundles] == [
        "palsgd inner=adamw",
        "palsgd inner=sgd",
    ]


def test_a_setting_that_moves_with_the_field_does_not_tear_its_line_apart(tmp_path):
    for workers, steps in ((4, 300), (8, 150)):
        write(tmp_path / str(workers), [runs.line(steps, metric=0.9)], workers=workers, steps=steps)
    by_field = {each.field: each for each in ablations(group(find_runs([tmp_path])))}
    assert by_field["workers"].moved == ["steps"]
    assert by_field["workers"].values == [4, 8]


def test_an_ablation_shows_means_with_their_intervals_over_seeds(tmp_path):
    for seed, metric in ((1, 0.90), (2, 0.94)):
        for p in (0.05, 0.1):
            last = [runs.line(300, metric=metric + p)]
            write(tmp_path / f"mix_prob={p},seed={seed}", last, seed=seed, mix_prob=p)
    (ablation,) = ablations(group(find_runs([tmp_path])))
    curve = ablation.curve(ablation.bundles[0], "metric")
    half = stats.t.ppf(0.975, 1) * stats.sem([0.90, 0.94])
    np.testing.assert_allclose(curve.mean, [0.97, 1.02])
    np.testing.assert_allclose(curve.high - curve.mean, [half, half])
    assert curve.n == 2


def test_the_runs_that_share_a_simulated_program_are_no_setting(tmp_path):
    for seed, program in ((1, ["a", "b"]), (2, ["b"])):
        write(tmp_path / str(seed), palsgd_lines(), seed=seed, config={"program": program})
    (only,) = group(find_runs([tmp_path]))
    assert (only.seeds, ablations([only])) == ([1, 2], [])


# --- the page and the figures


def test_the_page_needs_nothing_but_itself(three):
    page = three.read_text()
    assert "<script src" not in page
    assert "@import" not in page
    links = {part.split('"')[0] for part in page.split("http")[1:]}
    assert all("w3.org/" in link for link in links), "only names of SVG may look like addresses"


def test_a_comparison_of_four_methods_stays_below_a_megabyte(tmp_path):
    folder = runs.write_comparison(tmp_path / "all", steps=20_000, sync_every=64)
    page = write_report([folder], tmp_path / "report.html", figures=False)
    assert page.stat().st_size < 1_000_000
    assert not (tmp_path / "figures").exists()


def test_figures_are_also_files_of_their_own(three):
    figures = three.parent / "figures"
    names = {path.stem for path in figures.glob("*.svg")}
    assert {"loss-step", "error-time_s", "train_loss-bytes_sent", "speed-up-examples"} <= names
    for name in names:
        ElementTree.parse(figures / f"{name}.svg")
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "palsgd" in (figures / "loss-step.svg").read_text(), "a file brings its legend"


def test_floor_and_target_are_drawn_where_they_are_known(tmp_path, three):
    write(tmp_path / "ddp", ddp_lines(), method="ddp", config={"floor": 0.0625})
    write_report([tmp_path], tmp_path / "report.html")
    assert "floor 0.0625" in (tmp_path / "figures" / "loss-step.svg").read_text()
    assert "target 0.101" in (tmp_path / "figures" / "loss-step.svg").read_text()
    assert "floor" not in (three.parent / "figures" / "loss-step.svg").read_text()


def test_neighbours_of_one_kind_are_one_bar():
    kinds = ("gradient", "gradient", "mixing", "wait")
    spans = [
        {"worker": 1, "kind": kind, "start_s": 5.0 + at, "end_s": 6.0 + at}
        for at, kind in enumerate(kinds)
    ]
    assert bars(spans) == {1: [("gradient", 0, 2), ("mixing", 2, 3), ("wait", 3, 4)]}


def test_the_same_files_give_the_same_page(three, tmp_path):
    again = write_report([three.parent / "runs"], tmp_path / "again.html", figures=False)
    assert again.read_text() == three.read_text()


@pytest.mark.slow
def test_whatever_files_say_is_shown_and_never_run(tmp_path):
    evil = "<img src=x onerror=alert(1)> $x_1$ </script>"
    for method in ("ddp", evil):
        config = {"method": method, "workload": evil, "device": evil, "metric": evil, evil: evil}
        name = evil.replace("/", "") if method == evil else method
        write(tmp_path / "runs" / name, ddp_lines(), config=config)
    for seed in (1, 2):
        config = {"method": evil, "workload": evil, evil: seed}
        write(tmp_path / "runs" / f"s{seed}", ddp_lines(), seed=seed, config=config)
    page = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 2, "the data's and the program's own"
    assert "&lt;img src=x onerror=alert(1)&gt; $x_1$" in page
    figure = ElementTree.parse(tmp_path / "figures" / "loss-step.svg")
    assert any("$x_1$" in text for text in figure.getroot().itertext()), (
        "no formula is read into it"
    )


def test_names_with_equals_and_commas_are_found_and_sorted_by_value(tmp_path):
    for value in (64, 8, 16):
        write(tmp_path / "sweep" / f"sync_every={value},seed=1", palsgd_lines(), sync_every=value)
    names = [run.name for run in find_runs([tmp_path / "sweep"])]
    assert names == [f"sweep/sync_every={value},seed=1" for value in (8, 16, 64)]


def test_workloads_have_a_section_each(tmp_path):
    write(tmp_path / "a", ddp_lines(), method="ddp", workload="digits")
    write(tmp_path / "b", ddp_lines(), method="ddp", workload="stories")
    page = write_report([tmp_path], tmp_path / "report.html", figures=False).read_text()
    assert page.count('<section class="workload"') == 2
    assert "<h1>stories</h1>" in page


def test_a_run_given_twice_is_shown_once(tmp_path):
    write(tmp_path / "ddp", ddp_lines(), method="ddp")
    assert len(find_runs([tmp_path, tmp_path / "ddp", tmp_path])) == 1


def test_a_diverged_run_is_drawn_as_far_as_it_was_finite(tmp_path):
    lines = [*ddp_lines(), runs.line(400, metric=0.1, loss=float("nan"), train_loss=float("inf"))]
    write(tmp_path / "bad", lines)
    page = write_report([tmp_path], tmp_path / "report.html", figures=False).read_text()
    rows = Tables(page).found[FINAL]
    assert rows[1][2] == "inf"


# --- unfinished and broken runs


def test_an_unfinished_run_has_curves_but_no_final_row(tmp_path):
    write(tmp_path / "ddp", ddp_lines(), method="ddp")
    write(tmp_path / "palsgd", palsgd_lines()[:1], finished=False)
    page = write_report([tmp_path], tmp_path / "report.html", figures=False).read_text()
    tables = Tables(page).found
    assert [row[0] for row in tables[FINAL][1:]] == ["ddp"]
    assert [row[0] for row in tables["To the target"][1:]] == ["ddp"]
    assert "palsgd: unfinished (step 100)" in page
    data = json.loads(page.split('class="data">')[1].split("</script>")[0])
    steps = {each["label"]: each["x"]["step"] for each in data["points"]["loss"]}
    assert steps["palsgd"] == [100]


def test_a_run_that_has_just_started_does_not_stop_the_report(tmp_path):
    write(tmp_path / "palsgd", [], finished=False)
    page = write_report([tmp_path], tmp_path / "report.html", figures=False).read_text()
    assert "unfinished (no line yet)" in page


def test_a_cut_off_last_line_is_left_out_and_said(tmp_path):
    folder = write(tmp_path / "killed", ddp_lines(), finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "gradi')
    (run,) = find_runs([folder])
    assert len(run.lines) == 3
    assert run.notes == ("the last line of metrics.jsonl is cut off and left out",)


def broken(tmp_path, **change):
    folder = write(tmp_path / "run", ddp_lines())
    for name, text in change.items():
        path = folder / {"config": "config.yaml", "metrics": "metrics.jsonl"}.get(
            name, "summary.json"
        )
        path.unlink() if text is None else path.write_text(text)
    return folder


GOOD = json.dumps(runs.line(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": f"{GOOD}\n{{oops\n{GOOD}\n"}, r"metrics.jsonl, line 2: not JSON: '{oops'"),
        ({"metrics": f"{GOOD}\n[1]\n"}, r"metrics.jsonl, line 2: not an object: \[1\]"),
        ({"metrics": '{"step": "x"}\n'}, r"metrics.jsonl, line 1: step is 'x', not a number"),
        ({"config": None}, r"config.yaml is missing: .* leave it out"),
        ({"config": "a: [1"}, r"config.yaml is not plain YAML"),
        ({"config": "workload: digits"}, r"config.yaml has no 'method'"),
        ({"config": "{workload: d, method: ddp, schema: 9}"}, r"has schema 9, this palsgd reads 1"),
        ({"summary": "{"}, r"summary.json is not JSON .* delete it"),
        ({"summary": "[]"}, r"summary.json is not an object; delete it"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        find_runs([broken(tmp_path, **change)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_a_folder_without_runs_is_named_with_what_was_looked_for(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"no run in .*{name}: looked .* metrics.jsonl beside"):
        write_report([tmp_path / name], tmp_path / "report.html")


# --- terminal and TensorBoard


def test_the_terminal_says_the_verdicts_first_and_never_missed(tmp_path):
    from rich.console import Console

    console = Console(width=300, record=True, file=io.StringIO())
    console.print(terminal_table([write_three(tmp_path)]))
    lines = console.export_text().replace(GAP, " ").splitlines()
    assert lines[: len(compare(tmp_path).verdicts)] == compare(tmp_path).verdicts
    palsgd = next(line for line in lines if line.startswith(" palsgd"))
    for value in ("0.0700", "0.9300", "270", "22.5 s", "6 kB"):
        assert value in palsgd
    assert "not reached within 300" in next(x for x in lines if x.startswith(" diloco"))
    assert "missed" not in "".join(lines)


def test_tensorboard_gets_every_line_of_every_method(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = write_tensorboard([write_three(tmp_path / "runs")], tmp_path / "events")
    assert {path.name for path in out.iterdir()} == {"digits_ddp", "digits_diloco", "digits_palsgd"}
    events = EventAccumulator(str(out / "digits_palsgd")).Reload()
    metric = events.Scalars("validation/metric")
    assert [(e.step, e.wall_time, round(e.value, 6)) for e in metric] == [
        (100, 7.5, 0.6),
        (200, 15.0, 0.91),
        (300, 22.5, 0.93),
    ]


def test_tensorboard_stays_inside_its_folder_whatever_methods_are_called(tmp_path):
    folder = write(tmp_path / "runs", ddp_lines(), config={"method": "../../x", "workload": ".."})
    out = write_tensorboard([folder], tmp_path / "a" / "b" / "events")
    assert [path.parent for path in tmp_path.rglob("events.out*")] == [next(out.iterdir())]


@pytest.mark.slow
def test_importing_the_report_loads_no_plotting():
    heavy = {"matplotlib", "rich", "tensorboard", "jinja2"}
    code = f"import sys, palsgd; before = set(sys.modules); import palsgd.lab.report; print(({heavy} & set(sys.modules)) - before)"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_made_up_runs_have_every_key_of_the_schema(tmp_path):
    """The folders of these tests are like those of the program: docs/files.md names every key."""
    folder = runs.write_run(tmp_path / "run", method="palsgd")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    summary = json.loads((folder / "summary.json").read_text())
    span = json.loads((folder / "timeline.jsonl").read_text().splitlines()[0])
    assert {"schema", "engine", "floor", "sync_every"} <= set(config)
    assert {"step", "distance", "agreement", "bytes_sent"} <= set(line)
    assert {"final_metric", "waiting_s", "time_to_target_s"} <= set(summary)
    assert set(span) == {"worker", "kind", "start_s", "end_s"}
