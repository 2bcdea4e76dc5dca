"""Lightning's own callbacks that change weights, in a fit that resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging


def keep_rates(trainer: L.Trainer) -> Callable[[], None]:
    """Its scheduler, made anew behind a resume, sets another learning rate than the checkpoint's.  Returns the undo."""
    wrapped = [vars(one) for one in _averaging(trainer)]
    for one in _averaging(trainer):
        vars(one)["on_train_epoch_start"] = _keeping(one, one.on_train_epoch_start)

    def undo() -> None:
        for one in wrapped:
            one.pop("on_train_epoch_start", None)

    return undo


def resume_averaging(trainer: L.Trainer) -> None:
    """Inside an epoch Lightning does not call the hook in which the average would restart."""
    for one in _averaging(trainer):
        if one._scheduler_state is not None and not one._initialized:
            module = trainer.lightning_module
            before = {name: value.clone() for name, value in module.state_dict().items()}
            one.on_train_epoch_start(trainer, module)  # in its last epoch it also begins its batch norm anew
            module.load_state_dict(before)


def leaves_gradients(trainer: L.Trainer) -> bool:
    """Whether the gradients of the last training step are used once more: the epoch for batch norm ends with a step."""
    return any(
        one._model_contains_batch_norm and one._max_epochs != -1 and trainer.current_epoch >= one.swa_end
        for one in _averaging(trainer)
    )


def resets_weights(callback: L.Callback) -> bool:
    """Whether it puts the parameters that it leaves back to what they were when the run began."""
    return isinstance(callback, ModelPruning) and bool(vars(callback)["_use_lottery_ticket_hypothesis"])


def _averaging(trainer: L.Trainer) -> list[Any]:
    return [one for one in vars(trainer)["callbacks"] if isinstance(one, StochasticWeightAveraging)]


def _keeping(averaging: Any, begin: Callable[..., None]) -> Callable[[L.Trainer, L.LightningModule], None]:
    def on_train_epoch_start(trainer: L.Trainer, module: L.LightningModule) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        begins = not averaging._initialized
        if begins and averaging._scheduler_state is not None and trainer.current_epoch == averaging.swa_end + 1:
            _begin_in_last_epoch(averaging, lambda: begin(trainer, module), trainer.current_epoch)
        begin(trainer, module)
        if begins and averaging._initialized and averaging._scheduler_state is not None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    return on_train_epoch_start


def _begin_in_last_epoch(averaging: Any, begin: Callable[[], None], epoch: int) -> None:
    """It does not restart in the epoch for batch norm, and its next checkpoint would not have the averages."""
    end, updated = averaging._max_epochs, averaging._latest_update_epoch
    averaging._max_epochs, averaging._latest_update_epoch = end + 1, epoch  # no epoch of training, and averaged already
    try:
        begin()
    finally:
        averaging._max_epochs, averaging._latest_update_epoch = end, updated
