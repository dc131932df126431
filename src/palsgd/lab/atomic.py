"""Files that appear whole or not at all: a full disk, a kill or a power failure leaves the old file
as it was."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palsgd.disk import force, naming

PART = "part"  # how the name of a file ends that is not yet whole


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. What was written there takes the name of `path` when the
    block ends, and is removed when the block fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{PART}")
    try:
        with naming(path):
            yield part
            force(part)
            os.replace(part, path)
            force(path.parent)
    finally:
        part.unlink(missing_ok=True)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Text is written as UTF-8."""
    with atomic_path(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
