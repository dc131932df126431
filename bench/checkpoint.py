"""What a save of palsgd.checkpoint costs, beside a sync and beside the disk alone.

    python bench/checkpoint.py                     # two gloo processes on this machine's CPU
    python bench/checkpoint.py --model gpt-neo-33m --folder /a/disk --out checkpoint.json

Two processes train tensors in the shapes of a GPT-Neo model by DiLoCo with AdamW inside. In turn
each takes a step with its sync, saves, loads, and writes as many bytes as its save has into a plain
file, which it forces onto the disk. A save takes what the disk takes for those bytes and, beyond
that, the copy of the state, the checksums and three small exchanges. CPU seconds are those of one
process, its threads included; they say more than the clock where other programs run beside.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import (
    SIZES,
    add_record_options,
    in_two_processes,
    join_the_other,
    provenance,
    save,
    summary,
    with_gradients,
)

import palsgd

LR = 1e-3


def measure(args):
    """What both processes found."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return in_two_processes(_worker, folder, args.model, args.repeats)


def _worker(pipe, rank, folder, name, repeats):
    join_the_other(rank, folder)
    model = with_gradients(name, "cpu", rank=rank)
    inner = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    opt = palsgd.DiLoCo(model, inner, sync_every=1, same_data=True)
    pipe.send(_turns(model, opt, Path(folder), repeats))
    dist.barrier()
    dist.destroy_process_group()


def _turns(model, opt, folder, repeats):
    times = {what: ([], []) for what in ("sync", "save", "load", "plain write")}
    for turn in range(repeats + 1):
        spans = {"sync": _timed(opt.step)}
        spans["save"] = _timed(lambda: palsgd.checkpoint.save(folder / "saves", model, opt))
        spans["load"] = _timed(lambda: palsgd.checkpoint.load(folder / "saves", model, opt))
        size = _own_file(folder / "saves", opt).stat().st_size
        spans["plain write"] = _timed(partial(_write, folder / f"plain-{dist.get_rank()}", size))
        for what in times if turn else ():  # the first turn is not counted
            for found, span in zip(times[what], spans[what], strict=True):
                found.append(span)
    kept = palsgd.checkpoint.find(folder / "saves")
    return {
        "seconds": {what: statistics.median(found) for what, (found, _) in times.items()},
        "cpu_seconds": {what: statistics.median(found) for what, (_, found) in times.items()},
        "bytes": size,
        "kept": len(kept),
        "clock": opt.clock,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _timed(call):
    """Seconds, and CPU seconds."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def _own_file(folder, opt):
    newest = palsgd.checkpoint.find(folder)[0].path
    return next((newest / f"worker-{opt.transport.worker}").iterdir())


def _write(path, size):
    with open(path, "wb") as file:
        file.write(memoryview(bytearray(size)))
        file.flush()
        os.fsync(file.fileno())


def figures(found):
    """Of the slower process, as a save ends when both have ended."""
    seconds, cpu = (
        {what: max(each[kind][what] for each in found) for what in found[0][kind]}
        for kind in ("seconds", "cpu_seconds")
    )
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "bytes": found[0]["bytes"],
        "models": found[0]["bytes"] / (4 * found[0]["parameters"]),
        "over_sync": {what: seconds[what] / seconds["sync"] for what in ("save", "load")},
        "over_plain_write": {
            what: [seconds[what] / seconds["plain write"], cpu[what] / cpu["plain write"]]
            for what in ("save", "load")
        },
    }


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(SIZES), default="gpt-neo-8m")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to save to; default: that of temporary files")
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.model, args.repeats = "tiny", 2
    return args


def main():
    args = arguments()
    found = measure(args)
    record = provenance("cpu", tiny=args.tiny) | {"model": args.model} | figures(found)
    record["untimed"] = {
        "parameters": found[0]["parameters"],
        "kept": [each["kept"] for each in found],
        "clock": [each["clock"] for each in found],
    }
    print(f"{record['machine']['device']}, torch {torch.__version__}, tensors of {args.model}")
    for what, span in record["seconds"].items():
        print(f"{what:12} {span * 1e3:8.1f} ms, {record['cpu_seconds'][what] * 1e3:8.1f} of CPU")
    print(f"a save has {record['bytes'] / 1e6:.1f} MB, {record['models']:.2f} fp32 models")
    print(summary(record))
    save(record, args.out)


if __name__ == "__main__":
    sys.exit(main())
