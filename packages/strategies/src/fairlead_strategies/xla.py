"""TPUs through torch-xla."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from fairlead import BuildContext, Capability, Resolution, StrategyConfigBase, StrategyPlugin, hookimpl
from fairlead.findings import Inexact
from fairlead_strategies.shared import LIGHTNING


class XLAStrategyConfig(StrategyConfigBase):
    """TPUs through torch-xla; one device or many.

    Example:
        >>> XLAStrategyConfig(debug=True).sync_module_states
        True
    """

    name: Literal["xla"] = "xla"
    debug: bool = False
    """Have torch-xla report compilations and slow operations (PT_XLA_DEBUG). The Trainer only."""
    sync_module_states: bool = True
    """Start every rank with the parameters of rank 0. Of no effect with one device."""


class XLA(StrategyPlugin):
    """Data parallel training on TPUs."""

    config = XLAStrategyConfig
    runtime = "fairlead_strategies.xla:build"
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


def build(config: XLAStrategyConfig, context: BuildContext) -> Any:
    """Lightning's strategy for the resolved number of ranks: the single-device one for one rank, else the parallel one.

    The parallel ones bring their own cluster environment, Lightning's `XLAEnvironment`.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
    """
    from lightning.fabric import strategies as fabric
    from lightning.pytorch import strategies as trainer

    if context.resolution.world_size == 1:
        indices = context.resolution.device_indices
        index = indices[0] if indices else 0
        if context.engine == "trainer":
            return trainer.SingleDeviceXLAStrategy(index, debug=config.debug)
        return fabric.SingleDeviceXLAStrategy(index)
    if context.engine == "trainer":
        return trainer.XLAStrategy(debug=config.debug, sync_module_states=config.sync_module_states)
    return fabric.XLAStrategy(sync_module_states=config.sync_module_states)


xla = XLA()
