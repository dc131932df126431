"""What workers compare when they are built beside the options: inner settings, versions, the model
and its code."""

import functools
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import palsgd
from palsgd.agreement import described, inner_settings, program_settings


class Scaled(nn.Module):
    def __init__(self, activation=torch.relu, times=None):
        super().__init__()
        self.linear, self.activation, self.times = nn.Linear(4, 3), activation, times

    def forward(self, x):
        return self.activation(self.linear(x))


class Halved(Scaled):
    def forward(self, x):
        return self.activation(self.linear(x)) / 2


Halved.__name__ = Halved.__qualname__ = "Scaled"  # another version of the file has the same name


class Calling(nn.Module):
    """Its forward leaves the work to a method, a function beside it and a default."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return helped(self.inside(x))

    def inside(self, x, times=1):
        return self.linear(x) * times


def helped(x):
    return x + 1


def helped_otherwise(x):
    return x + 2


def of_another_version(part):
    """The class as another version of this file has it."""
    beside = {**globals(), "helped": helped_otherwise}
    changed = {
        "method": {"inside": lambda self, x, times=1: self.linear(x) - times},
        "default": {"inside": lambda self, x, times=2: self.linear(x) * times},
        "helper": {"forward": FunctionType(Calling.forward.__code__, beside)},
    }[part]
    for name, function in changed.items():
        function.__qualname__, function.__module__ = f"Calling.{name}", __name__
    return type("Calling", (Calling,), changed | {"__qualname__": "Calling"})


MODELS = {
    "activation": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
                   lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh())),
    "function": (Scaled, lambda: Scaled(torch.tanh)),
    "lambda": (lambda: Scaled(lambda x: x * 2), lambda: Scaled(lambda x: x * 3)),
    "partial": (lambda: Scaled(functools.partial(torch.mul, other=2)),
                lambda: Scaled(functools.partial(torch.mul, other=3))),
    "forward": (Scaled, Halved),
    **{part: (Calling, of_another_version(part)) for part in ("method", "default", "helper")},
}  # fmt: skip
TOLD = {
    "activation": ("the model", "(1): ReLU()", "(1): Tanh()"),
    "function": ("the model's code", ".relu'", ".tanh'"),
    "lambda": ("the model's code", "activation: <lambda>.<locals>.<lambda>"),
    "partial": ("the model's code", "'other': 2", "'other': 3"),
    "forward": ("the model's code", "Scaled.forward: Scaled"),
    "method": ("the model's code", "Calling.inside: Calling.inside"),
    "default": ("the model's code", "Calling.inside: Calling.inside"),
    "helper": ("the model's code", "Calling.forward: Calling.forward"),
    "lr": ("lr of inner", "0.1", "0.01"),
    "betas": ("betas of inner", "[0.9, 0.999]", "[0.9, 0.95]"),
    "tensor lr": ("lr of inner", "0.125", "0.25"),
    "decay of a group": ("weight_decay of inner group 1", "0.0", "0.5"),
    "groups": ("number of inner parameter groups", "1", "2"),
    "schedule": ("scheduler", "CosineAnnealingLR(T_max=50", "CosineAnnealingLR(T_max=90"),
    "torch": ("versions", "torch 9.9"),
    "palsgd": ("versions", "palsgd 9.9"),
}


def inner_of(name, model, odd):
    first, second = [[p] for p in model.parameters()]
    if name == "betas":
        return torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95 if odd else 0.999))
    if name == "tensor lr":
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25 if odd else 0.125))
    if name == "decay of a group":
        groups = [{"params": first}, {"params": second, "weight_decay": 0.5 if odd else 0.0}]
        return torch.optim.SGD(groups, lr=0.1)
    if name == "groups":
        parts = [first, second] if odd else [first + second]
        return torch.optim.SGD([{"params": part} for part in parts], lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.01 if name == "lr" and odd else 0.1)


def schedule_of(name, odd):
    if name != "schedule":
        return {}
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    return {"scheduler": functools.partial(cosine, T_max=90 if odd else 50)}


def job(name):
    odd = dist.get_rank() == 1
    torch.manual_seed(0)
    model = MODELS.get(name, (Scaled, Scaled))[odd]()
    module = {"torch": torch, "palsgd": palsgd}.get(name)
    before = getattr(module, "__version__", None)
    if module is not None and odd:
        module.__version__ = "9.9"
    try:
        palsgd.DiLoCo(model, inner_of(name, model, odd), sync_every=4, **schedule_of(name, odd))
    finally:
        if module is not None:
            module.__version__ = before


@pytest.mark.parametrize("name", TOLD)
def test_what_differs_is_told_on_every_rank_with_both_values(world, name):
    for got in world.outcomes(job, workers=2, name=name):
        assert got.error == "ValueError", got.trace
        assert len(got.message) < 400
        assert "\n" not in got.message
        for text in ("rank 0", "rank 1", *TOLD[name]):
            assert text in got.message


def equal_job():
    rank = dist.get_rank()
    model = Scaled(lambda x: x * 2 if x.dim() in {1, 2, 3} or str(x) in {"a", "b", "c"} else x)
    model.rank = rank  # a value that a worker keeps for itself
    inner = torch.optim.SGD(model.parameters(), lr=0.1, foreach=rank == 0)
    palsgd.DiLoCo(model, inner, sync_every=4)
    return program_settings(model)


def test_equal_code_is_equal_in_other_processes_whatever_a_worker_keeps_for_itself(world):
    first, second = world.run(equal_job, workers=2)
    assert first == second


def test_a_name_without_its_address_and_a_device_without_its_number():
    model = nn.Linear(2, 1)
    model.extra_repr = lambda: f"{object()} cuda:3"
    text = program_settings(model)["the model"]
    assert "0x" not in text
    assert "cuda:" not in text
    assert "cuda" in text


def test_numpy_numbers_and_tensors_are_numbers():
    import numpy as np

    model = nn.Linear(2, 1)
    settings = [
        inner_settings(torch.optim.SGD(model.parameters(), lr=lr))
        for lr in (0.5, np.float64(0.5), torch.tensor(0.5))
    ]
    assert settings[0] == settings[1] == settings[2]
    assert repr(settings[0]) == repr(settings[1]) == repr(settings[2])


def test_a_wrapped_function_is_its_own_code():
    def decorator(function):
        return functools.wraps(function)(lambda *a: function(*a))

    assert described(decorator(Scaled.forward)) == described(Scaled.forward)
    assert described(decorator(Halved.forward)) != described(Scaled.forward)


def test_simulated_workers_share_code_and_compare_inner_settings():
    rates = iter([0.1, 0.2])
    with pytest.raises(ValueError, match=r"lr of inner differs between workers: worker 1 has 0\.2"):
        palsgd.simulate(
            workers=2, steps=2, model=lambda: nn.Linear(4, 3), vectorize=False,
            loss=lambda model, x: model(x).sum(), data=lambda k: [torch.ones(1, 4)],
            method=lambda model: palsgd.DiLoCo(
                model, torch.optim.SGD(model.parameters(), lr=next(rates)), sync_every=2
            ),
        )  # fmt: skip
