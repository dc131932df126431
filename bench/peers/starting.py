"""One process per worker, over loopback or an emulated link; what each wrote comes back."""

import json
import os
import sys
import tempfile
from pathlib import Path

from palsgd.lab.links import Link, Network
from palsgd.lab.links.processes import run_on_loopback

HERE = Path(__file__).parent
LOOPBACK = "loopback"
# one thread each: workers share the cores, and a step must cost the same wherever it runs
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "RUST_LOG": "off"}


def run_workers(script: str, order: dict, *, workers: int, rate: str, timeout: float) -> list[dict]:
    """`script` of this folder with `order` on its command line, in as many processes; each
    writes OUT/RANK.json."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / script), json.dumps(order | {"out": folder})]
        os.environ.update(SURROUNDINGS)
        if rate == LOOPBACK:
            run_on_loopback(command, workers, timeout=timeout)
        else:
            with Network(workers, Link(rate)) as network:
                network.run(command, env=SURROUNDINGS, timeout=timeout)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(workers)]
