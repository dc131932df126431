"""Ray Train starts the workers, on this machine or on the cluster that `ray` is connected to:

    python examples/with_ray.py runs/ray

The process group that Ray makes is all that palsgd needs. Started again, it goes on from its last
save; so do workers that Ray has started again after a loss. The folder must be on a disk that all
workers see.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn

import palsgd


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """In each worker."""
    device, worker = get_device(), get_context().get_world_rank()
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1 + worker)  # each worker has data of its own

    def batches():
        while True:
            labels = torch.randint(10, (32,), generator=random)
            points = centres[labels] + 1.5 * torch.randn(32, 64, generator=random)
            yield points.to(device), labels.to(device)

    torch.manual_seed(0)  # every worker starts from the same weights
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = palsgd.PALSGD(model, inner, sync_every=32)  # prepare_model() would average every gradient
    if palsgd.checkpoint.find(settings["folder"]):
        palsgd.checkpoint.load(settings["folder"], model, opt)
    began, losses = opt.clock, []
    for inputs, labels in palsgd.until(batches(), opt, steps=settings["steps"]):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if opt.synced:
            palsgd.checkpoint.save(settings["folder"], model, opt)
    sent = opt.ledger.bytes_sent / opt.clock
    return {"clocks": (began, opt.clock), "losses": losses, "rounds": opt.rounds, "sent": sent}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default="runs/ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()

    ray.init(log_to_driver=False)
    gpus = ray.cluster_resources().get("GPU", 0) >= args.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(args.folder.resolve() / "saves"), "steps": args.steps},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=gpus),
        run_config=RunConfig(
            storage_path=str(args.folder.resolve() / "ray"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    found = trainer.fit().return_value  # worker 0's
    began, ended = found["clocks"]
    print(f"clock {began} to {ended}, {found['rounds']} syncs, {found['sent']:.0f} bytes per step")
    if found["losses"]:
        print(f"loss {found['losses'][0]:.3f} -> {found['losses'][-1]:.3f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
