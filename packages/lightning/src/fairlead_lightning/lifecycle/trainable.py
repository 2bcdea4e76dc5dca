"""Parameters that begin or cease to need gradients in a training: DDP is built again, so that it averages them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError, RunFailedError
from fairlead_distributed._sharded import is_fully_sharded
from fairlead_lightning.checkpoint.replicas import flattens


class Trainable:
    """Watches which parameters need gradients, before each forward pass of a training in several ranks.

    DDP registers the parameters to average when it is built: one that is unfrozen later, by a schedule of fine-tuning
    or `requires_grad_()` in a hook, or added to the model, would be trained on each rank by itself. `fully_shard`
    looks by itself; where the parameters to train are fixed when the strategy is set up, the fit ends.

    Args:
        rebuilt: Called when DDP was built again.
    """

    def __init__(self, rebuilt: Callable[[L.Trainer], None]) -> None:
        self._rebuilt = rebuilt
        self._parameters: list[nn.Parameter] = []
        self._needed: list[bool] = []
        self._optimized = 0
        self._undo: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks begin anew."""
        return {**self.__dict__, "_parameters": [], "_undo": None}

    def fit_starts(self, trainer: L.Trainer) -> None:
        """The strategy is set up."""
        self.end()
        if trainer.world_size == 1:
            return
        schedules = [one for one in vars(trainer)["callbacks"] if isinstance(one, BaseFinetuning)]
        if schedules and flattens(trainer.strategy):
            name = type(trainer.strategy).__name__
            raise ConfigError(
                f"{type(schedules[0]).__name__} unfreezes parameters in the training, which {name} cannot follow",
                where="trainer.strategy",
                why="it fixes what is trained when it is set up",
                fix="strategy: fsdp, or ddp",
            )
        self._look(trainer)
        attributes: dict[str, Any] = vars(trainer.strategy)
        step = trainer.strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if self._changed(trainer):
                self._adapt(trainer)
            return step(*args, **kwargs)

        attributes["training_step"] = training_step
        self._undo = partial(attributes.pop, "training_step", None)

    def end(self) -> None:
        """Leaves the strategy as it was."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def after_backward(self, trainer: L.Trainer) -> None:
        """A change inside of `training_step` is too late: DDP had begun its pass."""
        if self._undo is not None and isinstance(trainer.strategy.model, DistributedDataParallel):
            changed = self._flags_changed()
            if changed:
                raise _failed(
                    trainer,
                    changed,
                    "DDP had registered what it averages before this forward pass",
                    "change `requires_grad` in a hook before it, such as on_train_batch_start or on_train_epoch_start",
                )

    def _look(self, trainer: L.Trainer) -> None:
        self._parameters = list(trainer.lightning_module.parameters())
        self._needed = [one.requires_grad for one in self._parameters]
        self._optimized = _optimized(trainer)

    def _changed(self, trainer: L.Trainer) -> bool:
        # An added layer is trained when an optimizer has it: those of the optimizers are counted, which is quick.
        flags = [one.requires_grad for one in self._parameters]
        return flags != self._needed or _optimized(trainer) != self._optimized

    def _flags_changed(self) -> list[nn.Parameter]:
        pairs = zip(self._parameters, self._needed, strict=True)
        return [one for one, needed in pairs if one.requires_grad != needed]

    def _adapt(self, trainer: L.Trainer) -> None:
        strategy, model = trainer.strategy, trainer.strategy.model
        known = set(map(id, self._parameters))
        added = [one for one in trainer.lightning_module.parameters() if id(one) not in known]
        changed = [*self._flags_changed(), *added]
        if isinstance(strategy, DDPStrategy) and isinstance(model, DistributedDataParallel):
            if changed:
                model._remove_autograd_hooks()  # type: ignore[no-untyped-call]
                strategy.model = model.module
                strategy.configure_ddp()
                self._rebuilt(trainer)
        elif changed and flattens(strategy):
            name = type(strategy).__name__
            raise _failed(
                trainer,
                changed,
                f"{name} fixes what is trained when it is set up: these would not be trained rightly",
                "use strategy: ddp or fsdp, which follow the change; or freeze and unfreeze between two fits",
            )
        self._look(trainer)


def reshard(module: nn.Module) -> None:
    """Forward passes alone leave FSDP2's outermost parameters gathered; hooks look for those of the optimizer."""
    for part in module.modules():
        if is_fully_sharded(part):
            part.reshard()


def _optimized(trainer: L.Trainer) -> int:
    return sum(len(group["params"]) for optimizer in trainer.optimizers for group in optimizer.param_groups)


def _failed(trainer: L.Trainer, changed: Iterable[nn.Parameter], why: str, fix: str) -> RunFailedError:
    ids = set(map(id, changed))
    names = [name for name, one in trainer.lightning_module.named_parameters() if id(one) in ids]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return RunFailedError(
        f"other parameters need gradients than before: {', '.join(names[:3])}{more}",
        where=f"step {trainer.global_step}",
        why=why,
        fix=fix,
    )
