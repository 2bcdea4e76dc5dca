"""The config of `strategy: ddp` and its presets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fairlead_strategies.fields import ProcessGroupConfig

__all__ = ["DDPStrategyConfig"]


class DDPStrategyConfig(ProcessGroupConfig):
    """A full copy of the model on every rank; gradients are averaged during backward (R3, R116, R117).

    Example:
        >>> DDPStrategyConfig(bucket_cap_mb=50).bucket_cap_mb
        50
    """

    name: Literal["ddp"] = "ddp"
    find_unused_parameters: bool = False
    """Look for parameters that a step did not use, so that ranks do not wait for their gradients (R4, R16). Costs a
    walk over the graph in every step."""
    bucket_cap_mb: int = Field(25, gt=0)
    """Size in MiB of the buckets in which gradients are sent; smaller buckets mean more all-reduce calls that start
    earlier (R18). `bucket_size_mb` is accepted too. The default is torch's: 25, with a first bucket of 1 MiB."""
    gradient_as_bucket_view: bool = False
    """Let `.grad` be a view of the bucket: saves one copy of the gradients in memory."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order; allows re-entrant activation checkpointing
    and more overlap."""
    start_method: Literal["popen", "spawn", "fork"] = "popen"
    """How the ranks of this node are started when nothing else starts them: `popen` runs the script again, `spawn`
    and `fork` use multiprocessing (R5). `spawn` is slower and needs everything to be picklable, but works in a
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
