"""Weights that are not finite end a run, in place of being saved."""

from __future__ import annotations

from collections.abc import Sequence

from fairlead.errors import RunFailedError
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_runs.commit import list_checkpoints


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
