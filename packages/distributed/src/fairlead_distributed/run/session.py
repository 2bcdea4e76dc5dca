"""One fit's part in a run, as one rank sees it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.multiprocessing import ProcessExitedException

from fairlead.errors import FairleadError, RunDirectoryError, RunFailedError, RunLockedError
from fairlead.exactness import job_digest
from fairlead_distributed.info import get_world_size
from fairlead_distributed.run.proof import RankProof
from fairlead_distributed.stacks import StacksOnRequest
from fairlead_launch.reports import lost_a_peer
from fairlead_runs import Beat, Heartbeat, History, RunDirectory, fingerprint, origin, read_heartbeats
from fairlead_runs.commit import Fence
from fairlead_runs.commit.files import disk_error
from fairlead_runs.fingerprints import limits
from fairlead_runs.handoff import Handoff
from fairlead_runs.step_times import StepTimes, times_folder

STATE_FILE = "state.ckpt"
"""What plain Lightning reads of a checkpoint: a file, or a directory of shards."""


class RunSession:
    """The run as one rank sees it: rank 0, whose `directory` holds the lock, writes the history, each its heartbeat.

    Attributes:
        fence: What rank 0 checks before it changes the run; None on the others, and of a finished run.
        proof: Of `--prove-resume`, which has started this process.
    """

    def __init__(
        self,
        handoff: Handoff,
        job: Mapping[str, Any],
        *,
        rank: int = 0,
        directory: RunDirectory | None = None,
        previous: Mapping[str, Any] | None = None,
        messages: tuple[str, ...] = (),
    ) -> None:
        self.handoff = handoff
        self.path = Path(handoff.path)
        self.start = handoff.start
        self.checkpoint = Path(handoff.checkpoint) if handoff.checkpoint else None
        self.weights = Path(handoff.weights) if handoff.weights else None
        self.finished = handoff.finished
        self.previous = previous
        self.messages = messages
        self.proof: RankProof | None = None
        self.phase = ""
        """Where this rank is, as in its heartbeat."""
        self._step = 0
        self.fingerprint = fingerprint(job).digest
        self.job_digest = job_digest(job)
        self._limits = limits(job)
        self.fence: Fence | None = directory.fence if directory is not None else None
        self._directory = directory
        self._rank = rank
        self._history = self._history_of(rank)
        self._begun = False
        self._heartbeat: Heartbeat | None = None
        self.times: StepTimes | None = None
        """Where this rank's time goes, from `join` on."""

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks get everything but the lock, which stays with the process that holds it."""
        return {**self.__dict__, "_directory": None, "_heartbeat": None, "times": None}

    @cached_property
    def origin(self) -> Mapping[str, str | None]:
        """The code and the environment of this start, for the manifests of its checkpoints; rank 0 writes them."""
        file = self.path / "starts" / str(self.start) / "provenance.json"
        if self._rank != 0 or not file.exists():  # people tidy up while a job runs
            return {}
        return origin(json.loads(file.read_text(encoding="utf-8")))

    @property
    def token(self) -> str:
        """Names the stages of this start's checkpoints, the same on all ranks."""
        return f"s{self.start}"

    @property
    def resumed(self) -> bool:
        """Whether this start resumes from a checkpoint."""
        return self.checkpoint is not None

    @property
    def resume_step(self) -> int | None:
        """The optimizer step that this run resumes from; None when it begins."""
        step = self.previous.get("step") if self.previous is not None else None
        return int(step) if step is not None else None

    def join(self, rank: int, local_rank: int, node_rank: int) -> None:
        """Says which rank this is, once that is known for sure; opens its heartbeat."""
        self._rank = rank
        self.fence = self.fence if rank == 0 else None  # a spawned rank has a copy
        self._history = self._history_of(rank)
        if self._heartbeat is None:
            folder = RunDirectory(self.path, rank=rank)
            self._heartbeat = folder.heartbeat(node_rank=node_rank, local_rank=local_rank, rank=rank, start=self.start)
            stacks = StacksOnRequest(self.path, self.start, rank)
            times = self.times = StepTimes(
                times_folder(self.path, self.start), node=node_rank, local_rank=local_rank, rank=rank
            )

            def still() -> None:
                times.write_still()
                stacks()

            self._heartbeat.on_still = still

    def at(self, part: str) -> None:
        """Which part of a step, of `fairlead_runs.step_times.STEP_PARTS`, begins on this rank."""
        if self.times is not None:
            self.times.at(part)

    def beat(self, phase: str, step: int) -> None:
        """Says where this rank is; costs microseconds.

        Raises:
            FairleadError: This start was replaced by another one, and ends here.
        """
        self.raise_if_replaced()
        self.phase = phase
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, step)
        if self.times is not None:
            self.times.beat(phase, step)
        self._step = step
        if self.proof is not None:
            self.proof.at(self.path, step)

    def proof_saves(self) -> bool:
        """Whether a proof wants a checkpoint after this step; the same on all ranks."""
        return self.proof is not None and self.proof.saves(self._step)

    def heartbeats(self) -> list[Beat]:
        """The last sign of life of each rank of this start, by rank."""
        return [beat for beat in read_heartbeats(self.path / "heartbeats") if beat.start == self.start]

    def raise_if_replaced(self, *, look: bool = False) -> None:
        """Raises where rank 0 has learned, in whatever thread, that another start owns the run; `look`: or sees now."""
        if self.fence is None:
            return
        lost = self.fence.why_lost() if look else self.fence.lost
        if lost is not None:
            raise lost

    def check_owner(self) -> None:
        """Looks whether this start still owns the run; raises where it does not, or where that cannot be read."""
        if self.fence is None:
            return
        try:
            self.fence.check()
        except OSError as error:
            raise disk_error(error, "cannot read the lock of the run", self.fence.path, RunDirectoryError) from error

    def event(self, name: str, *, any_rank: bool = False, **fields: Any) -> None:
        """Adds a line to the history; a disk that refuses it is a warning.

        From ranks other than 0 only failures, and with `any_rank` what one of them does instead of rank 0. The history
        of a run that another start owns is left alone: `raise_if_replaced` is what ends this one.
        """
        if self._rank != 0 and not any_rank and name not in ("failed", "checkpoint-failed"):
            return
        try:
            self._history.append(name, **fields)
        except RunLockedError:
            return
        except RunDirectoryError as error:
            warnings.warn(f"the event {name!r} is not in the history: {error.block()}", stacklevel=2)

    def begin(self, *, step: int, epoch: int) -> None:
        """Records that the training begins: what ends it from now on is a failure of the run."""
        self._begun = True
        self.event("training", step=step, epoch=epoch)
        if self.proof is not None:
            self.proof.at(self.path, step)

    def batch_is(self, samples: int) -> None:
        """Records how many samples make a step, over all ranks."""
        self.event("batch", samples=samples)

    def complete(self, *, step: int, epoch: int, reason: str = "") -> None:
        """Records that the limits of the job were reached, and which; raises where another start owns the run."""
        self.check_owner()
        self.event("finished", limits=self._limits, step=step, epoch=epoch, reason=reason)
        self.raise_if_replaced()
        self.beat("end", step)
        if self.proof is not None:
            self.proof.end()

    def raised(self, error: BaseException, step: int, *, stopped: bool) -> None:
        """Records what ended this start on this rank: a failure, or a person who stopped it.

        That a peer went away is no failure of this rank; of several ranks, the one with the cause records it.
        """
        if get_world_size() > 1 and lost_a_peer(error):
            self.beat("failed", step)
            return
        text = f"{type(error).__name__}: {error}"[:2000]
        self.event("stop" if stopped else "failed", rank=self._rank, step=step, error=text)
        if self._heartbeat is not None:
            self._heartbeat.beat("stopped" if stopped else "failed", step)

    def children_stopped(self, exception: BaseException) -> int | None:
        """The exit code of ranks that this process has spawned, if they ended for a stop."""
        if not isinstance(exception, ProcessExitedException):
            return None
        names = [event["event"] for event in self._history.read()]
        return exception.exit_code if "stop" in names[len(names) - names[::-1].index("start") :] else None

    def _history_of(self, rank: int) -> History:
        return History(self.path / "history.jsonl", rank=rank, start=self.start, fence=self.fence)

    def close(self) -> None:
        """Releases the run directory; may be called twice."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self.times is not None:
            self.times.close()
            self.times = None
        if self._directory is not None:
            self._directory.close()
            self.fence = None  # what comes now is no change of the run, and readers believe it as that of this start
            self._history = self._history_of(self._rank)

    def __enter__(self) -> RunSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._begun and isinstance(error, FairleadError):
            error.exit_code = RunFailedError.exit_code  # 2, of most errors, says that nothing was started
        self.close()
