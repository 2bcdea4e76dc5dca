"""Parameters that begin or cease to need gradients in a training are averaged over the ranks from then on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from tiny_job import make_trainer, plain, samples
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from fairlead import Fairlead, FairleadError
from fairlead_distributed.testing import run_ranks
from fairlead_lightning.lifecycle import trainable


class Two(L.LightningModule):
    """Two layers, of which the first is trained later; or what `kind` says happens to them in the second epoch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        if kind in ("hook", "inside", "unfrozen", "mixed"):
            self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and batch_idx == 1:
            if self.kind in ("hook", "unfrozen"):
                self.net[0].requires_grad_(True)
            elif self.kind == "ceases":
                self.net[2].requires_grad_(False)
            elif self.kind == "added":
                torch.manual_seed(7 + 100 * self.global_rank)
                self.net.append(nn.Linear(1, 1))
                self.trainer.optimizers[0].add_param_group({"params": list(self.net[3].parameters()), "lr": 0.1})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "inside" and batch_idx == 1:
            self.net[0].requires_grad_(True)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad or self.kind in ("hook", "unfrozen")]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Unfreezes(BaseFinetuning):
    """Lightning's own schedule."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)


KINDS = {**dict.fromkeys(("schedule", "hook", "ceases", "added"), "ddp"), "sharded": "fsdp", "mixed": "fsdp"}
REFUSED = {"inside": "ddp", "flat": "fsdp", "unfrozen": "fsdp"}
SETTINGS: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False, "limit_val_batches": 0}


def callbacks(kind: str) -> list[L.Callback]:
    return [Unfreezes()] if kind in ("schedule", "sharded", "flat") else []


def whole(model: L.LightningModule) -> Tensor:
    full = (one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters())
    return torch.cat([one.detach().flatten() for one in full])


def flattened(does: bool) -> contextlib.AbstractContextManager[Any]:
    """As with DeepSpeed, which takes seconds to import: the strategy fixes what is trained."""
    return patch.object(trainable, "flattens", lambda strategy: True) if does else contextlib.nullcontext()


def train_on_two_ranks(rank: int, root: Path) -> dict[str, Any]:
    def data() -> Any:
        return DataLoader(Subset(samples(16), [*range(rank, 16, 2)]), batch_size=4)

    got: dict[str, Any] = {}
    for kind, strategy in {**KINDS, **REFUSED}.items():
        model = Two(kind)
        saves = kind not in ("flat", "unfrozen")
        trainer: Any = make_trainer(root / kind, devices=2, strategy=strategy, enable_checkpointing=saves, **SETTINGS)
        trainer.callbacks.extend(callbacks(kind))
        try:
            with flattened(kind in ("flat", "unfrozen")):
                trainer.fit(model, data())
        except FairleadError as error:
            got[kind] = error.block()
        else:
            got[kind] = whole(model)
    script = Two("script")
    trainer = plain(
        devices=2, strategy="ddp", callbacks=[Fairlead(str(root / "script")), *callbacks("schedule")], **SETTINGS
    )
    trainer.fit(script, data())
    got["script"] = whole(script)
    return got


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_on_two_ranks, 2, tmp_path_factory.mktemp("trainable"), timeout=120)


def alone(kind: str) -> Tensor:
    """One process with both ranks' samples in each step."""
    order = [index for step in (0, 8) for rank in (0, 1) for index in range(step + rank, step + 8, 2)]
    model = Two(kind)
    trainer = plain(max_epochs=2, limit_val_batches=0, callbacks=callbacks("schedule" if kind == "sharded" else kind))
    trainer.fit(model, DataLoader(Subset(samples(16), order), batch_size=8))
    return whole(model)


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_is_averaged_from_then_on(found: list[dict[str, Any]], kind: str) -> None:
    for got in found:
        torch.testing.assert_close(got[kind], alone(kind), rtol=1e-5, atol=1e-6)


def test_a_script_with_the_callback(found: list[dict[str, Any]]) -> None:
    for got in found:
        torch.testing.assert_close(got["script"], alone("schedule"), rtol=1e-5, atol=1e-6)


def test_what_comes_too_late_or_cannot_be_followed_ends_the_fit_with_the_names(found: list[dict[str, Any]]) -> None:
    for got in found:
        assert "other parameters need gradients than before: net.0.weight, net.0.bias" in got["inside"]
        assert "before this forward pass" in got["inside"]
        assert "other parameters need gradients than before: net.0.weight, net.0.bias" in got["unfrozen"]
        assert "fixes what is trained when it is set up" in got["unfrozen"]
        assert "Unfreezes unfreezes parameters in the training, which MeshStrategy cannot follow" in got["flat"]
