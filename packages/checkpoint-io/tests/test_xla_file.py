"""`checkpoint_io: xla` with a stand-in for torch_xla, which is not installed here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.fabric.plugins.io.xla as lightning_xla
import pytest
import torch
from lightning.fabric.plugins import XLACheckpointIO

from fairlead.errors import CheckpointError, MissingDependencyError
from fairlead.install import install_line
from fairlead.plugins import PluginManager
from fairlead_checkpoint_io import XLACheckpointIOConfig
from fairlead_checkpoint_io.xla_file_runtime import XLAFileCheckpointIO


@pytest.fixture
def fake_torch_xla(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A FAKE torch_xla: it records what it is asked to move. No XLA device is involved."""
    moved: list[dict[str, Any]] = []

    def convert(data: dict[str, Any], convert: bool) -> dict[str, Any]:
        assert convert
        moved.append(data)
        return {**data, "w": torch.ones(2)}

    model = ModuleType("torch_xla.core.xla_model")
    model._maybe_convert_to_cpu = convert  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.core", ModuleType("torch_xla.core"))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    monkeypatch.setattr(lightning_xla, "_XLA_AVAILABLE", True)
    return moved


def test_tensors_are_moved_first_and_then_written_atomically(
    fake_torch_xla: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The XLA plugin; what touches a device is faked."""
    backend = XLAFileCheckpointIO(XLACheckpointIOConfig())
    assert isinstance(backend, XLACheckpointIO)  # Lightning's XLA strategies refuse anything else
    state = {"w": torch.zeros(2), "step": 1}
    backend.save_checkpoint(state, tmp_path / "x.ckpt")
    assert fake_torch_xla == [state]
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["w"].tolist() == [1, 1]
    assert backend.load_checkpoint(tmp_path / "x.ckpt")["step"] == 1
    (tmp_path / "x.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        backend.load_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.skipif(PluginManager().is_installed("torch-xla"), reason="torch_xla is installed")
def test_without_torch_xla_the_pip_line_is_named() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        PluginManager().require_engines("checkpoint_io", "xla")
    assert caught.value.fix == install_line("xla")
