"""Builds nothing: the bridge writes `metrics.csv` in any case."""

from __future__ import annotations

from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.csv.config import CSVLoggerConfig

__all__ = ["build"]


def build(config: CSVLoggerConfig, context: BuildContext) -> None:
    """None, which the bridge leaves out: the run's `MetricsFile` is this logger."""
