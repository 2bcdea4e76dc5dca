"""The logger `csv`: the file `metrics.csv`, which is written in any case."""

from __future__ import annotations

from typing import Literal

from fairlead import LoggerConfigBase, LoggerPlugin
from fairlead.engines import LIGHTNING
from fairlead.interfaces import BuildContext


class CSVLoggerConfig(LoggerConfigBase):
    """The file `metrics.csv` in the run directory, which is written in any case: naming it changes nothing."""

    name: Literal["csv"] = "csv"


class CSV(LoggerPlugin):
    """`metrics.csv`, which every run has."""

    config = CSVLoggerConfig
    runtime = "fairlead_lightning.loggers.csv:build"
    engines = LIGHTNING
    extra = "lightning"


csv = CSV()


def build(config: CSVLoggerConfig, context: BuildContext) -> None:
    """None, which the bridge leaves out: the run's `MetricsLogger` is this logger."""
