"""What PALSGD adds to a training step, as ratios taken in one run.

    python bench/step.py                       # CPU, or the GPU where there is one
    python bench/step.py --device cpu --model gpt-neo-8m --out step.json

Four questions: a mixing step over its memory floor; a round over the bare inner optimizer,
without the network; a sync over the bare all-reduce of the same bytes, in real gloo processes;
peak memory over the bare inner optimizer.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import SIZES, gpt_neo_tensors, interleaved, machine, settle, table

import palsgd
from palsgd.replica import mix_

H, P, LR, ETA = 64, 0.1, 1e-3, 16.0


def build(model, transport=None, sync_every=H):
    inner = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return palsgd.PALSGD(
        model, inner, sync_every=sync_every, mix_prob=P, mix_rate=ETA, transport=transport
    )


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


def mixing(name, device, repeats):
    """One mixing step over reading x and the anchor and writing x at the copy bandwidth."""
    local = [p.detach() for p in gpt_neo_tensors(name, device)]
    anchor = [p.detach() for p in gpt_neo_tensors(name, device)]
    elements = sum(t.numel() for t in local)
    flat, flat_anchor = torch.randn(elements, device=device), torch.randn(elements, device=device)
    source, target = torch.randn(2, elements, device=device)

    def python_loop():
        for x, a in zip(local, anchor, strict=True):
            x.sub_((x - a) * 0.01)

    times = interleaved(
        {
            "copy": lambda: target.copy_(source),
            "mixing": lambda: mix_(local, anchor, 0.01),
            "python loop": python_loop,
            "one flat buffer": lambda: flat.lerp_(flat_anchor, 0.01),
        },
        device,
        repeats,
    )
    bandwidth = 8 * elements / times["copy"]
    floor = 12 * elements / bandwidth
    return {
        "elements": elements,
        "copy_gb_per_s": bandwidth / 1e9,
        "floor_ms": floor * 1e3,
        "mixing_ms": times["mixing"] * 1e3,
        "mixing_over_floor": times["mixing"] / floor,
        "python_loop_over_floor": times["python loop"] / floor,
        "flat_buffer_over_floor": times["one flat buffer"] / floor,
    }


def round_overhead(name, device, repeats):
    """A round of H steps through step(), over H bare steps and over as many as took a gradient."""
    model = with_gradients(gpt_neo_tensors(name, device))
    bare = torch.optim.AdamW(
        with_gradients(gpt_neo_tensors(name, device)).parameters(), lr=LR, fused=True
    )
    opt = build(model, palsgd.Alone())
    opt.step()
    while not opt.synced:
        opt.step()
    spans = {"palsgd": [], "same steps": [], "same gradients": []}

    def timed(into, call):
        settle(device)
        start = time.perf_counter()
        call()
        settle(device)
        spans[into].append(time.perf_counter() - start)

    def one_round():
        opt.step()
        while not opt.synced:
            opt.step()

    bare.step()
    for _ in range(repeats):
        before = opt.gradient_steps
        timed("palsgd", one_round)
        taken = opt.gradient_steps - before
        timed("same gradients", lambda taken=taken: [bare.step() for _ in range(taken)])
        timed("same steps", lambda: [bare.step() for _ in range(H)])
    total = {key: sum(values) for key, values in spans.items()}
    return {
        "sync_every": H,
        "mix_prob": P,
        "rounds": repeats,
        "realised_p": opt.ledger.realised_p,
        "bare_step_ms": total["same steps"] / repeats / H * 1e3,
        "round_over_bare_round": total["palsgd"] / total["same steps"],
        "round_over_same_gradients": total["palsgd"] / total["same gradients"],
    }


def sync_ratio(name, processes, repeats):
    """A whole sync over dist.all_reduce of one flat tensor of the same bytes, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_sync_worker, (processes, name, repeats, folder), nprocs=processes)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
    # a collective takes as long as its slowest rank
    slowest = {
        key: [max(times) for times in zip(*(f[key] for f in found), strict=True)]
        for key in found[0]
    }
    ratios = [s / b for s, b in zip(slowest["sync"], slowest["all-reduce"], strict=True)]
    return {
        "processes": processes,
        "repeats": repeats,
        "all_reduce_ms": statistics.median(slowest["all-reduce"]) * 1e3,
        "sync_ms": statistics.median(slowest["sync"]) * 1e3,
        "of_which_exchange_ms": statistics.median(slowest["exchange"]) * 1e3,
        "sync_over_all_reduce": statistics.median(ratios),
    }


def _sync_worker(rank, processes, name, repeats, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, os.cpu_count() // processes))
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    torch.manual_seed(0)
    model = with_gradients(gpt_neo_tensors(name, "cpu"))
    opt = build(model)
    opt.run_until(10**9)  # opens the local phase
    same_bytes = torch.randn(opt._core.replica.layout.size + opt._core.roll_call.size)
    times = {"all-reduce": [], "sync": [], "exchange": []}
    calls = {
        "all-reduce": lambda: dist.all_reduce(same_bytes),
        "sync": lambda: opt._drive(opt._core._sync()),
    }
    for repeat in range(repeats + 1):
        for p in model.parameters():
            p.data.add_(1e-3 * (rank + 1))
        same_bytes.normal_()
        for key, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            with torch.no_grad():
                call()
            if repeat:  # the first is a warm-up
                times[key].append(time.perf_counter() - start)
        if repeat:
            times["exchange"].append(opt.ledger.history[-1]["exchange_s"])
    Path(folder, f"{rank}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def peak_memory(name, device):
    """Peak bytes of training with PALSGD less those with the inner optimizer alone, in models."""
    context = mp.get_context("spawn")
    peaks = {}
    for who in ("bare", "palsgd"):
        ours, theirs = context.Pipe()
        child = context.Process(target=_memory_worker, args=(theirs, who, name, device))
        child.start()
        peaks[who], elements = ours.recv()
        child.join()
    return {
        "bare_mb": peaks["bare"] / 1e6,
        "extra_models": (peaks["palsgd"] - peaks["bare"]) / (4 * elements),
        "of_which": "1 anchor + 1 momentum of the outer optimizer + 1 bucket of 128 MiB",
        "bucket_models": min(1.0, 2**27 / (4 * elements)),
    }


def _memory_worker(pipe, who, name, device):
    model = with_gradients(gpt_neo_tensors(name, device))
    elements = sum(p.numel() for p in model.parameters())
    if who == "bare":
        opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    else:
        opt = build(model, palsgd.Alone(), sync_every=4)
    for _ in range(12):
        opt.step()
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send((peak, elements))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--model", choices=list(SIZES), help="default: 125m on a GPU, 8m on a CPU")
    parser.add_argument(
        "--processes", type=int, default=4, help="gloo processes of the sync figure"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    name = args.model or ("gpt-neo-125m" if args.device == "cuda" else "gpt-neo-8m")
    result = {
        "machine": machine(args.device),
        "model": name,
        "mixing": mixing(name, args.device, 5 * args.repeats),
        "round": round_overhead(name, args.device, args.repeats),
        "sync": {"model": "gpt-neo-8m"} | sync_ratio("gpt-neo-8m", args.processes, args.repeats),
        "memory": peak_memory("gpt-neo-125m", args.device),
    }
    print(f"{result['machine']['device']}, torch {torch.__version__}, tensors of {name}")
    print(report(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def report(result):
    mix, round_, sync, memory = (result[k] for k in ("mixing", "round", "sync", "memory"))
    return table(
        [
            ("mixing step", f"{mix['mixing_over_floor']:.2f} x", "memory floor"),
            ("  a Python loop instead", f"{mix['python_loop_over_floor']:.2f} x", "memory floor"),
            ("  one flat buffer instead", f"{mix['flat_buffer_over_floor']:.2f} x", "memory floor"),
            (
                f"round, H={H}, p={P}",
                f"{round_['round_over_bare_round']:.3f} x",
                f"{H} bare fused AdamW steps",
            ),
            (
                "  the same round",
                f"{round_['round_over_same_gradients']:.3f} x",
                "bare steps, as many as gradients",
            ),
            (
                f"sync, {sync['processes']} gloo processes",
                f"{sync['sync_over_all_reduce']:.2f} x",
                "bare all-reduce of the same bytes",
            ),
            ("extra peak memory", f"{memory['extra_models']:.2f}", "fp32 models (125m)"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
