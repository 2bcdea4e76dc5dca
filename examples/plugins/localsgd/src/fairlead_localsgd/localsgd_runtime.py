"""The strategy itself; imported only when a run is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from fairlead import BuildContext
from fairlead.errors import ConfigError
from fairlead_localsgd.localsgd import LocalSGDStrategyConfig


class LocalSGDStrategy(DDPStrategy):
    """Starts and connects ranks as DDP does, but averages weights instead of gradients.

    Args:
        period: Optimizer steps between two averagings.
        backend: The backend of the process group.
    """

    replicas_drift = True  # on purpose: Fairlead does not compare the weights of the ranks

    def __init__(self, period: int, backend: str) -> None:
        super().__init__(process_group_backend=backend)
        self.period = period
        self._steps = 0

    def configure_ddp(self) -> None:
        """No wrapper: gradients stay on their rank."""
        self._average()  # all ranks begin with the same weights

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Steps alone; every `period` steps the weights are averaged."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1
        if self._steps % self.period == 0:
            self._average()
        return result

    @torch.no_grad()
    def _average(self) -> None:
        assert self.model is not None
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= self.world_size


def build(config: LocalSGDStrategyConfig, context: BuildContext) -> LocalSGDStrategy:
    """The strategy that a config describes."""
    if context.engine == "fabric":
        raise ConfigError("localsgd works with the Trainer only", where="trainer.strategy", fix="use strategy: ddp")
    return LocalSGDStrategy(config.period, context.resolution.backend)
