"""XLA devices through torch-xla: TPUs, and what else PJRT drives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal

from fairlead import Capability, Finding, Resolution, StrategyConfigBase, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_strategies.shared import LightningStrategy


class XLAStrategyConfig(StrategyConfigBase):
    """XLA devices through torch-xla; one device, or all devices of a machine in one process (SPMD).

    With several devices the batch of a loader is that of the machine: it is split over them.

    Example:
        >>> XLAStrategyConfig(sharding_strategy="FULL_SHARD").sharding_strategy
        'FULL_SHARD'
    """

    name: Literal["xla"] = "xla"
    sharding_strategy: Literal["NO_SHARD", "FULL_SHARD"] = "NO_SHARD"
    """What is split over the devices besides the batch: `NO_SHARD` nothing, each has all parameters, as in DDP;
    `FULL_SHARD` parameters, gradients and optimizer state, as in FSDP. Of no effect with one device."""
    debug: bool = False
    """Have torch-xla report compilations and slow operations (PT_XLA_DEBUG). The Trainer only."""
    sync_module_states: bool = True
    """Over several hosts: start every rank with the parameters of rank 0."""


class XLA(LightningStrategy):
    """Data parallel and fully sharded training on XLA devices."""

    config = XLAStrategyConfig
    runtime = "fairlead_strategies.xla_runtime:build"
    starts_processes = True
    one_process = True
    accelerator = "xla"
    precision = "xla"
    checkpoint_io = "xla"
    engines = (*LIGHTNING, "torch-xla")
    extra = "xla"
    codes: ClassVar[Mapping[str, str]] = {
        "xla-devices": "The XLA strategy is to drive some of several devices; one process drives one of them, or all.",
        "xla-hosts": "`sharding_strategy` of the XLA strategy has no effect over several hosts.",
    }

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

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown for one process: what is computed together ends at the same points, whatever is saved in between."""
        if resolution.world_size > 1:
            yield Inexact(
                f"strategy: xla with {resolution.world_size} ranks",
                why="no test has resumed a run over several TPU hosts",
                fix="one host, where it matters",
                certain=False,
            )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Devices that a program for all of them cannot leave out, and a field that Lightning's strategy lacks."""
        config, found, driven = resolution.strategy, resolution.devices_found.count, resolution.devices_per_rank
        assert isinstance(config, XLAStrategyConfig)
        if driven > 1 and found not in (0, driven):  # none: that is a finding already
            yield Finding(
                "error",
                "xla-devices",
                f"one process is to drive {driven} XLA devices, but it sees {found}",
                where="trainer.devices",
                why=f"a program for several devices (SPMD) runs on all that a process sees: "
                f"{resolution.devices_found.evidence}",
                fix="write `devices: auto` or 1, or show it fewer: CPU_NUM_DEVICES, GPU_NUM_DEVICES, TPU_VISIBLE_CHIPS",
            )
        if resolution.num_nodes > 1 and config.sharding_strategy != "NO_SHARD":
            yield Finding(
                "error",
                "xla-hosts",
                f"sharding_strategy {config.sharding_strategy} is for the devices of one machine, not for "
                f"{resolution.num_nodes} hosts",
                where="trainer.strategy.sharding_strategy",
                why="over several hosts Lightning's XLAStrategy trains, which gives each chip all parameters",
                fix="leave sharding_strategy out, or train on one host",
            )


xla = XLA()
xla_debug = XLA(debug=True)
# One device or many is the resolution's to know.
single_xla = XLA(name="xla")
single_tpu = XLA(name="xla")
