"""The callback `Fairlead` in an ordinary Lightning script: what it adds, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric as lf
import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tiny_job import Data, Line, apart, checkpoints, contents, events, latest, loader, metric_rows, plain

from fairlead import Fairlead, Run, RunConfig, Trainer
from fairlead.config import CheckpointConfig
from fairlead.errors import ConfigError, FingerprintError
from fairlead_runs.commit import verify


def script(root: Path, *callbacks: L.Callback, model: Line | None = None, **settings: Any) -> tuple[L.Trainer, Line]:
    """One start of a user's script."""
    model = model if model is not None else Line()
    trainer = plain(callbacks=[Fairlead(run=root / "run"), *callbacks], **settings)
    trainer.fit(model, datamodule=Data())
    return trainer, model


def test_a_script_gets_a_run_directory(tmp_path: Path) -> None:
    script(tmp_path, max_epochs=2)
    run = tmp_path / "run"
    assert [e["event"] for e in events(run)] == ["start", "training", "batch", "checkpoint", "checkpoint", "finished"]
    assert latest(run).step == 16
    assert verify(latest(run).path, deep=True) == []
    assert len([row for row in metric_rows(run) if row["train/loss"]]) == 16
    assert "tiny_job:Line" in (run / "job.yaml").read_text()


def test_it_trains_as_without_it(tmp_path: Path) -> None:
    without = Line()
    plain(max_epochs=3).fit(without, datamodule=Data())
    script(tmp_path, max_epochs=1)
    trainer, model = script(tmp_path, max_epochs=3)
    assert model.seen == list(range(8, 24))
    assert trainer.current_epoch == 3
    assert apart(model, without) == 0


@pytest.mark.parametrize("stopped_early", [False, True])
def test_a_finished_run_is_not_trained_again_but_has_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped_early: bool
) -> None:
    def once() -> tuple[L.Trainer, Line]:
        patience = [EarlyStopping("val/loss", patience=1, min_delta=1e9)] if stopped_early else []
        return script(tmp_path, *patience, max_epochs=4)

    _, first = once()
    before = contents(tmp_path)
    trainer, again = once()
    assert "val/loss" in trainer.callback_metrics
    assert len(first.seen) == (16 if stopped_early else 32)
    assert again.seen == []
    assert apart(again, first) == 0
    assert "is finished" in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_the_scripts_own_ckpt_path_counts_while_the_run_has_no_checkpoint(tmp_path: Path) -> None:
    start = plain(max_epochs=1)
    start.fit(Line(), datamodule=Data())
    start.save_checkpoint(tmp_path / "start.ckpt")

    def again(epochs: int) -> list[int]:
        model = Line()
        trainer = plain(max_epochs=epochs, callbacks=[Fairlead(run=tmp_path / "run")])
        trainer.fit(model, datamodule=Data(), ckpt_path=str(tmp_path / "start.ckpt"))
        return model.seen

    assert again(2) == list(range(8, 16))
    assert again(3) == list(range(16, 24))


def test_the_scripts_own_loggers_and_callbacks_work_as_before(tmp_path: Path) -> None:
    own = ModelCheckpoint(tmp_path / "own", monitor="val/loss", save_top_k=1)
    stopping = EarlyStopping("val/loss", patience=50, min_delta=1e9)
    logger = CSVLogger(tmp_path / "csv")
    trainer, _ = script(tmp_path, own, stopping, max_epochs=3, enable_checkpointing=True, logger=logger)
    assert Path(own.best_model_path).parent == tmp_path / "own"
    assert trainer.checkpoint_callback is own
    assert trainer.loggers == [logger]
    assert list((tmp_path / "csv").rglob("metrics.csv"))
    state = torch.load(latest(tmp_path / "run").path / "state.ckpt", weights_only=True)
    (kept,) = [s for key, s in state["callbacks"].items() if "EarlyStopping" in key]
    assert kept["wait_count"] == stopping.wait_count == 2


def test_what_comes_after_the_fit_writes_nothing(tmp_path: Path) -> None:
    trainer, model = script(tmp_path, max_epochs=1)
    before = contents(tmp_path / "run")
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    assert contents(tmp_path / "run") == before


def test_a_fit_that_raised_leaves_the_trainer_usable(tmp_path: Path) -> None:
    class Breaks(Line):
        broken = True

        def on_train_epoch_start(self) -> None:
            if self.broken and self.trainer.current_epoch == 1:
                raise ZeroDivisionError

    model = Breaks()
    trainer = plain(max_epochs=2, callbacks=[Fairlead(run=tmp_path / "run")])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, datamodule=Data())
    assert events(tmp_path / "run")[-1]["event"] == "failed"
    model.broken = False
    trainer.fit(model, datamodule=Data())
    assert model.seen == list(range(16))
    assert [int(r["step"]) for r in metric_rows(tmp_path / "run") if r["train/loss"]] == list(range(16))
    assert len(trainer.loggers) == 0


def test_another_model_is_another_run(tmp_path: Path) -> None:
    script(tmp_path, max_epochs=1)
    with pytest.raises(FingerprintError, match="other settings") as caught:
        script(tmp_path, model=Line(lr=0.01), max_epochs=1)
    assert "model.args.lr" in str(caught.value)


def test_a_backend_that_does_not_say_when_it_is_done_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's own AsyncCheckpointIO: a file could be committed before it is written."""
    script(tmp_path, max_epochs=1, plugins=[AsyncCheckpointIO()])
    assert "AsyncCheckpointIO is not used" in capsys.readouterr().out
    assert [verify(c.path, deep=True) for c in checkpoints(tmp_path / "run")] == [[]]


def test_the_run_may_be_a_config(tmp_path: Path) -> None:
    run = RunConfig(name="lr{model.args.lr}", dir=str(tmp_path), seed=None)
    save = CheckpointConfig(every_n_steps=3, every_n_epochs=None, on_validation=False, keep_last=9)
    plain(max_epochs=1, callbacks=[Fairlead(run=run, checkpoint=save)]).fit(Line(), datamodule=Data())
    assert [c.step for c in checkpoints(tmp_path / "lr0.05")] == [3, 6, 8]


@pytest.mark.parametrize("task", [0, 1])
def test_a_trainer_that_knows_of_one_of_several_ranks_does_not_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: int
) -> None:
    """`srun -n2 python train.py` with `Trainer(devices=1)`: not "another job is using this run directory"."""
    environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"set Trainer\(devices=2, num_nodes=1\)") as caught:
        script(tmp_path, max_epochs=1)
    assert "one of 2 ranks" in caught.value.block().splitlines()[0]
    assert "SLURM_STEP_NUM_TASKS" in caught.value.block()
    assert not (tmp_path / "run").exists()
    lf.Fabric(accelerator="cpu", devices=1).launch()
    with pytest.raises(ConfigError, match="the Run knows of one and would train alone"), Run(tmp_path / "run"):
        pass
    monkeypatch.setenv("FAIRLEAD_ENVIRONMENT", "lightning")  # each on purpose
    script(tmp_path, max_epochs=1)
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("recipe", [{}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "NODE_RANK": "0"}])
def test_an_exported_world_size_is_not_trained_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, str]
) -> None:
    """`WORLD_SIZE=4 python train.py` with `Trainer(devices=1)` on each of four machines."""
    for name, value in {**recipe, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE|one of 4") as caught:
        script(tmp_path, max_epochs=1)
    assert "alone" in caught.value.block()
    assert not (tmp_path / "run").exists()


def test_a_wrong_argument_is_named() -> None:
    """As in a job file, with what is meant, and without pydantic's words."""
    with pytest.raises(ConfigError, match=r"(?s)unknown logger 'tensorbord'.*Fairlead, loggers\[0\].*'tensorboard'"):
        Fairlead(loggers=["tensorbord"])
    with pytest.raises(ConfigError, match=r"(?s)'every_n_step'.*Fairlead, checkpoint\.every_n_step.*'every_n_steps'"):
        Fairlead(checkpoint={"every_n_step": 3})
    with pytest.raises(ConfigError, match=r"(?s)batch_policy is the text 'keep'.*Fairlead, batch_policy"):
        Fairlead(batch_policy="keep")  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [False, True], ids=["a second one", "Fairlead's Trainer"])
def test_a_fit_has_one_run(tmp_path: Path, own: bool) -> None:
    """Two would each resume it, and put its loaders over an order of their own."""
    second = Fairlead(run=tmp_path / "second")
    trainer: L.Trainer = (
        Trainer({"accelerator": "cpu", "max_epochs": 1}, run={"name": "run", "dir": str(tmp_path)}, callbacks=second)
        if own
        else plain(callbacks=[Fairlead(run=tmp_path / "run"), second], max_epochs=1)
    )
    with pytest.raises(ConfigError, match="this fit has a run already"):
        trainer.fit(Line(), datamodule=Data())
    assert not (tmp_path / "second").exists()
