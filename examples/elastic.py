"""Training that goes on when a worker dies, and takes it in again when it is back:

    python examples/elastic.py

It holds the store in which workers meet, starts three workers, kills one and has another process
take its place.
"""

import os
import subprocess
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

from palsgd import PALSGD, ElasticTransport, events, until

WORKERS, STEPS = 3, 1000


def train(*, stands_by: bool) -> None:
    torch.manual_seed(0)  # every worker starts from the same weights
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = torch.randperm(len(labels)).split([1437, 360])

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stands_by:
        stand_by()
    transport = ElasticTransport(min_workers=2)
    opt = PALSGD(model, inner, sync_every=25, transport=transport)
    tell(transport, opt)

    own = train[transport.worker :: WORKERS]  # a worker that comes back has the same examples
    loader = DataLoader(TensorDataset(images[own], labels[own]), batch_size=32, shuffle=True)
    for batch, target in until(loader, opt, steps=STEPS):
        time.sleep(0.01)  # a larger model would take so long
        nn.functional.cross_entropy(model(batch), target).backward()
        opt.step()
        opt.zero_grad()

    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    say(f"worker {transport.worker} ends at clock {opt.clock}: accuracy {accuracy:.3f}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # at once, as several processes write to one terminal
    sys.stdout.flush()


def tell(transport: ElasticTransport, opt: PALSGD) -> None:
    """Have what happens printed by one worker, the highest."""
    say(f"worker {transport.worker} of {transport.workers} begins at clock {opt.clock}")

    def left(event: events.Left) -> None:
        if event.worker == max(transport.members):
            say(f"clock {event.clock}: without {event.numbers}, {event.workers} workers go on")

    def joined(event: events.Joined) -> None:
        if event.worker == max(transport.members):
            say(f"clock {event.clock}: with {event.numbers}, there are {event.workers} workers")

    opt.on(events.Left, left)
    opt.on(events.Joined, joined)


def start(number: int, store: TCPStore, role: str = "worker") -> subprocess.Popen[str]:
    place = {"RANK": number, "WORLD_SIZE": WORKERS, "MASTER_PORT": store.port}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, __file__, role]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)


def main() -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spare = start(0, store, "spare")  # it imports torch, which takes seconds, and waits
    wait_for(store, "spare")
    workers = [start(number, store) for number in range(WORKERS)]
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


if __name__ == "__main__":
    if sys.argv[1:]:
        train(stands_by=sys.argv[1] == "spare")
    else:
        sys.exit(main())
