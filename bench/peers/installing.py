"""Peers come from their own homes, if they are asked for by name, into a folder that is not the
project's, in the versions below."""

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

# The peers themselves go in without what they ask for: that includes torch, and every contender is
# to run on the same one.
PEERS = {"torchft": "torchft-nightly==2026.10.26", "accelerate": "accelerate==1.15.0"}
# What a peer needs beyond torch and the lab's own packages.
BESIDE = {
    "torchft": (
        "opentelemetry-exporter-otlp-proto-http==1.39.1", "opentelemetry-sdk==1.39.1",
    ),
    "accelerate": ("psutil==7.1.3", "safetensors==0.6.2"),
}  # fmt: skip


def install(packages: Iterable[str], folder: Path) -> None:
    """Once each; the folder is appended to the workers' path, so that what is installed here
    wins."""
    for package in packages:
        if missing(package, folder):
            _pip(folder, "--no-deps", PEERS[package])
            _pip(folder, *BESIDE[package])


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
    names = [pinned.split("==")[0] for pinned in PEERS.values()]
    return {name: found[name] for name in names if name in found}
