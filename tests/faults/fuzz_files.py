"""Files of runs and of data sets that somebody changed."""

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fuzz_commands import run
from fuzz_values import changed_bytes, changed_tree
from rich.console import Console

from palsgd.lab.cli.common_options import cluster_fields
from palsgd.lab.data import cifar10, images, sources, tokens
from palsgd.lab.kept import kept
from palsgd.lab.report import terminal_table, write_report
from palsgd.lab.run_folder import RunFolder, find_runs
from palsgd.lab.settings import Settings
from palsgd.lab.timing import record
from palsgd.lab.tuning.tuned_file import SHIPPED, read_tuned, tuned_elsewhere, tuned_settings
from palsgd.simulator.checkpoints import ProgramList
from support.pictures import write_original, write_photographs
from support.runs import write_comparison

Case = tuple[str, Callable[[], str | None]]
SESSION = {
    "link": None, "backend": "gloo", "machine": "here", "repetitions": 2,
    "programs": [{"runs": ["ddp"], "warmup": None, "step_s": [0.1, 0.2],
                  "averaging": [[0.1, 0, 0, 0.1]] * 2, "local": None, "mixing_s": 0.0}],
}  # fmt: skip


def changed_file(path: Path, rng: random.Random) -> None:
    """Change bytes of a file, or a value in it."""
    content = path.read_bytes()
    if path.suffix not in (".json", ".yaml", ".jsonl") or rng.random() < 0.4:
        path.write_bytes(changed_bytes(content, rng))
    elif path.suffix == ".yaml":
        tree = changed_tree(yaml.safe_load(content), rng)
        path.write_text(yaml.safe_dump(tree, sort_keys=False), errors="surrogatepass")
    elif path.suffix == ".json":
        path.write_text(json.dumps(changed_tree(json.loads(content), rng)))
    else:
        lines = content.decode().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(changed_tree(json.loads(lines[at]), rng))
        path.write_text("\n".join(lines) + "\n")


def copy_of(original: Path, folder: Path) -> Path:
    """A copy to change, in place of the last one."""
    place = folder / "changed"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(original, place)
    return place


# -- runs ------------------------------------------------------------------------------------------


@cache
def comparison(folder: Path) -> Path:
    made = write_comparison(folder / "comparison", methods=("ddp", "palsgd"), steps=200)
    parts = ["computing", "mixing", "waiting", "exchanging"]
    whole = {"schema": 1, "parts": parts, "sessions": [SESSION]}
    (made / "timing.json").write_text(json.dumps(whole))
    return made


def changed_comparison(rng: random.Random, folder: Path) -> tuple[Path, str]:
    place = copy_of(comparison(folder), folder)
    paths = sorted(path for path in place.rglob("*.*") if path.is_file())
    chosen = rng.sample(paths, rng.choice((1, 1, 2)))
    for path in chosen:
        changed_file(path, rng)
    return place, ", ".join(path.name for path in chosen)


def runs_case(rng: random.Random, folder: Path) -> Case:
    link = rng.choice((None, "100mbit,20ms,step=50ms"))
    state = rng.getstate()

    def call() -> None:
        rng.setstate(state)
        place, _ = changed_comparison(rng, folder)
        found = RunFolder(place / "ddp")
        found.config(), found.summary(), found.lines(), found.timeline(), str(found.failure)
        kept(place), record.read(place)
        find_runs([place])
        Console(file=open("/dev/null", "w")).print(terminal_table([place], link))  # noqa: SIM115

    return f"runs, {link}", call


def pages_case(rng: random.Random, folder: Path) -> Case:
    state = rng.getstate()

    def call() -> None:
        rng.setstate(state)
        place, _ = changed_comparison(rng, folder)
        write_report([place], folder / "page" / "report.html")

    return "page", call


# -- single files ----------------------------------------------------------------------------------


def files_case(rng: random.Random, folder: Path) -> Case:
    state, kind = rng.getstate(), rng.choice(("tuned", "cluster", "programs"))

    def call() -> None:
        rng.setstate(state)
        READERS[kind](rng, folder)

    return f"file {kind}", call


def read_changed_tuned(rng: random.Random, folder: Path) -> None:
    path = folder / f"tuned-{rng.randrange(10**9)}.yaml"
    shutil.copy(SHIPPED / "digits.yaml", path)
    changed_file(path, rng)
    base = Settings(workload="digits", steps=20)
    try:
        read_tuned(path)
        tuned_elsewhere(path, base)
        tuned_settings(path, "palsgd", base)
    finally:
        path.unlink()


def read_changed_cluster(rng: random.Random, folder: Path) -> None:
    path = folder / "cluster.yaml"
    fields = {"rate": "100mbit", "latency": "20ms", "step": "50ms", "cv": 0.1, "stragglers": 1}
    path.write_text(yaml.safe_dump(fields))
    changed_file(path, rng)
    Settings(workload="digits", steps=20, cluster=cluster_fields(str(path)))


def read_changed_programs(rng: random.Random, folder: Path) -> None:
    programs = ProgramList(folder / "programs")
    shutil.rmtree(folder / "programs", ignore_errors=True)
    programs.add([([0, 1], "exact"), ([2], "vectorized")])
    changed_file(folder / "programs" / "programs.json", rng)
    programs.read()


READERS: dict[str, Callable[[random.Random, Path], None]] = {
    "tuned": read_changed_tuned,
    "cluster": read_changed_cluster,
    "programs": read_changed_programs,
}


# -- data ------------------------------------------------------------------------------------------


@cache
def data_sets(folder: Path) -> dict[str, Path]:
    from PIL import Image

    root = folder / "data"
    write_original(root / "pickles")
    sprites = root / "sprites"
    sprites.mkdir()
    labels = {name: {"labels": [0, 1, 2, 3]} for name in cifar10.SPLITS}
    (sprites / "labels.json").write_text(json.dumps(labels))
    for name in cifar10.SPLITS:
        Image.effect_noise((64, 64), 80).convert("RGB").save(sprites / f"{name}.webp")
    words = np.array([tokens.END, 5, 6, tokens.END], np.uint16)
    about: Any = {"tokens": 4, "stories": 1, "sources": [{"name": "a.txt", "sha256": "0"}]}
    encoded = root / "tokens"
    encoded.mkdir()
    for split in tokens.SPLITS:
        (encoded / f"{split}.bin").write_bytes(words.tobytes())
        (encoded / f"{split}.json").write_text(json.dumps(about))
    write_photographs(root / "photographs", count=1)
    return {path.name: path for path in root.iterdir()}


def data_case(rng: random.Random, folder: Path) -> Case:
    name = rng.choice(list(DATA))
    state = rng.getstate()

    def call() -> str | None:
        rng.setstate(state)
        place = copy_of(data_sets(folder)[name], folder)
        paths = sorted(path for path in place.rglob("*") if path.is_file())
        changed_file(rng.choice(paths), rng)
        return DATA[name](place)

    return f"data {name}", call


def read_photographs(place: Path) -> None:
    for split in images.SPLITS:
        found = images.split_folder(place, split)
        for i in range(len(found)):
            images.decoded(found, i)


def checked(name: str) -> Callable[[Path], str | None]:
    """`palsgd data check`, as a command."""
    return lambda place: run(["data", "check", name, "--data", str(place)], place.parent)


DATA: dict[str, Callable[[Path], Any]] = {
    "pickles": lambda place: cifar10.load(place) and None,
    "sprites": checked("cifar10"),
    "tokens": lambda place: sources.SOURCES["tinystories"].check(place) and None,
    "photographs": read_photographs,
}
KINDS: dict[str, Callable] = {
    "runs": runs_case,
    "pages": pages_case,
    "files": files_case,
    "data": data_case,
}
