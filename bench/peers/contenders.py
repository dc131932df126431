"""Who takes part: what is trained, with which grid of settings, and who runs it over the links.

Steps to a loss depend on the algorithm, seconds per step on who runs it. So an algorithm is trained
once (TRAININGS), and every contender (CONTENDERS) says which of them it runs. All trainings have
equally many trials to be tuned by (TRIALS).
"""

from dataclasses import dataclass, field
from typing import Any

TRIALS = 4
_LR = (2e-3, 3e-3, 4.5e-3, 6e-3)
_RATES = [{"lr": lr} for lr in _LR]
# DiLoCo and PALSGD share their trials between the inner and the outer learning rate.
_OUTER = [
    {"lr": 2e-3, "outer": [1.0, 0.5]},
    {"lr": 3e-3, "outer": [0.7, 0.5]},
    {"lr": 3e-3, "outer": [1.0, 0.5]},
    {"lr": 4.5e-3, "outer": [0.7, 0.5]},
]
# And PALSGD its own between those and the pull.
_PULLED = [
    {"lr": 2e-3, "outer": [1.0, 0.5], "pull": 0.5},
    {"lr": 3e-3, "outer": [0.7, 0.5], "pull": 0.2},
    {"lr": 3e-3, "outer": [1.0, 0.5], "pull": 0.5},
    {"lr": 4.5e-3, "outer": [0.7, 0.5], "pull": 0.5},
]
_MIXING = {"mix_prob": 0.1}
_CODED = {"compress": "int4", "delay_share": 0.375}  # of a round: 24 steps of 64


@dataclass(frozen=True, kw_only=True)
class Training:
    """An algorithm, as palsgd's class for it with settings that are not tuned."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    grid: list[dict[str, Any]]

    @property
    def local(self) -> bool:
        """Has it rounds of H steps?"""
        return self.method != "DDP"


TRAININGS = {
    "ddp": Training(method="DDP", grid=_RATES),
    "localsgd": Training(method="LocalSGD", grid=_RATES),
    "diloco": Training(method="DiLoCo", grid=_OUTER),
    "palsgd": Training(method="PALSGD", settings=_MIXING, grid=_PULLED),
    "palsgd-no-pull": Training(method="PALSGD", settings=_MIXING | {"pull": 0.0}, grid=_OUTER),
    "diloco-int4": Training(method="DiLoCo", settings=_CODED, grid=_OUTER),
    "palsgd-int4": Training(method="PALSGD", settings=_MIXING | _CODED, grid=_PULLED),
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    label: str
    training: str  # of TRAININGS: whose steps to a loss it has
    adapter: str = "ours.Ours"  # module.Class in this folder
    settings: dict[str, Any] = field(default_factory=dict)  # of the adapter
    package: str | None = None  # to be installed for it, if it is asked for by name

    @property
    def local(self) -> bool:
        return TRAININGS[self.training].local


_DDP, _TORCHFT = "torch_own.TorchDDP", "torchft_diloco.TorchftDiLoCo"
CONTENDERS = {
    "ddp": Contender(label="torch DDP", training="ddp", adapter=_DDP),
    "ddp-buckets": Contender(
        label="torch DDP, one bucket", training="ddp", adapter=_DDP, settings={"bucket_mb": 1024}
    ),
    # The hook's rounding is not simulated: it is taken to cost no steps, which favours it.
    "ddp-bf16": Contender(
        label="torch DDP, bf16 hook", training="ddp", adapter=_DDP, settings={"hook": "bf16"}
    ),
    "ddp-bf16-buckets": Contender(
        label="torch DDP, bf16 hook, one bucket", training="ddp", adapter=_DDP,
        settings={"hook": "bf16", "bucket_mb": 1024},
    ),
    "post-local": Contender(
        label="torch PostLocalSGDOptimizer", training="localsgd", adapter="torch_own.PostLocalSGD"
    ),
    "accelerate": Contender(
        label="accelerate LocalSGD", training="localsgd", package="accelerate",
        adapter="accelerate_local_sgd.AccelerateLocalSGD",
    ),
    "torchft": Contender(
        label="torchft DiLoCo", training="diloco", adapter=_TORCHFT, package="torchft",
        settings={"outer": [0.7, 0.5]},
    ),
    "localsgd": Contender(label="palsgd LocalSGD", training="localsgd"),
    "diloco": Contender(label="palsgd DiLoCo", training="diloco"),
    "palsgd": Contender(label="PALSGD", training="palsgd"),
    "palsgd-no-pull": Contender(label="PALSGD without pull (eta = 0)", training="palsgd-no-pull"),
    "diloco-int4": Contender(label="palsgd DiLoCo, int4, overlap", training="diloco-int4"),
    "palsgd-int4": Contender(label="PALSGD, int4, overlap", training="palsgd-int4"),
}  # fmt: skip
# Who runs without being asked for by name.
STANDARD = tuple(name for name, each in CONTENDERS.items() if each.package is None)


def settings_of(training: Training, chosen: dict[str, Any], sync_every: int) -> dict[str, Any]:
    """What palsgd's class is called with, the inner learning rate aside."""
    found = training.settings | {key: value for key, value in chosen.items() if key != "lr"}
    if training.local:
        found["sync_every"] = sync_every
    if share := found.pop("delay_share", None):
        found["delay"] = max(1, round(share * sync_every))
    return found
