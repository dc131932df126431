"""What workers must have in common beside their options: the inner optimizer's settings, versions,
the model's structure and its code."""

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from palsgd.replica import unwrapped

# Entries of a parameter group that are no settings: they say how a step is computed, which may
# differ between machines, or they change during training.
_NO_SETTINGS = {"params", "param_names", "lr", "initial_lr"}
_NO_SETTINGS |= {"foreach", "fused", "capturable", "differentiable"}
_PLACES = re.compile(r" at 0x[0-9a-fA-F]+|(?<=cuda):\d+")  # addresses, numbers of devices
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def inner_settings(inner: Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of each parameter group as they are at the start of training."""
    return [
        {
            "lr": float(group.get("initial_lr", group["lr"])),
            **{name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS},
        }
        for group in inner.param_groups
    ]


def by_name(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the parameter groups, each under its own name."""
    found: dict[str, Any] = {"number of inner parameter groups": len(groups)}
    for number, group in enumerate(groups):
        whose = f" of inner group {number}" if len(groups) > 1 else " of inner"
        found |= {name + whose: value for name, value in sorted(group.items())}
    return found


def versions() -> str:
    palsgd: Any = import_module(__name__.partition(".")[0])
    release = torch.__version__.partition("+")[0]  # without the kind of build
    python = ".".join(map(str, sys.version_info[:2]))  # bytes of code differ between these
    return f"palsgd {palsgd.__version__}, torch {release}, Python {python}"


def program_settings(model: nn.Module) -> dict[str, Any]:
    """The versions and the model's code, which are the same for all workers of one process."""
    model = unwrapped(model)
    return {
        "versions": versions(),
        "the model": _PLACES.sub("", repr(model)),
        "the model's code": "\n".join(_code_lines(model)),
    }


def _plain(value: Any) -> Any:
    """A setting as numbers and texts that are equal in all processes where the setting is."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if hasattr(value, "item"):  # NumPy's numbers
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in sorted(value.items())}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(map(_plain, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return described(value) if callable(value) else type(value).__qualname__


def _code_lines(model: nn.Module) -> Iterator[str]:
    """A line for the forward of each class, and one for each function that a module holds."""
    seen = set()
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in seen:
            seen.add(kind)
            yield f"{kind.__qualname__}.forward: {described(kind.forward)}"
        for attribute in sorted(vars(module).keys() - _OF_EVERY_MODULE):
            value = vars(module)[attribute]
            if callable(value) and not isinstance(value, Tensor):
                yield f"{name}.{attribute}".lstrip(".") + f": {described(value)}"


def described(function: Any) -> str:
    """A callable by its name and a hash of its code, not by its address."""
    if isinstance(function, functools.partial):
        given = _plain([*function.args, dict(function.keywords)])
        return f"partial of {described(function.func)} with {given}"
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)
    if code is None or str(named.__module__).partition(".")[0] == "torch":
        return f"{named.__module__}.{named.__qualname__}"
    return f"{named.__qualname__} {_hash(code)}"


def _hash(code: CodeType) -> str:
    return hashlib.blake2b(repr(_contents(code)).encode(), digest_size=6).hexdigest()


def _contents(part: Any) -> Any:
    """What a function does, without the places of its source."""
    if isinstance(part, CodeType):
        return part.co_code, part.co_names, part.co_freevars, _contents(part.co_consts)
    if isinstance(part, tuple):
        return tuple(map(_contents, part))
    if isinstance(part, frozenset):  # its order depends on the process
        return sorted(map(repr, part))
    return part
