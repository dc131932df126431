"""Tests that need network namespaces."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

from palsgd.lab.links import unavailable


def needs_namespaces(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test that needs network namespaces. Setting them up makes each of these slow. A user
    may not make namespaces, so the test is skipped; root may, so where they do not work the test
    fails and says why."""
    if os.geteuid() != 0:
        return pytest.mark.slow(pytest.mark.skip(reason=str(unavailable()))(test))

    @functools.wraps(test)
    def with_namespaces(*args: Any, **kwargs: Any) -> Any:
        reason = unavailable()
        if reason is not None:
            pytest.fail(reason)
        return test(*args, **kwargs)

    return pytest.mark.slow(with_namespaces)
