"""Runs PyTorch's own tests of optimizers and schedulers with a palsgd optimizer around each
optimizer.

    python tests/torch_suite/run.py path/to/a/pytorch/checkout [--kind LocalSGD] [-k EXPRESSION]

The tests are not part of the installed torch; a checkout of any commit near its version will do,
and only its folder `test` is read. Tests that fail and cannot apply to a wrapper are listed in
`cannot_apply.py` with their reasons. Any other failure makes the exit code 1; an entry
of that list which no failure needs is printed, if all tests were run.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "cpu")

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import palsgd

sys.path.insert(0, str(Path(__file__).parent))

from cannot_apply import CANNOT_APPLY, reason_of

FILES = {"test_optim.py": "TestOptimRenewed", "optim/test_lrscheduler.py": "TestLRScheduler"}
KINDS = {
    "DDP": lambda model, inner: palsgd.DDP(model, inner, transport=palsgd.Alone()),
    "LocalSGD": lambda model, inner: palsgd.LocalSGD(
        model, inner, sync_every=4, transport=palsgd.Alone()
    ),
}


class Holder(nn.Module):
    """A model that holds the tensors of an optimizer. The tests give tensors that need no gradient
    and set their gradients by hand; here they need one, as those of a model do."""

    def __init__(self, inner: Optimizer):
        super().__init__()
        tensors = [p for group in inner.param_groups for p in group["params"]]
        for number, tensor in enumerate(tensors):
            if tensor.is_leaf and tensor.is_floating_point():
                tensor.requires_grad_(True)
            self._parameters[f"p{number}"] = tensor  # type: ignore[assignment]


def wrapped(kind: type[Optimizer], build: Any) -> type:
    """A class whose instances are palsgd optimizers around instances of `kind`."""

    class Wrapped(kind):  # type: ignore[valid-type, misc]
        def __new__(cls, *args: Any, **settings: Any) -> Any:
            # the step of a differentiable optimizer refuses parameters that need a gradient
            settings.pop("differentiable", None)
            inner = kind(*args, **settings)
            return build(Holder(inner), inner)

    Wrapped.__name__ = Wrapped.__qualname__ = kind.__name__
    return Wrapped


class Suite:
    """Puts the wrapped optimizers in place of torch's, and keeps the outcome of each test."""

    def __init__(self, build: Any):
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
        own = {n: c for n, c in found.items() if isinstance(c, type) and issubclass(c, Optimizer)}
        self._wrapped = {c: wrapped(c, build) for c in own.values() if c is not Optimizer}

    def replace_in_table(self) -> None:
        """The table from which torch makes the tests of each optimizer."""
        from torch.testing._internal.common_optimizers import optim_db

        for info in optim_db:
            info.optim_cls = self._wrapped[info.optim_cls]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = set(FILES.values())
        items[:] = [i for i in items if any(i.cls.__name__.startswith(name) for name in chosen)]
        items[:] = [i for i in items if FILES.get(_file(i)) and _of_file(i)]
        for module in {item.module for item in items}:
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in self._wrapped:
                    setattr(module, name, self._wrapped[value])

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.split("::", 1)[1].replace("::", ".")
        if report.failed:
            self.outcomes[name] = "failed"
            self.errors[name] = getattr(report.longrepr, "reprcrash", report.longrepr)
        elif report.skipped:
            self.outcomes.setdefault(name, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(name, "passed")


def _file(item: Any) -> str:
    return next((f for f in FILES if str(item.path).endswith(f)), "")


def _of_file(item: Any) -> bool:
    """Is the test in the file that defines it? test_optim.py also imports the schedulers'."""
    return item.cls.__name__.startswith(FILES[_file(item)])


def report(suite: Suite, *, whole: bool) -> int:
    """Print the counts and what was not expected. Returns the exit code."""
    failed = [name for name, outcome in suite.outcomes.items() if outcome == "failed"]
    reasons = {name: reason_of(name) for name in failed}
    unexpected = [name for name in failed if reasons[name] is None]
    used = {reason for reason in reasons.values() if reason}
    stale = [pattern for pattern, why in CANNOT_APPLY if why not in used] if whole else []
    counts = Counter(suite.outcomes.values())
    for why, number in Counter(r for r in reasons.values() if r).most_common():
        print(f"{number:5d} cannot apply: {why}")
    for name in unexpected:
        print(f"FAILED {name}: {str(suite.errors[name])[:300]}")
    for pattern in stale:
        print(f"no failure needs the entry {pattern!r} of cannot_apply.py")
    print(
        f"{counts['passed']} passed, {len(failed) - len(unexpected)} cannot apply, "
        f"{len(unexpected)} failed, {counts['skipped']} skipped by torch"
    )
    return 1 if unexpected or not suite.outcomes else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch")
    parser.add_argument("--kind", choices=KINDS, default="DDP", help="the palsgd optimizer")
    parser.add_argument("-k", default="", help="run only tests whose names match")
    chosen = parser.parse_args()
    folder = chosen.checkout / "test"
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        parser.error(f"{folder} has no {missing[0]}; give the folder of a pytorch checkout")
    sys.path.insert(0, str(folder))
    suite = Suite(KINDS[chosen.kind])
    suite.replace_in_table()
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-c", os.devnull, "-r", "N"]
    options += ["--rootdir", str(folder), "-k", chosen.k]
    pytest.main([*options, *(str(folder / name) for name in FILES)], plugins=[suite])
    return report(suite, whole=not chosen.k)


if __name__ == "__main__":
    sys.exit(main())
