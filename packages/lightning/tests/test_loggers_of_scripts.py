"""The loggers of a script with the callback go on where they were, as those of a job do."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tiny_job import Data, Line, plain

from fairlead import CheckpointConfig, Fairlead
from fairlead_lightning.loggers.tensorboard.events import event_files


class Fails(Line):
    """Raises in a step that lies behind a checkpoint."""

    at = -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.at:
            raise RuntimeError("no luck")


def train(root: Path, at: int = -1, *, loggers: Any = None, **settings: Any) -> L.Trainer:
    loggers = loggers or [CSVLogger(root / "logs"), TensorBoardLogger(root / "logs", name="events")]
    callback = Fairlead(run=root / "run", checkpoint=CheckpointConfig(every_n_steps=4))
    trainer = plain(max_epochs=3, callbacks=[callback], logger=loggers, log_every_n_steps=1, **settings)
    model = Fails()
    model.at = at
    trainer.fit(model, datamodule=Data())
    return trainer


def rows(root: Path) -> list[dict[str, str]]:
    (file,) = (root / "logs").rglob("metrics.csv")
    assert file.parent.name == "version_0"
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def scalars(root: Path) -> dict[str, list[int]]:
    """The steps of each value, over all files of TensorBoard's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    (folder,) = (root / "logs" / "events").iterdir()
    assert folder.name == "version_0"
    steps: dict[str, list[int]] = {}
    for name in event_files(folder):  # each by itself: of one process and one second their names are in no order
        found = EventAccumulator(str(folder / name)).Reload()
        for tag in found.Tags()["scalars"]:
            steps.setdefault(tag, []).extend(one.step for one in found.Scalars(tag))
    return {tag: sorted(found) for tag, found in steps.items()}


@pytest.mark.parametrize("at", [5, 7])
def test_each_step_is_there_once_as_if_nothing_had_happened(tmp_path: Path, at: int) -> None:
    """The rows behind the checkpoint are trained and logged again."""
    train(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="no luck"):
        train(tmp_path, at)
    train(tmp_path)
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert scalars(tmp_path) == scalars(tmp_path / "whole")


def test_a_version_that_the_script_names_is_its_own(tmp_path: Path) -> None:
    for at, version in ((5, "mine"), (-1, "yours")):
        with pytest.raises(RuntimeError, match="no luck") if at > 0 else nullcontext():
            train(tmp_path, at, loggers=[CSVLogger(tmp_path / "logs", version=version)])
    folders = (tmp_path / "logs" / "lightning_logs").iterdir()
    assert sorted(folder.name for folder in folders if (folder / "metrics.csv").exists()) == ["mine", "yours"]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.parametrize("version", ["mine", 3])
def test_a_version_that_every_start_names_keeps_its_rows(tmp_path: Path, version: str | int) -> None:
    """Lightning deletes them when it makes the logger's writer, before a callback is asked anything."""
    for at in (5, 7, 9, -1):
        with pytest.raises(RuntimeError, match="no luck") if at > 0 else nullcontext():
            train(tmp_path, at, loggers=[CSVLogger(tmp_path / "logs", version=version)])
    train(tmp_path / "whole")
    (file,) = (tmp_path / "logs").rglob("metrics.csv")
    with file.open(newline="") as lines:
        assert list(csv.DictReader(lines)) == rows(tmp_path / "whole")


def test_the_settings_of_checkpoints_may_be_a_mapping(tmp_path: Path) -> None:
    callback = Fairlead(run=tmp_path / "run", checkpoint={"every_n_steps": 4})
    assert callback._config.checkpoint == CheckpointConfig(every_n_steps=4)
