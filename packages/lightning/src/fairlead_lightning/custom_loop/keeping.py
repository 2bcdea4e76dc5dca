"""Which checkpoints of a loop are kept, and what their manifests say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fairlead.config import CheckpointConfig
from fairlead.errors import ConfigError
from fairlead_runs.commit import RetentionPolicy

_THE_LOOPS_OWN: Final = ("every_n_steps", "every_n_epochs", "every_n_minutes", "on_validation", "save_weights_only")
_USUAL_MONITORS: Final = ("val/loss", "val_loss")


class Keeping:
    """What is kept, and by which metric (`monitor`; None: not known before one is measured)."""

    def __init__(self, config: CheckpointConfig | None) -> None:
        self._config = config or CheckpointConfig()
        self.monitor = self._config.monitor
        # Refused, rather than not done.
        if said := [name for name in _THE_LOOPS_OWN if name in self._config.model_fields_set]:
            raise ConfigError(
                f"{', '.join(said)}: when to save is the loop's to decide",
                where="LoopRun(checkpoint=...)",
                fix="leave it out, and call run.save() where a checkpoint is due",
            )

    @property
    def policy(self) -> RetentionPolicy:
        """What follows a commit."""
        return RetentionPolicy.of(self._config, self.monitor)

    def measured(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What a manifest says of the metrics of its checkpoint."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        if self.monitor is None:
            self.monitor = next((name for name in _USUAL_MONITORS if name in values), None)
        return {"metrics": values, "monitor": self.monitor, "mode": self._config.mode}


def _number(name: str, value: Any) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric {name!r} is not one number", where="LoopRun.save(metrics=...)", why=str(error)
        ) from error
