"""Checks over the store, before a collective runs, that all ranks make the same call.

Each rank announces its call and the line that makes it. The first one sets what all others have to call; where one
calls something else, every rank gets the same report at once instead of a hang. It costs five short requests to the
store, and no synchronization of the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

import torch.distributed as dist

from fairlead.errors import ConfigError
from fairlead_distributed import _environ
from fairlead_distributed.alarms import SlowWait
from fairlead_distributed.control_plane import ControlPlane
from fairlead_distributed.errors import CollectiveError, CollectiveMismatchError, TensorMismatchError
from fairlead_distributed.process_group import group_store
from fairlead_runs.mailbox import StoreMailbox
from fairlead_runs.waiting import ranks_text

_REPORT_S: Final = 3.0  # how long the ranks of a mismatch wait for those that have not come to it yet
_SHOWN: Final = 16  # lines in a report
_SAME, _APART, _LATE = "same", "apart", "late"


class Call(NamedTuple):
    """One rank's call: `kind` is the function, `what` all that must be the same, `site` the line that made it."""

    number: int
    kind: str
    what: str
    site: str

    def __str__(self) -> str:
        called = f"{self.kind}{self.what and ' ' + self.what}"
        return f"{called} at {self.site} (call {self.number})" if self.number else called


_NONE_YET: Final = Call(0, "not there yet", "", "")


def check_call(
    kind: str,
    what: str,
    group: dist.ProcessGroup | None = None,
    *,
    check: bool | None = None,
    timeout: timedelta | None = None,
) -> bool:
    """Waits until all ranks of a group make this call; whether that was checked.

    Args:
        kind: The function.
        what: What must be the same on all ranks, as text.
        group: The ranks; None: all.
        check: Whether to; None: with a timeout, and as FAIRLEAD_CHECK_COLLECTIVES says. The same on all ranks.
        timeout: How long to wait for the other ranks; None: as long as the process group waits in a collective.

    Raises:
        CollectiveMismatchError: The ranks call different functions.
        TensorMismatchError: They call it with tensors or settings that differ.
        CollectiveError: Some did not come in time. The group can be used further: for them it is an error, too.
        ConfigError: `check` was requested, and this kind of store cannot carry it.
    """
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    calls, name, ranks = _Calls.of_process_group(), group.group_name, dist.get_process_group_ranks(group)
    number = calls.numbers[name] = calls.numbers[name] + 1
    if name not in calls.most:  # once: ranks that disagreed later on would wait for each other
        calls.most[name] = _environ.checked_calls(_environ.or_process(None))
    due = check if check is not None else timeout is not None or number <= calls.most[name]
    if len(ranks) == 1 or not due:
        return False
    if calls.mailbox is None:
        if not check:
            return False
        raise ConfigError("collectives cannot be checked over this store", where="check=True", fix="use a TCPStore")
    box, call = calls.mailbox.under(name), Call(number, kind, what, _site())
    if (verdict := _meet(box, ranks, call, (timeout or calls.timeout).total_seconds())) != _SAME:
        raise _error(box, ranks, call, late=verdict == _LATE)
    if box.rank == ranks[0]:  # all have come here: no rank looks at the call before any more
        box.forget(*(f"{number - 1}/{key}" for key in ("first", "count", "verdict")))
    return True


class _Calls:
    """The calls of this process in all groups that are made of the ranks of a store, counted, and how to ask it."""

    def __init__(self, store: dist.Store) -> None:
        self.numbers: Counter[str] = Counter()
        self.most: dict[str, float] = {}
        """How many of the first calls of each group are checked."""
        self.timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        self.mailbox: StoreMailbox | None = None
        """The messages of all groups, over a connection of their own; None: the store has but one."""
        with suppress(ConfigError):
            self.mailbox = ControlPlane.of_process_group().open("calls")

    @classmethod
    def of_process_group(cls) -> _Calls:
        store = group_store()
        assert store is not None  # or there would be no group to call in
        if store not in _of_stores:
            _of_stores[store] = cls(store)
        return _of_stores[store]


_of_stores: weakref.WeakKeyDictionary[dist.Store, _Calls] = weakref.WeakKeyDictionary()
"""By the store of a process group: what goes with it, and is gone with it."""


def _meet(box: StoreMailbox, ranks: Sequence[int], call: Call, seconds: float) -> str:
    """Whether all ranks have come with the same call, as the first to know it has put it down for all."""
    began, pause, verdict = time.monotonic(), 5e-5, f"{call.number}/verdict"
    box.put(f"last/{box.rank}", json.dumps(call))
    requested = f"{call.kind} {call.what}"
    if box.put_first(f"{call.number}/first", requested) != requested:
        return box.put_first(verdict, _APART)
    if box.count(f"{call.number}/count") == len(ranks):
        return box.put_first(verdict, _SAME)

    def slow_line() -> str | None:
        last = _calls_of(box, "last", ranks)
        here = [rank for rank in ranks if last[rank].number == call.number]
        if box.rank != here[0] or len(here) == len(ranks):  # one of those that wait speaks
            return None
        return f"rank {box.rank} has waited {time.monotonic() - began:.0f} s in a collective:\n{_rows(last)}"

    slow = SlowWait(slow_line)
    while not box.has(verdict):
        # Not by a wait of the store: torch prints warnings when one runs out.
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if time.monotonic() >= began + seconds:
            return box.put_first(verdict, _LATE)
        slow.look()
    return box.read([verdict])[0]


def _calls_of(box: StoreMailbox, name: str, ranks: Sequence[int]) -> dict[int, Call]:
    """The call that each rank has put under a name."""
    there = [rank for rank in ranks if box.has(f"{name}/{rank}")]
    texts = box.read([f"{name}/{rank}" for rank in there]) if there else []
    calls = {rank: Call(*json.loads(text)) for rank, text in zip(there, texts, strict=True)}
    return {rank: calls.get(rank, _NONE_YET) for rank in ranks}


def _rows(calls: Mapping[int, Call]) -> str:
    """`ranks 0, 2: all_reduce SUM of torch.float32 (2,) at train.py:12 in step (call 7)`, once for equal calls."""
    same: dict[Call, list[int]] = {}
    for rank, one in calls.items():
        same.setdefault(one, []).append(rank)
    rows = sorted(same.items(), key=lambda row: (-len(row[1]), row[1]))
    return "\n".join(f"{ranks_text(ranks)}: {one}" for one, ranks in rows[:_SHOWN])


def _error(box: StoreMailbox, ranks: Sequence[int], call: Call, *, late: bool) -> CollectiveError | TensorMismatchError:
    """What went wrong in a call, with that of each rank; where they differ, those on their way have some seconds."""
    name, deadline = "last" if late else f"{call.number}/apart", time.monotonic() + _REPORT_S
    box.put(f"{name}/{box.rank}", json.dumps(call))
    while (_NONE_YET in (calls := _calls_of(box, name, ranks)).values()) and not late and time.monotonic() < deadline:
        time.sleep(0.1)
    where, why = f"rank {box.rank}, {call.site}", _rows(calls)
    missing = tuple(rank for rank in ranks if calls[rank].number < call.number)
    kinds = sorted({one.kind for one in calls.values()} - {_NONE_YET.kind})
    if late:
        error = CollectiveError(
            f"{ranks_text(missing)} did not come to {call.kind} in time"
            if missing
            else f"rank {box.rank} came too late to {call.kind}: the others have given up waiting",
            where=where,
            why=why,
            fix="look at what those ranks do instead: they ended, hang, or never make this call; "
            "where they only need longer, give a longer timeout",
        )
        error.missing = missing
        return error
    if len(kinds) > 1:
        return CollectiveMismatchError(
            f"the ranks call different collectives: {', '.join(kinds)}",
            where=where,
            why=why,
            fix="all ranks must make the same calls in the same order: look around these lines for an "
            "`if rank == 0`, or for a loop that one rank leaves earlier",
        )
    return TensorMismatchError(
        f"the ranks call {call.kind} with different arguments",
        where=where,
        why=why,
        fix="bring them to one shape, dtype and setting first, for example by padding the last batch",
    )


def _site() -> str:
    """The line outside of Fairlead that made the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fairlead_"):
        frame = frame.f_back
    path, here = frame.f_code.co_filename, os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{frame.f_lineno} in {frame.f_code.co_name}"
