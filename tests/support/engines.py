"""Methods to simulate, and what must be equal in the simulator's two engines."""

from functools import partial

import numpy as np

import palsgd
from support.problems import vector

RULES = dict(sync_every=5, warmup_steps=4)
MIXING = dict(mix_prob=0.3, mix_rate=2.0, seed=11)
METHODS = {
    "ddp": palsgd.DDP,
    "localsgd": partial(palsgd.LocalSGD, **RULES),
    "diloco": partial(palsgd.DiLoCo, outer=palsgd.nesterov(lr=0.5), **RULES),
    "balanced": partial(palsgd.PALSGD, draws="balanced", **MIXING, **RULES),
    "independent": partial(palsgd.PALSGD, draws="independent", **MIXING, **RULES),
    "shared": partial(palsgd.PALSGD, draws="shared", **MIXING, **RULES),
}


def check(fast, exact, rtol=1e-9, atol=1e-11):
    assert (fast.engine, exact.engine) == ("vectorized", "exact")
    np.testing.assert_allclose(vector(fast.model), vector(exact.model), rtol=rtol, atol=atol)
    for a, b in zip(fast.model.buffers(), exact.model.buffers(), strict=True):
        np.testing.assert_allclose(a.double(), b.double(), rtol=rtol, atol=atol)
    counts = ("gradient_steps", "warmup_steps", "mixing_steps", "syncs", "messages", "bytes_sent")
    for mine, theirs in zip(fast.ledgers, exact.ledgers, strict=True):
        for name in counts:
            assert getattr(mine, name) == getattr(theirs, name), name
        assert (mine.beta_min, mine.beta_max) == (theirs.beta_min, theirs.beta_max)
    for mine, theirs in zip(fast.history, exact.history, strict=True):
        assert mine["clock"] == theirs["clock"]
        assert mine["bytes_sent"] == theirs["bytes_sent"]
        for key in ("losses", "distance"):
            np.testing.assert_allclose(mine[key], theirs[key], rtol=rtol * 100, atol=atol * 100)
