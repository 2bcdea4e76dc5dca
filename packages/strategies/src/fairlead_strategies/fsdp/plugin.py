"""What `fsdp` and `fsdp_native` contribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import ClassVar

from fairlead import Finding, StrategyPlugin, hookimpl
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.resolve import Resolution
from fairlead_strategies.fields import LIGHTNING
from fairlead_strategies.fsdp.config import FSDPStrategyConfig

__all__ = ["FSDP", "fsdp", "fsdp_native"]


class FSDP(StrategyPlugin):
    """Fully sharded data parallel, torch's first generation. `fsdp_native` is the same under its old name (R7)."""

    config = FSDPStrategyConfig
    runtime = "fairlead_strategies.fsdp.runtime:build"
    sharded_state = True
    precision = "fsdp"
    engines = LIGHTNING
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {
        "fsdp-checkpoint-io": "Sharded checkpoints of FSDP do not go through `checkpoint_io`.",
        "fsdp-mesh": "The device mesh of FSDP does not have as many places as there are ranks.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with FSDP1."""

        def no(others: tuple[str, ...], reason: str, fix: str) -> Capability:
            return Capability("strategy.fsdp", others, "no", reason, fix)

        yield no(("accelerator.cpu",), "Lightning refuses FSDP without a GPU", "strategy: fsdp2")
        yield no(
            ("accelerator.mps",),
            "MPS is a single device, and Lightning refuses parallel strategies on it",
            "strategy: single_device",
        )
        yield no(("accelerator.xla",), "Lightning drives XLA devices only through its XLA strategies", "strategy: xla")
        yield no(
            ("precision.64-true",),
            "Lightning's FSDP precision has no 64-bit mode",
            "precision: 32-true, or strategy: ddp",
        )
        yield no(
            ("precision.bitsandbytes", "precision.transformer-engine", "precision.deepspeed", "precision.xla"),
            "Lightning's FSDP strategy accepts its own precision plugin only",
            "precision: 32-true, bf16-mixed, 16-mixed, bf16-true or 16-true",
        )
        yield no(
            ("clipping.norm",),
            "each rank sees only its part of the gradients, and Lightning refuses to compute their norm with FSDP",
            "strategy: fsdp2, or gradient_clip_algorithm: value",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Fields that do not fit the rest of the run."""
        config = resolution.strategy
        assert isinstance(config, FSDPStrategyConfig)
        if config.state_dict_type == "sharded":
            yield Finding(
                "warning",
                "fsdp-checkpoint-io",
                f"checkpoint_io {resolution.checkpoint_io.name!r} is not used",
                where="trainer.strategy.state_dict_type",
                why="Lightning has every rank write its own part of a sharded checkpoint directly",
                fix="state_dict_type: full",
            )
        if config.device_mesh is not None and prod(config.device_mesh) != resolution.world_size:
            copies, shards = config.device_mesh
            yield Finding(
                "error",
                "fsdp-mesh",
                f"a device mesh of {copies} x {shards} does not have {resolution.world_size} places, one per rank",
                where="trainer.strategy.device_mesh",
                why=f"{copies} x {shards} = {copies * shards}",
                fix="choose sizes whose product is the number of ranks, or leave `device_mesh` out",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "strategy: fsdp",
            why="no test has resumed it: it needs GPUs",
            fix="strategy: fsdp2, or ddp",
            certain=False,
        )


fsdp = FSDP()
fsdp_native = FSDP(name="fsdp_native")  # a preset that only is another name
