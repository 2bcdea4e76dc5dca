"""The config of the logger `csv`."""

from __future__ import annotations

from typing import Literal

from fairlead import LoggerConfigBase

__all__ = ["CSVLoggerConfig"]


class CSVLoggerConfig(LoggerConfigBase):
    """The file `metrics.csv` in the run directory.

    It is written in any case: naming it says so, and changes nothing.

    Example:
        >>> CSVLoggerConfig().name
        'csv'
    """

    name: Literal["csv"] = "csv"
