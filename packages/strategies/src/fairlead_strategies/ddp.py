"""Distributed data parallel: a full copy of the model on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_strategies.shared import LightningStrategy, ProcessGroupConfig


class DDPStrategyConfig(ProcessGroupConfig):
    """A full copy of the model on every rank; gradients are averaged during backward."""

    name: Literal["ddp"] = "ddp"
    find_unused_parameters: bool = False
    """Look for parameters that a step did not use, so that ranks do not wait for their gradients. Costs a
    walk over the graph in every step."""
    bucket_cap_mb: int = Field(25, gt=0)
    """Size in MiB of the buckets in which gradients are sent; smaller buckets mean more all-reduce calls that start
    earlier. `bucket_size_mb` is accepted too. The default is torch's: 25, with a first bucket of 1 MiB."""
    gradient_as_bucket_view: bool = True
    """Let `.grad` be a view of the bucket: saves one copy of the gradients in memory."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order; allows re-entrant activation checkpointing
    and more overlap."""
    broadcast_buffers: bool = True
    """Copy rank 0's buffers, such as running statistics, to all ranks before every forward pass."""
    init_sync: bool = True
    """Start every rank with rank 0's parameters and buffers, and compare their shapes. False: they are known to be
    equal, and a start is faster; ranks that were seeded differently then train different models."""
    start_method: Literal["popen", "spawn", "fork"] = "popen"
    """How the ranks of this node are started when nothing else starts them: `popen` reruns the script, `spawn`
    and `fork` use multiprocessing. `spawn` is slower and needs everything to be picklable, but works in a
    program without a script; `fork` fails once CUDA was used."""
    ddp_comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """How gradients are sent: None as they are; `fp16` and `bf16` halve the bytes; `powersgd` sends a low-rank
    approximation. `bf16` needs NCCL."""
    exact_reduction: Literal["auto", "on", "off"] = "auto"
    """Add the gradients of all ranks in the order of the ranks, so that a resumed run ends with the same bits as an
    undisturbed one; otherwise more than two ranks add those of a resumed run's first step in another order. `auto` does
    it where that order would change and the cost is small: on gloo, without a `ddp_comm_hook` and without
    `find_unused_parameters` (which keeps the order anyway, unless the graph is static). `on` does it with NCCL too.
    Two ranks need nothing: a + b = b + a."""
    powersgd_rank: int = Field(1, gt=0)
    """Rank of PowerSGD's approximation: higher is more exact and sends more. Used with `ddp_comm_hook: powersgd`."""
    powersgd_start_iter: int = Field(1000, ge=2)
    """Steps with exact gradients before PowerSGD starts; the first steps are the most sensitive ones. Torch's
    default."""

    @model_validator(mode="before")
    @classmethod
    def _one_bucket_size(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "bucket_size_mb" not in data:
            return data
        if "bucket_cap_mb" in data:
            raise ValueError("`bucket_size_mb` is another name of `bucket_cap_mb`; give one of them")
        return {"bucket_cap_mb" if key == "bucket_size_mb" else key: value for key, value in data.items()}


class DDP(LightningStrategy):
    """Data parallel training with torch's DistributedDataParallel."""

    config = DDPStrategyConfig
    runtime = "fairlead_strategies.ddp_runtime:build"
    codes: ClassVar[Mapping[str, str]] = {
        "ddp-comm-hook": "The communication hook of DDP does not work with the process group's backend.",
        "ddp-exact-reduction": "An exact order of reduction is requested together with a communication hook.",
        "ddp-start-method": "DDP is to start ranks itself, but a launcher has started them already.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Devices that Lightning does not drive with DDP."""
        yield from self.no_mps_and_xla()

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
        if config.ddp_comm_hook == "bf16" and resolution.backend != "nccl":
            yield Finding(
                "error",
                "ddp-comm-hook",
                f"the communication hook 'bf16' does not work with the backend {resolution.backend!r}",
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

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """After its first step DDP puts the gradients into other buckets, also after a resume.

        So more than two ranks add them in another order.  Two ranks do not: a + b = b + a.
        """
        config = resolution.strategy
        assert isinstance(config, DDPStrategyConfig)
        hook = config.ddp_comm_hook
        if hook == "powersgd":
            yield Inexact(
                "trainer.strategy.ddp_comm_hook: powersgd",
                why="the error that it carries from step to step is in no checkpoint",
                fix="leave ddp_comm_hook out",
            )
        if resolution.world_size <= 2 or _fixed_order(config, resolution.backend):
            return
        why = "a resumed run adds the gradients of its first step in another order"
        fix = "trainer.strategy: {name: ddp, exact_reduction: on}"
        if hook is not None:
            why += f", for the communication hook {hook} replaces exact_reduction"
            fix = "leave ddp_comm_hook out, or find_unused_parameters: true"
        yield Inexact(f"strategy: ddp with {resolution.world_size} ranks", why=why, fix=fix)


ddp = DDP()
ddp_find_unused_parameters_true = DDP(find_unused_parameters=True)
ddp_spawn = DDP(start_method="spawn")
ddp_spawn_find_unused_parameters_true = DDP(start_method="spawn", find_unused_parameters=True)
ddp_fork = DDP(start_method="fork")
ddp_fork_find_unused_parameters_true = DDP(start_method="fork", find_unused_parameters=True)

# Lightning's other names for the same: with `name`, a preset is none that a config is shown under.
ddp_find_unused_parameters_false = DDP(name="ddp")
ddp_spawn_find_unused_parameters_false = DDP(name="ddp", start_method="spawn")
ddp_fork_find_unused_parameters_false = DDP(name="ddp", start_method="fork")
ddp_notebook = DDP(name="ddp", start_method="fork")
ddp_notebook_find_unused_parameters_false = DDP(name="ddp", start_method="fork")
ddp_notebook_find_unused_parameters_true = DDP(name="ddp", start_method="fork", find_unused_parameters=True)


def _fixed_order(config: DDPStrategyConfig, backend: str) -> bool:
    """Whether the order of the sums does not depend on when the run was started."""
    # Looking for unused parameters keeps the first buckets; a static graph builds others all the same.
    if config.find_unused_parameters and not config.static_graph:
        return True
    if config.ddp_comm_hook is not None:
        return False
    return config.exact_reduction == "on" or (config.exact_reduction == "auto" and backend == "gloo")
