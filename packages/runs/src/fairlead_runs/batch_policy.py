"""What stays the same when a run resumes with another number of ranks: the batch of a rank, or of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fairlead.errors import ConfigError
from fairlead.resolve import Resolution
from fairlead_runs.data_ranks import data_ranks, replicas_in
from fairlead_runs.describe import counted

DATA_RANKS: Final = "data_parallel_ranks"
"""The setting that says how many batches the ranks of a custom loop take at a time, by its model; None: not known."""


def batch_plan(resolution: Resolution, previous: Mapping[str, Any] | None) -> int:
    """How many batches of each rank make one optimizer step, by `trainer.batch_policy`.

    `previous` is the metadata of the checkpoint that the run resumes from. Global batch = batch of a rank x ranks
    x accumulate_grad_batches, where ranks that share a batch count once. `ConfigError`: the number of ranks changed and
    nothing says what to keep, or the old global batch cannot be made of whole batches of the new ranks. With
    `batch_size: global` nothing needs to be kept: each start divides the same global batch.
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
    # Not what the config asks for: the start before may have kept the global batch of one before it.
    old = old_world * int(previous.get("accumulate_grad_batches", requested))
    policy = resolution.trainer.batch_policy
    if old == new_world * requested or policy == "keep_per_device" or resolution.trainer.batch_size == "global":
        return requested
    if policy is None:
        raise ConfigError(
            f"the run was trained with {old_world} {ranks} and would resume with {new_world}",
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
