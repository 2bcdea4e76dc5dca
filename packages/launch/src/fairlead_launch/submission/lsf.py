"""The submitter `lsf`: `bsub`. Written from IBM's documentation; tried with stand-ins."""

from __future__ import annotations

from typing import Literal

from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.batch import BatchSubmitterConfig


class LSFSubmitterConfig(BatchSubmitterConfig):
    """A batch job of LSF, whose ranks `blaunch` or `jsrun` starts. Tried with stand-ins of LSF's commands only.

    Example:
        >>> LSFSubmitterConfig(time="24:00:00", partition="gpu").name
        'lsf'
    """

    name: Literal["lsf"] = "lsf"
    requeue: bool = True
    """Whether LSF may requeue the job."""
    launcher: Literal["blaunch", "jsrun"] = "blaunch"
    """What starts the ranks: `jsrun` on IBM's Power systems, `blaunch` elsewhere."""


class LSF(SubmitterPlugin):
    """Hands jobs to LSF."""

    config = LSFSubmitterConfig
    runtime = "fairlead_launch.submission.lsf_runtime:build"


lsf = LSF()
