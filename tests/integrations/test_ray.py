"""The lines about Ray Train on the page for operators, run by a Ray of two workers here."""

import os

import pytest

from support.pages import code_blocks, executed, section
from support.places import SOURCE

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    variables = {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False,
        runtime_env={"env_vars": variables}, _temp_dir=str(tmp_path_factory.mktemp("r")),
    )  # fmt: skip
    yield
    ray.shutdown()


def loader(worker):
    import torch

    numbers = torch.Generator().manual_seed(worker)
    return [(torch.randn(4, 8, generator=numbers), torch.randn(4, 1, generator=numbers))] * 5


def test_the_lines_for_ray_train_locally_and_go_on_after_a_save(two_workers, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    (code,) = code_blocks(section("docs/operations.md", "Ray"))
    train = executed("docs/operations.md", code)["train_under_ray"]
    for steps in (100, 192):
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(tmp_path / "s"), "loader": loader, "steps": steps},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray"), name=str(steps)),
        )
        metrics = trainer.fit().metrics
        assert metrics["clock"] == steps
    # 9 parameters in syncs at 64, 100, 164 and 192, and not at every one of some 170 steps
    assert metrics["bytes_sent"] < 10 * 9 * 4 * 10
    assert sorted(path.name for path in (tmp_path / "s").iterdir())[-1] == "step-192"
