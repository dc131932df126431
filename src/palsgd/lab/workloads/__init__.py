"""Workloads and the paper's settings for them, by name."""

import difflib
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from palsgd.lab.data.download import Progress
from palsgd.lab.settings import Settings
from palsgd.lab.workload import Workload

WORKLOADS = {
    "digits": "digits:Digits",
    "stories": "stories:Stories",
    "stories-1m": "stories_1m:Stories1M",
    "cifar10-cnn": "cifar10_cnn:Cifar10CNN",
    "cifar10-vgg16": "cifar10_vgg16:Cifar10VGG16",
    "imagenet-resnet50": "imagenet_resnet50:ImageNetResNet50",
    "tinystories-gptneo-8m": "tinystories_gptneo_8m:TinyStoriesGPTNeo8M",
    "tinystories-gptneo-125m": "tinystories_gptneo_125m:TinyStoriesGPTNeo125M",
}  # in this package; imported when asked for


def load(
    name: str,
    *,
    data: Path | str | None = None,
    device: torch.device | str = "cpu",
    seed: int = 2023,
    download: bool = False,
    progress: Progress | None = None,
) -> Workload:
    """The workload `name`, its data ready on `device`."""
    _check_known("workload", name, WORKLOADS)
    kind = getattr(_module(name), WORKLOADS[name].partition(":")[2])
    return kind(data=data, device=device, seed=seed, download=download, progress=progress)


def recipe(name: str) -> Settings:
    """The settings of that name."""
    _check_known("recipe", name, recipes())
    return recipes()[name]


def grid(name: str) -> dict[str, list]:
    """The values that a study of the paper tries: the fields it varies, all combinations."""
    _check_known("grid", name, grids())
    return grids()[name]


@cache
def recipes() -> dict[str, Settings]:
    return {key: value for name in WORKLOADS for key, value in _module(name).RECIPES.items()}


@cache
def grids() -> dict[str, dict[str, list]]:
    return {key: value for name in WORKLOADS for key, value in _module(name).GRIDS.items()}


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{WORKLOADS[name].partition(':')[0]}")


def _check_known(kind: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"{kind} {name!r} is unknown; did you mean {nearest!r}? There are {', '.join(known)}"
        )
