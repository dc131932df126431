"""What each setting costs in memory and in a round, beyond the bare inner optimizer.

    python bench/memory.py                     # CPU, or the GPU where there is one
    python bench/memory.py --device cuda --model gpt-neo-125m --out memory.json

Every setting runs in two fresh gloo processes on the same device, with tensors in the shapes of a
GPT-Neo model and fused AdamW inside. Memory is in fp32 models: alive between two steps, and at the
peak of the rounds, less what the inner optimizer alone has at the same moments. On a GPU it is that
of torch's allocator, on a CPU the resident memory of the process. A round is timed over as many
steps of the inner optimizer alone. The weights of runs with and without offload are compared.
"""

import argparse
import hashlib
import os
import resource
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from common import (
    SIZES,
    add_record_options,
    in_two_processes,
    join_the_other,
    provenance,
    save,
    settle,
    summary,
    with_gradients,
)

import palsgd

H, LR, ROUNDS = 8, 1e-3, 4
BARE = "inner optimizer alone"
SETTINGS = {
    "DiLoCo": {},
    "fragments=4": {"fragments": 4},
    "delay=2": {"delay": 2},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "int4, delay=2": {"compress": "int4", "delay": 2},
    "topk:0.03, delay=2": {"compress": "topk:0.03", "delay": 2},
    "fragments=4, delay=1, int8": {"fragments": 4, "delay": 1, "compress": "int8"},
}
OFFLOADED = ("DiLoCo", "delay=2", "int8", "fragments=4, delay=1, int8")


def settings(*, tiny):
    """Those of SETTINGS, and some of them with offload."""
    names = OFFLOADED if not tiny else OFFLOADED[2:]
    away = {f"{name}, offload": SETTINGS[name] | {"offload": True} for name in names}
    return {name: SETTINGS[name] for name in (names if tiny else SETTINGS)} | away


def measure(name, given, args):
    """What both processes of a setting found."""
    # A forked process has torch already. CUDA cannot be used in one.
    start = "spawn" if args.device == "cuda" else "fork"
    with tempfile.TemporaryDirectory() as folder:
        return in_two_processes(_worker, folder, name, given, args.model, args.device, start=start)


def _worker(pipe, rank, folder, name, given, model_name, device):
    join_the_other(rank, folder)
    model = with_gradients(model_name, device, rank=rank)
    inner = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    opt = inner if name == BARE else palsgd.DiLoCo(model, inner, sync_every=H, **given)
    elements = sum(p.numel() for p in model.parameters())
    pipe.send(_rounds(opt, model, device) | {"elements": elements})
    dist.barrier()
    os._exit(0)  # threads of exchanges in the background may still wait for the next one


def _rounds(opt, model, device):
    """Two rounds whose memory is measured, then rounds whose seconds are."""
    opt.step()
    for _ in range(2 * H):
        opt.step()
    alive, peak = alive_bytes(device), peak_bytes(device)
    spans = []
    for _ in range(ROUNDS):
        settle(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(H):
            opt.step()
        settle(device)
        spans.append(time.perf_counter() - start)
    return {
        "alive": alive,
        "peak": peak,
        "round_s": statistics.median(spans),
        "weights": weights(model),
        "syncs": getattr(getattr(opt, "ledger", None), "syncs", 0),
    }


def alive_bytes(device):
    if device == "cuda":
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def weights(model):
    """A hash of the local model."""
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(p.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def row(name, found, bare):
    """The larger figures of the two processes, over those of the inner optimizer alone."""
    model = 4 * found[0]["elements"]

    def over(what):
        return max(mine[what] - theirs[what] for mine, theirs in zip(found, bare, strict=True))

    round_s = max(each["round_s"] for each in found)
    return {
        "setting": name,
        "alive_models": over("alive") / model,
        "peak_models": over("peak") / model,
        "round_ms": round_s * 1e3,
        "round_over_bare": round_s / max(each["round_s"] for each in bare),
        "weights": [each["weights"] for each in found],
        "syncs": found[0]["syncs"],
    }


def untimed(rows, elements):
    by_name = {each["setting"]: each for each in rows}
    pairs = [(name, f"{name}, offload") for name in OFFLOADED if name in by_name]
    return {
        "elements": elements,
        "syncs": {each["setting"]: each["syncs"] for each in rows},
        "offload gives the same weights": all(
            by_name[kept]["weights"] == by_name[away]["weights"] for kept, away in pairs
        ),
    }


def report(record):
    lines = [f"{'setting':34} {'alive':>7} {'peak':>7} {'round':>8}"]
    for each in record["rows"]:
        models = f"{each['alive_models']:7.2f} {each['peak_models']:7.2f}"
        lines.append(f"{each['setting']:34} {models} {each['round_over_bare']:7.2f}x")
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--model", choices=list(SIZES), help="default: 125m on a GPU, 33m on a CPU")
    add_record_options(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if args.tiny:
        args.model = "tiny"
    args.model = args.model or ("gpt-neo-125m" if args.device == "cuda" else "gpt-neo-33m")
    return args


def main():
    args = arguments()
    record = provenance(args.device, tiny=args.tiny) | {
        "model": args.model,
        "sync_every": H,
        "rows": [],
    }
    bare = measure(BARE, {}, args)
    record["bare"] = {"round_ms": max(each["round_s"] for each in bare) * 1e3}
    record["bare"]["peak_mb"] = max(each["peak"] for each in bare) / 1e6
    for name, given in settings(tiny=args.tiny).items():
        record["rows"].append(row(name, measure(name, given, args), bare))
        save(record, args.out)
    record["elements"] = bare[0]["elements"]
    record["untimed"] = untimed(record["rows"], record["elements"])
    print(f"{record['machine']['device']}, torch {torch.__version__}, tensors of {args.model}")
    print(report(record))
    print(summary(record))
    save(record, args.out)


if __name__ == "__main__":
    sys.exit(main())
