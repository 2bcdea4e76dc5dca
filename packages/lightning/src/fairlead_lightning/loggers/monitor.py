"""What the loggers for monitoring systems have in common: they show the state of a run, on rank 0, while it trains."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_runs.monitoring import Reading, RunMetrics


class Monitor(ABC):
    """A logger of a Trainer's or a `Run`'s that keeps the newest values and has no history: nothing to cut back.

    It begins where it is first used on rank 0, in the process that trains.

    Args:
        context: Has the run directory.
    """

    name: ClassVar[str]

    def __init__(self, context: BuildContext) -> None:
        lightning = sys.modules.get("lightning.pytorch.loggers.logger")  # a `Run` does not need it
        if lightning is not None:
            lightning.Logger.register(Monitor)
        if context.run_dir is None:  # as of a Fabric
            what = f"the logger {self.name} shows a run, and there is none here"
            raise ConfigError(what, where="trainer.loggers", fix="fairlead.Trainer, the callback Fairlead, or Run")
        self._path = context.run_dir.absolute()
        self.run = context.extras.get("run_name") or self._path.name
        self._metrics: RunMetrics | None = None

    @property
    def experiment(self) -> RunMetrics | None:
        """The run's metrics, which are shown from now on; None on other ranks than 0."""
        from fairlead_distributed.info import get_rank  # not there with the extra `check`, which loads this plugin

        if self._metrics is None and get_rank() == 0 and _lightnings_rank() == 0:
            self._metrics = RunMetrics(self._path)
            self._begin()
        return self._metrics

    def readings(self, *, active: bool = True) -> list[Reading]:
        """The values of all metrics now, each with the label `run`; may be called in any thread."""
        return self._metrics.read(self.run, active=active) if self._metrics is not None else []

    @abstractmethod
    def _begin(self) -> None:
        """Shows `readings` from now on."""

    @abstractmethod
    def _end(self) -> None:
        """Shows the last ones, and stops."""

    # -- what Lightning and `Run` call

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Takes the newest values; the step is that of the run."""
        if self.experiment is not None:
            self.experiment.log(metrics)

    def finalize(self, status: str) -> None:
        """Shows the last values, and stops; what is logged later restarts it."""
        if self._metrics is not None:
            self._end()
            self._metrics = None

    def nothing(self, *_: Any, **__: Any) -> None:  # noqa: B027 - not abstract
        """What a monitoring system does not take: hyperparameters, graphs, checkpoints."""

    log_hyperparams = log_graph = save = after_save_checkpoint = nothing
    version = ""
    save_dir = root_dir = log_dir = None
    group_separator = "/"


def _lightnings_rank() -> int:
    """The rank that Lightning knows, also of ranks without a process group."""
    found = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    return int(getattr(found, "rank", None) or 0)
