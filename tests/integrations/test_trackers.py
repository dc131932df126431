"""The lines of docs/trackers.md, in a run of one worker: what they log arrives."""

import pytest
import torch

import palsgd
from support.pages import code_blocks, executed, page, section

PAGE = "docs/trackers.md"


def tracked(title, folder, monkeypatch):
    """Train with the lines of a section, in this folder. What they leave behind."""
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.PALSGD(model, inner, sync_every=4, transport=palsgd.Alone())
    first, *_ = code_blocks(page(PAGE))
    (code,) = code_blocks(section(PAGE, title))
    found = executed(PAGE, first, code, opt=opt)
    for batch in palsgd.until([torch.randn(3, 2)], opt, steps=12):
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return found


def test_tensorboard_has_the_figures_of_every_sync(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    tracked("TensorBoard", tmp_path, monkeypatch)["writer"].close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs" / "palsgd"))
    events.Reload()
    assert [each.step for each in events.Scalars("bytes_sent")] == [4, 8, 12]
    assert [each.value for each in events.Scalars("syncs")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the tracker's own
def test_weights_and_biases_has_the_figures_of_every_sync(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tracked("Weights & Biases", tmp_path, monkeypatch)["run"]
    assert run.step == 12
    run.finish()
    wandb.teardown()  # as when the program ends; the last lines are written then
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.read_bytes().count(b"syncs") >= 3
    assert wandb.run is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the tracker's own
def test_mlflow_has_the_figures_of_every_sync(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    tracked("MLflow", tmp_path, monkeypatch)
    run = mlflow.active_run().info.run_id
    mlflow.end_run()
    client = mlflow.tracking.MlflowClient()
    assert [each.step for each in client.get_metric_history(run, "bytes_sent")] == [4, 8, 12]
    assert client.get_run(run).data.params["method"] == "PALSGD"
