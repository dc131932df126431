"""PyTorch's tests that cannot apply to an optimizer around another, each with its reason."""

import re

CANNOT_APPLY: list[tuple[str, str]] = []


def reason_of(name: str) -> str | None:
    """Why the test cannot apply, or None if it should pass."""
    return next((why for pattern, why in CANNOT_APPLY if re.search(pattern, name)), None)
