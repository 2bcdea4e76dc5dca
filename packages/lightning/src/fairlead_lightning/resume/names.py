"""Names in checkpoints are those of the module as it was written, whatever its parts are wrapped in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L

from fairlead_distributed.full_state import named_as, plain_state


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
