"""The public suite of checkpoint IOs catches one that leaves half a file, and one that runs what it loads."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from fairlead import CheckpointIOConfigBase, CheckpointIOPlugin
from fairlead.testing import CheckpointIOConformance, FakeEntryPoint, stand_ins


class MineCheckpointIOConfig(CheckpointIOConfigBase):
    """Mine."""

    name: Literal["mine"] = "mine"


class Half(TorchCheckpointIO):
    """Writes to the path itself, part by part."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """One part after the other."""
        Path(path).parent.mkdir(exist_ok=True)
        with Path(path).open("wb") as file:
            for part in checkpoint.items():
                pickle.dump(part, file)


class Believes(TorchCheckpointIO):
    """Runs what a file says."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """As torch did before 2.6."""
        return torch.load(path, weights_only=False)


class Sound(TorchCheckpointIO):
    """As Lightning's, and without code."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Tensors and plain data only."""
        return torch.load(path, weights_only=True)


def said(kind: Callable[[], object], test: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a test of the suite says of an IO; nothing where it passes."""
    monkeypatch.setattr(f"{__name__}.build_mine", lambda config, context: kind(), raising=False)
    plugin = type(
        "Mine", (CheckpointIOPlugin,), {"config": MineCheckpointIOConfig, "runtime": f"{__name__}:build_mine"}
    )
    points = [FakeEntryPoint(key, one) for key, one in {**stand_ins(), "checkpoint_io.mine": plugin()}.items()]
    suite: Any = type("Suite", (CheckpointIOConformance,), {"plugin_name": "mine", "entry_points": points})
    try:
        getattr(suite(), test)(folder)
    except AssertionError as error:
        return str(error)
    return ""


def test_half_a_file_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sound").mkdir()
    test = "test_an_interrupted_save_leaves_no_file"
    found = said(Half, test, tmp_path, monkeypatch)
    assert "an interrupted save leaves checkpoints/step-1.ckpt" in found
    assert "do: write to a hidden name" in found
    assert said(Sound, test, tmp_path / "sound", monkeypatch) == ""


def test_code_in_a_checkpoint_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sound").mkdir()
    found = said(Believes, "test_a_pickle_is_refused", tmp_path, monkeypatch)
    assert "loading a checkpoint ran code in it" in found
    assert "do: load with weights_only=True" in found
    assert said(Sound, "test_a_pickle_is_refused", tmp_path / "sound", monkeypatch) == ""
