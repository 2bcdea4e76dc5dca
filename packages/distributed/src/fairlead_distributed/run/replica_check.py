"""Do the ranks still hold the same model? A run whose replicas differ fails, with the first tensor that does."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final, Literal

import torch.distributed as dist
from torch import Tensor

from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead_distributed.divergence import Divergence, first_divergence
from fairlead_distributed.run.session import RunSession
from fairlead_runs.commit import list_checkpoints
from fairlead_runs.waiting import ranks_text

OnDivergence = Literal["error", "warning", "ignore"]


class ReplicaCheck:
    """Compares what all ranks hold, bit for bit (`first_divergence`), whenever it is asked to.

    Args:
        on_divergence: What ranks that differ do: end the run, or give one warning; "ignore" compares nothing.
        fix: What to do about a buffer, or replicas, that differ on purpose.
    """

    def __init__(self, on_divergence: OnDivergence, fix: str) -> None:
        self.on_divergence = on_divergence
        self._fix = _CAUSES + fix
        self._session: RunSession | None = None
        self._equal: int | None = None
        self._warned = False

    def begin(self, session: RunSession) -> None:
        """A start of this run begins."""
        self._session, self._equal, self._warned = session, None, False

    def compare(self, step: int, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Compares the named tensors of all ranks, which call it together.

        Raises:
            RunFailedError: They do not hold the same; on all ranks.
        """
        if self.on_divergence == "ignore" or not dist.is_initialized():
            return
        found = first_divergence(pairs)
        if found is None:
            self._equal = step
        elif self.on_divergence == "error" or not self._warned:
            self._warned = True
            self._differ(step, found)

    def _differ(self, step: int, found: Divergence) -> None:
        session = self._session
        groups = "; ".join(ranks_text(one) for one in found.groups)
        since = f"they were equal at step {self._equal}" if self._equal is not None else "since its first steps"
        checkpoints = list_checkpoints(session.path / "checkpoints") if session is not None else []
        newest = f"; the newest checkpoint is of step {checkpoints[-1].step}" if checkpoints else ""
        what = f"at step {step} the ranks do not hold the same model any more: {found}"
        why = f"{since}; ranks that agree with each other: {groups}{newest}"
        where = str(session.path) if session is not None else f"rank {dist.get_rank()}"
        if session is not None:
            session.event("diverged", step=step, what=str(found), ranks=list(found.ranks))
        if self.on_divergence == "error":
            raise RunFailedError(what, where=where, why=why, fix=self._fix)
        if dist.get_rank() == 0:
            finding = Finding("warning", "replicas-differ", what, where=where, why=why, fix=self._fix)
            warnings.warn(str(finding), stacklevel=2)


_CAUSES: Final = (
    "look for what one rank does alone: weights changed under `if rank == 0`, an optimizer step that is skipped,\n"
    "random numbers of its own (a seed with the rank in it), a parameter that the strategy does not average, a buffer\n"
    "that each rank updates from its own data; or for a device with faulty memory.\n"
)
