"""What PALSGD adds to a training step, as ratios taken in one run.

    python bench/step.py                       # CPU, or the GPU where there is one
    python bench/step.py --device cpu --model gpt-neo-8m --out step.json

Four questions: step() without a sync over the bare inner step, in CPU time of one thread; a mixing
step over its memory floor; a round over the bare inner optimizer, without the network; peak memory
over the bare inner optimizer. What a sync costs is bench/sync.py's to say.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.multiprocessing as mp
from common import (
    SIZES,
    add_record_options,
    gpt_neo_tensors,
    interleaved,
    mixing_step,
    provenance,
    save,
    settle,
    summary,
    table,
)
from torch import nn

import palsgd

H, P, LR, ETA = 64, 0.1, 1e-3, 16.0
IDLE_LR, BLOCK = 1e-4, 200  # steps of a block, which are timed together
LAUNCHES = 5


def build(model, transport=None, sync_every=H):
    inner = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return palsgd.PALSGD(
        model, inner, sync_every=sync_every, mix_prob=P, mix_rate=ETA, transport=transport
    )


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


def idle_step(launches, blocks):
    """step() without a sync over the bare SGD step of an 8 x 8 Linear: medians over processes.

    A process of its own for each launch, as where its objects happen to lie in memory changes the
    figure by more than its blocks differ among themselves.
    """
    command = [sys.executable, __file__, "--launch", str(blocks)]
    found = []
    for _ in range(launches):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        found.append(json.loads(done.stdout))
    ratios = sorted(each["step_us"] / each["bare_us"] for each in found)
    return {
        "launches": found,
        "bare_us": statistics.median(each["bare_us"] for each in found),
        "step_us": statistics.median(each["step_us"] for each in found),
        "step_over_bare": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }


def launch(blocks):
    """Microseconds of this thread's CPU time for a step of either kind, blocks of them in turn."""
    torch.set_num_threads(1)
    bare_model, model = small_model(), small_model()
    bare = torch.optim.SGD(bare_model.parameters(), lr=IDLE_LR)
    opt = palsgd.DiLoCo(
        model,
        torch.optim.SGD(model.parameters(), lr=IDLE_LR),
        sync_every=10**6,
        transport=palsgd.Alone(),
    )
    opt.step(), bare.step()  # the first one opens the local phase
    times = {"bare_us": [], "step_us": []}
    for _ in range(blocks):
        for name, step in (("bare_us", bare.step), ("step_us", opt.step)):
            start = time.thread_time()
            for _ in range(BLOCK):
                step()
            times[name].append((time.thread_time() - start) / BLOCK * 1e6)
    return {name: statistics.median(values) for name, values in times.items()} | {
        "steps": opt.clock,
        "syncs": opt.ledger.syncs,
        "equal_weights": all(
            torch.equal(x, y)
            for x, y in zip(model.parameters(), bare_model.parameters(), strict=True)
        ),
    }


def small_model():
    torch.manual_seed(0)
    return with_gradients(nn.Linear(8, 8))


def mixing(name, device, repeats):
    """One mixing step over reading x and the anchor and writing x at the copy bandwidth."""
    local = [p.detach() for p in gpt_neo_tensors(name, device)]
    anchor = [p.detach() for p in gpt_neo_tensors(name, device)]
    elements = sum(t.numel() for t in local)
    flat, flat_anchor = torch.randn(elements, device=device), torch.randn(elements, device=device)
    source, target = torch.randn(2, elements, device=device)
    mix = mixing_step()

    def python_loop():
        for x, a in zip(local, anchor, strict=True):
            x.sub_((x - a) * 0.01)

    times = interleaved(
        {
            "copy": lambda: target.copy_(source),
            "mixing": lambda: mix(local, anchor, 0.01),
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
        "gradient_steps": opt.gradient_steps,
        "syncs": opt.ledger.syncs,
        "bare_step_ms": total["same steps"] / repeats / H * 1e3,
        "round_over_bare_round": total["palsgd"] / total["same steps"],
        "round_over_same_gradients": total["palsgd"] / total["same gradients"],
    }


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
        "elements": elements,
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


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--model", choices=list(SIZES), help="default: 125m on a GPU, 8m on a CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="of the step without a sync")
    parser.add_argument("--launch", type=int, metavar="BLOCKS", help=argparse.SUPPRESS)
    add_record_options(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if args.tiny:
        args.model, args.repeats = "tiny", 2
    args.model = args.model or ("gpt-neo-125m" if args.device == "cuda" else "gpt-neo-8m")
    return args


def main():
    args = arguments()
    if args.launch:
        print(json.dumps(launch(args.launch)))
        return
    record = provenance(args.device, tiny=args.tiny) | {
        "model": args.model,
        "idle": idle_step(1 if args.tiny else args.launches, 2 if args.tiny else 100),
        "mixing": mixing(args.model, args.device, 5 * args.repeats),
        "round": round_overhead(args.model, args.device, args.repeats),
        "memory": peak_memory("tiny" if args.tiny else "gpt-neo-125m", args.device),
    }
    record["untimed"] = untimed(record)
    print(f"{record['machine']['device']}, torch {torch.__version__}, tensors of {args.model}")
    print(report(record))
    print(summary(record))
    save(record, args.out)


def untimed(record):
    launches = record["idle"]["launches"]
    return {
        "elements": record["mixing"]["elements"],
        "idle steps": launches[0]["steps"],
        "idle syncs": launches[0]["syncs"],
        "idle weights equal the bare ones": all(each["equal_weights"] for each in launches),
        "gradient steps of the rounds": record["round"]["gradient_steps"],
        "syncs of the rounds": record["round"]["syncs"],
    }


def report(record):
    idle, mix, round_, memory = (record[k] for k in ("idle", "mixing", "round", "memory"))
    return table(
        [
            (
                "step() without a sync",
                f"{idle['step_over_bare']:.2f} x ({idle['least']:.2f} to {idle['most']:.2f})",
                f"bare SGD step of an 8 x 8 Linear ({idle['bare_us']:.1f} us)",
            ),
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
                "extra peak memory",
                f"{memory['extra_models']:.2f}",
                f"fp32 models of {memory['elements']:,}",
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
