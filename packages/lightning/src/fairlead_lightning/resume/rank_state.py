"""What each rank adds to a checkpoint: all that Lightning does not save and that the next step depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import lightning.fabric as lf
import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden

from fairlead.errors import CheckpointError
from fairlead_distributed import rng_state, set_rng_state
from fairlead_distributed.full_state import named_as, plain_name, plain_state
from fairlead_distributed.module_state import module_state, restore_module
from fairlead_distributed.run.commits import load_part, rank_file
from fairlead_distributed.run.gradients import gradient_to_save, restore_gradient
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_runs.batch_size import replicas_in, replicas_of
from fairlead_runs.logger_positions import LOGGER_POSITIONS

FORMAT: Final = 1


def read(folder: Path, rank: int) -> dict[str, Any] | None:
    """A rank's part of a checkpoint; None where it has none: it is plain Lightning's, or of fewer ranks."""
    path = folder / rank_file(rank)
    if not path.exists():
        return None
    state = load_part(path)
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        return None  # of a version that saved generators only
    if state["format"] > FORMAT:
        raise CheckpointError(
            "a newer version of Fairlead wrote this checkpoint",
            where=str(path),
            why=f"its format is {state['format']}, this version reads up to {FORMAT}",
            fix="upgrade fairlead",
        )
    return state


def gradients_wait(trainer: L.Trainer) -> bool:
    """Whether gradients of a step are there for the next one: Lightning's own loop begins each without any.

    A loop that steps its optimizers itself may accumulate for one of them and step another; hooks that come before the
    gradients are set to None see those of the step before, or decide themselves what becomes of them.
    """
    model = trainer.lightning_module
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    given = [one for one in vars(trainer)["callbacks"] if not type(one).__module__.startswith("fairlead")]
    return (
        not model.automatic_optimization
        or compat.leaves_gradients(trainer)
        or any(is_overridden(name, model) for name in hooks)
        or any(is_overridden("on_before_zero_grad", one, L.Callback) for one in given)
    )


def capture(trainer: L.Trainer) -> dict[str, Any]:
    """This rank's state between two batches; in data parallel training its buffers differ (batch norm)."""
    model = trainer.lightning_module
    waiting = gradients_wait(trainer)
    return {
        "format": FORMAT,
        "world_size": trainer.world_size,
        "rng": rng_state(),
        "logged": compat.logged_state(trainer),
        # Rank 0's buffers are in the checkpoint itself.
        **module_state(trainer.lightning_module, buffers=trainer.global_rank > 0),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradients": {
            plain_name(name): gradient_to_save(one)
            for name, one in model.named_parameters()
            if waiting and one.grad is not None
        },
        "should_stop": trainer.should_stop,
    }


@torch.no_grad()
def restore(trainer: L.Trainer, state: Mapping[str, Any]) -> None:
    """Puts back what `capture` gave, generators last."""
    inside = state["where"] in ("batch", "done")
    compat.restore_logged(trainer, state["logged"], compat.training_position(trainer)[1] if inside else 0)
    restore_module(trainer.lightning_module, state)
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in vars(trainer)["callbacks"]):
        trainer.accumulate_grad_batches = state.get("accumulate_grad_batches", trainer.accumulate_grad_batches)
    weights = {plain_name(name): one for name, one in trainer.lightning_module.named_parameters()}
    for name, gradient in state.get("gradients", {}).items():
        restore_gradient(weights[name], gradient)
    trainer.should_stop = state["should_stop"]
    set_rng_state(state["rng"])


def same_ranks(metadata: Mapping[str, Any], trainer: L.Trainer) -> bool:
    """Whether as many ranks resume as have saved, and the same of them share batches."""
    world = trainer.world_size
    return metadata.get("world_size") == world and replicas_in(metadata) == replicas_of(trainer.strategy, world)


def data_rank(engine: L.Trainer | lf.Fabric) -> int:
    """Which of the batches this rank takes; ranks that share one have the same number, and draw alike."""
    shards = getattr(engine.strategy, "distributed_sampler_kwargs", None)
    return int(shards["rank"]) if shards else engine.global_rank


def saved_positions(session: RunSession) -> Mapping[str, Any]:
    """Where the loggers stood in the checkpoint that a start resumes from, if that is one of the same run."""
    if session.checkpoint is None or not session.checkpoint.is_relative_to(session.path):
        return {}
    state = read(session.checkpoint.parent, 0) or {}
    positions: Mapping[str, Any] = state.get(LOGGER_POSITIONS, {})
    return positions


def plain_names(trainer: L.Trainer) -> Callable[[], None]:
    """Has the strategy save weights without the names of wrappers, and match them without; returns what ends it."""
    attributes: dict[str, Any] = vars(trainer.strategy)
    strategy: Any = trainer.strategy
    state, load = strategy.lightning_module_state_dict, strategy.load_model_state_dict

    def lightning_module_state_dict() -> dict[str, Any]:
        return plain_state(state())

    def load_model_state_dict(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        weights = checkpoint.get("state_dict")
        if isinstance(weights, Mapping):
            checkpoint = {**checkpoint, "state_dict": named_as(trainer.lightning_module, weights)}
        load(checkpoint, *args, **kwargs)

    ours = {"lightning_module_state_dict": lightning_module_state_dict, "load_model_state_dict": load_model_state_dict}
    attributes.update(ours)

    def undo() -> None:
        for name, one in ours.items():
            if attributes.get(name) is one:
                del attributes[name]

    return undo
