"""The names of the states of a method."""

import pytest
import torch

import palsgd
from support.problems import linear


@pytest.mark.parametrize("name", ["norm", "mix_group", "local", "rates"])
def test_a_state_may_not_have_the_name_of_something_else_in_w(name):
    class Named(palsgd.Method):
        local_state = (name,)

    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"has a state '{name}'.*another name"):
        palsgd.LocalOptimizer(model, inner, Named(), sync_every=4, transport=palsgd.Alone())


def test_a_file_of_the_folder_is_found_by_its_name_as_well():
    assert palsgd.methods.scaffold.ROW.title == "SCAFFOLD"
    with pytest.raises(AttributeError, match="has no 'Scafold'"):
        _ = palsgd.methods.Scafold
