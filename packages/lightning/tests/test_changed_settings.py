"""A run that goes on with other settings than its checkpoint was made with: it is said whose value counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from tiny_job import Line, events, fit, latest, loader, manifest, plain

from fairlead import Fairlead, RunConfig
from fairlead.errors import CheckpointError


class Quiet(L.LightningModule):
    """A script's model, which saves no hyperparameters."""

    def __init__(self, lr: float = 0.01, momentum: float = 0.9, gamma: float | None = None) -> None:
        super().__init__()
        self.lr, self.momentum, self.gamma = lr, momentum, gamma
        self.net = torch.nn.Linear(3, 1)
        self.first: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.first is None:
            self.first = self.net.weight.detach().clone()
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        if self.gamma is None:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)]


def script(run: RunConfig, model: Quiet | None = None, batch: int = 4, **settings: Any) -> tuple[Quiet, L.Trainer]:
    model = model or Quiet()
    callbacks = [*settings.pop("callbacks", []), Fairlead(run=run)]
    trainer = plain(callbacks=callbacks, **{"max_epochs": 1, **settings})
    trainer.fit(model, loader(batch))
    return model, trainer


def said(run: Path) -> list[str]:
    return [change for event in events(run, "settings-changed") for change in event["changes"]]


def at(root: Path, **further: Any) -> RunConfig:
    return RunConfig(name="run", dir=str(root), seed=None, **further)


def test_what_a_script_changes_is_noticed_and_whose_value_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(at(tmp_path), Quiet(gamma=0.5), callbacks=[EarlyStopping("x", patience=3, strict=False)])
    stopping = EarlyStopping("x", patience=4, strict=False)
    _, trainer = script(
        at(tmp_path), Quiet(lr=0.1, gamma=0.9), batch=8, callbacks=[stopping], max_epochs=2, limit_val_batches=0
    )
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == 0.01
    assert said(tmp_path / "run") == [
        "callbacks[0].patience: 3 -> 4 (the checkpoint's counts: 3)",
        "loaders[0].batch_size: 4 -> 8 (the new value counts)",
        "model.gamma: 0.5 -> 0.9 (the new value counts)",
        "model.lr: 0.01 -> 0.1 (the new value counts)",
        "optimizers[0].groups[0].initial_lr: 0.01 -> 0.1 (the checkpoint's counts: 0.01)",
        "schedules[0].gamma: 0.5 -> 0.9 (the checkpoint's counts: 0.5)",
        "trainer.limit_val_batches: 1 -> 0 (the new value counts)",
    ]
    text = capsys.readouterr().out
    assert "warning[settings-changed]" in text
    assert "--resume weights:" in text
    exactness = json.loads((tmp_path / "run" / "starts" / "2" / "exactness.json").read_text())
    assert not exactness["exact"]


def test_a_run_that_goes_on_as_it_was_says_nothing(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        script(at(tmp_path), Quiet(gamma=0.5), max_epochs=epochs)
    assert said(tmp_path / "run") == []


def test_a_job_that_names_a_checkpoint_of_another_rate(tmp_path: Path) -> None:
    fit(tmp_path / "a", model=Line(lr=0.001), max_steps=4)
    named = latest(tmp_path / "a" / "run").path
    fit(tmp_path / "b", {"resume": str(named)}, model=Line(lr=0.01), max_steps=6)
    assert "optimizers[0].groups[0].initial_lr: 0.001 -> 0.01 (the checkpoint's counts: 0.001)" in said(
        tmp_path / "b" / "run"
    )


def test_a_checkpoint_of_plain_lightning(tmp_path: Path) -> None:
    model = Quiet(momentum=0.5)
    trainer = plain(max_epochs=1)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    script(at(tmp_path, ckpt_path=str(tmp_path / "plain.ckpt")), max_epochs=2)
    assert said(tmp_path / "run") == ["optimizers[0].groups[0].momentum: 0.5 -> 0.9 (the checkpoint's counts: 0.5)"]


@pytest.mark.parametrize("kind", ["checkpoint", "file", "weights only"])
def test_a_new_run_begins_with_the_weights_alone(tmp_path: Path, kind: str) -> None:
    trained, trainer = script(RunConfig(name="first", dir=str(tmp_path), seed=None))
    source = latest(tmp_path / "first").path
    if kind == "file":
        trainer.save_checkpoint(source := tmp_path / "plain.ckpt")
    elif kind == "weights only":
        torch.save(trained.state_dict(), source := tmp_path / "weights.pt")
    model, trainer = script(at(tmp_path, resume=f"weights:{source}"), Quiet(lr=0.1))
    assert torch.equal(model.first, trained.net.weight)
    assert trainer.global_step == 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert said(tmp_path / "run") == []
    assert events(tmp_path / "run", "start")[0]["weights"]
    assert manifest(latest(tmp_path / "run"))["metadata"]["step"] == 8
    script(at(tmp_path, resume=f"weights:{source}"), Quiet(lr=0.1))
    assert latest(tmp_path / "run-2").step == 8


def test_weights_that_cannot_be_had(tmp_path: Path) -> None:
    for path, match in (
        ("nowhere", "does not exist"),
        ("text.ckpt", "cannot be read"),
        ("folder", "in shards"),
    ):
        (tmp_path / "text.ckpt").write_text("no weights")
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=match):
            script(RunConfig(name=path, dir=str(tmp_path / "runs"), seed=None, resume=f"weights:{tmp_path / path}"))
    other = torch.nn.Linear(9, 9)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="another model"):
        script(at(tmp_path, resume=f"weights:{tmp_path / 'other.pt'}"))
