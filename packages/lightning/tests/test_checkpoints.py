"""When a checkpoint is written, what is kept, and what happens when the disk refuses."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_job import Data, Line, checkpoints, events, fit, latest, loader, make_trainer, metric_rows

from fairlead import RunConfig, Trainer
from fairlead.errors import CheckpointError
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import Checkpoint, FileHash, Syscalls, hash_file, publish, verify


def test_best_is_known_to_lightning(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=3)
    model = Line()
    trainer.fit(model, datamodule=Data())
    values = [float(r["val/loss"]) for r in metric_rows(tmp_path / "run") if r["val/loss"]]
    found = trainer.validate(model, loader(), ckpt_path="best", verbose=False)
    assert found[0]["val/loss"] == pytest.approx(min(values))


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    class Worse(Line):
        """A loss with its minimum after the second epoch."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", abs(float(self.trainer.current_epoch) - 1.0))

    fit(tmp_path, model=Worse(), max_epochs=6, checkpoint={"keep_last": 2, "keep_best": 1})
    assert [c.step for c in checkpoints(tmp_path / "run")] == [16, 40, 48]


def test_every_nth_step_is_kept(tmp_path: Path) -> None:
    fit(
        tmp_path, max_steps=12, checkpoint={"every_n_steps": 2, "keep_last": 1, "keep_best": 0, "keep_every_n_steps": 4}
    )
    assert [c.step for c in checkpoints(tmp_path / "run")] == [4, 8, 12]


def by_the_clock(rank: int, root: Path, devices: int) -> None:
    often = {"every_n_minutes": 1e-9, "every_n_epochs": None, "keep_last": 99}
    settings: dict[str, Any] = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto"}
    make_trainer(root, max_steps=24, limit_val_batches=0, checkpoint=often, **settings).fit(Line(), loader(), loader())


def test_ranks_look_at_the_clock_after_every_tenth_step(tmp_path: Path) -> None:
    """To agree on it they wait for each other; a process alone need not."""
    by_the_clock(0, tmp_path / "alone", 1)
    assert len(checkpoints(tmp_path / "alone" / "run")) == 24
    run_ranks(by_the_clock, 2, tmp_path / "two", 2)
    assert [c.step for c in checkpoints(tmp_path / "two" / "run")] == [10, 20, 24]


def test_nothing_is_saved_between_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    """Also where the last step of an epoch has fewer of them: eight batches make three steps of 3, 3 and 2."""
    seen: list[tuple[int, int]] = []

    class Watch(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            done = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"]
            seen.append((checkpoint["global_step"], done))

    fit(
        tmp_path,
        model=Watch(),
        max_epochs=2,
        accumulate_grad_batches=3,
        limit_val_batches=0,
        checkpoint={"every_n_steps": 1, "every_n_epochs": None, "keep_last": 99},
    )
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert [c.step for c in checkpoints(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    # Lightning counts a batch as completed after this hook; an epoch is saved when it is over.
    assert [done for _, done in seen] == [3, 6, 8, 3, 6, 8]


def test_two_optimizers_do_not_step_over_a_save(tmp_path: Path) -> None:
    """With manual optimization a batch is two steps, and a multiple of three falls inside one."""

    class Two(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.01), torch.optim.SGD(self.parameters(), lr=0.02)]

    fit(tmp_path, model=Two(), max_epochs=1, limit_val_batches=0, checkpoint={"every_n_steps": 3, "keep_last": 99})
    assert [c.step for c in checkpoints(tmp_path / "run")] == [4, 6, 10, 12, 16]


def test_weights_only_checkpoints_are_smaller(tmp_path: Path) -> None:
    """Without optimizer and loop state."""
    fit(tmp_path / "a", max_steps=8)
    fit(tmp_path / "b", max_steps=8, checkpoint={"save_weights_only": True})
    sizes = [(latest(tmp_path / name / "run").path / "state.ckpt").stat().st_size for name in "ab"]
    assert sizes[1] < sizes[0]
    state = torch.load(latest(tmp_path / "b" / "run").path / "state.ckpt", weights_only=True)
    assert "optimizer_states" not in state


def test_the_users_own_model_checkpoint_works_beside(tmp_path: Path) -> None:
    own = ModelCheckpoint(tmp_path / "own", monitor="val/loss", filename="{step}")
    config = make_trainer(tmp_path, max_epochs=2).fairlead_config
    trainer = Trainer(config, run=RunConfig(name="run", dir=str(tmp_path)), callbacks=[own])
    trainer.fit(Line(), datamodule=Data())
    assert Path(own.best_model_path).parent == tmp_path / "own"
    assert latest(tmp_path / "run").step == 16


def test_async_saves_are_committed_when_durable_and_drained_at_the_end(tmp_path: Path) -> None:
    """The manifest is written by the thread that wrote the file, and no later than the end of fit."""
    trainer = make_trainer(
        tmp_path, max_steps=12, checkpoint_io="async", checkpoint={"every_n_steps": 2, "keep_last": 9}
    )
    trainer.fit(Line(), datamodule=Data())
    run = tmp_path / "run"
    assert [e["event"] for e in events(run)][-2:] == ["checkpoint", "finished"]
    assert [e["step"] for e in events(run, "checkpoint")] == [2, 4, 6, 8, 10, 12]
    assert all(verify(c.path, deep=True) == [] for c in checkpoints(run))
    assert latest(run).step == 12


@pytest.mark.parametrize("backend", ["async", {"name": "distributed", "background": True}], ids=["async", "shards"])
def test_two_saves_of_one_step_do_not_write_into_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    """One is due at the step and one after its validation, while a slow disk still has the first."""

    def slowly(*args: Any, **kwargs: Any) -> Checkpoint:
        time.sleep(0.3)
        return publish(*args, **kwargs)

    monkeypatch.setattr("fairlead_distributed.run.commits.publish", slowly)
    fit(
        tmp_path,
        max_steps=8,
        val_check_interval=4,
        checkpoint_io=backend,
        checkpoint={"every_n_steps": 2, "keep_last": 9},
    )
    found = checkpoints(tmp_path / "run")
    assert [(c.step, c.version) for c in found] == [(2, 1), (4, 2), (6, 1), (8, 1)]
    for one in found:
        assert verify(one.path, deep=True) == []
        assert "rank-00000.pt" in one.manifest.files
        assert any(name.startswith("state.ckpt") for name in one.manifest.files)
    assert "val/loss" in found[1].metadata["metrics"]
    assert [e["step"] for e in events(tmp_path / "run", "checkpoint-failed")] == []


@pytest.mark.parametrize("backend", ["torch", "async"])
@pytest.mark.filterwarnings("ignore:training continues")
def test_a_disk_that_is_full_for_a_while_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """It is said, it is in the history, the training goes on, and the checkpoint before it stays."""
    real = Syscalls.fsync
    full = {"now": False}

    def fsync(self: Syscalls, fd: int) -> None:
        if full["now"] and "history" not in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        real(self, fd)

    monkeypatch.setattr(Syscalls, "fsync", fsync)

    class Fills(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            full["now"] = self.trainer.global_step in (4, 5)

    model = Fills()
    make_trainer(
        tmp_path,
        max_steps=8,
        checkpoint_io=backend,
        limit_val_batches=0,
        checkpoint={"every_n_steps": 1, "every_n_epochs": None, "keep_last": 2},
    ).fit(model, datamodule=Data())
    run = tmp_path / "run"
    assert model.seen == list(range(8))
    assert "No space left" in str([e["error"] for e in events(run, "checkpoint-failed")])
    saved = [e["step"] for e in events(run, "checkpoint")]
    assert 5 not in saved  # in the background too: the save of step 6 waited for it
    assert {7, 8} < set(saved)
    assert latest(run).step == 8
    assert not list((run / "checkpoints").glob(".stage-*"))


@pytest.mark.parametrize("backend", ["torch", "async"])
@pytest.mark.filterwarnings("ignore:training continues")
def test_a_result_that_cannot_be_saved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The run is not finished: a restart resumes from the checkpoint before."""
    real = Syscalls.fsync
    full = {"now": False}

    def fsync(self: Syscalls, fd: int) -> None:
        if full["now"] and "history" not in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        real(self, fd)

    monkeypatch.setattr(Syscalls, "fsync", fsync)

    class Fills(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 10:
                self.trainer.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]
                full["now"] = True

    with pytest.raises(CheckpointError, match="could not be saved") as raised:
        make_trainer(tmp_path, max_steps=12, checkpoint_io=backend).fit(Fills(), datamodule=Data())
    assert raised.value.exit_code == 1  # the run failed; 2 would say that nothing was started
    run = tmp_path / "run"
    assert events(run, "finished") == []
    assert latest(run).step == 8
    full["now"] = False
    monkeypatch.undo()
    model = Fills()
    make_trainer(tmp_path, max_steps=12, checkpoint_io=backend).fit(model, datamodule=Data())
    assert model.seen[0] == 8


def full_disk_on_rank_one(rank: int, root: Path) -> tuple[list[str], list[str]]:
    """What is said, and which files are read again for their checksums."""
    trainer = make_trainer(
        root,
        devices=2,
        strategy="ddp",
        max_steps=3,
        limit_val_batches=0,
        checkpoint={"every_n_steps": 1, "every_n_epochs": None, "keep_last": 9},
    )
    real, hashed = Syscalls.fsync, []

    def fsync(system: Syscalls, fd: int) -> None:
        if rank == 1 and trainer.global_step == 2:
            raise OSError(28, "No space left on device")
        real(system, fd)

    def rehash(path: Path, *args: Any, **kwargs: Any) -> FileHash:
        hashed.append(path.name)
        return hash_file(path, *args, **kwargs)

    Syscalls.fsync = fsync  # type: ignore[method-assign,assignment]
    vars(sys.modules["fairlead_runs.commit.publish"])["hash_file"] = rehash
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Line(), datamodule=Data())
    return [str(w.message) for w in caught if "no checkpoint was written" in str(w.message)], hashed


def test_a_disk_that_one_rank_finds_full_costs_one_checkpoint(tmp_path: Path) -> None:
    """No rank commits what another has not written, and the rank is named; no file is read again."""
    (said, hashed), other = run_ranks(full_disk_on_rank_one, 2, tmp_path)
    assert "No space left on device (rank 1)" in said[0]
    assert hashed == []
    assert other == ([], [])
    run = tmp_path / "run"
    assert [c.step for c in checkpoints(run)] == [1, 3]
    assert [e["step"] for e in events(run, "checkpoint-failed")] == [2]
    assert "(rank 1)" in events(run, "checkpoint-failed")[0]["error"]
    assert all({"rank-00000.pt", "rank-00001.pt"} < c.manifest.files.keys() for c in checkpoints(run))
    assert not list((run / "checkpoints").glob(".stage-*"))


def evaluated(rank: int, root: Path) -> float:
    """Rank 1 looks where there is no checkpoint, as where its view of a network file system is old."""
    trainer = make_trainer(root if rank == 0 else root / "old", devices=2, strategy="ddp")
    (found,) = trainer.validate(Line(), loader(), verbose=False)
    return float(found["val/loss"])


def test_rank_0_finds_the_weights_to_evaluate_for_all(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=8)
    (metrics,) = make_trainer(tmp_path).validate(Line(), loader(), verbose=False)
    assert run_ranks(evaluated, 2, tmp_path) == pytest.approx([metrics["val/loss"]] * 2)
