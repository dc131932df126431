"""Who takes part, and with which settings: the best of the small grid beside them.

`python bench/peers.py --phases tune` runs the grids again; README.md has what they gave.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Contender:
    label: str
    adapter: str  # module.Class in this folder
    settings: dict[str, Any] = field(default_factory=dict)
    grid: list[dict[str, Any]] = field(default_factory=list)  # what was tried beside the settings
    local: bool = True  # has a round of H steps
    package: str | None = None  # to be installed for it
    ours: bool = False


def _ours(label: str, method: str, grid: list | None = None, **settings: Any) -> Contender:
    return Contender(
        label=label,
        adapter="ours.Ours",
        settings={"method": method, **settings},
        grid=grid or [],
        ours=True,
    )


_OUTER = [{"outer": [lr, momentum]} for lr, momentum in ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5))]
_PALSGD = dict(mix_prob=0.1, mix_rate=1.0, outer=[0.7, 0.5])

CONTENDERS = {
    "ddp": Contender(label="torch DDP", adapter="torch_own.TorchDDP", local=False),
    "ddp-bf16": Contender(
        label="torch DDP, bf16 hook",
        adapter="torch_own.TorchDDP",
        settings={"hook": "bf16"},
        local=False,
    ),
    "ddp-powersgd": Contender(
        label="torch DDP, PowerSGD hook",
        adapter="torch_own.TorchDDP",
        settings={"hook": "powersgd", "rank": 16},
        grid=[{"rank": rank} for rank in (4, 16)],
        local=False,
    ),
    "post-local": Contender(
        label="torch PostLocalSGDOptimizer", adapter="torch_own.PostLocalSGD"
    ),
    "accelerate": Contender(
        label="accelerate LocalSGD",
        adapter="accelerate_local_sgd.AccelerateLocalSGD",
        package="accelerate",
    ),
    "torchft": Contender(
        label="torchft DiLoCo",
        adapter="torchft_diloco.TorchftDiLoCo",
        settings={"outer": [1.0, 0.5]},
        grid=_OUTER,
        package="torchft",
    ),
    "torchft-fragments": Contender(
        label="torchft DiLoCo, 2 fragments",
        adapter="torchft_diloco.TorchftDiLoCo",
        settings={"outer": [1.0, 0.5], "fragments": 2, "delay": 16, "alpha": 0.0},
        grid=[{"alpha": alpha} for alpha in (0.0, 0.5)],
        package="torchft",
    ),
    "localsgd": _ours("palsgd LocalSGD", "LocalSGD"),
    "diloco": _ours("palsgd DiLoCo", "DiLoCo", _OUTER, outer=[1.0, 0.5]),
    "palsgd": _ours("PALSGD", "PALSGD", _OUTER, **_PALSGD),
    "palsgd-int8": _ours(
        "PALSGD, int8, overlap", "PALSGD", **_PALSGD, compress="int8", delay=40
    ),
    "palsgd-int4": _ours(
        "PALSGD, int4, overlap", "PALSGD", **_PALSGD, compress="int4", delay=24
    ),
}  # fmt: skip
