"""Simulated workers on one device: the vectorized engine against the loop and the limit.

    python bench/simulate.py --out bench/results/simulate-h200.json
    python bench/simulate.py --part cnn --device cpu --workers 4 8

Three parts, each with its ratios taken in one run. Times are per gradient step of all workers, over
whole rounds, mixing and syncs included.

cnn      the paper's small CNN (conv5x5 3-32, conv5x5 32-64, fc 4096-1024-10), PALSGD over momentum
         SGD, H = 32, p = 0.25, for several K: the exact engine (workers one after another), the
         vectorized one as it is, compiled, and with CUDA graphs; and the limit: the joint batch
         forward and backward through one model, plus the stacked state moved once.
gpt-neo  GPT-Neo-8M, bf16, PALSGD over AdamW: the exact engine with Hugging Face's model and with
         ours, the vectorized one as it is and compiled.
many     R runs of the small CNN with 8 workers in one program, against one run.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import add_record_options, provenance, save, seconds, settle, summary
from torch import nn

import palsgd
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.simulator.batches import Batches
from palsgd.simulator.exact import Exact, seeded
from palsgd.simulator.history import Recorder
from palsgd.simulator.run import Run
from palsgd.simulator.stacking_checks import fastest_convolutions
from palsgd.simulator.vectorized import Vectorized

H, P = 32, 0.25
GPT_NEO = dict(words=50257, hidden=128, layers=8, heads=8)
TINY_GPT_NEO = dict(words=64, hidden=16, layers=2, heads=2)


@dataclass
class Problem:
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    method: Callable[[nn.Module], palsgd.LocalOptimizer]
    batch: Callable[[torch.Generator], Any]
    device: str

    def batches(self, worker):
        generator = torch.Generator(self.device).manual_seed(worker)
        return [self.batch(generator) for _ in range(4)]


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip


def tiny_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 10)
    )  # fmt: skip


def image_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def momentum_sgd(model, lr=1e-2):
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return palsgd.PALSGD(model, inner, sync_every=H, mix_prob=P, mix_rate=1.0)


def images(size, generator):
    device = generator.device
    return (
        torch.randn(size, 3, 32, 32, generator=generator, device=device),
        torch.randint(10, (size,), generator=generator, device=device),
    )


def hugging_face_model(words=50257, hidden=128, layers=8, heads=8):
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=words, max_position_embeddings=300, hidden_size=hidden, num_layers=layers,
        num_heads=heads, attention_types=[[["global", "local"], layers // 2]],
        bos_token_id=words - 1, eos_token_id=words - 1,
        resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return GPTNeoForCausalLM(config)


def hugging_face_loss(device, model, batch):
    with torch.autocast(device, torch.bfloat16):
        logits = model(batch[0]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def own_model(words, hidden, layers, heads):
    return GPTNeo(vocab=words, positions=300, hidden=hidden, heads=heads, layers=layers)


def own_loss(device, model, batch):
    with torch.autocast(device, torch.bfloat16):
        return model(*batch)


def adamw(model):
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return palsgd.PALSGD(model, inner, sync_every=8, mix_prob=0.1, mix_rate=16.0, max_norm=1.0)


def tokens(size, length, words, generator):
    shape = (2, size, length)
    return torch.randint(words, shape, generator=generator, device=generator.device).unbind()


def vectorized_step(problem, workers, compiled=False, rounds=3, runs=1):
    """Seconds per gradient step of all workers of all runs, and the peak of memory."""
    torch.manual_seed(0)
    crew = []
    for _ in range(runs):
        recorder = Recorder(None, 1, steps=10**9)
        model = problem.model().to(problem.device)
        sources = [Batches(problem.batches, k) for k in range(workers)]
        crew.append(Run(model, problem.loss, sources, problem.method, recorder))
    every = crew[0].opt.sync_every
    engine = Vectorized(crew, steps=2 * every)
    engine.choose_program(compile=compiled, against_loop=False)
    engine.advance()  # compiles, chooses algorithms
    if problem.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, total = crew[0].ledgers[0].gradient_steps, 0.0
    for _ in range(rounds):
        engine.steps += every
        settle(problem.device)
        start = time.perf_counter()
        engine.advance()
        settle(problem.device)
        total += time.perf_counter() - start
    taken = crew[0].ledgers[0].gradient_steps - before
    peak = torch.cuda.max_memory_allocated() if problem.device == "cuda" else 0
    return total / taken, peak


def exact_step(problem, workers):
    """Seconds per gradient step of all workers, one after another, over one round."""
    torch.manual_seed(0)
    data = {k: problem.batches(k) for k in range(workers)}

    def run(steps):
        engine = Exact(
            model=problem.model().to(problem.device), steps=steps, loss=problem.loss,
            method=problem.method,
            rngs=[seeded(k, torch.device(problem.device)) for k in range(workers)],
            batches=[Batches(data.__getitem__, k) for k in range(workers)],
            recorder=Recorder(None, 1, steps=steps),
        )  # fmt: skip
        opts = [worker.opt for worker in engine.workers]
        settle(problem.device)
        start = time.perf_counter()
        engine.advance()
        settle(problem.device)
        taken = time.perf_counter() - start
        return taken, opts[0].ledger.gradient_steps, opts[0].sync_every

    _, _, every = run(1)
    (short, few, _), (long, many, _) = run(every), run(2 * every)
    return (long - short) / (many - few)


def limit(problem, workers, repeats=20):
    """The joint batch through one model, and the time to move the stacked state once."""
    model = problem.model().to(problem.device)
    joint = [
        torch.cat(parts)
        for parts in zip(*(problem.batches(k)[0] for k in range(workers)), strict=True)
    ]
    params = list(model.parameters())
    elements = workers * sum(p.numel() for p in params)
    # SGD with momentum reads weights, momenta and gradients and writes weights and momenta
    source, target = torch.zeros(2, elements, device=problem.device)
    with fastest_convolutions():
        one = seconds(
            lambda: torch.autograd.grad(problem.loss(model, joint), params), problem.device, repeats
        )
    copy = seconds(lambda: target.copy_(source), problem.device, repeats)
    return one, 2.5 * copy


def header(*columns):
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)


def line(*cells):
    print(f"| {' | '.join(c if isinstance(c, str) else f'{c:.2f}' for c in cells)} |", flush=True)


def cnn_problem(args):
    model = tiny_cnn if args.tiny else small_cnn
    return Problem(model, image_loss, momentum_sgd, partial(images, args.batch), args.device)


def measure_cnn(args):
    problem = cnn_problem(args)
    header("workers", "loop ms", "vectorized ms", "compiled ms", "CUDA graphs ms",
           "joint + state ms", "x loop", "x limit", "GB as it is", "GB compiled")  # fmt: skip
    modes = {"vectorized": False, "compiled": True, "graphs": "reduce-overhead"}
    if args.device == "cpu" or args.no_compile:
        modes = (
            {"vectorized": False} if args.no_compile else {"vectorized": False, "compiled": True}
        )
    for workers in args.workers:
        one, moved = limit(problem, workers)
        row = {
            "workers": workers,
            "batch": args.batch,
            "loop_ms": exact_step(problem, workers) * 1e3,
        }
        for name, mode in modes.items():
            torch.compiler.reset()
            step, peak = vectorized_step(problem, workers, mode, args.rounds)
            row |= {f"{name}_ms": step * 1e3, f"{name}_gb": peak / 1e9}
        best = min(row[f"{name}_ms"] for name in modes)
        row |= {"joint_batch_ms": one * 1e3, "state_moved_once_ms": moved * 1e3,
                "faster_than_loop": row["loop_ms"] / best,
                "over_limit": best / (one + moved) / 1e3}  # fmt: skip
        line(
            str(workers), row["loop_ms"], row["vectorized_ms"], row.get("compiled_ms", "-"),
            row.get("graphs_ms", "-"), f"{one * 1e3:.2f} + {moved * 1e3:.2f}",
            row["faster_than_loop"], row["over_limit"], row["vectorized_gb"],
            row.get("compiled_gb", "-"),
        )  # fmt: skip
        yield row


def measure_gpt_neo(args):
    workers, size, length = args.gpt_neo
    header("GPT-Neo-8M", "ms", "M tokens/s", "x Hugging Face loop", "GB")
    model = TINY_GPT_NEO if args.tiny else GPT_NEO
    batch = partial(tokens, size, length, model["words"])
    theirs = Problem(
        partial(hugging_face_model, **model),
        partial(hugging_face_loss, args.device),
        adamw,
        batch,
        args.device,
    )
    ours = Problem(
        partial(own_model, **model), partial(own_loss, args.device), adamw, batch, args.device
    )
    cases = {
        "loop, Hugging Face's model": lambda: (exact_step(theirs, workers), 0),
        "loop, our model": lambda: (exact_step(ours, workers), 0),
        "vectorized": lambda: vectorized_step(ours, workers, False, args.rounds),
        "vectorized, compiled": lambda: vectorized_step(ours, workers, True, args.rounds),
    }
    reference = None
    for name, measure in cases.items():
        if "compiled" in name and args.no_compile:
            continue
        torch.compiler.reset()
        step, peak = measure()
        reference = reference or step
        row = {"case": name, "workers": workers, "batch": size, "tokens": length, "ms": step * 1e3,
               "tokens_per_s": workers * size * length / step, "faster_than_loop": reference / step,
               "gb": peak / 1e9}  # fmt: skip
        line(name, row["ms"], row["tokens_per_s"] / 1e6, row["faster_than_loop"], row["gb"])
        yield row


def measure_many(args):
    problem = cnn_problem(args)
    header("runs of 8 workers", "ms a step", "x one run", "GB")
    one = None
    for runs in args.runs:
        step, peak = vectorized_step(problem, 8, False, args.rounds, runs)
        one = one or step
        row = {"runs": runs, "workers": 8, "ms": step * 1e3, "over_one_run": step / one,
               "gb": peak / 1e9}  # fmt: skip
        line(str(runs), row["ms"], row["over_one_run"], row["gb"])
        yield row


PARTS = {"cnn": measure_cnn, "gpt-neo": measure_gpt_neo, "many": measure_many}


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=int, default=32, help="images per worker")
    parser.add_argument(
        "--gpt-neo", type=int, nargs=3, default=[8, 64, 256], metavar=("K", "ROWS", "TOKENS")
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.workers, args.runs, args.batch, args.gpt_neo = [2], [1], 1, [2, 1, 8]
        args.rounds, args.no_compile, args.device = 1, True, "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    return args


def main():
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    record = provenance(args.device, tiny=args.tiny) | {"untimed": untimed()}
    print(f"{record['machine']['device']}, torch {torch.__version__}, TF32")
    for part in args.part:
        rows = record[part] = []
        for row in PARTS[part](args):
            rows.append(row)
            save(record, args.out)
    print(summary(record))


def untimed():
    """Both engines train a tiny CNN of two workers for a round, on a CPU, to the same weights."""
    problem = Problem(tiny_cnn, image_loss, momentum_sgd, partial(images, 4), "cpu")
    exact, stacked = (engine_end(problem, vectorize) for vectorize in (False, True))
    pairs = list(zip(exact.model.parameters(), stacked.model.parameters(), strict=True))
    return {
        "parameters": sum(x.numel() for x, _ in pairs),
        "gradient steps": [exact.ledger.gradient_steps, stacked.ledger.gradient_steps],
        "engines agree": all(torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in pairs),
    }


def engine_end(problem, vectorize):
    return palsgd.simulate(
        workers=2, steps=H, model=problem.model, loss=problem.loss, data=problem.batches,
        method=problem.method, vectorize=vectorize, progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
