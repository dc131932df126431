"""What workers must have in common beside their options: the inner optimizer's settings, versions,
the model's structure and its code."""

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import CodeType, FunctionType
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
    """A line for the forward of each class and for every other function that the class or a class
    of the user's below it has, as forward may call them; and one for each function that a module
    holds."""
    seen = set()
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in seen:
            seen.add(kind)
            for function in sorted({"forward", *_own_functions(kind)}):
                yield f"{kind.__qualname__}.{function}: {described(getattr(kind, function))}"
        for attribute in sorted(vars(module).keys() - _OF_EVERY_MODULE):
            value = vars(module)[attribute]
            if callable(value) and not isinstance(value, Tensor):
                yield f"{name}.{attribute}".lstrip(".") + f": {described(value)}"


def _own_functions(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if not _is_torchs(base) and base is not object:
            yield from (name for name, value in vars(base).items() if inspect.isfunction(value))


def described(function: Any) -> str:
    """A callable by its name and a hash of its code, not by its address."""
    if isinstance(function, functools.partial):
        given = _plain([*function.args, dict(function.keywords)])
        return f"partial of {described(function.func)} with {given}"
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    if not inspect.isfunction(function) or _is_torchs(named):
        return f"{named.__module__}.{named.__qualname__}"
    return f"{named.__qualname__} {_hash(function)}"


def _is_torchs(part: Any) -> bool:
    return str(part.__module__).partition(".")[0] == "torch"


def _hash(function: FunctionType) -> str:
    """Of the code of a function and of the functions beside it that it calls by name. Numbers
    beside it do not count: the number of a rank may be among them."""
    reached: dict[str, FunctionType] = {"": function}
    waiting = [function]
    while waiting:
        for name, other in _called(waiting.pop()):
            if other not in reached.values():
                reached[name] = other
                waiting.append(other)
    parts = [(name, _whole(each)) for name, each in sorted(reached.items())]
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def _called(function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """Functions of the same module, of nobody's library, that the code names."""
    for name in function.__code__.co_names:
        other = function.__globals__.get(name)
        if inspect.isfunction(other) and other.__module__ == function.__module__:
            yield name, other


def _whole(function: FunctionType) -> Any:
    """The code and the defaults of arguments, as far as these are plain."""
    given = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    plain = [each for each in given if isinstance(each, bool | int | float | str | tuple)]
    return _contents(function.__code__), repr(plain)


def _contents(part: Any) -> Any:
    """What a function does, without the places of its source."""
    if isinstance(part, CodeType):
        return part.co_code, part.co_names, part.co_freevars, _contents(part.co_consts)
    if isinstance(part, tuple):
        return tuple(map(_contents, part))
    if isinstance(part, frozenset):  # its order depends on the process
        return sorted(map(repr, part))
    return part
