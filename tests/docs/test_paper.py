"""docs/paper.md: its column "ours" is what the recipes have, and no setting is left out."""

import re
from fnmatch import fnmatch

import pytest

from palsgd.lab import workloads
from palsgd.lab.settings import FIELDS, assignments, parsed
from support.pages import page

OURS = ("digits", "stories", "stories-1m", "stories-gptneo-8m", "stories-gptneo-125m")
PAPERS = {name: each for name, each in workloads.recipes().items() if each.workload not in OURS}
every_recipe = pytest.mark.parametrize("name", PAPERS)


def rows():
    """The rows of the first table: recipe, setting, paper, released code, ours, reason."""
    table = page("docs/paper.md").split("|---|---|---|---|---|---|\n")[1].split("\n\n")[0]
    for line in table.splitlines():
        yield [cell.strip() for cell in line.strip("|").split("|")]


def code(cell):
    """What a cell has in backticks, if that is all it has."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    return found and found[1]


def told(name):
    """The settings that the table gives to a recipe; a later row overrides an earlier one."""
    found = {}
    for recipe, setting, _, _, ours, _ in rows():
        if code(setting) and fnmatch(name, code(recipe)):
            found[code(setting)] = code(ours)
    return found


@every_recipe
def test_the_table_has_the_settings_of_every_recipe(name):
    settings, found = PAPERS[name], told(name)
    values = settings.as_dict()
    values["context"] = settings.context or workloads.kind(settings.workload).context
    for field, text in found.items():
        assert values[field] == parsed(field, text), field


@every_recipe
def test_every_setting_in_which_a_recipe_differs_from_the_defaults_is_in_the_table(name):
    values = PAPERS[name].as_dict()
    differ = {field for field, value in values.items() if value != FIELDS[field].default}
    assert differ - {"workload"} <= set(told(name))


def test_the_grids_of_the_table_are_those_of_the_workloads():
    found = {}
    for _, setting, _, _, ours, _ in rows():
        if grid := re.fullmatch(r"grid `([^`]+)`", setting):
            texts = assignments(code(ours).split())
            found[grid[1]] = {
                field: [parsed(field, each) for each in text.split(",")]
                for field, text in texts.items()
            }
    assert set(found) == {
        "cifar10-cnn/lr", "cifar10-vgg16/search", "tinystories-gptneo-8m/optimizers"
    }  # fmt: skip
    for name, fields in found.items():
        assert workloads.grid(name) == fields


def test_every_pattern_of_the_table_has_a_recipe():
    for recipe, *_ in rows():
        assert any(fnmatch(name, code(recipe)) for name in PAPERS), recipe
