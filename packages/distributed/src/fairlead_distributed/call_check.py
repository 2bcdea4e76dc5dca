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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from fairlead.errors import ConfigError
from fairlead_distributed import _environ
from fairlead_distributed.alarms import to_stderr, trouble_of
from fairlead_distributed.errors import CollectiveError, CollectiveMismatchError, TensorMismatchError
from fairlead_runs.mailbox import StoreMailbox
from fairlead_runs.waiting import ranks_text

_NOTE_S: Final = 10.0  # how long a rank waits for the others before it says for whom
_REPORT_S: Final = 3.0  # how long the ranks of a mismatch wait for those that have not come to it yet
_LEAVE_S: Final = 2.0  # how long a rank that leaves tries to say so
_SHOWN: Final = 16  # kinds of calls in a report
_SAME, _APART, _LATE = "same", "apart", "late"
_LEFT: Final = "destroy_process_group"

_of_stores: weakref.WeakKeyDictionary[dist.Store, _Connection] = weakref.WeakKeyDictionary()
"""By the store of a process group: what goes with it, and is gone with it."""


@dataclass(frozen=True)
class Call:
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
    connection = _Connection.of_process_group()
    calls = connection.calls(group)
    calls.number += 1
    due = check if check is not None else timeout is not None or calls.number <= calls.most
    if len(calls.ranks) == 1 or not due:
        return False
    mailbox = connection.mailbox
    if mailbox is None:
        if not check:
            return False
        raise ConfigError("collectives cannot be checked over this store", where="check=True", fix="use a TCPStore")
    calls.meet(mailbox.under(group.group_name), Call(calls.number, kind, what, _site()), timeout or connection.timeout)
    return True


def say_left() -> None:
    """This rank leaves the process group: those that wait for it are told."""
    connection = _Connection.of_process_group()
    for name, calls in connection.groups.items() if connection.is_open else ():
        if connection.mailbox is not None:
            call = Call(calls.number + 1, _LEFT, "", _site())
            # The store may have gone with the rank that hosts it: then nobody is left to be told.
            trouble_of(_LEAVE_S, calls.say, connection.mailbox.under(name), call)


class _Connection:
    """What this process asks the store of its process group, for all the groups made of its ranks."""

    def __init__(self, store: dist.Store) -> None:
        self.groups: dict[str, _Calls] = {}
        self.timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        self.is_open = False
        self._mailbox: StoreMailbox | None = None
        # Not the store itself, with which this object goes.
        self._own = StoreMailbox(dist.PrefixStore("fairlead/calls", store), dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_process_group(cls) -> _Connection:
        store = dist.distributed_c10d._get_default_store()
        if store not in _of_stores:
            _of_stores[store] = cls(store)
        return _of_stores[store]

    @property
    def mailbox(self) -> StoreMailbox | None:
        """The messages of all groups, over a connection of their own; None: the store has but one."""
        if not self.is_open:
            self.is_open = True
            with suppress(ConfigError):
                mailbox = self._own.connect_again()
                # Each start of a group on a store that has had others gets keys of its own.
                self._mailbox = mailbox.under(str(mailbox.count(f"opened/{mailbox.rank}")))
        return self._mailbox

    def calls(self, group: dist.ProcessGroup) -> _Calls:
        name = group.group_name
        if name not in self.groups:
            self.groups[name] = _Calls(dist.get_process_group_ranks(group), dist.get_rank())
        return self.groups[name]


class _Calls:
    """The calls of one group's ranks, numbered."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = ranks
        self.number = 0
        self.most = _environ.checked_calls(_environ.or_process(None))
        self._rank = rank

    def say(self, box: StoreMailbox, call: Call) -> None:
        """Puts what this rank did last where the others find it."""
        box.put(f"last/{self._rank}", json.dumps(asdict(call)))

    def meet(self, box: StoreMailbox, call: Call, timeout: timedelta) -> None:
        """Returns when all ranks have come with the same call; an error on all of them otherwise."""
        self.say(box, call)
        asked = f"{call.kind} {call.what}"
        if box.put_first(f"{call.number}/first", asked) != asked:
            verdict = box.put_first(f"{call.number}/verdict", _APART)
        elif box.count(f"{call.number}/count") == len(self.ranks):
            verdict = box.put_first(f"{call.number}/verdict", _SAME)
        else:
            verdict = self._await(box, call, timeout.total_seconds())
        if verdict != _SAME:
            raise self._mismatch(box, call) if verdict == _APART else self._late(box, call)
        if self._rank == self.ranks[0]:  # all have come here: nobody asks for the call before any more
            box.forget(*(f"{call.number - 1}/{name}" for name in ("first", "count", "verdict")))

    def _await(self, box: StoreMailbox, call: Call, seconds: float) -> str:
        key, start, pause, noted = f"{call.number}/verdict", time.monotonic(), 5e-5, False
        while not box.has(key):
            # Not by a wait of the store: one that runs out makes torch print lines of its own.
            time.sleep(pause)
            pause, waited = min(2 * pause, 0.05), time.monotonic() - start
            if waited >= seconds:
                return box.put_first(key, _LATE)
            if waited >= _NOTE_S and not noted:
                noted = True
                missing, last = self._missing(box, call)
                if missing and self._rank == min(set(self.ranks) - set(missing)):
                    to_stderr(f"rank {self._rank} has waited {waited:.0f} s in {call}\n  for {last}")
        return box.read([key])[0]

    def _missing(self, box: StoreMailbox, call: Call) -> tuple[tuple[int, ...], str]:
        """The ranks that have not come to a call, and where each was last."""
        last = self._last(box)
        missing = [r for r in self.ranks if r not in last or last[r].number < call.number or last[r].kind == _LEFT]
        places: dict[str, list[int]] = {}
        for rank in missing:
            seen = last.get(rank)
            if seen is None:
                place = "called no collective yet"
            else:
                numbers = f"call {seen.number} of this group, where this is {call.number}"
                place = (
                    f"left the group at {seen.site}" if seen.kind == _LEFT else f"was last seen in {seen} ({numbers})"
                )
            places.setdefault(place, []).append(rank)
        rows = [f"{ranks_text(ranks)}: {place}" for place, ranks in list(places.items())[:_SHOWN]]
        return tuple(missing), "\n  ".join(rows)

    def _last(self, box: StoreMailbox) -> dict[int, Call]:
        there = [rank for rank in self.ranks if box.has(f"last/{rank}")]
        texts = box.read([f"last/{rank}" for rank in there]) if there else []
        return {rank: Call(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}

    def _late(self, box: StoreMailbox, call: Call) -> CollectiveError:
        missing, last = self._missing(box, call)
        others = tuple(rank for rank in missing if rank != self._rank)
        error = CollectiveError(
            f"{ranks_text(others)} did not come to {call.kind} in time"
            if others
            else f"rank {self._rank} came too late to {call.kind}: the others have given up waiting",
            where=f"rank {self._rank}, {call.site}",
            why=last or None,
            fix="look at what those ranks do instead: they ended, hang, or never make this call; "
            "where they only need longer, give a longer timeout",
        )
        error.missing = others
        return error

    def _mismatch(self, box: StoreMailbox, call: Call) -> CollectiveError | TensorMismatchError:
        seen = self._gathered(box, call)
        places: dict[tuple[str, str, str], list[int]] = {}
        for rank, one in sorted(seen.items()):
            places.setdefault((one.kind, one.what, one.site), []).append(rank)
        rows = [
            f"{ranks_text(ranks)}: {Call(0, *one)}"
            for one, ranks in sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))
        ]
        missing = set(self.ranks) - seen.keys()
        if missing:
            rows.append(f"{ranks_text(missing)}: not there yet")
        kinds = {one.kind for one in seen.values()}
        where, why = f"rank {self._rank}, {call.site}", "\n".join(rows[:_SHOWN])
        if len(kinds) > 1:
            return CollectiveMismatchError(
                f"the ranks call different collectives: {', '.join(sorted(kinds))}",
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

    def _gathered(self, box: StoreMailbox, call: Call) -> dict[int, Call]:
        """What each rank calls here, of those that come within some seconds."""
        name = f"{call.number}/apart"
        box.put(f"{name}/{self._rank}", json.dumps(asdict(call)))
        box.count(f"{name}/count")
        deadline = time.monotonic() + _REPORT_S
        while box.count(f"{name}/count", 0) < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        there = [rank for rank in self.ranks if box.has(f"{name}/{rank}")]
        texts = box.read([f"{name}/{rank}" for rank in there])
        return {rank: Call(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}


def _site() -> str:
    """The line outside of Fairlead that made the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fairlead_"):
        frame = frame.f_back
    path, here = frame.f_code.co_filename, os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{frame.f_lineno} in {frame.f_code.co_name}"
