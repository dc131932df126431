"""docs/operations.md and the files it names: what they call exists."""

import inspect
import re
import subprocess
import sys

import pytest
import yaml
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

import palsgd
from palsgd.lab.settings import TIMEOUT_S
from palsgd.lab.yaml_files import read_yaml
from support.commands import palsgd as command
from support.pages import page, section
from support.patience import patient
from support.places import ROOT

SLURM, KUBERNETES = ROOT / "examples" / "slurm.sh", ROOT / "examples" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def torchrun_flags() -> set[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=True)
    return set(re.findall(r"--[a-z][\w-]+", done.stdout))


@pytest.fixture(scope="module")
def train_flags() -> set[str]:
    return set(re.findall(r"--[a-z][\w-]+", command("train", "--help").out))


@pytest.fixture(scope="module")
def manifests(tmp_path_factory) -> dict[str, dict]:
    """The documents of the file by their kind, each read as the project reads YAML."""
    found = {}
    for number, text in enumerate(KUBERNETES.read_text().split("\n---\n")):
        path = tmp_path_factory.mktemp("kubernetes") / f"{number}.yaml"
        path.write_text(text)
        document = read_yaml(path, fix="mend it")
        found[document["kind"]] = document
    return found


def flags(words: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", words))


def parts(command: str) -> tuple[set[str], set[str]]:
    """The flags of torchrun, and those of palsgd."""
    launcher, program = re.split(r"-m\s+palsgd\s+train", command)
    return flags(launcher), flags(program)


def commands() -> dict[str, str]:
    """Every torchrun command of the page and of the files, with nothing else around it."""
    blocks = re.findall(r"```(?:console)?\n(.*?)```", page("docs/operations.md"), flags=re.DOTALL)
    found = {f"block {n}": text for n, text in enumerate(blocks) if "-m palsgd train" in text}
    script = SLURM.read_text()
    found["slurm.sh"] = script[script.index("torchrun") : script.index("code=$?")]
    (pod,) = yaml.safe_load_all(KUBERNETES.read_text().split("\n---\n")[1])
    container = pod["spec"]["template"]["spec"]["containers"][0]
    found["kubernetes.yaml"] = " ".join(container["command"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(commands()))
def test_flags_of_a_command_are_those_of_torchrun_and_of_palsgd(name, torchrun_flags, train_flags):
    launcher, program = parts(commands()[name])
    assert launcher
    assert launcher - torchrun_flags == set()
    assert "--resume" in program
    assert program - train_flags == set()


def test_the_slurm_script_is_valid_and_sees_every_failure():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    assert text.startswith("#!/bin/bash\n")
    directives = re.findall(r"^#SBATCH (.*)$", text, flags=re.MULTILINE)
    assert "--requeue" in directives
    # Slurm ends to read directives at the first command.
    assert text.rindex("#SBATCH") < text.index("\nset ")


def test_pods_of_the_job_find_each_other_by_the_names_that_the_service_gives_them(manifests):
    service, job = manifests["Service"], manifests["Job"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint={first}:{port}" in container["command"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


def test_the_job_has_as_many_pods_as_the_run_has_workers(manifests):
    spec = manifests["Job"]["spec"]
    words = spec["template"]["spec"]["containers"][0]["command"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 3
    assert {"--nnodes=3", "--workers=3"} <= set(words)


def test_timeouts_of_the_job_stand_in_the_order_of_the_page(manifests):
    pod = manifests["Job"]["spec"]["template"]["spec"]
    given = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    shutdown = int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    default = inspect.signature(palsgd.leave_on_sigterm).parameters["within_s"].default
    assert default < shutdown < pod["terminationGracePeriodSeconds"]
    table = section("docs/operations.md", "What waits for how long")
    assert f"| a worker that received SIGTERM | {default:g} s |" in table
    assert f"| an exchange | {TIMEOUT_S / 60:g} min in the lab" in table


def test_the_page_says_how_long_torchrun_waits_for_machines_to_join():
    waits = RendezvousTimeout().join.total_seconds() / 60
    assert f"for all machines to join | {waits:g} min |" in page("docs/operations.md")
