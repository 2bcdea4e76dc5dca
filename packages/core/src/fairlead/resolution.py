"""What `fairlead.resolve` returns: every decision of a run, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairlead.config import TrainerConfig
from fairlead.config_bases import (
    AcceleratorConfigBase,
    CheckpointIOConfigBase,
    EnvironmentConfigBase,
    LayerSyncConfigBase,
    LoggerConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
)
from fairlead.facts import Devices, Job, Setting
from fairlead.findings import Finding
from fairlead.topology import Topology

__all__ = ["Resolution"]


@dataclass(frozen=True)
class Resolution:
    """Every decision of a run. Complete when `findings` has no error; else a field may be None.

    Args:
        settings: Each setting by name, with its value and the reason for it.
        trainer: The config as requested.
        topology: Who this rank is and who else is there.
        environment: Who started the ranks.
        requeue: Who restarts the job.
        loggers: Where metrics go besides metrics.csv.
        devices: Ranks on this node.
        devices_per_rank: Devices that each rank drives: more than one where a single process drives a machine.
        device_indices: The indices of the devices, where the config lists them.
        world_size: Ranks in all.
        device_type: The device type of torch that the accelerator is: cpu, cuda, mps, xla.
        backend: The backend of torch.distributed, as requested, else the one that fits the device: gloo, nccl, xla.
        devices_found: What the accelerator's probe saw on this machine.
        inside_job: Whether a scheduler or launcher started this process.
        job: The scheduler's job that this process is in; None outside of one.
    """

    settings: Mapping[str, Setting]
    trainer: TrainerConfig
    topology: Topology
    accelerator: AcceleratorConfigBase
    strategy: StrategyConfigBase
    precision: PrecisionConfigBase
    environment: EnvironmentConfigBase
    checkpoint_io: CheckpointIOConfigBase
    requeue: RequeueConfigBase
    layer_sync: LayerSyncConfigBase | None
    loggers: tuple[LoggerConfigBase, ...]
    num_nodes: int
    devices: int
    device_indices: tuple[int, ...] | None
    world_size: int
    device_type: str
    backend: str
    devices_found: Devices
    inside_job: bool
    findings: tuple[Finding, ...]
    job: Job | None = None
    devices_per_rank: int = 1

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What somebody looks for here may be elsewhere."""
            settings = vars(self).get("settings", {})
            advice = "it is context.run_dir" if name == "run_dir" else None
            if advice is None and name in settings:
                advice = f"it is resolution.value({name!r})"
            raise AttributeError(f"a Resolution has no attribute {name!r}" + (f": {advice}" if advice else ""))

    def value(self, name: str) -> Any:
        """The value of a setting."""
        return self.settings[name].value

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The settings as `explain --json` prints them."""
        return {name: {"value": s.value, "reason": s.reason} for name, s in self.settings.items()}
