"""What the template of each axis is about: its description and what the generated distribution requires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TORCH: Final = ("torch", "lightning>=2.6.6,<3")


@dataclass(frozen=True)
class Axis:
    """One template of a plugin.

    Args:
        about: What it does, for the description of the distribution.
        run: What the generated extra `run` has.
        requires: Packages of Fairlead that its modules import, besides the core.
        also: A second axis for which the same module has a plugin, and the name of that in the module.
    """

    about: str
    run: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    also: tuple[str, str] | None = None


AXES: Final = {
    "accelerator": Axis("a rank for each NUMA node of a processor", _TORCH),
    "strategy": Axis("ranks train alone and average their weights every few steps", _TORCH),
    "precision": Axis("32-bit numbers whose matrix products may be rounded to TensorFloat-32", _TORCH),
    "layer_sync": Axis("BatchNorm layers that keep the statistics that they begin with", _TORCH),
    "environment": Axis(
        "a scheduler's ranks, why a job is to stop, and how it is requeued",
        requires=("fairlead-hpc-signals",),
        also=("requeue", "requeue"),
    ),
    "requeue": Axis("a file for the daemon that restarts jobs"),
    "checkpoint_io": Axis("checkpoints as folders of NumPy's files", ("fairlead-checkpoint-io", *_TORCH, "numpy")),
    "submitter": Axis(
        "a scheduler that `fairlead submit` hands jobs to", requires=("fairlead-runs", "fairlead-launch")
    ),
    "logger": Axis("metrics as lines of JSON, cut back on resume", _TORCH),
    "command": Axis("how much disk space each run takes"),
    "check": Axis("runs that are written where files are deleted after some weeks"),
}
"""By the name of the axis; there is one for each."""
