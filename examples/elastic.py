"""Training that goes on when a worker dies, and takes it in again when it is back:

    python examples/elastic.py

It holds the store in which workers meet, starts three workers, kills one and has another process
take its place.
"""

import argparse
import os
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

from palsgd import PALSGD, ElasticTransport, events, process_groups, until

WORKERS = 3


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres, and the centre of each: the same on all workers."""
    random = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(10, 64, generator=random), torch.arange(count) % 10
    return centres[labels] + 1.5 * torch.randn(count, 64, generator=random), labels


def train(steps: int, *, stands_by: bool) -> None:
    device, _ = process_groups.device_and_backend()  # the transport sends over gloo
    inputs, labels = (each.to(device) for each in clouds(2000))
    torch.manual_seed(0)  # every worker starts from the same weights
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stands_by:
        stand_by()
    transport = ElasticTransport(min_workers=2)
    opt = PALSGD(model, inner, sync_every=25, transport=transport)
    tell(transport, opt)

    # A worker that comes back has the same examples.
    own = slice(400 + transport.worker, None, WORKERS)
    loader = DataLoader(TensorDataset(inputs[own], labels[own]), batch_size=32, shuffle=True)
    for batch, target in until(loader, opt, steps=steps):
        time.sleep(0.01)  # a larger model would take so long
        nn.functional.cross_entropy(model(batch), target).backward()
        opt.step()
        opt.zero_grad()

    accuracy = (model(inputs[:400]).argmax(1) == labels[:400]).float().mean()
    say(f"worker {transport.worker} ends at clock {opt.clock}: accuracy {accuracy:.3f}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # at once, as several processes write to one terminal
    sys.stdout.flush()


def tell(transport: ElasticTransport, opt: PALSGD) -> None:
    """Have what happens printed by one worker, the highest of those who were there before."""
    say(f"worker {transport.worker} of {transport.workers} begins at clock {opt.clock}")

    def left(event: events.Left) -> None:
        if event.worker == max(transport.members):
            say(f"clock {event.clock}: without {event.numbers}, {event.workers} workers go on")

    def joined(event: events.Joined) -> None:
        if event.worker == max(set(transport.members) - set(event.numbers)):
            say(f"clock {event.clock}: with {event.numbers}, there are {event.workers} workers")

    opt.on(events.Left, left)
    opt.on(events.Joined, joined)


def start(number: int, store: TCPStore, steps: int, role: str) -> subprocess.Popen[str]:
    place = {"RANK": number, "WORLD_SIZE": WORKERS, "MASTER_PORT": store.port, "LOCAL_RANK": number}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, __file__, "--steps", str(steps), "--role", role]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)


def drive(steps: int) -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spare = start(0, store, steps, "spare")  # it imports torch, which takes seconds, and waits
    wait_for(store, "spare")
    workers = [start(number, store, steps, "worker") for number in range(WORKERS)]
    wait_for(store, "palsgd 0 0/latest")  # the workers have met
    time.sleep(1.0)
    say("worker 0 is killed, and another process takes its place")
    workers[0].kill()
    spare.communicate("go")
    return max(worker.wait() for worker in [*workers[1:], spare])


def wait_for(store: TCPStore, key: str) -> None:
    while not store.check([key]):
        time.sleep(0.05)


def stand_by() -> None:
    """Wait until somebody has died."""
    TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).set("spare", "is there")
    sys.stdin.readline()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--role", choices=("driver", "worker", "spare"), default="driver")
    args = parser.parse_args()
    if args.role == "driver":
        sys.exit(drive(args.steps))
    train(args.steps, stands_by=args.role == "spare")


if __name__ == "__main__":
    main()
