"""Workloads of a user's own: named by a file, a module or an entry point, wherever a name goes."""

import re

import numpy as np
import pytest
import torch
import yaml

from palsgd import progress, references
from palsgd.lab import workloads
from palsgd.lab.settings import Settings
from palsgd.lab.workload import Workload
from support.commands import apart, palsgd, summary
from support.pages import code_blocks, section

SHORT = ("--workers", 2, "--steps", 12, "--sync-every", 4, "--no-report", "--quiet")
LINE = """
import torch
from palsgd.lab.workload import Workload

class Line(Workload):
    def load(self):
        x = torch.linspace(-1, 1, 96)[:, None]
        self.train, self.valid = (x, 2 * x), (x[1::3], 2 * x[1::3])

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
OTHER = LINE.replace("class Line", "class Other")


@pytest.fixture
def line(tmp_path, monkeypatch):
    """`line.py` in the present folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(LINE)
    return tmp_path / "line.py"


def config(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


# -- the page ------------------------------------------------------------------------------------


def test_the_workload_of_the_page_is_whole_short_and_reaches_its_floor(tmp_path, monkeypatch):
    (code,) = code_blocks(section("docs/extending.md", "Workload"))
    assert len(code.splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise.py").write_text(code)
    said = palsgd("compare", "noise.py", "--methods", "ddp,palsgd", "--simulate",
                  "--no-report", "--out", "out")  # fmt: skip
    assert said.code == 0, said.err
    found = summary(tmp_path / "out")
    for record in (found["ddp"], found["palsgd"]):
        assert record["final_loss"] == record["final_metric"] == pytest.approx(0.01, rel=0.5)


def test_the_page_lists_every_member_of_a_workload():
    table = section("docs/extending.md", "Workload").split("\n| member")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    own = set(vars(Workload)) | set(Workload.__annotations__)
    assert listed == {name for name in own if not name.startswith("_")} | {"recipe"}


# -- where it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["line.py", "line.py:Line", "./line.py:Line", "line:Line"])
def test_a_file_or_module_is_a_workload_for_every_command(line, monkeypatch, text):
    monkeypatch.syspath_prepend(str(line.parent))
    assert palsgd("explain", text, *SHORT[:6]).code == 0
    said = palsgd("train", text, *SHORT, "--simulate", "--out", "one")
    assert said.code == 0, said.err
    assert "Line" in said.out
    whole = "line:Line" if text == "line:Line" else f"{line}:Line"
    assert config(line.parent / "one" / "palsgd")["workload"] == whole
    assert palsgd("sweep", text, "seed=1,2", "steps=4", "workers=2", "--simulate", "--quiet",
                  "--no-report", "--out", "swept").code == 0  # fmt: skip
    assert {path.parent.name for path in (line.parent / "swept").glob("*/config.yaml")} == {
        "seed=1",
        "seed=2",
    }
    assert palsgd("plan", text, "--step-ms", 5, "--out", "plan").code == 0


@pytest.mark.slow
def test_real_processes_find_a_workload_and_a_method_by_the_settings_alone(line, monkeypatch):
    for name in ("FIRST_AFTER", "LINE_EVERY"):  # the file changes them in this process too
        monkeypatch.setattr(progress, name, getattr(progress, name))
    eager = (
        "import palsgd.progress\npalsgd.progress.FIRST_AFTER = palsgd.progress.LINE_EVERY = -1\n"
    )
    line.write_text(f"{LINE}\n{eager}\nclass Mine(palsgd.Method):\n    'Local SGD.'\n")
    words = ("compare", "line.py:Line", "--methods", "ddp,line.py:Mine", *SHORT[:-1])
    said = apart(*words, "--out", "real")
    assert said.code == 0, said.err
    for number, method in enumerate(("ddp", "Mine"), start=1):
        assert f"Line {method}, run {number} of 2: 12/12 steps" in said.err
    assert palsgd(*words, "--quiet", "--simulate", "--out", "simulated").code == 0
    real, simulated = (summary(line.parent / name) for name in ("real", "simulated"))
    for method in ("ddp", "Mine"):
        final = simulated[method]["final_loss"]
        assert real[method]["final_loss"] == pytest.approx(final, rel=1e-4)


def test_an_installed_package_offers_workloads_by_entry_points(tmp_path, monkeypatch):
    (tmp_path / "their_lab.py").write_text(LINE + "\nRECIPES = {'Line': dict(lr=0.5)}\n")
    info = tmp_path / "their_lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[palsgd.workloads]\nstraight = their_lab:Line\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = palsgd("train", "straight", *SHORT, "--simulate", "--out", "out")
    assert said.code == 0, said.err
    found = config(tmp_path / "out" / "palsgd")
    assert (found["workload"], found["lr"]) == ("straight", 0.5)
    assert len(found["workload_sha256"]) == 64
    assert "straight" in palsgd("train", "strait").line


def test_a_path_means_the_same_in_another_folder(line, tmp_path_factory, monkeypatch):
    settings = workloads.recipe("line.py")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert settings.workload == f"{line}:Line"
    assert workloads.load(settings.workload).examples == 96


def test_files_may_import_what_lies_beside_them(line):
    (line.parent / "beside_line.py").write_text("LENGTH = 3")
    (line.parent / "user.py").write_text(
        f"from beside_line import LENGTH\n{LINE}    length = LENGTH"
    )
    assert workloads.kind("user.py").length == 3


# -- its recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "lr"),
    [
        ("", Settings(workload="digits").lr),
        ("    recipe = dict(lr=0.25)", 0.25),
        ("from palsgd.lab.settings import Settings\n"
         "RECIPES = {'Line': Settings(workload='any', steps=3, lr=0.75)}", 0.75),
        ("RECIPES = {'whatever': dict(lr=0.125)}", 0.125),
        ("RECIPES = {'other': dict(lr=0.5), 'Line': dict(lr=0.0625)}", 0.0625),
    ],
)  # fmt: skip
def test_a_recipe_is_beside_the_class_in_it_or_the_default(line, more, lr):
    line.write_text(f"{LINE}\n{more}\n")
    found = workloads.recipe("line.py")
    assert (found.workload, found.lr) == (f"{line}:Line", lr)


# -- what a minimal one gets ---------------------------------------------------------------------


def test_default_batches_deal_every_row_once_in_an_epoch_and_parts_add_up(line):
    workload = workloads.load("line.py")
    rows = [
        workload.batch(worker=worker, workers=3, size=8, index=index)[0]
        for index in range(4)
        for worker in range(3)
    ]
    dealt = torch.cat(rows).flatten().sort().values
    torch.testing.assert_close(dealt, torch.linspace(-1, 1, 96))
    model = workload.model()
    weight, bias = (p.item() for p in model.parameters())
    x = np.linspace(-1, 1, 96)[1::3]
    loss = np.mean((weight * x + bias - 2 * x) ** 2)
    for parts in (1, 3, 5):
        totals = sum(workload.totals(model, part=part, parts=parts) for part in range(parts))
        assert workload.score(totals) == pytest.approx((loss, loss), rel=1e-5)


def test_a_metric_of_its_own_is_averaged_over_rows(line):
    line.write_text(
        LINE.replace("def load", "metric = 'share'\n    def measure(self, model, batch):\n"
                     "        return (batch[0] > 0).float().mean()\n\n    def load")
    )  # fmt: skip
    workload = workloads.load("line.py")
    found = workload.score(workload.totals(workload.model()))
    assert found[1] == pytest.approx(np.mean(np.linspace(-1, 1, 96)[1::3] > 0))


# -- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing.py:Line", "there is no file {0}/nothing.py; that folder has bare.py, both.py"),
        ("away/line.py", "there is no folder {0}/away either"),
        ("line.py:Lime", "{0}/line.py has no 'Lime'; it has Line"),
        ("line.py:torch", "{0}/line.py:torch is no workload; write a class that inherits"),
        ("both.py", "{0}/both.py has several workloads, Line, Other; write {0}/both.py:Line"),
        ("none.py", "{0}/none.py has no workload; write a class that inherits from"),
        ("half.py:Half", "{0}/half.py:Half lacks loss, model; write what is missing"),
        ("wrong.py", "{0}/wrong.py cannot be imported: line 2: ZeroDivisionError: "),
        ("syntax.py", "{0}/syntax.py cannot be imported: SyntaxError: "),
        ("no.such:Line", "there is no module 'no.such'; give one that Python finds"),
        ("recipes.py", "has a, b, none for Line; name one after the class"),
        ("bare.py", "Bare.load has set no self.train; set a tuple of tensors"),
    ],
)
def test_a_reference_that_leads_nowhere_gets_one_line_with_what_there_is(line, text, said):
    folder = line.parent
    (folder / "both.py").write_text(LINE + OTHER)
    (folder / "none.py").write_text("import torch\n")
    half = LINE.partition("    def model")[0].replace("class Line", "class Half")
    (folder / "half.py").write_text(half)
    (folder / "wrong.py").write_text("x = 1\nx / 0\n")
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "recipes.py").write_text(LINE + "\nRECIPES = {'a': {}, 'b': {}}\n")
    (folder / "bare.py").write_text(re.sub(r"        (x =|self\.).*", "        pass", LINE).replace(
        "class Line", "class Bare"))  # fmt: skip
    answer = palsgd("train", text, "--simulate", "--quiet", "--out", "out")
    assert answer.code == 2
    assert said.format(folder) in answer.line


def test_a_changed_file_is_not_gone_on_with(line):
    words = ("train", "line.py", *SHORT, "--simulate", "--out", "out")
    assert palsgd(*words).code == 0
    assert palsgd(*words, "--resume").code == 0
    line.write_text(f"{LINE}\n# another line\n")
    again = apart(*words, "--resume")
    assert again.code == 2
    assert f"the file of {line}:Line has changed since" in again.line
    assert "--force" in again.line


def test_names_for_people_leave_out_where_a_file_is():
    assert references.short("/a/b/mine.py:Name") == "Name"
    assert references.short("/a/b/mine.py") == "mine"
    assert references.short("package.module:Name") == "Name"
    assert references.short("digits") == "digits"
    assert references.absolute("C:\\mine.py").endswith("C:\\mine.py")


BAD = """\
import torch
from torch import nn
from palsgd.lab.workload import Workload


class Bad(Workload):
    recipe = dict(workers=2, steps=8, batch_size=16, sync_every=4, lr=0.05)

    def load(self):
        x = torch.rand(64, 3)
        self.train, self.valid = (x[:32], x[:32]), (x[32:], x[32:])
        LOAD

    def model(self):
        return MODEL

    def loss(self, model, batch):
        LOSS
"""


@pytest.mark.parametrize(
    ("part", "text", "said"),
    [
        ("LOAD", "open('gone.pt')", "bad.py, line 12: FileNotFoundError: "),
        ("LOAD", "raise RuntimeError('boom')", "bad.py, line 12: RuntimeError: boom"),
        ("LOAD", "self.valid = (x[:0], x[:0])", "Bad.load has set self.valid with 0 rows; "),
        ("MODEL", "None", "Bad.model returned None; return a torch.nn.Module"),
        ("MODEL", "[].lost", "bad.py, line 15: AttributeError: "),
        ("LOSS", "return {}['key']", "bad.py, line 18: KeyError: 'key'"),
        ("LOSS", "return None", "Bad.loss returned None; return the mean over the batch"),
        ("LOSS", "return batch[0]", "Bad.loss returned shape [32, 3]; return the mean"),
        ("LOSS", "return model(batch[0][:, :2]).mean()", "bad.py, line 18: RuntimeError: "),
    ],
)
def test_an_error_of_a_users_workload_is_one_line_with_its_place(tmp_path, part, text, said):
    parts = {"LOAD": "pass", "MODEL": "nn.Linear(3, 1)", "LOSS": "return model(batch[0]).mean()"}
    source = BAD
    for name, code in (parts | {part: text}).items():
        source = source.replace(name, code)
    (tmp_path / "bad.py").write_text(source)
    found = palsgd("train", tmp_path / "bad.py", "--simulate", "--quiet", "--no-report",
                   "--out", tmp_path / "out")  # fmt: skip
    assert found.code in (1, 2)
    assert found.err.splitlines()[-1].startswith(f"palsgd: {said}")
    assert "Traceback" not in found.err


def test_a_worker_process_says_the_place_too(tmp_path):
    source = BAD.replace("LOAD", "pass").replace("MODEL", "nn.Linear(3, 1)")
    (tmp_path / "bad.py").write_text(source.replace("LOSS", "return {}['key']"))
    found = palsgd("train", tmp_path / "bad.py", "--quiet", "--no-report", "--out", tmp_path / "o")
    assert "bad.py, line 18: KeyError: 'key'" in found.err
    assert "Traceback" not in found.err
