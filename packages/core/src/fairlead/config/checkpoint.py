"""When checkpoints are written and which are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fairlead.config.marks import NotExact
from fairlead.config_bases import ConfigModel


class CheckpointConfig(ConfigModel):
    """When checkpoints are written and which are kept. The end of training is always saved."""

    every_n_steps: PositiveInt | None = None
    """Save after every N optimizer steps."""
    every_n_epochs: PositiveInt | None = 1
    """Save at the end of every Nth epoch, after its validation."""
    every_n_minutes: PositiveFloat | None = None
    """Save when so many minutes have passed since the last save."""
    on_validation: bool = True
    """Save after every validation, so that each measured state can be restored."""
    monitor: str | None = None
    """The logged metric that decides which checkpoints are best; None: `val/loss` or `val_loss` where logged."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: NonNegativeInt = 1
    """How many of the best checkpoints by `monitor` are kept besides."""
    keep_every_n_steps: PositiveInt | None = None
    """Checkpoints at multiples of N steps are kept forever."""
    save_weights_only: Annotated[
        bool,
        NotExact(
            bool,
            why="the state of the optimizer and the place in the epoch are not saved",
            fix="save_weights_only: false",
        ),
    ] = False
    """Leave out optimizer and loop state: smaller, but a run cannot resume from it."""
