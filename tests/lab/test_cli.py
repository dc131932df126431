"""The command line: help, bad input, output for people, and what happens when something breaks."""

import re
import subprocess
import sys
from importlib.metadata import version
from itertools import count

import pytest
import torch
import yaml

from palsgd import progress
from palsgd.lab import cli, provenance, workloads
from palsgd.lab.cli import compare_command, sweep_command, train_command
from support.commands import apart, environment, lines, palsgd, records, summary

SMALL = ("--workers", 2, "--steps", 12, "--sync-every", 4, "warmup_steps=2", "--simulate")
COMMANDS = [each.name or each.callback.__name__ for each in cli.app.registered_commands] + [
    f"{name} {each.name or each.callback.__name__}"
    for name, group in {"data": cli.data_app, "bench": cli.bench_app}.items()
    for each in group.registered_commands
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    out = tmp_path_factory.mktemp("run") / "here"
    assert palsgd("train", "digits", *SMALL, "--out", out).code == 0
    return out


# -- help ----------------------------------------------------------------------------------------


def test_help_lists_every_command():
    said = palsgd("--help")
    assert said.code == 0
    assert {"demo", "train", "compare", "sweep", "report", "recipes"} < set(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"^  {command.split()[0]} ", said.out, re.MULTILINE), command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(command):
    said = palsgd(*command.split(), "--help")
    assert said.code == 0
    assert f"Example: palsgd {command}" in " ".join(said.out.split())


def test_help_is_shown_without_importing_torch_or_numpy():
    code = (
        "import sys\n"
        "from palsgd.lab.cli import app\n"
        f"for command in {['', 'data', 'bench', *COMMANDS]!r}:\n"
        "    app([*command.split(), '--help'], standalone_mode=False)\n"
        "    assert not {'torch', 'numpy'} & set(sys.modules), command\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(COMMANDS) + 3


def test_version_says_palsgd_commit_and_torch_without_importing_it(monkeypatch):
    code = (
        "import sys\n"
        "from palsgd.lab.cli import main\n"
        "sys.argv = ['palsgd', '--version']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    commit, dirty = provenance.checkout()
    of = "" if commit is None else f" (commit {commit[:12]}{', changed' if dirty else ''})"
    assert done.stdout == f"palsgd {version('palsgd')}{of}, torch {version('torch')}\n"
    monkeypatch.setattr(provenance, "checkout", lambda: (None, None))
    assert "commit" not in palsgd("--version").out


def test_examples_are_accepted_as_they_stand(tmp_path, monkeypatch):
    """All but what they run: flags and settings are read, nothing starts."""
    monkeypatch.chdir(tmp_path)
    ran = []
    for module in (train_command, compare_command, sweep_command):
        monkeypatch.setattr(module, "run_and_show", lambda runs, *args, **kwargs: ran.append(runs))
    for command in ("train", "compare", "sweep"):
        example = re.search(r"Example: palsgd (.*)", palsgd(command, "--help").out).group(1)
        assert palsgd(*example.split()).code == 0
    train, compare, sweep = (len(runs) for runs in ran)
    assert (train, sweep) == (1, 2 * 2 * 3)
    assert compare > 4 * 5  # four methods and some controls, with five seeds each
    assert compare % 5 == 0


def test_palsgd_alone_shows_the_help():
    said = palsgd()
    assert "Commands" in said.out + said.err
    assert "Traceback" not in said.err


def test_recipes_lists_all_recipes_and_grids():
    said = palsgd("recipes")
    assert said.code == 0
    words = said.out.split()
    assert all(name in words for name in workloads.recipes())
    assert all(f"{name}:" in words for name in workloads.grids())


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train digitz", "recipe 'digitz' is unknown; did you mean 'digits'?"),
        ("compare storys", "did you mean 'stories'?"),
        ("train digits workload=digitz --simulate", "did you mean 'digits'?"),
        (
            "train digits --method palsdg",
            "method='palsdg' is unknown; use one of 'anchordecay', 'ddp'",
        ),
        ("compare digits --methods ddp,palsdg", "method='palsdg' is unknown"),
        ("train digits stepz=3", "there is no setting 'stepz'; did you mean 'steps'?"),
        ("sweep digits sync_evry=3,4", "there is no setting 'sync_evry'; did you mean"),
        ("sweep digits digits/Q", "grid 'digits/Q' is unknown; did you mean 'digits/H'?"),
        ("sweep digits lr=1e-3..1e-1", "lr=1e-3..1e-1 is no number"),
        ("sweep digits lr=a..b --random 3", "lr=a..b is no range"),
        ("sweep digits seed=1,2 --random 0", "ask for at least 1"),
        ("sweep digits mix_rate=1000,2000", "use mix_rate <= 50"),
        ("train digits steps=abc", "steps=abc is no whole number"),
        ("train digits --steps abc", "--steps"),
        ("train digits workers=0", "workers=0 must be at least 1"),
        ("train digits --workers 0", "workers=0 must be at least 1"),
        ("train digits --mix-prob 1.5", "mix_prob=1.5 must be in [0, 1)"),
        ("train digits --stepz 3", "there is no option --stepz; did you mean --steps?"),
        ("data check --dota x", "there is no option --dota; did you mean --data?"),
        ("--verzion", "there is no option --verzion; did you mean --version?"),
        ("data fetsh", "there is no command 'fetsh'; did you mean 'fetch'? There are list"),
        ("train digits lr", "'lr' is not of the form field=value"),
        ("train", "recipe"),
        ("trian digits", "there is no command 'trian'; did you mean 'train'? There are demo"),
        ("train digits --device gpu", "device='gpu' is unknown; use one of 'auto', 'cpu'"),
        ("train cifar10-cnn --simulate", "no CIFAR-10 in data/cifar10: looked for"),
        ("train cifar10-cnn --simulate --data nowhere", "nowhere"),
        ("report nowhere", "there is no folder nowhere"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = palsgd(*words.split(), *(["--quiet"] if words.startswith("sweep") else []))
    assert answer.code == 2
    assert answer.line.startswith("palsgd: ")
    assert said in answer.line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_replaced_in_silence(tmp_path):
    answer = palsgd("train", "digits", "--device", "cuda", "--out", tmp_path / "x")
    assert answer.code == 2
    assert "use --device cpu" in answer.line


def test_a_folder_in_use_is_not_written_over(run):
    before = (run / "palsgd" / "metrics.jsonl").read_bytes()
    answer = palsgd("train", "digits", *SMALL, "--out", run)
    assert answer.code == 2
    assert "--resume" in answer.line
    assert "--force" in answer.line
    assert (run / "palsgd" / "metrics.jsonl").read_bytes() == before


def test_going_on_with_other_settings_names_the_one_that_differs(run):
    answer = palsgd("train", "digits", *SMALL, "lr=0.005", "--out", run, "--resume")
    assert answer.code == 2
    assert "was run with lr=0.002, now it is 0.005" in answer.line


def test_a_finished_run_is_not_done_again_but_with_force(tmp_path):
    words = ("train", "digits", *SMALL, "--no-report", "--quiet", "--out", tmp_path / "x")
    assert palsgd(*words).code == 0
    path = tmp_path / "x" / "palsgd" / "metrics.jsonl"
    first = path.stat().st_mtime_ns
    assert palsgd(*words, "--resume").code == 0
    assert path.stat().st_mtime_ns == first
    assert palsgd(*words, "--force").code == 0
    assert path.stat().st_mtime_ns > first
    assert len([line for line in lines(path.parent) if line["step"] == 0]) == 1


@pytest.mark.parametrize("how", [(), ("--simulate",)])
@pytest.mark.parametrize("out", [(), ("--out", "here/there")])
def test_data_that_are_missing_leave_no_folder_behind(tmp_path, monkeypatch, how, out):
    monkeypatch.chdir(tmp_path)
    answer = palsgd("train", "cifar10-cnn", "--data", "NONE", *how, *out)
    assert answer.code == 2
    assert answer.line.startswith("palsgd: no CIFAR-10 in NONE: looked for data_batch_1")
    assert list(tmp_path.iterdir()) == []


def test_data_that_are_missing_leave_earlier_results_alone(run):
    before = sorted(path.name for path in (run / "palsgd").iterdir())
    answer = palsgd("train", "cifar10-cnn", "--simulate", "--data", "NONE", "--force", "--out", run)
    assert answer.code == 2
    assert sorted(path.name for path in (run / "palsgd").iterdir()) == before


@pytest.mark.slow
def test_a_worker_that_refuses_its_input_speaks_as_if_there_were_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(
        "from palsgd.lab.workloads.digits import Digits\n"
        "class Broken(Digits):\n"
        "    def load(self):\n"
        "        raise ValueError('no digits here; look elsewhere')\n"
    )
    answer = apart("train", "broken.py", "--workers", 2, "--out", "x")
    assert answer.code == 2
    assert answer.line == "palsgd: no digits here; look elsewhere"
    assert not (tmp_path / "x").exists()


# -- what breaks ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for extra in ((), ("--simulate",)):
        answer = palsgd("train", "digits", "--out", tmp_path / "file" / "runs", *extra)
        assert answer.code == 1
        assert str(tmp_path / "file") in answer.line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no ulimit")
def test_a_full_disk_is_one_line(tmp_path):
    """Files of more than a block cannot be written: the model's 38 kB."""
    limited = ("bash", "-c", 'ulimit -f 8; exec "$@"', "-")
    answer = apart("train", "digits", *SMALL, "--quiet", "--out", tmp_path / "x", before=limited)
    assert answer.code == 1
    assert answer.line.startswith("palsgd: ")
    assert not (tmp_path / "x" / "palsgd" / "summary.json").exists()  # not taken for finished


def test_a_training_that_diverges_is_one_line(tmp_path):
    answer = palsgd("train", "digits", *SMALL, "inner=sgd", "lr=1e30", "--method", "diloco",
                    "--out", tmp_path / "x")  # fmt: skip
    assert answer.code == 1
    assert "lower the learning rate" in answer.line


# -- output for people ---------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch):
    """Progress is shown from the first step on."""
    seconds = count(1000, 20)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys, eager):
    with progress.ProgressBar("digits palsgd", 10) as bar:
        for step in range(1, 4):
            bar.at(step)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert re.fullmatch(r"digits palsgd: 1/10 steps, [\d.e-]+/s, \d+ (s|min) left", said[0])


def test_progress_is_a_bar_on_a_terminal_that_is_gone_afterwards(capsys, eager, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with progress.ProgressBar("digits palsgd", 10) as bar:
        bar.at(5, "a long note")
        bar.at(6)
        first, second = capsys.readouterr().err.split("\r")[1:]
    assert re.match(
        r"digits palsgd \[#{15}\.{15}\] 5/10 steps, \S+/s, \d+ s left a long note", first
    )
    assert re.match(r"digits palsgd \[#{18}\.{12}\] 6/10 steps, .* left +$", second)
    assert len(second) == len(first)
    assert re.fullmatch(r"\r +\r", capsys.readouterr().err)


def test_a_bar_is_no_wider_than_its_terminal(capsys, eager, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    with progress.ProgressBar("digits palsgd", 10) as bar:
        bar.at(5)
        assert len(capsys.readouterr().err.removeprefix("\r")) == 29


def test_the_time_left_is_that_of_all_runs(capsys, monkeypatch):
    """Two runs of 10 and 30 units of work. The clock: 4 s for the first run, 6 s between the two,
    10 s for the first third of the second one. So 20 units took 20 s, and 20 are left."""
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    whole = progress.Whole(runs=2, work=40.0)
    with progress.ProgressBar("first", 100, whole=whole, work=10.0) as bar:
        now[0] = 4.0
        bar.at(100)
    now[0] = 10.0
    with progress.ProgressBar("second", 300, whole=whole, work=30.0) as bar:
        now[0] = 20.0
        bar.at(100)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "first, run 1 of 2: 100/100 steps, 25/s, 12 s left for all"
    assert second == "second, run 2 of 2: 100/300 steps, 10/s, 20 s left for all"


def test_a_process_that_takes_over_measures_anew(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    whole = progress.Whole(runs=3, work=40.0).after(1, 10.0)
    with progress.ProgressBar("both", 10, whole=whole, runs=2, work=30.0) as bar:
        now[0] = 105.0
        bar.at(5)  # half of 30 units took 5 s
    assert capsys.readouterr().err == "both, runs 2 to 3 of 3: 5/10 steps, 1/s, 5 s left for all\n"


def test_a_simulated_comparison_counts_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_AFTER", -1.0)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    said = palsgd("compare", "digits", *SMALL, "--methods", "ddp,localsgd,diloco", "--no-report",
                  "--out", tmp_path / "out")  # fmt: skip
    assert said.code == 0, said.err
    assert re.search(r"^digits ddp, run 1 of 3: 1/12 steps, ", said.err, re.MULTILINE)
    assert re.search(r"runs? .*3 of 3: \d+/12 steps, .* left for all$", said.err, re.MULTILINE)


def test_a_simulated_run_tells_how_far_it_is_and_quiet_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_AFTER", -1.0)
    words = ("train", "digits", *SMALL, "--no-report")
    said = palsgd(*words, "--out", tmp_path / "loud")
    assert re.search(r"^digits palsgd: \d+/12 steps, ", said.err)
    assert "\r" not in said.err
    said = palsgd(*words, "--out", tmp_path / "quiet", "--quiet")
    assert said.err == ""
    assert "results: " in said.out


def test_a_quiet_sweep_says_nothing_but_results(tmp_path):
    words = ("sweep", "digits", "seed=1,2", "steps=4", "workers=2", "--simulate", "--no-report")
    assert palsgd(*words, "--out", tmp_path / "a").err == "2 points\n"
    assert palsgd(*words, "--out", tmp_path / "b", "--quiet").err == ""


def test_results_go_to_a_new_folder_under_runs_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert palsgd("train", "digits", *SMALL, "--no-report").code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-")
    assert summary(folder)["palsgd"]["steps"] == 12


def test_the_target_and_equal_figures_of_a_lone_run_are_null(run):
    record = summary(run)["palsgd"]
    assert record["target"] is None
    assert record["metric_at_equal_gradients"] is None
    assert record["metric_at_equal_time"] is None


def test_report_makes_a_page_a_table_and_tensorboard_files(run, tmp_path):
    said = palsgd("report", run, "--out", tmp_path / "page.html", "--tensorboard", tmp_path / "tb")
    assert said.code == 0, said.err
    assert "palsgd" in said.out
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert list((tmp_path / "tb").rglob("events.*"))


def test_a_setting_given_twice_takes_the_flag(tmp_path):
    said = palsgd("train", "digits", *SMALL, "lr=0.005", "seed=3", "--seed", 4, "--no-report",
                  "--out", tmp_path / "x")  # fmt: skip
    assert said.code == 0
    config = yaml.safe_load((tmp_path / "x" / "palsgd" / "config.yaml").read_text())
    assert (config["seed"], config["lr"]) == (4, 0.005)


def test_compare_runs_the_methods_it_is_told_in_that_order(tmp_path):
    said = palsgd("compare", "digits", *SMALL, "--methods", "palsgd, ddp", "--no-report",
                  "--out", tmp_path / "x")  # fmt: skip
    assert said.code == 0
    assert list(records(tmp_path / "x")) == ["palsgd", "ddp"]
