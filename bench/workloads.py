"""Training speed of the workloads, with their data and without.

    python bench/workloads.py --data DIR --out bench/results/workloads-h200.json
    python bench/workloads.py --tiny --workloads digits stories

Forward, backward and optimizer step of one worker, built as the lab builds them. "With data" takes
a new batch for every step, "same batch" one batch again and again; both are timed in turn over
whole stretches of steps, so that a loader may work while the device does. Where the two rates
agree, the loader holds nothing up.

For language a token is a position, padding included; "real" ones are those with a target.
GPT-Neo-8M stands beside Hugging Face's model, which with many more than 64 rows would fill the
memory with logits.

DIR has the folders cifar10, imagenet (with train and val), tinystories and gpt2-tokenizer. A
workload whose files are missing is left out.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import add_record_options, interleaved, provenance, save, settle, summary
from simulate import header, hugging_face_loss, hugging_face_model, line
from torch import nn

from palsgd.lab import workloads
from palsgd.lab.factory import inner_optimizer, low_precision
from palsgd.lab.workload import Workload

SIZES = {  # rows in a batch, precision
    "digits": (32, "fp32"),
    "stories": (16, "fp32"),
    "cifar10-cnn": (128, "tf32"),
    "cifar10-vgg16": (128, "tf32"),
    "imagenet-resnet50": (64, "bf16"),
    "tinystories-gptneo-8m": (512, "bf16"),
}
GPT_NEO = "tinystories-gptneo-8m"
STRETCH_S = 0.4  # of steps that are timed together
REPEATS = 5
COLUMNS = (
    "workload", "batch", "precision", "unit", "with data /s", "same batch /s", "real tokens /s",
    "ms with data", "with data / same batch", "x Hugging Face",
)  # fmt: skip


@dataclass
class Case:
    workload: Workload
    name: str
    rows: int
    precision: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    compiled: bool = False

    def batches(self) -> Iterator[Any]:
        for index in itertools.count():
            yield self.workload.batch(worker=0, workers=1, size=self.rows, index=index)

    def trainer(self) -> Callable[[Any], None]:
        """One step on a batch."""
        settings = replace(workloads.recipe(self.workload.name), precision=self.precision)
        autocast = low_precision(settings, self.workload.device)
        model = self.model().to(self.workload.device)
        inner = inner_optimizer(settings, model)
        called = torch.compile(model) if self.compiled else model

        def step(batch: Any) -> None:
            with autocast():
                loss = self.loss(called, batch)
            loss.backward()
            inner.step()
            inner.zero_grad()

        return step


def cases(workload: Workload, args: argparse.Namespace) -> Iterator[Case]:
    rows, precision = SIZES[workload.name]
    own = partial(Case, workload, precision=precision, model=workload.model, loss=workload.loss)
    small = partial(own, rows=4 if args.tiny else 64)
    if workload.name == GPT_NEO:
        yield replace(
            small(name=f"{GPT_NEO}, Hugging Face"),
            model=hugging_face_model,
            loss=partial(hugging_face_loss, args.device),
        )
        yield small(name=GPT_NEO)
    for compiled in (False, True) if args.compile else (False,):
        name = f"{workload.name}, compiled" if compiled else workload.name
        yield own(name=name, rows=4 if args.tiny else rows, compiled=compiled)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    step, batches = case.trainer(), case.batches()
    some = list(itertools.islice(batches, 4))
    steps = 2 if args.tiny else stretch(partial(step, some[0]), args.device)

    def with_data() -> None:
        for batch in itertools.islice(batches, steps):
            step(batch)

    def same_batch() -> None:
        for _ in range(steps):
            step(some[0])

    repeats = 1 if args.tiny else REPEATS
    taken = interleaved({"data": with_data, "same": same_batch}, args.device, repeats)
    return figures(case, some, {name: steps / s for name, s in taken.items()})


def stretch(step: Callable[[], None], device: str) -> int:
    """How many steps to time together."""
    for _ in range(3):
        step()
    settle(device)
    start = time.perf_counter()
    step()
    settle(device)
    return max(3, min(300, round(STRETCH_S / (time.perf_counter() - start))))


def figures(case: Case, some: list[Any], steps_per_s: dict[str, float]) -> dict[str, Any]:
    inputs, targets = (torch.stack(parts) for parts in zip(*some, strict=True))
    language = targets.ndim == 3  # batches, rows, positions
    units = targets[0].numel()
    row = {
        "case": case.name,
        "batch": list(inputs.shape[1:]),
        "precision": case.precision,
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "unit": "tokens" if language else "images",
        "with_data_per_s": units * steps_per_s["data"],
        "same_batch_per_s": units * steps_per_s["same"],
        "with_data_over_same_batch": steps_per_s["data"] / steps_per_s["same"],
        "with_data_ms": 1e3 / steps_per_s["data"],
    }
    if language:
        real = (targets != -100).float().mean().item()
        row["real_tokens_per_s"] = real * row["with_data_per_s"]
    return row


def show(row: dict[str, Any]) -> None:
    batch = " x ".join(map(str, row["batch"]))
    rates = (row["with_data_per_s"], row["same_batch_per_s"], row.get("real_tokens_per_s"))
    line(
        row["case"], batch, row["precision"], row["unit"],
        *("-" if rate is None else f"{rate:,.0f}" for rate in rates),
        row["with_data_ms"], row["with_data_over_same_batch"],
        row.get("over_hugging_face", "-"),
    )  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case, as soon as it is known; a line for what cannot be measured."""
    for name in args.workloads:
        reference = None
        try:
            workload = workloads.load(name, data=args.data, device=args.device)
            if args.tiny and name == GPT_NEO:
                workload.context = 32
            for case in cases(workload, args):
                row = measure(case, args)
                if case.model is hugging_face_model:
                    reference = row["with_data_per_s"]
                if reference:
                    row["over_hugging_face"] = row["with_data_per_s"] / reference
                yield row
        except (ValueError, ImportError) as error:
            print(f"{name}: left out: {error}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--workloads", nargs="+", choices=SIZES, help="default: all; --tiny: two")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--data", type=Path, help="folder with the data of all workloads")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    add_record_options(parser)
    args = parser.parse_args()
    args.workloads = args.workloads or (["digits", "stories"] if args.tiny else list(SIZES))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    return args


def main() -> None:
    args = arguments()
    record: dict[str, Any] = provenance(args.device, tiny=args.tiny) | {"rows": [], "untimed": {}}
    print(f"{record['machine']['device']}, torch {torch.__version__}")
    header(*COLUMNS)
    for row in rows(args):
        show(row)
        record["rows"].append(row)
        record["untimed"][row["case"]] = {key: row[key] for key in ("parameters", "batch")}
        save(record, args.out)
    print(summary(record))


if __name__ == "__main__":
    sys.exit(main())
