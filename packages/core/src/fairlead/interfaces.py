"""What packages hand each other: plain data, and protocols for what one needs of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fairlead.plugins import PluginManager
    from fairlead.resolve import Resolution

__all__ = [
    "BuildContext",
    "Claim",
    "Devices",
    "DurableSaves",
    "Requeuer",
    "Setting",
    "Specificity",
    "Topology",
]


@dataclass(frozen=True, slots=True)
class Setting:
    """A resolved value and the reason for it, `Setting(4, "SLURM_NNODES")`."""

    value: Any
    reason: str


class Specificity(IntEnum):
    """How closely a claim describes *this* process; the highest wins."""

    MACHINE = 0
    """Any machine: nothing says that a launcher is at work."""
    MANUAL = 10
    """Variables that a person exports: MASTER_ADDR, NODE_RANK."""
    SCHEDULER = 20
    """A scheduler started this very process as a task: a SLURM step, an LSF task, a pod."""
    LAUNCHER = 30
    """A launcher inside the scheduler's task started it: mpirun."""
    AGENT = 40
    """An agent on this node started it and will restart it: torchrun."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An environment's statement that it started this process, with the evidence for it."""

    evidence: str
    specificity: Specificity = Specificity.SCHEDULER


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one kind on this machine.

    Args:
        count: How many this process may use; 0 when there are none.
        evidence: How that was found: `nvidia-smi`, `CUDA_VISIBLE_DEVICES`, `/dev/nvidia*`.
        names: Model names, as far as they are known, such as `NVIDIA H100 80GB HBM3`.
        unlimited: True where the count is no limit (processes on a CPU).
    """

    count: int
    evidence: str
    names: tuple[str, ...] = ()
    unlimited: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """Who this process is and who else is there, each with its reason; None: not known, or not decided here.

    Args:
        launched: True when every rank was started from outside; False when Fairlead starts the
            ranks of this node itself.
        num_nodes: Number of nodes.
        local_world_size: Ranks on *this* node; nodes may differ.
        world_size: Ranks in all.
        node_rank: Index of this node, from 0.
        local_rank: Index of this rank on its node, from 0.
        global_rank: Index of this rank in all, from 0.
        main_address: Host name or address of the node with rank 0.
        main_port: TCP port of the store on it; None lets the ranks agree on one.
    """

    launched: bool
    num_nodes: Setting | None = None
    local_world_size: Setting | None = None
    world_size: Setting | None = None
    node_rank: Setting | None = None
    local_rank: Setting | None = None
    global_rank: Setting | None = None
    main_address: Setting | None = None
    main_port: Setting | None = None


@dataclass(frozen=True)
class BuildContext:
    """What a runtime is built with, besides its config.

    Args:
        resolution: All settings of the run, resolved.
        environ: The environment variables of the process.
        plugins: The plugin manager, to find what another package offers.
        engine: Which of Lightning's two class families is wanted.
        run_dir: The run directory; None when nothing is recorded.
        extras: What an engine passes through, such as `{"wrapped": checkpoint_io}`.
    """

    resolution: Resolution
    environ: Mapping[str, str]
    plugins: PluginManager
    engine: Literal["trainer", "fabric"] = "trainer"
    run_dir: Path | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class DurableSaves(Protocol):
    """A Lightning `CheckpointIO` that says when a checkpoint is durable.

    A manifest, `latest` and retention may only follow bytes that survive a power cut.  With a
    backend that has these methods they go into `then`; with one that does not, they follow
    `save_checkpoint`, which then must not return before the file is complete.
    """

    def submit(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], then: Callable[[], None]) -> None:
        """Saves as `save_checkpoint` does and calls `then` once the file is durable.

        `then` runs in the calling thread before this returns (synchronous backends) or later in
        the thread that writes; it must not call this object.  It is not called when the save
        fails; when it raises, that counts as a failure of this save.

        Raises:
            FairleadError: This save failed (`where` is this path), or an earlier one did (`where`
                is that path): then this one was accepted all the same.
        """
        ...

    def wait(self) -> None:
        """Returns when everything submitted is durable and every `then` has run.

        Raises:
            FairleadError: A save failed that was not reported yet; each is reported once.
        """
        ...


@runtime_checkable
class Requeuer(Protocol):
    """Has the job started again; built by a plugin of the axis `requeue`."""

    def requeue(self) -> str:
        """Asks for another start, and returns what was done, for the history.

        Raises:
            FairleadError: The scheduler refused or did not answer; the job will not start again.
        """
        ...
