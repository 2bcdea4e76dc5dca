"""The settings of local SGD."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from fairlead import StrategyConfigBase


class LocalSGDStrategyConfig(StrategyConfigBase):
    """Every rank trains alone; the weights are averaged every `period` steps (Stich, 2019)."""

    name: Literal["localsgd"] = "localsgd"
    """The tag."""
    period: PositiveInt = 8
    """Optimizer steps between two averagings; 1 averages after every step."""
