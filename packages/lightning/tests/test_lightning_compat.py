"""One test for each private part of Lightning that is used: they fail when Lightning changes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny_job import Data, Line, plain

from fairlead_lightning import _lightning_compat as compat


def test_every_private_use_has_a_test_here() -> None:
    """A new one needs a contract test in this file."""
    here = Path(__file__).read_text()
    assert [name for name in compat.__all__ if f"compat.{name}(" not in here] == []


def test_the_root_directory_can_be_moved(tmp_path: Path) -> None:
    trainer = plain(default_root_dir=str(tmp_path / "first"))
    assert trainer.default_root_dir == str(tmp_path / "first")
    compat.set_root_dir(trainer, tmp_path / "second")
    assert trainer.default_root_dir == str(tmp_path / "second")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = plain(max_epochs=1)
    trainer.fit(Line(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


class Resumes(L.Callback):
    """Resumes every fit, from its `setup`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        compat.resume_from(trainer, self.path)


def test_a_fit_that_is_under_way_is_resumed(saved: Path) -> None:
    """Weights, optimizer, loops: Lightning restores all of it from the file that `setup` named."""
    model = Line()
    trainer = plain(max_epochs=2, callbacks=[Resumes(saved)])
    trainer.fit(model, datamodule=Data())
    assert model.seen == list(range(8, 16))
    by_path = Line()
    plain(max_epochs=2).fit(by_path, datamodule=Data(), ckpt_path=str(saved))
    assert all((a == b).all() for a, b in zip(model.parameters(), by_path.parameters(), strict=True))


def test_resuming_is_for_one_fit(saved: Path) -> None:
    """The trainer's own method is there again afterwards."""
    trainer = plain(max_epochs=2, callbacks=[Resumes(saved)])
    private: Any = trainer
    trainer.fit(Line(), datamodule=Data())
    assert private._checkpoint_connector.resume_start.__func__ is type(private._checkpoint_connector).resume_start


class Terminated(Line):
    """Gets SIGTERM in its third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_only_noted() -> None:
    """Lightning's own handler would stop this fit; ours decides by itself when to stop."""
    noted: list[int] = []
    trainer = plain(max_steps=5)
    compat.replace_sigterm_handler(trainer, lambda signum, frame: noted.append(signum))
    model = Terminated()
    trainer.fit(model, datamodule=Data())
    assert noted == [signal.SIGTERM]
    assert model.seen == [0, 1, 2, 3, 4]
    private: Any = trainer
    assert callable(type(private.fit_loop.epoch_loop)._broadcast_sigterm_tensor)  # what is put out of action


def test_the_loops_stop_at_their_next_boundary() -> None:
    class Asks(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 2:
                compat.stop_on_sigterm(self.trainer)

    model = Asks()
    with pytest.raises(SIGTERMException):
        plain(max_steps=5).fit(model, datamodule=Data())
    assert model.seen == [0, 1, 2]


class Begins(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        compat.begin_next_epoch(trainer)


@pytest.mark.parametrize("limit", [{"max_steps": 24}, {"max_epochs": 3}])
def test_training_goes_on_with_the_next_epoch(saved: Path, limit: dict[str, int]) -> None:
    """Also fails when Lightning itself becomes right and the correction can go: see the last line."""
    epochs = []
    for callbacks in ([Begins()], []):
        model, trainer = Line(), plain(**limit, callbacks=callbacks)
        trainer.fit(model, datamodule=Data(), ckpt_path=str(saved))
        assert model.seen == list(range(8, 24))
        epochs.append(trainer.current_epoch)
    assert epochs == [3, 4 if "max_steps" in limit else 3]


def test_a_checkpoint_from_the_start_of_an_epoch_is_one_between_two(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            compat.between_epochs(checkpoint)

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    plain(max_epochs=2, callbacks=[Saves()]).fit(Line(), datamodule=Data())
    model, trainer = Line(), plain(max_steps=24, callbacks=[Begins()])
    trainer.fit(model, datamodule=Data(), ckpt_path=str(tmp_path / "saved.ckpt"))
    assert model.seen == list(range(8, 24))
    assert trainer.current_epoch == 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_checkpoint_inside_an_epoch_resumes_in_that_epoch(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            compat.inside_epoch(checkpoint)

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    plain(max_steps=11, callbacks=[Saves()]).fit(Line(), datamodule=Data())
    model, trainer = Line(), plain(max_steps=24)
    trainer.fit(model, datamodule=Data(), ckpt_path=str(tmp_path / "saved.ckpt"))
    assert model.seen == list(range(11, 24))
    assert trainer.current_epoch == 3
