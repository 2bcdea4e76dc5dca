"""TPUs through torch-xla."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fairlead import BuildContext, Capability, StrategyConfigBase, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_strategies.shared import UnprovenStrategy


class XLAStrategyConfig(StrategyConfigBase):
    """TPUs through torch-xla; one device or many."""

    name: Literal["xla"] = "xla"
    debug: bool = False
    """Have torch-xla report compilations and slow operations (PT_XLA_DEBUG). The Trainer only."""
    sync_module_states: bool = True
    """Start every rank with the parameters of rank 0. Of no effect with one device."""


class XLA(UnprovenStrategy):
    """Data parallel training on TPUs."""

    config = XLAStrategyConfig
    runtime = "fairlead_strategies.xla:build"
    starts_processes = True
    precision = "xla"
    engines = (*LIGHTNING, "torch-xla")
    extra = "xla"
    unproven = Inexact(
        "strategy: xla",
        why="no test has resumed a run on XLA devices",
        fix="accelerator: cpu or cuda, where it matters",
        certain=False,
    )

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning's XLA strategies refuse."""
        yield self.no(
            ("accelerator.cpu", "accelerator.cuda", "accelerator.mps"),
            "the XLA strategy drives XLA devices only",
            "accelerator: xla, or strategy: auto",
        )
        yield self.no(
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
        reason = "Lightning's XLA strategies accept the XLA checkpoint IO only"
        yield self.no(("checkpoint_io.torch",), reason, "checkpoint_io: xla")


def build(config: XLAStrategyConfig, context: BuildContext) -> Any:
    """Lightning's strategy for the resolved number of ranks: the single-device one for one rank, else the parallel one.

    The parallel ones bring their own cluster environment, Lightning's `XLAEnvironment`.
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
xla_debug = XLA(debug=True)
# One device or many is the resolution's to know.
single_xla = XLA(name="xla")
single_tpu = XLA(name="xla")
