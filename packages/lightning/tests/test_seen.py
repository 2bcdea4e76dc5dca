"""What a start sees of a script's own Trainer, and of the state that model and callbacks keep."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelPruning
from tiny_job import Line, plain

from fairlead.exactness import verdict
from fairlead_lightning.resume.exact_resume import script_reasons, state_reasons


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_steps": 3}, "exact"),
        ({"max_steps": 3, "val_check_interval": timedelta(minutes=1)}, "not exact"),
        ({"max_time": timedelta(minutes=1)}, "not exact"),
        ({"max_steps": 3, "reload_dataloaders_every_n_epochs": 2}, "exact"),
        ({"max_steps": 3, "overfit_batches": 2}, "not known"),
    ],
)
def test_a_scripts_settings(options: dict[str, Any], expected: str) -> None:
    """What no two runs do alike is not called exact (issue 3)."""
    assert verdict(list(script_reasons(plain(**options), seeded=True, in_order=True))) == expected


def test_a_script_without_a_seed() -> None:
    (reason,) = script_reasons(plain(max_steps=3), seeded=False, in_order=True)
    assert "seed_everything" in reason.fix


def test_pruning_that_goes_back_to_first_weights_is_seen() -> None:
    trainer = plain(max_steps=1, callbacks=[ModelPruning("l1_unstructured")])
    trainer.strategy._lightning_module = Line()
    (reason,) = state_reasons(trainer)
    assert reason.what == "ModelPruning(use_lottery_ticket_hypothesis=True)"


class OwnBatches(Line):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def test_a_step_that_takes_its_batches_itself_is_seen() -> None:
    trainer = plain(max_steps=1)
    trainer.strategy._lightning_module = OwnBatches()
    (reason,) = state_reasons(trainer)
    assert reason.what == "training_step(self, dataloader_iter)"
    assert reason.certain
