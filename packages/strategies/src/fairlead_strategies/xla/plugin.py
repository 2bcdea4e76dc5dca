"""What `xla` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlead import StrategyPlugin, hookimpl
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.resolve import Resolution
from fairlead_strategies.fields import LIGHTNING
from fairlead_strategies.xla.config import XLAStrategyConfig

__all__ = ["XLA", "xla"]


class XLA(StrategyPlugin):
    """Data parallel training on TPUs."""

    config = XLAStrategyConfig
    runtime = "fairlead_strategies.xla.runtime:build"
    starts_processes = True
    precision = "xla"
    engines = (*LIGHTNING, "torch-xla>=2.9")
    extra = "xla"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning's XLA strategies refuse."""

        def no(others: tuple[str, ...], reason: str, fix: str) -> Capability:
            return Capability("strategy.xla", others, "no", reason, fix)

        yield no(
            ("accelerator.cpu", "accelerator.cuda", "accelerator.mps"),
            "the XLA strategy drives XLA devices only",
            "accelerator: xla, or strategy: auto",
        )
        yield no(
            (
                "precision.64-true",
                "precision.16-mixed",
                "precision.bf16-mixed",
                "precision.bitsandbytes",
                "precision.transformer-engine",
                "precision.deepspeed",
                "precision.fsdp",
            ),
            "Lightning's XLA precision knows 32-true, bf16-true and 16-true only",
            "precision: bf16-true",
        )
        yield no(
            ("checkpoint_io.torch",),
            "Lightning's XLA strategies accept the XLA checkpoint IO only",
            "checkpoint_io: xla",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "strategy: xla",
            why="no test has resumed a run on XLA devices",
            fix="accelerator: cpu or cuda, where it matters",
            certain=False,
        )


xla = XLA()
