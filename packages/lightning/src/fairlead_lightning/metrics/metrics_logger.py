"""The run's own `metrics.csv` as a logger of Lightning's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from fairlead_runs.commit import Fence
from fairlead_runs.metrics_file import MetricsFile


class MetricsLogger(MetricsFile, Logger):
    """The logger that every run has, on rank 0.

    The step is Lightning's: the n-th optimizer step, and the validation after it, are in row n-1.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None,
        position: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
    ) -> None:
        Logger.__init__(self)
        # Lightning counts from 0: the next row is that of `resume_step`.
        MetricsFile.__init__(self, run_dir, resume_step - 1 if resume_step is not None else None, position, fence)
        self._last = 0

    @property
    def name(self) -> str:
        """The folder in the run directory for what Lightning keeps by logger, such as a user's own ModelCheckpoint."""
        return "lightning"

    @property
    def version(self) -> str:
        """None: the run directory is of one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory; `trainer.log_dir` is this."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: `job.yaml` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Takes the values of a step (None: that of the last call): numbers, or tensors with one element."""
        self._last = step if step is not None else self._last
        self.add(self._last, metrics)

    @rank_zero_only
    def position(self) -> dict[str, Any] | None:
        """Where the file stands, for a checkpoint; None on the ranks that log nothing."""
        return MetricsFile.position(self)

    @rank_zero_only
    def save(self) -> None:
        """Hands the rows to the operating system; Lightning calls it after each `log_metrics`."""
        self.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes everything, waits for the disk, and closes the file; later logging reopens it."""
        self.close()
