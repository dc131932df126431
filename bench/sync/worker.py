"""One worker of one launch: python worker.py '{"size": ..., "repeats": ..., "out": ...}'.

All contenders sync in turn in one process group, in an order that moves on by one with every
repeat. Seconds of every sync go to OUT/RANK.json, with what the weights have become.
"""

import gc
import json
import os
import sys
import time
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parent / "peers")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from contenders import CONTENDERS, Contender  # noqa: E402


def timed_sync(contender: Contender) -> float:
    """Moves the weights first, elsewhere on every worker."""
    with torch.no_grad():
        torch._foreach_mul_(contender.weights(), 1 + 1e-3 * (dist.get_rank() + 1))
        dist.barrier()
        start = time.perf_counter()
        contender.sync()
        return time.perf_counter() - start


def checksum(contender: Contender) -> int:
    total = 0
    for weight in contender.weights():
        total = zlib.crc32(weight.contiguous().numpy().data, total)
    return total


def farthest(contenders: dict[str, Contender]) -> dict[str, float]:
    """By how much, of the largest weight, members of a family differ from its first one."""
    found = {}
    first: dict[str, Contender] = {}
    for name, each in contenders.items():
        if not each.family:
            continue
        reference = first.setdefault(each.family, each).weights()
        pairs = list(zip(each.weights(), reference, strict=True))
        largest = max(float(y.abs().max()) for _, y in pairs)
        found[name] = max(float((x - y).abs().max()) for x, y in pairs) / largest
    return found


def measure(order: dict) -> dict:
    contenders = {name: CONTENDERS[name](order["size"]) for name in order["contenders"]}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for repeat in range(order["repeats"] + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            took = timed_sync(contenders[name])
            if repeat:  # the first opens connections
                seconds[name].append(took)
    found = {
        "seconds": seconds,
        "tensors": len(contenders[names[0]].weights()),
        "parameters": sum(w.numel() for w in contenders[names[0]].weights()),
        "bytes_sent": {name: each.bytes_sent for name, each in contenders.items()},
        "off_family": farthest(contenders),
        "checksums": {name: checksum(each) for name, each in contenders.items() if each.family},
    }
    for each in contenders.values():
        each.close()
    return found


def main() -> None:
    order = json.loads(sys.argv[1])
    sys.path.append(order["peers"])  # behind this environment's own packages
    dist.init_process_group("gloo")
    gc.disable()  # a collection in one worker would be waited for by all
    found = measure(order)
    Path(order["out"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # the last words on stderr are what is shown; peers' threads must not add to them
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # the record is written; threads of a group may abort an interpreter that ends
