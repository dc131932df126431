"""Workers whose models are not finite, in both engines."""

import pytest
import torch

import palsgd
from support.problems import batches, linear, mse


@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_no_finite_worker_is_the_same_error_with_and_without_codes(vectorize, compress):
    def shard(worker):
        inputs, targets = batches(worker)[0]
        return [(inputs, targets), (inputs, targets * torch.nan)]

    with pytest.raises(palsgd.NonFiniteError, match="workers 0, 1 of 2 has inf or nan"):
        palsgd.simulate(
            workers=2, steps=8, model=linear, loss=mse, data=shard, vectorize=vectorize,
            method=lambda model: palsgd.LocalSGD(
                model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4,
                on_nonfinite="skip", compress=compress,
            ),
        )  # fmt: skip
