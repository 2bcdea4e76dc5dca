"""The backends in an unmodified Lightning Trainer and Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.async_file_runtime import AsyncFileCheckpointIO
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO

# Lightning's own: advice about workers and loggers, and deprecations inside it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning", "ignore:.*workers")


class Line(pl.LightningModule):
    """The smallest model with an optimizer that has a state."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def make(kind: str) -> CheckpointIO:
    inner = TorchFileCheckpointIO(TorchCheckpointIOConfig())
    return inner if kind == "torch" else AsyncFileCheckpointIO(inner)


def fit(root: Path, io: CheckpointIO, *, resume: Path | None = None, steps: int, **checkpoint: Any) -> pl.Trainer:
    saver = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=1, **checkpoint)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        callbacks=[saver],
        plugins=[io],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
    trainer.fit(Line(), loader, ckpt_path=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("kind", ["torch", "async"])
def test_a_fit_saves_resumes_and_keeps_only_the_newest(kind: str, tmp_path: Path) -> None:
    """Through Lightning's own ModelCheckpoint, and read back by Lightning without us."""
    fit(tmp_path, make(kind), steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]
    assert Line.load_from_checkpoint(tmp_path / "step=2.ckpt", weights_only=True).layer.in_features == 4
    trainer = fit(tmp_path / "on", make(kind), resume=tmp_path / "step=2.ckpt", steps=4)
    assert trainer.global_step == 4


@pytest.mark.parametrize("kind", ["torch", "async"])
def test_weights_only_files_are_smaller_and_have_no_optimizer(kind: str, tmp_path: Path) -> None:
    fit(tmp_path / "all", make(kind), steps=1)
    fit(tmp_path / "weights", make(kind), steps=1, save_weights_only=True)
    whole, weights = tmp_path / "all" / "step=1.ckpt", tmp_path / "weights" / "step=1.ckpt"
    assert weights.stat().st_size < whole.stat().st_size
    assert "optimizer_states" not in torch.load(weights, weights_only=True)
    assert "optimizer_states" in torch.load(whole, weights_only=True)


def test_lightning_raises_what_failed_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    io = make("async")
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, plugins=[io], enable_checkpointing=False)
    trainer.strategy.connect(Line())
    trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")
    with pytest.raises(Exception, match="in the background"):
        trainer.strategy.teardown()


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[make("torch")])
    model = fabric.setup(torch.nn.Linear(2, 2))
    fabric.save(tmp_path / "x.ckpt", {"model": model, "step": 3})
    with torch.no_grad():
        before = model.weight.clone()
        model.weight.zero_()
    rest = fabric.load(tmp_path / "x.ckpt", {"model": model})
    assert torch.equal(model.weight, before)
    assert rest == {"step": 3}
