"""K simulated workers on CPU: palsgd.simulate against EXO Gym, which starts a process per worker.

    git clone https://github.com/exo-explore/gym exo-gym
    pip install einops psutil scikit-learn tqdm
    python bench/exogym.py --source exo-gym --out bench/results/exogym-epyc2.json

(The `exogym` package on PyPI is an empty placeholder.) Both sides get the same first weights, the
same batches in the same order, AdamW, and for DiLoCo the same Nesterov step every 32 steps, so that
their final losses agree to rounding. A run of each side is a program of its own; sides take turns;
figures are medians. EXO Gym runs without validation and logging. Every process has one torch thread
unless --threads says otherwise, so EXO Gym can use a core per worker, palsgd one in all.

Three lines of EXO Gym are changed, in a temporary copy: the name of the loopback interface, which
is macOS's; the first DiLoCo round, which has one step more than the others; and the hand-over of
the outer model, which on a CPU shares its memory with worker 0, so that every outer gradient after
the first is zero.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from common import add_record_options, provenance, save, summary
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# EXO Gym's processes import this file too: what only one side needs is imported where it is used

H = 32
LR, OUTER_LR = 1e-3, 0.7
SIDES = ("exogym", "exact", "vectorized")
COLUMNS = ("case", "workers", "EXO Gym ms/step", "exact", "vectorized", "exact faster",
           "vectorized faster", "EXO Gym s in all", "exact", "vectorized",
           "EXO Gym loss", "exact", "vectorized")  # fmt: skip
KNOWN_COMMIT = "9fa323c26364f4437ffd23517da5d65946003963"
PATCHES = [
    ("utils.py", '"lo0"', '"lo"'),
    ("strategy/diloco.py", "local_step % self.H == 0 and local_step > 0",
     "(local_step + 1) % self.H == 0"),
    ("strategy/diloco.py", "[name].data.to(param.device)", "[name].data.clone().to(param.device)"),
]  # fmt: skip


class Examples(Dataset):
    """Indexed by whole batches: the time of a loader that stacks examples is not the question."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return self.x[indices], self.y[indices]


def as_it_is(batch):
    return batch


@dataclass
class Task:
    model: nn.Module
    train: Examples
    test: Examples
    batch: int
    rounds: int


def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Task(model, Examples(x[:1536], y[:1536]), Examples(x[1536:], y[1536:]), 32, rounds=10)


def cnn():
    """Ten random pictures under noise; the test is how well the noisy ones are remembered."""
    from simulate import small_cnn

    labels = torch.randint(10, (512,))
    pictures = 0.1 * torch.randn(10, 3, 32, 32)
    data = Examples(pictures[labels] + torch.randn(512, 3, 32, 32), labels)
    return Task(small_cnn(), data, data, 8, rounds=3)


TASKS = {"digits": digits, "cnn": cnn}
CASES = ("digits-diloco", "digits-ddp", "cnn-diloco", "cnn-ddp")


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Stamped(nn.Module):
    """EXO Gym's kind of model, batch in and loss out; rank 0 notes when each round begins."""

    def __init__(self, net, stamps):
        super().__init__()
        self.net, self.stamps, self.calls = net, stamps, 0

    def forward(self, batch):
        if self.calls % H == 0 and torch.distributed.get_rank() == 0:
            with open(self.stamps, "a") as file:
                print(time.perf_counter(), file=file)
        self.calls += 1
        return loss(self.net, batch)


def exogym_side(task, method, workers, source):
    with tempfile.TemporaryDirectory() as folder:
        patched_copy(source, Path(folder, "exogym"))
        sys.path.insert(0, folder)  # before this file, whose name is the same
        from exogym import Trainer

        stamps = Path(folder, "stamps")
        model = Stamped(task.model, stamps)
        trainer = Trainer(model, task.train, task.train, start_port=free_port() - 199, device="cpu")
        start = time.perf_counter()
        trained = trainer.fit(
            num_epochs=1, max_steps=task.rounds * H, num_nodes=workers, strategy=strategy(method),
            batch_size=task.batch, minibatch_size=task.batch, val_size=0, disable_logging=True,
            dataloader_kwargs={"collate_fn": as_it_is},
        )  # fmt: skip
        total = time.perf_counter() - start
        return trained.net, total, [float(line) for line in stamps.read_text().split()]


def strategy(method):
    from exogym.strategy import DiLoCoStrategy, OptimSpec
    from exogym.strategy.strategy import SimpleReduceStrategy

    inner = OptimSpec(torch.optim.AdamW, lr=LR)
    if method == "ddp":
        return SimpleReduceStrategy(inner)
    outer = OptimSpec(torch.optim.SGD, lr=OUTER_LR, nesterov=True, momentum=0.9)
    return DiLoCoStrategy(inner, outer, H=H)


def patched_copy(source, target):
    shutil.copytree(source / "exogym", target)
    for name, old, new in PATCHES:
        text = (target / name).read_text()
        if old not in text:
            sys.exit(f"{source}/exogym/{name} has no `{old}`: check out {KNOWN_COMMIT}")
        (target / name).write_text(text.replace(old, new))


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def palsgd_side(task, method, workers, vectorize):
    import palsgd

    stamps = []

    def stamp(_):
        stamps.append(time.perf_counter())
        return 0.0

    def batches(worker):
        sampler = DistributedSampler(task.train, workers, worker)
        return DataLoader(task.train, task.batch, sampler=sampler, collate_fn=as_it_is)

    start = time.perf_counter()
    result = palsgd.simulate(
        workers=workers, steps=task.rounds * H, model=lambda: task.model, loss=loss, data=batches,
        method=partial(optimizer, method), vectorize=vectorize,
        evaluate=stamp, evaluate_every=H if method == "ddp" else 1,
    )  # fmt: skip
    return result.model, time.perf_counter() - start, stamps


def optimizer(method, model):
    import palsgd

    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    if method == "ddp":
        return palsgd.DDP(model, inner)
    return palsgd.DiLoCo(model, inner, sync_every=H, outer=palsgd.nesterov(OUTER_LR, 0.9))


def run_side(side, case, workers, args):
    """One run: milliseconds per step without its first round, seconds in all, final loss."""
    torch.manual_seed(0)
    name, method = case.split("-")
    task = TASKS[name]()
    task.rounds, source = args.rounds or task.rounds, args.source
    if side == "exogym":
        model, total, stamps = exogym_side(task, method, workers, source)
    else:
        model, total, stamps = palsgd_side(task, method, workers, side == "vectorized")
    lengths = [late - early for early, late in pairwise(stamps[1:])]
    with torch.no_grad():
        final = loss(model, (task.test.x, task.test.y)).item()
    return {"step_ms": statistics.median(lengths) / H * 1e3, "total_s": total, "loss": final}


def run_apart(side, case, workers, args):
    """The same in a program of its own, which ends with its processes when time is up."""
    command = [sys.executable, __file__, "--side", side, "--cases", case]
    command += ["--workers", str(workers)]
    if args.source:
        command += ["--source", str(args.source.resolve())]
    if args.rounds:
        command += ["--rounds", str(args.rounds)]
    threads = 1 if side == "exogym" else args.threads
    program = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = program.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command)}: not done after {args.timeout} s")
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    if program.returncode:
        sys.exit(f"{' '.join(command)}: exit code {program.returncode}\n{errors[-2000:]}")
    return json.loads(output.splitlines()[-1])


def measure(case, workers, args):
    sides = SIDES if args.source else SIDES[1:]
    runs = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side in sides:
            runs[side].append(run_apart(side, case, workers, args))
    middle = {
        side: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for side, found in runs.items()
    }
    times_faster = {
        f"{side}_faster_{key}": statistics.median(
            theirs[key] / ours[key] for theirs, ours in zip(runs["exogym"], runs[side], strict=True)
        )
        for side in SIDES[1:]
        for key in ("step_ms", "total_s")
        if args.source
    }
    return {"case": case, "workers": workers, **middle, **times_faster, "runs": runs}


def line(row):
    cells = [row["case"], str(row["workers"])]
    cells += figures(row, "step_ms", ".2f")
    ratios = [row.get(f"{side}_faster_step_ms") for side in SIDES[1:]]
    cells += ["" if ratio is None else f"{ratio:.1f} x" for ratio in ratios]
    cells += figures(row, "total_s", ".1f") + figures(row, "loss", ".6f")
    return f"| {' | '.join(cells)} |"


def figures(row, key, form):
    return [f"{row[side][key]:{form}}" if side in row else "" for side in SIDES]


def commit(source):
    found = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
    )
    return found.stdout.strip() or "unknown"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="a checkout of EXO Gym; --tiny can do without")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES[:3])
    parser.add_argument("--rounds", type=int, help="of a run; at least three, as one is not timed")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of palsgd's process")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run of one side")
    parser.add_argument("--side", choices=SIDES, help="run this side once and print its figures")
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.cases, args.workers, args.repeats, args.rounds = ["digits-diloco"], [2], 1, 3
    elif not args.source and not args.side:
        parser.error("--source is needed, a checkout of EXO Gym; see --help")
    if args.source and not (args.source / "exogym").is_dir():
        parser.error(f"--source {args.source}: no folder exogym in it; see --help")
    return args


def main():
    args = arguments()
    cases = [(case, workers) for case in args.cases for workers in args.workers]
    if args.side:
        print(json.dumps(run_side(args.side, *cases[0], args)))
        return
    record = provenance("cpu", tiny=args.tiny) | {
        "exogym_commit": commit(args.source) if args.source else None,
        "not_installed": [] if args.source else ["exogym"],
        "repeats": args.repeats,
        "palsgd_threads": args.threads,
        "rows": [],
        "untimed": {},
    }
    print(f"{record['machine']['device']}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for case in cases:
        row = measure(*case, args)
        record["rows"].append(row)
        name = f"{row['case']}, {row['workers']} workers: loss"
        record["untimed"][name] = [row[side]["loss"] for side in SIDES if side in row]
        print(line(row), flush=True)
        save(record, args.out)
    print(summary(record))


if __name__ == "__main__":
    sys.exit(main())
