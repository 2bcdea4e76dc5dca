"""What the logger `csv` contributes."""

from __future__ import annotations

from fairlead import LoggerPlugin
from fairlead_lightning.fields import LIGHTNING
from fairlead_lightning.loggers.csv.config import CSVLoggerConfig

__all__ = ["CSV", "csv"]


class CSV(LoggerPlugin):
    """`metrics.csv`, which every run has."""

    config = CSVLoggerConfig
    runtime = "fairlead_lightning.loggers.csv.runtime:build"
    engines = LIGHTNING
    extra = "lightning"


csv = CSV()
