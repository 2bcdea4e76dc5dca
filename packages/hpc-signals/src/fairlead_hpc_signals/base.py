"""The settings of the requeuers that run a command."""

from __future__ import annotations

from pydantic import Field

from fairlead.bases import RequeueConfigBase

__all__ = ["CommandSettings"]


class CommandSettings(RequeueConfigBase):
    """How patiently a command is run."""

    timeout_s: float = Field(default=30.0, gt=0, strict=False)
    """Seconds after which one attempt is killed. Default 30: a scheduler that is busy answers within that, and a
    preempted job has seldom more than a minute left."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after one that failed or took too long."""
    retry_wait_s: float = Field(default=2.0, ge=0, strict=False)
    """Seconds between two attempts."""
