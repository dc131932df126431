"""How fast gradients of picture models can be: layouts, compiled or not, workers side by side.

    python bench/pictures.py --device cuda --out bench/results/pictures-h200.json

Workers that are not stacked replay their gradients as CUDA graphs, one after another. Here the same
gradients, in bf16 on made-up pictures, are replayed with the channels first and last in memory,
compiled, and with the graphs of four workers on four streams. Pictures a second of all workers, and
how many times those of the first way. Losses are recorded, so that one sees that all ways compute
the same. The weights have the order of the pictures here; in the lab the pictures alone have it.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import add_record_options, provenance, save, seconds, summary
from torch import nn
from torch.nn.functional import cross_entropy

Row = dict[str, Any]
CASES = {"vgg-16": (128, 32), "resnet-18": (128, 32), "resnet-50": (64, 224)}  # batch, pixels
WAYS = {  # channels last, compiled, streams
    "channels first": (False, False, 1),
    "channels last": (True, False, 1),
    "channels last, four streams": (True, False, 4),
    "channels last, compiled": (True, True, 1),
    "channels last, compiled, four streams": (True, True, 4),
}
WORKERS = 4


def model_of(case: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    found = getattr(models, case.replace("-", ""))(num_classes=10)
    if case == "resnet-18":  # as the lab has it for small pictures
        found.conv1, found.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    for each in found.modules():
        if isinstance(each, nn.Dropout):  # so that losses can be compared
            each.p = 0.0
    return found


def gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = cross_entropy(model(images), labels)
    loss.backward()
    return loss.detach()


def recorded(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = call()
    return graph, loss


class Way:
    """The gradients of all workers, in one of the ways."""

    def __init__(self, case: str, way: str, device: str, tiny: bool):
        batch, pixels = (4, 32) if tiny else CASES[case]
        last, compiled, self.streams = WAYS[way]
        self.losses, self.graphs, self.calls = [], [], []
        self.sides = [torch.cuda.Stream() for _ in range(self.streams)] if device == "cuda" else []
        for worker in range(WORKERS):
            model = model_of(case).to(device)
            generator = torch.Generator(device).manual_seed(worker)
            images = torch.randn(batch, 3, pixels, pixels, device=device, generator=generator)
            if last:
                model = model.to(memory_format=torch.channels_last)
                images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.arange(batch, device=device) % 10
            program = torch.compile(model) if compiled else model
            self.add(partial(gradient, program, images, labels), model, device)

    def add(self, call: Callable[[], torch.Tensor], model: nn.Module, device: str) -> None:
        """Record it, on a GPU."""
        if device != "cuda":
            self.losses.append(call())
            return
        self.calls.append(call)  # a graph reads its pictures where they were
        call()
        model.zero_grad(set_to_none=True)
        graph, loss = recorded(call)
        self.graphs.append(graph)
        self.losses.append(loss)

    def __call__(self) -> None:
        now = torch.cuda.current_stream()
        for side in self.sides:
            side.wait_stream(now)
        for worker, graph in enumerate(self.graphs):
            with torch.cuda.stream(self.sides[worker % self.streams]):
                graph.replay()
        for side in self.sides:
            now.wait_stream(side)


def measure(case: str, name: str, device: str, tiny: bool) -> Row:
    batch = 4 if tiny else CASES[case][0]
    way = Way(case, name, device, tiny)
    took = seconds(way, device, 20) if device == "cuda" else float("nan")
    torch.compiler.reset()
    return {"pictures_per_s": WORKERS * batch / took, "loss": float(torch.stack(way.losses).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    add_record_options(parser)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    cases = ["resnet-18"] if args.tiny else args.cases
    ways = list(WAYS)[:2] if args.tiny else args.ways
    record: Row = {**provenance(args.device, tiny=args.tiny), "rows": {}, "untimed": {}}
    for case, way in itertools.product(cases, ways):
        rows = record["rows"].setdefault(case, {})
        row = rows[way] = measure(case, way, args.device, args.tiny)
        row["over_first"] = row["pictures_per_s"] / rows[ways[0]]["pictures_per_s"]
        record["untimed"].setdefault(case, {})[way] = row["loss"]
        print(f"{case:10} {way:38} {row['pictures_per_s']:9.0f}/s {row['over_first']:6.2f} times, "
              f"loss {row['loss']:.4f}", flush=True)  # fmt: skip
        save(record, args.out)
    print(summary(record))


if __name__ == "__main__":
    main()
