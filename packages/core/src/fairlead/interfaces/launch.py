"""What packages hand each other: plain data, and protocols for what one needs of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fairlead.commit import Checkpoint, FileHash, RetentionPolicy
    from fairlead.plugins import PluginManager
    from fairlead.resolve import Resolution
    from fairlead.run import Fingerprint
    from fairlead.starts import Start

__all__ = [
    "BuildContext",
    "CheckpointCopies",
    "Claim",
    "Devices",
    "DurableSaves",
    "OutlivesStops",
    "Requeuer",
    "Setting",
    "ShardedLoads",
    "ShardedSaves",
    "Specificity",
    "StopGuard",
    "StopSignals",
    "Stopped",
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
        start: What all ranks of this start know of it alike, the ports among which they agree included.
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
    start: Start | None = None


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

    def submit(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], then: Callable[[FileHash | None], None]
    ) -> None:
        """Saves as `save_checkpoint` does and calls `then` once the file is durable.

        `then` takes the file's checksum, or None where it was not computed in passing.  It runs in the calling thread
        before this returns (synchronous backends) or later in the thread that writes; it must not call this object.
        It is not called when the save fails; when it raises, that counts as a failure of this save.

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
class ShardedSaves(Protocol):
    """A Lightning `CheckpointIO` that saves on all ranks together, each its own part.

    Lightning's strategies call their CheckpointIO on rank 0 only, so whoever saves hands such a backend the
    checkpoint of every rank.  All of these are called on all ranks, in the same order, in the thread that trains.
    """

    def meet(self) -> None:
        """Makes what the ranks need to talk to each other, once; `submit_shards` does so too."""
        ...

    def submit_shards(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        then: Callable[[Mapping[str, FileHash]], None],
        *,
        names: Sequence[Sequence[str | None]],
    ) -> None:
        """Saves into the new directory `path`, and calls `then` on rank 0 once the files of all ranks are durable.

        Args:
            checkpoint: As Lightning dumps it; tensors may be DTensors.  Ranks that hold no part of it give less.
            path: The directory, the same on all ranks.
            then: Takes the checksum of each file by its name in the directory.  It runs in the calling thread before
                this returns, or later in the thread that writes; it must not call this object.  It is not called
                when the save fails on any rank; when it raises, that counts as a failure of this save.
            names: For each optimizer the names of its parameters, in the order of its groups; None: not of the module.

        Raises:
            FairleadError: This save failed on some rank (`where` is this path), or an earlier one did (`where` is that
                path): then this one was accepted all the same.  Raised on all ranks.
        """
        ...

    def wait(self) -> None:
        """Returns when everything submitted is durable and every `then` has run.

        Raises:
            FairleadError: A save failed that was not reported yet; each is reported once.
        """
        ...


@runtime_checkable
class ShardedLoads(Protocol):
    """A Lightning `CheckpointIO` that reads directories of shards: each rank what it needs, into its own tensors."""

    def load_shards(
        self,
        path: str | os.PathLike[str],
        place: Callable[[tuple[str | int, ...], Any, Any], Any | None],
        weights_only: bool | None = None,
    ) -> dict[str, Any] | None:
        """The checkpoint as Lightning dumped it, with integers for the optimizers' parameters.

        Args:
            path: The directory.
            place: Called with a tensor's place in the checkpoint (`("state_dict", "layer.weight")`), its whole size and
                its dtype; gives the tensor to read into, a DTensor for this rank's part, or None for a new one.
            weights_only: As in Lightning.

        Returns:
            None where this backend cannot read it.

        Raises:
            FairleadError: It is damaged, or holds pickled objects.
        """
        ...


@runtime_checkable
class CheckpointCopies(Protocol):
    """A Lightning `CheckpointIO` that keeps copies of a run's checkpoints elsewhere; rank 0 alone calls these.

    `open`, `fetch` and `begin` in this order at a start; `committed` after each commit; `settle` at the end.
    """

    @property
    def stop_wait_s(self) -> float:
        """For how many seconds after its signal a stop may wait for the copies."""
        ...

    def open(self, name: str, fingerprint: Fingerprint, *, new: bool = False) -> None:
        """Looks at the place of a run; nothing is written.

        Args:
            name: The run directory's name.
            fingerprint: That of the job.
            new: The run must be a new one.

        Raises:
            FingerprintError: The place belongs to another run, or holds one already.
            FairleadError: It cannot be reached.
        """
        ...

    def fetch(self, run: Path) -> list[str]:
        """Publishes the newest sound copy in the run directory, if that has nothing as new; what to tell the user.

        Raises:
            FairleadError: The copies cannot be reached, or the disk refuses.
        """
        ...

    def begin(self, run: Path, start: int, event: Callable[..., None]) -> None:
        """A start of the run writes from now on, and earlier ones that still live no longer.

        Args:
            run: The run directory.
            start: The number of the start.
            event: Adds a line to the history; called from any thread.

        Raises:
            FairleadError: The place cannot be written.
        """
        ...

    def committed(self, checkpoint: Checkpoint, policy: RetentionPolicy) -> None:
        """Copies a published checkpoint in the background, and does the retention, here and there.

        Raises:
            FairleadError: An old checkpoint cannot be deleted here.
        """
        ...

    def settle(self, timeout_s: float | None = None) -> str | None:
        """Waits until all copies are complete, at most so many seconds; what is lacking and why, or None."""
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


class StopSignals(Protocol):
    """The signals that ask a run to stop: handlers that note them, and nothing else."""

    @property
    def raised(self) -> bool:
        """Whether one has come."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each came, by name."""
        ...

    def install(self, only: Iterable[str] | None = None) -> object:
        """Installs the handlers, or some of them; in the main thread. Those that are there stay.

        Raises:
            ConfigError: This is not the main thread.
        """
        ...

    def uninstall(self) -> None:
        """Puts back what was there before."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for one, at most so many seconds; whether one has come."""
        ...

    def conflicts(self) -> Sequence[Any]:
        """The signals whose handler was replaced since, each with `signal` and `handler`."""
        ...


class Stopped(Protocol):
    """How a stop ended; the same on all ranks."""

    @property
    def exit_code(self) -> int:
        """What all ranks end with: 75 (or the requeuer's own) when another start is wanted; 143 or 130 when not."""
        ...

    @property
    def reason(self) -> Any:
        """Why it came: `why` and `evidence`, `scheduler_requeues`."""
        ...

    @property
    def start_wanted(self) -> bool:
        """Whether another start is wanted."""
        ...

    @property
    def requeued(self) -> str | None:
        """What was done for it."""
        ...

    @property
    def error(self) -> str | None:
        """Why it could not be arranged."""
        ...

    @property
    def refused(self) -> str | None:
        """Why it is not wanted, where a budget is used up."""
        ...


class OutlivesStops(Protocol):
    """Has a worker of a loader outlive the signals that ask a run to stop; see `StopGuard.in_worker`."""

    def __call__(self, worker: int) -> None:
        """To be called in each worker, with its number."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Around the start of workers: what comes before they are that far waits for them."""
        ...


class StopGuard(Protocol):
    """Has all ranks stop at the same step, and the job started again; made by a requeue plugin's `guard`."""

    @property
    def flags(self) -> StopSignals:
        """The signals of this process."""
        ...

    @property
    def decision(self) -> Any:
        """Who was asked by what, once the ranks have agreed: `signals`, `requests`, `flagged`; else None."""
        ...

    @property
    def outcome(self) -> Stopped | None:
        """How the stop ended, once it has."""
        ...

    @property
    def in_worker(self) -> OutlivesStops:
        """For the workers of a loader, which must outlive the signals."""
        ...

    def start(self) -> object:
        """Joins the other ranks; on all of them, when the process group is there."""
        ...

    def should_stop(self) -> bool:
        """Whether to stop here; the same answer on all ranks, which call it equally often."""
        ...

    def ask(self, why: str) -> None:
        """Asks all ranks to stop, without a signal."""
        ...

    def save_and_requeue(
        self,
        save: Callable[[], object],
        requeuer: Requeuer | None = None,
        *,
        finish: Callable[[Any], object] | None = None,
        budget: Callable[[Any], str | None] | None = None,
    ) -> Stopped:
        """Saves on all ranks, closes what is open, has the job started again by rank 0.

        Args:
            save: Returns when what it saved is durable.
            requeuer: Has the job started again.
            finish: Closes loggers and writes the history, before the requeue; left out when time is short.
            budget: Called on rank 0 with the reason: why no other start is wanted; None where one is.

        Raises:
            FairleadError: Another rank could not save; nothing was requeued.
            Exception: What `save` raised on this rank.
        """
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...
