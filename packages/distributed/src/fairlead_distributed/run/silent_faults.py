"""What goes wrong in a training without an error: weights that are no numbers any more, replicas that differ, samples
that several ranks or workers read.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead_distributed._sharded import local_part
from fairlead_distributed.divergence import Divergence, first_divergence
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_runs.commit import list_checkpoints
from fairlead_runs.waiting import ranks_text


@torch.no_grad()
def non_finite_weights(module: nn.Module) -> list[str]:
    """The trained weights in which something is infinite or no number, as far as this rank holds them, in their order.

    One pass over the weights and, on an accelerator, one wait for it.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> _ = line.bias.data.fill_(math.nan)
        >>> non_finite_weights(line)
        ['bias']
    """
    finite: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad and not isinstance(weight, nn.UninitializedParameter):
            held = local_part(weight)
            if held.numel() and not held.is_meta:
                finite[name] = torch.linalg.vector_norm(held, math.inf).isfinite()  # its largest value; copies nothing
    together = len({one.device for one in finite.values()}) == 1  # or the model is spread over several
    found = torch.stack(list(finite.values())).tolist() if together else [bool(one) for one in finite.values()]
    return [name for name, is_so in zip(finite, found, strict=True) if not is_so]


_ELEMENTS = 256


def batch_fingerprint(batch: Any) -> bytes | None:
    """A hash of a batch's shapes and of some elements of each of its tensors; None where it has no data known here.

    Args:
        batch: Tensors, arrays, numbers and text in lists, tuples and dicts. Of a tensor about 256 elements are read,
            spread evenly.

    Example:
        >>> batch_fingerprint([torch.ones(2), "a"]) == batch_fingerprint([torch.ones(2), "a"])
        True
    """
    found = hashlib.sha256()
    known = False
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _ELEMENTS)].cpu().contiguous().view(torch.uint8)
            found.update(repr((tuple(leaf.shape), leaf.dtype)).encode() + some.numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            found.update(repr(leaf).encode())
        elif type(leaf).__module__ == "numpy":
            found.update(repr(leaf).encode())  # numpy shortens what is long
        else:
            continue
        known = True
    return found.digest() if known else None


def ranks_with_the_same(batches: Mapping[int, Sequence[bytes | None]]) -> tuple[int, ...]:
    """The ranks of whose first batches half or more are those of another rank too, () if there are none.

    Args:
        batches: The fingerprints of each rank's first batches, of ranks that should read different ones. Fewer than
            two different ones say nothing: such data are constant.
    """
    owner: dict[bytes, int] = {}
    found: set[int] = set()
    for rank, own in batches.items():
        distinct = {one for one in own if one is not None}
        shared = Counter(owner[one] for one in distinct if one in owner)
        for other, count in shared.items():
            if count >= max(2, len(distinct) / 2):
                found |= {rank, other}
        for one in distinct:
            owner.setdefault(one, rank)
    return tuple(sorted(found))


def workers_read_the_same(batches: Sequence[bytes | None], workers: int) -> bool:
    """Whether a loader's workers, whose batches come in turn, give the same ones.

    Args:
        batches: The fingerprints of the first batches of an epoch, two rounds of the workers at least.
        workers: The loader's `num_workers`.
    """
    if workers < 2 or len(batches) < 2 * workers or len(set(batches)) < 2 or None in batches:
        return False
    rounds = [batches[i : i + workers] for i in range(0, len(batches) - workers + 1, workers)]
    return all(len(set(one)) == 1 for one in rounds)


def finite_weights(
    names: Sequence[str], session: RunSession | None, step: int, fix: str, *, ends: bool, more: str = ""
) -> bool:
    """Whether all weights are finite, the same on all ranks, which give the `names` of theirs that are not.

    `more` is what is known of the cause.

    Raises:
        RunFailedError: Some are not, and that `ends` the run.
    """
    names = next(filter(None, gather_objects(names)), [])
    if names and ends:
        what = f"at step {step} the weights are not finite"
        if session is not None:
            session.event("not-finite", step=step, what=what, why=named_weights(names))
        raise not_finite(session, what, named_weights(names) + (f"; {more}" if more else ""), fix)
    return not names


def not_finite(session: RunSession | None, what: str, why: str, fix: str) -> RunFailedError:
    """The error, which names the newest checkpoint."""
    checkpoints = list_checkpoints(session.path / "checkpoints") if session is not None else []
    newest = f"; the newest checkpoint is of before, of step {checkpoints[-1].step}" if checkpoints else ""
    return RunFailedError(what, where=str(session.path) if session is not None else None, why=why + newest, fix=fix)


def named_weights(names: Sequence[str]) -> str:
    """The first of the weights that are not finite, as part of a sentence."""
    if not names:
        return "all weights are finite"
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the weight {names[0]} is not finite{more}"


OnDivergence = Literal["error", "warning", "ignore"]


class ReplicaCheck:
    """Compares what all ranks hold, bit for bit (`first_divergence`), whenever it is called.

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


_BATCHES: Final = 4


class SampleCheck:
    """Compares fingerprints of the first batches of a start over the ranks that should have different ones.

    Args:
        say: Prints a finding, on rank 0.
        fix: How to declare that data repeat on purpose.
    """

    def __init__(self, say: Callable[[str], None], fix: str) -> None:
        self._say = say
        self._fix = fix
        self._session: RunSession | None = None
        self._seen: list[bytes | None] | None = None
        self._most = _BATCHES

    def begin(self, session: RunSession | None, workers: int) -> None:
        """The training begins, with so many workers of its loaders; all ranks call it together."""
        self._session = session
        alone = (not dist.is_initialized() or dist.get_world_size() == 1) and workers < 2
        self._seen = None if alone else []
        self._most = max(gather_objects(max(_BATCHES, 2 * workers)))

    def saw(self, batch: Any) -> bool:
        """Takes the fingerprint of one of the first batches; whether they are to be compared now."""
        if self._seen is None:
            return False
        self._seen.append(batch_fingerprint(batch))
        return len(self._seen) == self._most

    def compare(self, data_rank: int, loaders: Sequence[Any]) -> None:
        """Compares what was seen, if it was not yet; all ranks call it together, ranks of one `data_rank` share it."""
        if self._seen is None:
            return
        own, self._seen = self._seen, None
        first: dict[int, list[bytes | None]] = {}  # one of the ranks that share a batch
        members: dict[int, int] = {}
        for rank, (of_data, seen) in enumerate(gather_objects((data_rank, own))):
            if of_data not in members:
                members[of_data] = rank
                first[rank] = seen
        names = ", ".join(sorted({type(getattr(one, "dataset", one)).__name__ for one in loaders}))
        same = ranks_with_the_same(first)
        workers = [int(getattr(one, "num_workers", 0)) for one in loaders]
        in_workers = len(loaders) == 1 and workers_read_the_same(own, workers[0])
        if same:
            why = f"half or more of their first {len(own)} batches are equal"
            self._tell(f"{ranks_text(same)} train on the same samples", why, names)
        elif any(gather_objects(in_workers)):
            self._tell(
                f"the {workers[0]} workers of the loader read the same samples",
                "each of their first batches comes from every worker",
                names,
            )

    def _tell(self, what: str, why: str, names: str) -> None:
        finding = Finding(
            "warning",
            "same-samples",
            what,
            where=f"the training's dataset, {names}",
            why=f"{why}: an epoch trains on each sample several times",
            fix=self._fix,
        )
        if self._session is not None:
            self._session.event(finding.code, what=what)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._say(str(finding))
