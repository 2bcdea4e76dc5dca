"""The samples of one optimizer step over all ranks, how ranks share them, and what learning rate goes with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

from fairlead.config import ClassSpec, JobConfig, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.facts import Setting
from fairlead.resolution import Resolution
from fairlead_runs.describe import counted

LrRule = Literal["linear", "sqrt", "none"]
"""How a learning rate follows the global batch: in proportion, with its square root, or not at all."""


@dataclass(frozen=True)
class GlobalBatch:
    """What makes one optimizer step: the batch of a rank, the ranks, and the batches that each adds up for a step.

    Example:
        >>> batch = GlobalBatch(32, ranks=16, nodes=2, accumulate=4)
        >>> batch.samples, str(batch)
        (2048, '32 per device x 8 devices x 2 nodes x 4 batches')
        >>> str(GlobalBatch(32, ranks=4, shared_by=8))  # tensor parallelism: eight ranks work on a batch
        '32 per replica x 4 replicas of 8 devices'
        >>> str(GlobalBatch(32, drives=4))  # SPMD: one process splits its batch over four devices
        '32 per process of 4 devices'
    """

    per_device: int
    ranks: int = 1
    """Those that have a batch of their own."""
    nodes: int = 1
    accumulate: int = 1
    shared_by: int = 1
    """Ranks that work on one batch together."""
    drives: int = 1
    """Devices over which each rank splits its batch."""

    @property
    def samples(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        return effective_batch(self.per_device, self.ranks, accumulate_grad_batches=self.accumulate)

    def __str__(self) -> str:
        ranks = [(self.ranks, "rank")]  # nodes may have unequal numbers of them
        if self.ranks % self.nodes == 0:
            ranks = [(self.ranks // self.nodes, "device"), (self.nodes, "node")]
        batches = [f"{self.accumulate} batches"] if self.accumulate > 1 else []
        if self.shared_by > 1:
            replicas = f"{self.ranks} replica{'s' if self.ranks > 1 else ''} of {self.shared_by} devices"
            return " x ".join([f"{self.per_device} per replica", replicas, *batches])
        named = [f"{count} {name}s" for count, name in ranks if count > 1]
        device = f"process of {self.drives} devices" if self.drives > 1 else "device"
        return " x ".join([f"{self.per_device} per {device}", *named, *batches])


def effective_batch(batch_size: int, devices: int = 1, num_nodes: int = 1, accumulate_grad_batches: int = 1) -> int:
    """The global (or effective) batch: the samples of one optimizer step, over all ranks.

    Args:
        batch_size: Samples in the batch of one rank.
        devices: Ranks on each node.
        num_nodes: Nodes.
        accumulate_grad_batches: Batches of each rank whose gradients are added up for one optimizer step.

    Example:
        >>> effective_batch(32, devices=8, num_nodes=2, accumulate_grad_batches=4)
        2048
    """
    return batch_size * devices * num_nodes * accumulate_grad_batches


def split_batch(total: int, world_size: int, accumulate_grad_batches: int = 1) -> int:
    """The batch of one rank, where all ranks together are to take `total` samples for an optimizer step.

    Args:
        total: Samples in one optimizer step, over all ranks.
        world_size: Ranks in all; where several share a batch, as in tensor parallelism, how many batches there are.
        accumulate_grad_batches: Batches of each rank to one optimizer step.

    Raises:
        ConfigError: They cannot be shared evenly; the message names the nearest totals that can.

    Example:
        >>> split_batch(256, world_size=8)
        32
    """
    parts = world_size * accumulate_grad_batches
    if total > 0 and total % parts == 0:
        return total // parts
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    batches = f" x {accumulate_grad_batches} batches" if accumulate_grad_batches > 1 else ""
    below = total // parts * parts
    nearest = f"{below} or {below + parts}" if below > 0 else str(parts)
    raise ConfigError(
        f"a global batch of {total} samples cannot be shared by {ranks}{batches}",
        why=f"{total} / {parts} is not a whole number" if total > 0 else "it has no samples",
        fix=f"the nearest sizes that can: {nearest}",
    )


def lr_factor(effective: float, base: float, rule: LrRule = "linear") -> float:
    """What a learning rate that was chosen for the global batch `base` is multiplied by for the one of `effective`.

    `linear` is the rule of Goyal et al. 2017 (arXiv:1706.02677), `sqrt` that of Krizhevsky 2014 (arXiv:1404.5997).

    Args:
        effective: Samples in one optimizer step, over all ranks.
        base: The same where the learning rate was chosen.
        rule: `linear`: in proportion; `sqrt`: with the square root; `none`: 1.

    Raises:
        ConfigError: A batch is not positive, or there is no such rule.

    Example:
        >>> lr_factor(2048, base=512), lr_factor(2048, base=512, rule="sqrt"), lr_factor(2048, base=512, rule="none")
        (4.0, 2.0, 1.0)
    """
    if effective <= 0 or base <= 0:
        raise ConfigError(f"no learning rate follows from a batch of {effective} and a base of {base}")
    if rule not in ("linear", "sqrt", "none"):
        raise ConfigError(f"there is no learning-rate rule {rule!r}", fix="name linear, sqrt or none")
    ratio = effective / base
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def scale_lr(base_lr: float, effective: float, base: float, rule: LrRule = "linear") -> float:
    """The learning rate for a global batch of `effective`, where `base_lr` was chosen for one of `base`.

    The arguments and errors are those of `lr_factor`.

    Example:
        >>> scale_lr(0.1, effective=2048, base=256)
        0.8
    """
    return base_lr * lr_factor(effective, base, rule)


def lr_setting(trainer: TrainerConfig, batch: GlobalBatch) -> Setting | None:
    """What a job's learning rates are multiplied by, with the reason; None without `trainer.base_batch_size`."""
    base, rule = trainer.base_batch_size, trainer.lr_rule or "linear"
    if base is None:
        return None
    factor = lr_factor(batch.samples, base, rule)
    return Setting(factor, f"lr_rule {rule}: global batch {batch.samples} / base_batch_size {base}")


def batch_of_job(job: JobConfig) -> int | None:
    """The batch size that a job says where `trainer.batch_size_from` points; None: it says no number there.

    Raises:
        ConfigError: That is not the path of an argument; or its value is to be divided, and is no number of samples.
    """
    value: Any = _arguments(job)
    for name in _argument_path(job)[2:]:
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if value is not None and job.trainer.batch_size == "global":
        raise ConfigError(
            f"trainer.batch_size is global, but the batch size is {value!r:.60}",
            where=job.trainer.batch_size_from,
            fix="give the number of samples, or name the argument that has it in trainer.batch_size_from",
        )
    return None  # such as "auto": what the user's class makes of it is its own matter


def global_batch(job: JobConfig | None, trainer: TrainerConfig) -> int | None:
    """The samples of a step that `batch_size: global` asks for; None without it.

    Raises:
        ConfigError: There is no job that says them.
    """
    if trainer.batch_size != "global":
        return None
    total = batch_of_job(job) if job is not None else None
    if total is None:
        raise ConfigError(
            "trainer.batch_size is global, but no job says a batch size",
            where=trainer.batch_size_from,
            why="what all ranks take together for a step is divided in the job, before the data are built",
            fix=f"give {trainer.batch_size_from}, or name the argument that has it in trainer.batch_size_from; where "
            "the loaders are made by a script: leave batch_size out, and give them split_batch(total, world_size)",
        )
    return total


def for_each_rank(job: JobConfig, resolution: Resolution, *, evaluates: bool = False) -> JobConfig:
    """The job with the batch size that each rank's objects are built with: with `batch_size: global`, its share.

    An evaluation takes as many samples at a time as would be trained on, also where they cannot be shared evenly.

    Raises:
        ConfigError: The job says no batch size, or one that cannot be shared evenly.
    """
    trainer = job.trainer
    total = global_batch(job, trainer)
    if total is None:
        return job
    ranks, accumulate = data_ranks(resolution), trainer.accumulate_grad_batches
    if evaluates:
        share = max(1, total // (ranks * accumulate))
    else:
        try:
            share = split_batch(total, ranks, accumulate)
        except ConfigError as error:
            error.where = trainer.batch_size_from
            raise
    section, _, *names = _argument_path(job)
    spec: ClassSpec = getattr(job, section)
    changed = spec.model_copy(update={"args": _with(_arguments(job), names, share)})
    return job.model_copy(update={section: changed})


def _argument_path(job: JobConfig) -> list[str]:
    """`data.args.batch_size`, in its parts."""
    path = job.trainer.batch_size_from
    parts = path.split(".")
    if len(parts) < 3 or parts[0] not in ("data", "model") or parts[1] != "args" or not all(parts):
        raise ConfigError(
            f"{path!r} is no argument of the job's data or model",
            where="trainer.batch_size_from",
            fix="name one, as data.args.batch_size or model.args.batch_size",
        )
    return parts


def _arguments(job: JobConfig) -> Mapping[str, Any]:
    spec: ClassSpec | None = getattr(job, _argument_path(job)[0])
    return spec.args if spec is not None else {}


def _with(arguments: Mapping[str, Any], names: list[str], value: int) -> dict[str, Any]:
    """A copy with another value at an existing path."""
    first, *rest = names
    return {**arguments, first: _with(arguments[first], rest, value) if rest else value}


DATA_RANKS: Final = "data_parallel_ranks"
"""The setting that says how many batches the ranks of a custom loop take at a time, by its model; None: not known."""


def batch_plan(resolution: Resolution, previous: Mapping[str, Any] | None) -> int:
    """How many batches of each rank make one optimizer step, by `trainer.batch_policy`.

    `previous` is the metadata of the checkpoint that the run resumes from. Global batch = batch of a rank x ranks
    x accumulate_grad_batches, where ranks that share a batch count once. `ConfigError`: the number of ranks changed and
    nothing says what to preserve, or the old global batch is not a multiple of the new ranks. With
    `batch_size: global` nothing needs to be preserved: each start divides the same global batch.
    """
    requested = resolution.trainer.accumulate_grad_batches
    if previous is None or previous.get("world_size") is None:
        return requested
    by_model = resolution.settings.get(DATA_RANKS)
    old_world, new_world = replicas_in(previous)[0], by_model.value if by_model is not None else data_ranks(resolution)
    if new_world is None:
        return requested
    split = (old_world, new_world) != (int(previous["world_size"]), resolution.world_size)
    ranks = "replicas of the model" if split else "ranks"
    # Not what the config says: the start before may have preserved the global batch of one before it.
    old = old_world * int(previous.get("accumulate_grad_batches", requested))
    policy = resolution.trainer.batch_policy
    if old == new_world * requested or policy == "keep_per_device" or resolution.trainer.batch_size == "global":
        return requested
    if policy is None:
        raise ConfigError(
            f"the run was trained with {old_world} {ranks} and would resume with {new_world}"
            if old_world != new_world
            else f"the run accumulated {old // old_world} batches to a step and would resume with {requested}",
            where="trainer.batch_policy",
            why=f"the global batch would change from {old} to {new_world * requested} batches of one rank",
            fix="set batch_policy: keep_global (same global batch) or keep_per_device (same batch for each rank)",
        )
    if old % new_world:
        below = max(n for n in range(1, new_world) if old % n == 0)
        above = next((n for n in range(new_world + 1, old + 1) if old % n == 0), None)
        sizes = f"{below} or {above} ranks" if above else counted(below, "rank")
        raise ConfigError(
            f"{new_world} ranks cannot share a global batch of {old} x the batch of one rank",
            where="trainer.batch_policy",
            why=f"{old} / {new_world} is not a whole number",
            fix=f"start {sizes}, or set batch_policy: keep_per_device",
        )
    return old // new_world


@runtime_checkable
class SharesBatches(Protocol):
    """The config of a strategy in which several ranks may work on one batch.

    Example:
        >>> class Pairs:
        ...     def data_parallel_ranks(self, world_size):
        ...         return world_size // 2
        >>> isinstance(Pairs(), SharesBatches)
        True
    """

    def data_parallel_ranks(self, world_size: int) -> int:
        """How many batches the ranks take at a time; a ConfigError where so many ranks cannot be laid out."""


@runtime_checkable
class LaidOut(Protocol):
    """What such a strategy has at run time, as `layout`."""

    @property
    def data_parallel(self) -> int:
        """How many batches the ranks take at a time: one each replica."""

    @property
    def neighbours(self) -> int:
        """How many consecutive ranks share a batch; with stages of a pipeline, others far away do too."""

    def data_rank(self, rank: int) -> int:
        """Which replica a rank belongs to."""


def data_ranks(resolution: Resolution) -> int:
    """How many batches the ranks of a run take at a time.

    Raises:
        ConfigError: So many ranks cannot be laid out as the strategy asks.
    """
    strategy: Any = resolution.strategy
    if isinstance(strategy, SharesBatches):
        return strategy.data_parallel_ranks(resolution.world_size)
    return resolution.world_size


def replicas_in(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Of a checkpoint with a `world_size`: the replicas, and the consecutive ranks that shared a batch of each."""
    replicas = metadata.get("replicas")
    return (int(replicas[0]), int(replicas[1])) if replicas else (int(metadata["world_size"]), 1)


def replicas_of(strategy: object, world_size: int) -> tuple[int, int]:
    """The same of a strategy that runs."""
    layout = getattr(strategy, "layout", None)
    return (layout.data_parallel, layout.neighbours) if isinstance(layout, LaidOut) else (world_size, 1)
