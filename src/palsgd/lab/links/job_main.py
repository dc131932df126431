"""Jobs of the lab by workers behind emulated links, or beside them.

`run` starts the workers; what each of them does is `python -m palsgd.lab.links.job_main ORDER`,
where ORDER is a file with the jobs.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from palsgd.lab.forecast import work_of
from palsgd.lab.launcher import Job, work
from palsgd.lab.links.link import Link
from palsgd.lab.links.network import Network
from palsgd.lab.links.processes import run_on_loopback
from palsgd.lab.run_folder import write_json
from palsgd.lab.settings import Settings
from palsgd.progress import Whole

TIMEOUT_S = 3600.0


def run(
    jobs: list[Job], device: str, link: str | None = None, *, within_s: float | None = None
) -> None:
    """Time the jobs over the link, each worker in a namespace of its own, and train those for which
    `within_s` is enough. Without a link the workers use loopback, and let others go first."""
    order: dict[str, Any] = {
        "jobs": [vars(job) | _as_text(job) | {"link": link} for job in jobs],
        "device": device,
        "link": link,
        "within_s": within_s,
        "command": sys.argv,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        write_json(path, order)
        command = [sys.executable, "-m", "palsgd.lab.links.job_main", str(path)]
        workers, echo = jobs[0].settings.processes, not jobs[0].quiet
        if link is None:
            run_on_loopback(command, workers, timeout=TIMEOUT_S, echo=echo)
            return
        with Network(workers, Link.parse(link)) as network:
            network.run(command, timeout=TIMEOUT_S, echo=echo)


def _as_text(job: Job) -> dict[str, Any]:
    return {
        "settings": job.settings.as_dict(),
        "folder": str(job.folder.resolve()),
    }


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = order["command"]  # the user's, which config.yaml names
    # A namespace looks like a machine of its own; in truth the workers share this one.
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    jobs = [
        Job(
            **{
                **each,
                "settings": Settings.from_dict(each["settings"]),
                "folder": Path(each["folder"]),
            }
        )
        for each in order["jobs"]
    ]
    if order["link"] is None:
        os.nice(5)
    within_s = math.inf if order["within_s"] is None else order["within_s"]
    whole = Whole(runs=len(jobs), work=work_of(job.settings for job in jobs))
    work(jobs, order["device"], whole, order["link"], within_s)


if __name__ == "__main__":
    main()
