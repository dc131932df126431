"""Jobs of the lab by workers behind emulated links.

`run` starts the workers; what each of them does is `python -m palsgd.lab.links.job_main ORDER`,
where ORDER is a file with the jobs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from palsgd.lab.forecast import work_of
from palsgd.lab.launcher import Job, work
from palsgd.lab.links.link import Link
from palsgd.lab.links.network import Network
from palsgd.lab.run_folder import write_json
from palsgd.lab.settings import Settings
from palsgd.progress import Whole

TIMEOUT_S = 3600.0


def run(jobs: list[Job], device: str, link: str) -> None:
    """Time and run the jobs over the link, each worker in a namespace of its own."""
    order: dict[str, Any] = {
        "jobs": [vars(job) | _as_text(job) | {"link": link} for job in jobs],
        "device": device,
        "link": link,
        "command": sys.argv,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        write_json(path, order)
        command = [sys.executable, "-m", "palsgd.lab.links.job_main", str(path)]
        workers, echo = jobs[0].settings.processes, not jobs[0].quiet
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
    whole = Whole(runs=len(jobs), work=work_of(job.settings for job in jobs))
    work(jobs, order["device"], whole, order["link"])


if __name__ == "__main__":
    main()
