"""A strategy that averages weights: the settings, and what this plugin contributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import PositiveInt

from fairlead import Capability, StrategyConfigBase, StrategyPlugin, hookimpl


class LocalSGDStrategyConfig(StrategyConfigBase):
    """Every rank trains alone; the weights are averaged every `period` steps (Stich, 2019)."""

    name: Literal["localsgd"] = "localsgd"
    """The tag."""
    period: PositiveInt = 8
    """Optimizer steps between two averagings; 1 averages after every step."""


class LocalSGD(StrategyPlugin):
    """Averages weights instead of gradients."""

    config = LocalSGDStrategyConfig
    runtime = "fairlead_localsgd.localsgd_runtime:build"
    engines = ("torch", "lightning")

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What does not go together with it."""
        yield Capability(
            "strategy.localsgd",
            ("accelerator.mps", "accelerator.xla"),
            "no",
            "it averages through torch.distributed's gloo or nccl backend",
            "accelerator: cpu or cuda",
        )


localsgd = LocalSGD()
