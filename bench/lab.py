"""The speed of the lab's own commands on one device, beside what the engines can do.

    python bench/lab.py --out bench/results/lab-h200.json
    python bench/lab.py --cases cnn-64 gpt-neo-8m

Each case runs a command of `palsgd` as a user would, in a process of its own, on made-up data of
the right shapes, as speed does not depend on what is in a picture. "once it runs" is the rate over
the second half of the run's training seconds, "end to end" over the whole command, start, loading,
compiling and evaluations included. Beside it stands a bare engine on the same shapes, from
bench/simulate.py, in this process, right after.

cnn-64        the small CNN, K = 64: milliseconds a step, over the limit of bench/simulate.py
gpt-neo-8m    K = 8, bf16, three minutes: tokens a second, over the bare engine, compiled
gpt-neo-125m  K = 8, bf16: tokens a second, over the loop, and the share of the arithmetic's peak
vgg-16        K = 4: images a second, over the faster of loop and stack
resnet-50     K = 4, bf16: images a second, over the faster of loop and stack
sweep         96 runs of the 1 M GPT-Neo, K = 8, 576 steps, as one command: seconds

Cases are added to a record that is there already; each says of which commit it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import REPOSITORY, add_record_options, provenance, save, summary
from simulate import (
    Problem,
    adamw,
    cnn_problem,
    exact_step,
    limit,
    own_loss,
    own_model,
    tokens,
    vectorized_step,
)
from torch import nn

Row = dict[str, Any]
PEAK_BF16 = 989e12  # dense bf16 products a second of an H200, by its data sheet
NEO_8M = dict(words=50257, hidden=128, layers=8, heads=8)
NEO_125M = dict(words=50257, hidden=768, layers=12, heads=12)


# -- made-up data ----------------------------------------------------------------------------------


def make_data(folder: Path, tiny: bool) -> None:
    rng = np.random.default_rng(0)
    make_cifar10(folder / "cifar10", rng, 200 if tiny else 10_000)
    make_stories(folder / "tinystories", rng, 300 if tiny else 20_000)
    make_photographs(folder / "imagenet", rng, 20 if tiny else 2000)


def make_cifar10(folder: Path, rng: np.random.Generator, each: int) -> None:
    """The form with a sprite per split."""
    from PIL import Image

    folder.mkdir(parents=True)
    labels = {}
    for name, count in (("train", 5 * each), ("test", each)):
        rows = -(-count // 100)
        pixels = rng.integers(0, 256, (rows * 32, 3200, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.webp", lossless=True, quality=0, method=0)
        labels[name] = {"labels": rng.integers(0, 10, rows * 100).tolist()}
    (folder / "labels.json").write_text(json.dumps(labels))


def make_stories(folder: Path, rng: np.random.Generator, count: int) -> None:
    """Texts as tokens already, in the form that `palsgd data prepare` writes."""
    from palsgd.lab.data.tokens import END, SPLITS

    folder.mkdir(parents=True)
    for split in SPLITS:
        stories = count if split == "train" else max(20, count // 50)
        lengths = rng.integers(120, 260, stories)
        words = rng.integers(0, 50_000, lengths.sum() + stories + 1).astype(np.uint16)
        words[np.concatenate([[0], np.cumsum(lengths + 1)])] = END
        words.tofile(folder / f"{split}.bin")
        record = {"stories": stories, "tokens": len(words), "sources": []}
        (folder / f"{split}.json").write_text(json.dumps(record))


def make_photographs(folder: Path, rng: np.random.Generator, count: int) -> None:
    from PIL import Image

    for split, number in (("train", count), ("val", max(10, count // 20))):
        for i in range(number):
            place = folder / split / f"class{i % 10}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{i}.jpg", quality=80)


# -- commands --------------------------------------------------------------------------------------


def command(args: argparse.Namespace, data: Path, *words: str) -> tuple[Path, float]:
    """Run `palsgd WORDS` and return its folder and its seconds."""
    out = Path(tempfile.mkdtemp(prefix="lab-")) / "runs"
    full = [sys.executable, "-m", "palsgd", *words, "--simulate", "--no-report", "--quiet",
            "--device", args.device, "--out", str(out)]  # fmt: skip
    if words[0] != "sweep" or "stories-1m" not in words:
        full += ["--data", str(data)]
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY / "src"))
    start = time.perf_counter()
    done = subprocess.run(full, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"palsgd {' '.join(words)}: {done.stderr.strip()[-500:]}")
    return out, time.perf_counter() - start


def rates(out: Path, wall: float) -> Row:
    """Gradient steps a second: once it runs, and over the whole command."""
    (folder,) = (path.parent for path in out.rglob("metrics.jsonl"))
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get("simulation_s") is not None]
    last = lines[-1]
    half = next(line for line in lines if line["simulation_s"] >= last["simulation_s"] / 2)
    if half is last:
        half = {"gradient_steps": 0, "simulation_s": 0.0}
    steps = last["gradient_steps"] - half["gradient_steps"]
    config = (folder / "config.yaml").read_text()
    engine = next(line.split()[1] for line in config.splitlines() if line.startswith("engine:"))
    return {
        "engine": engine,
        "gradient_steps": last["gradient_steps"],
        "steps_per_s": steps / (last["simulation_s"] - half["simulation_s"]),
        "end_to_end_steps_per_s": last["gradient_steps"] / wall,
        "command_s": wall,
    }


def trained(args: argparse.Namespace, data: Path, recipe: str, units: int, *changes: str) -> Row:
    """A run of PALSGD; `units` are the images or tokens of a step of all workers."""
    steps = "steps=8" if args.tiny else next(c for c in changes if c.startswith("steps="))
    changes = tuple(c for c in changes if not c.startswith("steps="))
    if args.tiny:
        changes = (*changes, "warmup_steps=0", "sync_every=4")
    words = ("compare", recipe, steps, *changes, "evaluate_every=1000000", "--methods", "palsgd")
    row = rates(*command(args, data, *words))
    row |= {"command": "palsgd " + " ".join(words), "units_per_step": units}
    return row | {
        "per_s": units * row["steps_per_s"],
        "end_to_end_per_s": units * row["end_to_end_steps_per_s"],
    }


# -- cases -----------------------------------------------------------------------------------------


def case_cnn(args: argparse.Namespace, data: Path) -> Row:
    workers = 2 if args.tiny else 64
    row = trained(args, data, "cifar10-cnn", 32 * workers, f"workers={workers}", "steps=2400")
    if not args.tiny:
        args.batch = 32
        joint, moved = limit(cnn_problem(args), workers)
        bare, _ = vectorized_step(cnn_problem(args), workers, False)
        row |= {"limit_ms": 1e3 * (joint + moved), "bare_ms": 1e3 * bare}
        row["over_limit"] = 1e3 / row["steps_per_s"] / row["limit_ms"]
    return row


def language(args: argparse.Namespace, model: Row, rows: int) -> Problem:
    return Problem(
        partial(own_model, **model), partial(own_loss, args.device), adamw,
        partial(tokens, rows, 256, model["words"]), args.device,
    )  # fmt: skip


def case_neo_8m(args: argparse.Namespace, data: Path) -> Row:
    rows, workers = (2, 2) if args.tiny else (256, 8)
    row = trained(
        args, data, "tinystories-gptneo-8m", rows * workers * 256, f"workers={workers}",
        f"batch_size={rows}", "context=256", "warmup_steps=64", "sync_every=64", "steps=600",
    )  # fmt: skip
    if not args.tiny:
        bare, _ = vectorized_step(language(args, NEO_8M, rows), workers, True, 2)
        row["bare_per_s"] = rows * workers * 256 / bare
        row["over_bare"] = row["per_s"] / row["bare_per_s"]
        row["end_to_end_over_bare"] = row["end_to_end_per_s"] / row["bare_per_s"]
    return row


def case_neo_125m(args: argparse.Namespace, data: Path) -> Row:
    if args.tiny:
        return {}
    rows, workers = 32, 8
    row = trained(
        args, data, "tinystories-gptneo-125m", rows * workers * 256, f"batch_size={rows}",
        "context=256", "warmup_steps=0", "sync_every=16", "steps=160",
    )  # fmt: skip
    loop = exact_step(language(args, NEO_125M, rows), workers)
    row["loop_per_s"] = rows * workers * 256 / loop
    row["over_loop"] = row["per_s"] / row["loop_per_s"]
    row["share_of_peak"] = 6 * 124.4e6 * row["per_s"] / PEAK_BF16
    return row


def images(args: argparse.Namespace, model: Callable[..., nn.Module], rows: int, size: int,
           precision: str) -> Problem:  # fmt: skip
    low = torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16")

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        with low:
            return nn.functional.cross_entropy(net(batch[0]), batch[1])

    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(rows, 3, size, size, generator=generator, device=args.device)
        return x, torch.randint(10, (rows,), generator=generator, device=args.device)

    def momentum_sgd(net: nn.Module) -> Any:
        import palsgd

        inner = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        return palsgd.PALSGD(net, inner, sync_every=16, mix_prob=0.05, pull=0.5)

    return Problem(partial(model, num_classes=10), loss, momentum_sgd, batch, args.device)


def beside_engines(row: Row, problem: Problem, workers: int) -> Row:
    """Loop and stack on the same shapes; a stack that cannot be made is left out."""
    row["loop_per_s"] = row["units_per_step"] / exact_step(problem, workers)
    try:
        row["stack_per_s"] = row["units_per_step"] / vectorized_step(problem, workers, False, 1)[0]
    except RuntimeError as error:
        row["stack_per_s"], row["no_stack"] = 0.0, str(error).splitlines()[0]
    row["over_faster"] = row["per_s"] / max(row["loop_per_s"], row["stack_per_s"])
    return row


def case_vgg(args: argparse.Namespace, data: Path) -> Row:
    if args.tiny:
        return {}
    from torchvision.models import vgg16  # type: ignore[import-untyped]

    changes = ("warmup_steps=0", "sync_every=32", "schedule=constant", "steps=480")
    row = trained(args, data, "cifar10-vgg16", 4 * 128, *changes)
    return beside_engines(row, images(args, vgg16, 128, 32, "tf32"), 4)


def case_resnet(args: argparse.Namespace, data: Path) -> Row:
    if args.tiny:
        return {}
    from torchvision.models import resnet50  # type: ignore[import-untyped]

    changes = ("warmup_steps=0", "sync_every=64", "schedule=constant", "steps=192")
    row = trained(args, data, "imagenet-resnet50", 4 * 64, *changes)
    return beside_engines(row, images(args, resnet50, 64, 224, "bf16"), 4)


def case_sweep(args: argparse.Namespace, data: Path) -> Row:
    """Twelve settings, eight seeds."""
    recipe, workers, steps = ("digits", 2, 8) if args.tiny else ("stories-1m", 8, 576)
    points = ["lr=0.001,0.002", "outer_lr=0.3,0.7", "mix_prob=0.05,0.1,0.2"]
    points += [f"seed={','.join(str(1 + i) for i in range(2 if args.tiny else 8))}"]
    words = ("sweep", recipe, f"workers={workers}", f"steps={steps}", "method=palsgd",
             "warmup_steps=0", "evaluate_every=1000000", *points)  # fmt: skip
    out, wall = command(args, data, *words)
    runs = len(list(out.rglob("summary.json"))) - 1
    return {"command": "palsgd " + " ".join(words), "runs": runs, "command_s": wall}


CASES = {
    "cnn-64": case_cnn,
    "gpt-neo-8m": case_neo_8m,
    "gpt-neo-125m": case_neo_125m,
    "vgg-16": case_vgg,
    "resnet-50": case_resnet,
    "sweep": case_sweep,
}


def attempt(case: Callable[..., Row], args: argparse.Namespace, data: Path) -> Row:
    """A case that breaks is told in the record, and the others are measured all the same."""
    try:
        return case(args, data)
    except (RuntimeError, ValueError) as error:
        return {"failed": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.device, args.cases = "cpu", [c for c in args.cases if c in ("cnn-64", "sweep")]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    record: Row = provenance(args.device, tiny=args.tiny) | {"cases": {}, "untimed": {}}
    if args.out is not None and args.out.exists():
        record |= {key: json.loads(args.out.read_text())[key] for key in ("cases", "untimed")}
    with tempfile.TemporaryDirectory(prefix="lab-data-") as folder:
        make_data(Path(folder), args.tiny)
        for name in args.cases:
            torch.compiler.reset()
            row = record["cases"][name] = attempt(CASES[name], args, Path(folder))
            row["commit"] = record["commit"]
            kept = {k: row[k] for k in ("gradient_steps", "runs", "engine") if k in row}
            record["untimed"][name] = kept
            print(name, json.dumps(row), flush=True)
            save(record, args.out)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    print(summary(record))
    return int(any("failed" in record["cases"][name] for name in args.cases))


if __name__ == "__main__":
    sys.exit(main())
