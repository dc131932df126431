"""Peers come from their own homes at run time, into a folder that is not the project's."""

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

# What a peer needs beyond torch and the lab's own packages. The peers themselves go in without
# what they ask for: that includes torch, and every contender is to run on the same one.
PEERS = ("torchft-nightly", "accelerate")
BESIDE = (
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-sdk",
    "psutil",
    "safetensors",
    "einops",
    "tqdm",
)


def install(folder: Path) -> None:
    """Once; the folder is appended to the workers' path, so that what is installed here wins."""
    if not (folder / "torchft").is_dir():
        _pip(folder, "--no-deps", *PEERS)
        _pip(folder, *BESIDE)


def _pip(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)


def missing(package: str, folder: Path) -> str | None:
    """Why it cannot be imported, or None if it can."""
    code = f"import sys; sys.path.append({str(folder)!r}); import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def versions(folder: Path) -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in distributions(path=[str(folder)])}
    return {name: found[name] for name in PEERS if name in found}
