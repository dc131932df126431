"""Methods of a user's own on the command line: named by a file, a module or an entry point."""

import pytest
import yaml

from palsgd import registry
from palsgd.lab import workloads
from palsgd.lab.factory import build_optimizer
from palsgd.lab.groups import Group, label
from palsgd.lab.methods import method_of, own_settings, without_effect
from palsgd.lab.report.styles import line_styles
from palsgd.lab.settings import Settings
from palsgd.transports import Alone, ambient
from support.commands import lines, palsgd, summary

SHORT = (
    "--workers",
    2,
    "--steps",
    16,
    "--sync-every",
    4,
    "warmup_steps=0",
    "--no-report",
    "--quiet",
)
# Local SGD whose gradients are scaled: with scale=1 it is Local SGD, with 0 it does not learn.
SCALED = '''
from dataclasses import dataclass
import torch
import palsgd

@dataclass(frozen=True, kw_only=True)
class Scaled(palsgd.Method):
    """Gradients times a number."""
    scale: float = 1.0
    lr: float = 0.5  # a name that settings have too
    refuses = {"outer": "it has a step of its own"}

    def before_gradient(self, w):
        torch._foreach_mul_(w.grad, self.scale)

    def apply(self, w, reduced, outer):
        torch._foreach_sub_(w.anchor, reduced["model"])

frozen = Scaled(scale=0.0)
'''


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """`scaled.py` in the present folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(SCALED)
    return tmp_path / "scaled.py"


def test_a_class_or_an_instance_is_compared_with_the_others(scaled):
    said = palsgd("compare", "digits", "--methods", "localsgd,scaled.py:Scaled,scaled.py:frozen",
                  *SHORT, "--simulate", "--out", "out")  # fmt: skip
    assert said.code == 0, said.err
    found = summary(scaled.parent / "out")
    assert {"localsgd", "Scaled", "frozen"} <= set(found)
    assert found["Scaled"]["final_loss"] == pytest.approx(found["localsgd"]["final_loss"], rel=1e-5)
    assert found["Scaled"]["final_loss"] < found["frozen"]["final_loss"]
    curve = [line["loss"] for line in lines(scaled.parent / "out" / "frozen") if "loss" in line]
    assert max(curve) == pytest.approx(min(curve), rel=0.01)  # but for weight decay
    config = yaml.safe_load((scaled.parent / "out" / "frozen" / "config.yaml").read_text())
    assert config["method"] == f"{scaled}:frozen"
    assert len(config["method_sha256"]) == 64
    assert "Scaled" in said.out
    assert str(scaled) not in said.out


def test_its_settings_are_given_as_those_of_the_library(scaled):
    said = palsgd("train", "digits", "--method", "scaled.py:Scaled", "scale=0.25", "method.lr=2",
                  *SHORT, "--simulate", "--out", "one")  # fmt: skip
    assert said.code == 0, said.err
    config = yaml.safe_load((scaled.parent / "one" / "Scaled" / "config.yaml").read_text())
    assert (config["scale"], config["method.lr"]) == (0.25, 2.0)
    said = palsgd("sweep", "digits", "scale=0.5,1", "method=scaled.py:Scaled", "steps=8",
                  "workers=2", "warmup_steps=0", "--simulate", "--quiet", "--no-report",
                  "--out", "two")  # fmt: skip
    assert said.code == 0, said.err
    assert {path.parent.name for path in (scaled.parent / "two").glob("*/config.yaml")} == {
        "scale=0.5",
        "scale=1",
    }
    said = palsgd("train", "digits", "--method", "scaled.py:Scaled", "scael=1")
    assert "did you mean 'scale'?" in said.line


def test_the_lab_knows_what_has_an_effect_on_it(scaled):
    settings = Settings(workload="digits", steps=8, method="scaled.py:Scaled")
    assert settings.method == f"{scaled}:Scaled"
    nothing = without_effect(settings.method)
    assert {"mix_prob", "pull", "mu", "draws", "outer_lr"} <= nothing
    assert not nothing & {"scale", "method.lr", "sync_every", "compress", "lr"}
    assert {"scale", "method.lr"} <= without_effect("diloco")
    assert label(settings.method, {"scale": 0.5}) == "Scaled scale=0.5"


def test_given_settings_replace_those_of_an_instance(scaled):
    settings = Settings(workload="digits", steps=8, method="scaled.py:frozen")
    assert own_settings(settings) == {"scale": 0.0, "lr": 0.5}
    settings = settings.changed({"scale": "0.5"})
    assert method_of(settings).settings() == {"scale": 0.5, "lr": 0.5}
    with ambient(Alone()):
        opt = build_optimizer(settings, 8, workloads.load("digits").model())
    assert opt.method.scale == 0.5


def test_a_method_that_is_called_as_one_of_the_library_is_not_taken_for_it(scaled):
    scaled.write_text(SCALED.replace("Scaled", "PALSGD"))
    settings = Settings(workload="digits", steps=8, method="scaled.py:PALSGD", sync_every=4)
    with ambient(Alone()):
        opt = build_optimizer(settings, 8, workloads.load("digits").model())
    assert opt.method.settings() == {"scale": 1.0, "lr": 0.5}


def test_own_methods_get_colours_that_differ(scaled):
    groups = [Group(name, {}, []) for name in ("ddp", f"{scaled}:Scaled", f"{scaled}:frozen")]
    assert len({style.light for style in line_styles(groups)}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scaled.py:Scald", "{0} has no 'Scald'; it has Scaled, frozen"),
        ("scaled.py:dataclass", "{0}:dataclass is no method; write a class that inherits from"),
        ("nowhere.py:Scaled", "there is no file"),
        ("scald", "method='scald' is unknown; use one of 'anchordecay'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare", "explain"])
def test_what_is_no_method_gets_one_line_with_what_there_is(scaled, command, text, said):
    flag = "--methods" if command == "compare" else "--method"
    answer = palsgd(command, "digits", flag, text)
    assert answer.code == 2
    assert said.format(scaled) in answer.line


def test_two_methods_of_one_name_are_refused(scaled):
    (scaled.parent / "other.py").write_text(SCALED)
    answer = palsgd("compare", "digits", "--methods", "scaled.py:Scaled,other.py:Scaled",
                    "--simulate")  # fmt: skip
    assert answer.code == 2
    assert "would both be called 'Scaled'" in answer.line


def test_a_file_that_only_reports_are_told_of_is_not_imported(scaled):
    assert registry.known(f"{scaled}:Scaled") is None
    assert without_effect(f"{scaled}:Scaled") == set()
    assert registry.row(f"{scaled}:Scaled") is registry.known(f"{scaled}:Scaled")


def test_an_installed_package_offers_methods_by_entry_points(tmp_path, monkeypatch):
    (tmp_path / "their_methods.py").write_text(SCALED)
    info = tmp_path / "their_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[palsgd.methods]\nscaled = their_methods:Scaled\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert palsgd("explain", "digits", "--method", "scaled", "scale=2").code == 0
    assert Settings(workload="digits", method="scaled").method == "scaled"
    assert "'scaled'" in palsgd("explain", "digits", "--method", "scald").line
