"""The models a user writes: a job, its run, its trainer, and where it is to run.

Field names are Lightning's wherever Lightning has the thing. What else must be known of a field (may a resume change
it? is it passed on to Lightning?) stands on the field itself: see `fairlead.config.marks`.
"""

from __future__ import annotations

from fairlead.config.job import JobConfig, ResourcesConfig, RunConfig
from fairlead.config.trainer import CheckpointConfig, ClassSpec, TrainerConfig

__all__ = [
    "CheckpointConfig",
    "ClassSpec",
    "JobConfig",
    "ResourcesConfig",
    "RunConfig",
    "TrainerConfig",
]
