"""The logger `wandb`: Weights & Biases."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fairlead import LoggerConfigBase, LoggerPlugin
from fairlead.engines import LIGHTNING


class WandbLoggerConfig(LoggerConfigBase):
    """A run at Weights & Biases, or a record of one on disk where there is no network.

    All starts of a run are one run there: its id is in `wandb-run.json` of the run directory.

    W&B takes nothing back, so what it has of a step is not logged once more when the step is retrained;
    what had not arrived when the process was killed is logged by the next start. Offline, a start that follows a kill
    records the steps since shortly before its checkpoint once more.

    Example:
        >>> WandbLoggerConfig(project="gpt").project
        'gpt'
    """

    name: Literal["wandb"] = "wandb"
    project: str | None = None
    """The project; None: WANDB_PROJECT, else Lightning's `lightning_logs`."""
    entity: str | None = None
    """The user or team; None: WANDB_ENTITY, else the account's default."""
    run_name: str | None = None
    """How the run is called there; None: the name of the run directory."""
    group: str | None = None
    """Runs with the same group are shown together: a sweep, or the seeds of one experiment."""
    tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tags of the run."""
    notes: str | None = None
    """A longer description."""
    job_type: str | None = None
    """What kind of run it is: train, eval."""
    offline: bool | None = None
    """Whether to record only on disk. None: as WANDB_MODE sets; without it, offline if no login is found or the server
    cannot be reached. The end of the run prints the command that uploads the record."""
    prefix: str = ""
    """Put before the name of each metric, with a dash."""


class Wandb(LoggerPlugin):
    """Metrics at Weights & Biases."""

    config = WandbLoggerConfig
    runtime = "fairlead_lightning.loggers.wandb_runtime:build"
    engines = (*LIGHTNING, "wandb")
    extra = "wandb"


wandb = Wandb()
