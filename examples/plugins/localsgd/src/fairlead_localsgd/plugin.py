"""What this package contributes: one strategy."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead import Capability, StrategyPlugin, hookimpl
from fairlead_localsgd.config import LocalSGDStrategyConfig


class LocalSGD(StrategyPlugin):
    """Local SGD."""

    config = LocalSGDStrategyConfig
    runtime = "fairlead_localsgd.runtime:build"
    engines = ("torch", "lightning>=2.6.6,<2.7")

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
