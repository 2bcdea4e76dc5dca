"""Do all ranks make the same call? Compared over the store before a collective, where it is not too late to say so.

Each rank says what it is about to call, and from which line. The first to come sets what all others have to call too;
one that calls something else says so at once, and every rank gets the same report instead of a hang. It costs a rank
five short questions to the store, and no device has to be waited for.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
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
_SHOWN: Final = 16  # kinds of calls in a report
_SAME, _APART, _LATE = "same", "apart", "late"


class Call(NamedTuple):
    """One rank's call: `kind` is the function, `what` all that must be the same, `site` the line that made it."""

    number: int
    kind: str
    what: str
    site: str

    def __str__(self) -> str:
        return f"{self.kind}{self.what and ' ' + self.what} at {self.site}"


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
        ConfigError: `check` was asked for, and this kind of store cannot carry it.
    """
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    calls, name, ranks = _Calls.of_process_group(), group.group_name, dist.get_process_group_ranks(group)
    number = calls.numbers[name] = calls.numbers[name] + 1
    if number == 1:
        calls.most[name] = _environ.checked_calls(_environ.or_process(None))
    due = check if check is not None else timeout is not None or number <= calls.most[name]
    if len(ranks) == 1 or not due:
        return False
    if calls.mailbox is None:
        if not check:
            return False
        raise ConfigError("collectives cannot be checked over this store", where="check=True", fix="use a TCPStore")
    meeting = _Meeting(calls.mailbox.under(name), ranks, Call(number, kind, what, _site()))
    meeting.hold((timeout or calls.timeout).total_seconds())
    return True


class _Calls:
    """The calls of this process in all groups that are made of the ranks of a store, counted, and how to ask it."""

    def __init__(self, store: dist.Store) -> None:
        self.numbers: Counter[str] = Counter()
        self.most: dict[str, float] = {}
        self.timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs

    @classmethod
    def of_process_group(cls) -> _Calls:
        store = group_store()
        assert store is not None  # or there would be no group to call in
        if store not in _of_stores:
            _of_stores[store] = cls(store)
        return _of_stores[store]

    @cached_property
    def mailbox(self) -> StoreMailbox | None:
        """The messages of all groups, over a connection of their own; None: the store has but one."""
        with suppress(ConfigError):
            return ControlPlane.of_process_group().open("calls")
        return None


_of_stores: weakref.WeakKeyDictionary[dist.Store, _Calls] = weakref.WeakKeyDictionary()
"""By the store of a process group: what goes with it, and is gone with it."""


class _Meeting:
    """The ranks of a group in one call."""

    def __init__(self, box: StoreMailbox, ranks: Sequence[int], call: Call) -> None:
        self._box = box
        self._ranks = ranks
        self._call = call
        self._verdict = f"{call.number}/verdict"
        self._began = time.monotonic()

    def hold(self, seconds: float) -> None:
        """Returns when all ranks have come with the same call; an error on all of them otherwise."""
        box, call = self._box, self._call
        box.put(f"last/{box.rank}", json.dumps(call))
        asked = f"{call.kind} {call.what}"
        if box.put_first(f"{call.number}/first", asked) != asked:
            verdict = box.put_first(self._verdict, _APART)
        elif box.count(f"{call.number}/count") == len(self._ranks):
            verdict = box.put_first(self._verdict, _SAME)
        else:
            verdict = self._await(seconds)
        if verdict != _SAME:
            raise self._mismatch() if verdict == _APART else self._late()
        if box.rank == self._ranks[0]:  # all have come here: nobody asks for the call before any more
            box.forget(*(f"{call.number - 1}/{name}" for name in ("first", "count", "verdict")))

    def _await(self, seconds: float) -> str:
        pause, slow = 5e-5, SlowWait(self._waits)
        while not self._box.has(self._verdict):
            # Not by a wait of the store: one that runs out makes torch print lines of its own.
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() >= self._began + seconds:
                return self._box.put_first(self._verdict, _LATE)
            slow.look()
        return self._box.read([self._verdict])[0]

    def _waits(self) -> str | None:
        """Whom the first of the ranks that are there waits for."""
        missing, last = self._missing()
        if not missing or self._box.rank != min(set(self._ranks) - set(missing)):
            return None
        waited = time.monotonic() - self._began
        return f"rank {self._box.rank} has waited {waited:.0f} s in {self._call}\n  for {last}"

    def _missing(self) -> tuple[tuple[int, ...], str]:
        """The ranks that have not come to a call, and where each was last."""
        last, here = self._said("last"), self._call.number
        places: dict[str, list[int]] = {}
        for rank in self._ranks:
            seen = last.get(rank)
            if seen is None:
                place = "called no collective yet"
            elif seen.number < here:
                place = f"was last seen in {seen} (call {seen.number} of this group, where this is {here})"
            else:
                continue
            places.setdefault(place, []).append(rank)
        rows = [f"{ranks_text(ranks)}: {place}" for place, ranks in list(places.items())[:_SHOWN]]
        return tuple(sorted(rank for ranks in places.values() for rank in ranks)), "\n  ".join(rows)

    def _said(self, name: str) -> dict[int, Call]:
        """What ranks have put under a name."""
        there = [rank for rank in self._ranks if self._box.has(f"{name}/{rank}")]
        texts = self._box.read([f"{name}/{rank}" for rank in there]) if there else []
        return {rank: Call(*json.loads(text)) for rank, text in zip(there, texts, strict=True)}

    def _late(self) -> CollectiveError:
        (missing, last), rank, call = self._missing(), self._box.rank, self._call
        others = tuple(one for one in missing if one != rank)
        error = CollectiveError(
            f"{ranks_text(others)} did not come to {call.kind} in time"
            if others
            else f"rank {rank} came too late to {call.kind}: the others have given up waiting",
            where=f"rank {rank}, {call.site}",
            why=last or None,
            fix="look at what those ranks do instead: they ended, hang, or never make this call; "
            "where they only need longer, give a longer timeout",
        )
        error.missing = others
        return error

    def _mismatch(self) -> CollectiveError | TensorMismatchError:
        """The error of calls that differ, with those of all ranks that come within some seconds."""
        box, name, deadline = self._box, f"{self._call.number}/apart", time.monotonic() + _REPORT_S
        box.put(f"{name}/{box.rank}", json.dumps(self._call))
        box.count(f"{name}/count")
        while box.count(f"{name}/count", 0) < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        seen = self._said(name)
        places: dict[Call, list[int]] = {}
        for rank, one in sorted(seen.items()):
            places.setdefault(one._replace(number=0), []).append(rank)
        rows = [
            f"{ranks_text(ranks)}: {one}" for one, ranks in sorted(places.items(), key=lambda p: (-len(p[1]), p[1]))
        ]
        if missing := set(self._ranks) - seen.keys():
            rows.append(f"{ranks_text(missing)}: not there yet")
        kinds = {one.kind for one in seen.values()}
        where, why = f"rank {box.rank}, {self._call.site}", "\n".join(rows[:_SHOWN])
        if len(kinds) > 1:
            return CollectiveMismatchError(
                f"the ranks call different collectives: {', '.join(sorted(kinds))}",
                where=where,
                why=why,
                fix="all ranks must make the same calls in the same order: look around these lines for an "
                "`if rank == 0`, or for a loop that one rank leaves earlier",
            )
        return TensorMismatchError(
            f"the ranks call {self._call.kind} with different arguments",
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
