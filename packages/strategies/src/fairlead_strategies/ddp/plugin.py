"""What `ddp` and its presets contribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from fairlead import Finding, StrategyPlugin, hookimpl
from fairlead.capabilities import Capability
from fairlead.resolve import Resolution
from fairlead_strategies.ddp.config import DDPStrategyConfig
from fairlead_strategies.fields import LIGHTNING

__all__ = ["DDP", "ddp", "ddp_find_unused_parameters_true", "ddp_fork", "ddp_spawn"]


class DDP(StrategyPlugin):
    """Data parallel training with torch's DistributedDataParallel."""

    config = DDPStrategyConfig
    runtime = "fairlead_strategies.ddp.runtime:build"
    engines = LIGHTNING
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {
        "ddp-comm-hook": "The communication hook of DDP does not work with the process group's backend.",
        "ddp-exact-reduction": "An exact order of reduction is asked for together with a communication hook.",
        "ddp-start-method": "DDP is to start ranks itself, but a launcher has started them already.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Devices that Lightning does not drive with DDP."""
        yield Capability(
            "strategy.ddp",
            ("accelerator.mps",),
            "no",
            "MPS is a single device, and Lightning refuses parallel strategies on it",
            "strategy: single_device",
        )
        yield Capability(
            "strategy.ddp",
            ("accelerator.xla",),
            "no",
            "Lightning drives XLA devices only through its XLA strategies",
            "strategy: xla",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Settings that fit neither the launcher nor the backend."""
        config = resolution.strategy
        assert isinstance(config, DDPStrategyConfig)
        if resolution.topology.launched and config.start_method != "popen":
            yield Finding(
                "error",
                "ddp-start-method",
                f"every launched process would {config.start_method} {resolution.devices} more",
                where="trainer.strategy.start_method",
                why=f"the ranks were already started: environment {resolution.environment.name!r}",
                fix="strategy: ddp",
            )
        backend = resolution.backend if config.process_group_backend == "auto" else config.process_group_backend
        if config.ddp_comm_hook == "bf16" and backend != "nccl":
            yield Finding(
                "error",
                "ddp-comm-hook",
                f"the communication hook 'bf16' does not work with the backend {backend!r}",
                where="trainer.strategy.ddp_comm_hook",
                why="torch sends bfloat16 gradients over NCCL only",
                fix="ddp_comm_hook: fp16",
            )
        if config.ddp_comm_hook is not None and config.exact_reduction == "on":
            yield Finding(
                "error",
                "ddp-exact-reduction",
                f"exact_reduction: on does not work together with ddp_comm_hook: {config.ddp_comm_hook}",
                where="trainer.strategy.exact_reduction",
                why="both are communication hooks, and DDP takes only one",
                fix="leave ddp_comm_hook out, or exact_reduction: off",
            )


ddp = DDP()
ddp_find_unused_parameters_true = DDP(find_unused_parameters=True)
ddp_spawn = DDP(start_method="spawn")
ddp_fork = DDP(start_method="fork")
