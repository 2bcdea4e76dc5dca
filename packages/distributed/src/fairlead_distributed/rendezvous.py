"""Rendezvous: the ranks of one start find each other, and missing or different ranks are named.

torch gives every restart of a torchrun job the same keys in one store, so that a worker can dial a dead one (torch
2.13: 2 of 12 restarts after a `kill -9` were clean). Here rank 0 opens a numbered attempt under its own prefix,
since the restart count alone does not tell attempts apart, and the others prove that they are alive by a random word
that only rank 0 of this attempt answers. Then each writes one record and waits for one verdict, the same for all.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from fairlead.starts import Start
from fairlead_distributed import _environ
from fairlead_distributed.alarms import SlowWait
from fairlead_distributed.errors import PreflightError, RendezvousError
from fairlead_distributed.opening import Opened
from fairlead_distributed.preflight import RankFacts, absent_lines, differences
from fairlead_runs.mailbox import StoreMailbox
from fairlead_runs.waiting import ranks_text

_POLL_FIRST, _POLL_LAST = 0.002, 0.1  # seconds between two looks of rank 0 into the store
_VERDICT_GRACE = 30.0  # seconds after rank 0's own deadline, until which its verdict has come if it lives
DECLINE_S = 15.0
"""Seconds for which a rank that does not come waits for the others, to tell them."""
_READ_GRACE = 10.0  # seconds for which a failed rank 0 keeps the store alive, so that all have read why
_TOGETHER = (
    "look at the output of the missing ranks: they did not start, ended early, or were given another MASTER_ADDR \
or MASTER_PORT; a slow start needs a longer `preflight_timeout`"
)
_ONE_INSTALLATION = "start all ranks from one installation and one config, as copied or mounted on every node"


def meet(
    opened: Opened,
    rank: int,
    world_size: int,
    facts: RankFacts,
    start: Start | None,
    *,
    environ: Mapping[str, str],
    timeout: timedelta,
    declines: str | None = None,
) -> dist.PrefixStore:
    """Waits until all ranks of this attempt are here and fit together; returns the part of the store that is theirs.

    The store may be of any age; rank 0 closes it when no further rank has to find it. All ranks that came get the same
    PreflightError; a RendezvousError says that the store went away. `declines` says why this rank does not take part:
    that is their error then, and its own.
    """
    attempt = dist.PrefixStore(f"fairlead/restart_{_environ.restart_count(environ)}", opened.store)
    deadline = time.monotonic() + timeout.total_seconds()
    mailbox = StoreMailbox(attempt, rank, world_size)
    meeting = _Meeting(mailbox, facts, start, deadline, timeout, opened.where, opened.close, declines)
    generation = meeting.lead() if rank == 0 else meeting.follow()
    return dist.PrefixStore(f"{generation}/group", attempt)


@dataclass
class _Meeting:
    mailbox: StoreMailbox
    facts: RankFacts
    start: Start | None
    deadline: float
    timeout: timedelta
    where: str
    all_here: Callable[[], None]
    declines: str | None = None

    # -- rank 0

    def lead(self) -> int:
        generation, mailbox = self.mailbox.count("generation"), self.mailbox
        if self.declines is not None:
            self.decline(generation, self.declines)
        mailbox.arrive(f"{generation}/facts", self.facts.to_json())
        read, unread, pause = 0, set[int](), _POLL_FIRST
        slow = SlowWait(partial(self.absent_line, generation))
        while not mailbox.has(f"{generation}/facts/all"):
            if mailbox.has(f"{generation}/failed"):
                self.fail(generation, json.loads(mailbox.read([f"{generation}/failed"])[0]))
            if time.monotonic() >= self.deadline:
                verdict = self.absent(generation)
                if verdict is None:
                    break
                self.fail(generation, verdict)
            slow.look()
            written = mailbox.count("hello", 0)
            unread.update(range(read + 1, written + 1))
            read = written
            if answered := self.answer(generation, sorted(unread)):
                unread.difference_update(answered)
                pause = _POLL_FIRST
            time.sleep(pause)
            pause = min(_POLL_LAST, pause * 1.3)
        self.all_here()
        different = differences(self.records(generation, range(mailbox.world_size)))
        if different:
            what, fix = f"the ranks do not fit together: {different[0]}", _ONE_INSTALLATION
            self.fail(generation, self.verdict(what, "\n".join(different[1:]) or None, fix))
        mailbox.put(f"{generation}/go", "{}")
        return generation

    def decline(self, generation: int, why: str) -> NoReturn:
        """Answers the ranks that come within the timeout, and reports that rank 0 does not take part."""
        answered = set[int]()
        while len(answered) < self.mailbox.world_size - 1 and time.monotonic() < self.deadline:
            written = set(range(1, self.mailbox.count("hello", 0) + 1))
            answered.update(self.answer(generation, sorted(written - answered)))
            time.sleep(_POLL_LAST)
        self.fail(generation, self.declined(why))

    def declined(self, why: str) -> dict[str, Any]:
        who = f"rank {self.mailbox.rank} on {self.facts}"
        return self.verdict(f"{who} failed before it joined the others", why, None)

    def answer(self, generation: int, numbers: Sequence[int]) -> list[int]:
        """Answers the ranks that came with this attempt's number; in few messages, for thousands come at once."""
        numbers = self.written(numbers)
        if numbers:
            keys = [f"hello/{number}" for number in numbers]
            seconds = max(0.0, self.deadline - time.monotonic())
            text = f"{generation} {self.mailbox.world_size} {seconds:.3f}"
            self.mailbox.put_all([f"answer/{word}" for word in self.mailbox.read(keys)], text)
        return numbers

    def written(self, numbers: Sequence[int]) -> list[int]:
        """Those whose word is there: a process that died behind taking its number leaves a gap, never wait for one."""
        if not numbers or self.mailbox.has(*(f"hello/{number}" for number in numbers)):
            return list(numbers)
        half = len(numbers) // 2
        return self.written(numbers[:half]) + self.written(numbers[half:]) if half else []

    def records(self, generation: int, ranks: Sequence[int]) -> dict[int, RankFacts]:
        found = self.mailbox.read([f"{generation}/facts/{rank}" for rank in ranks])
        return {rank: RankFacts.from_json(text) for rank, text in zip(ranks, found, strict=True)}

    def absent_line(self, generation: int) -> str | None:
        missing = self.mailbox.missing(f"{generation}/facts")
        hosts = "; ".join(absent_lines(missing, {}, self.start)[:4]).replace("missing: ", "")
        left = self.deadline - time.monotonic()
        return f"rank 0 waits at {self.where} for {hosts}; it gives up in {left:.0f} s" if missing else None

    def absent(self, generation: int) -> dict[str, Any] | None:
        """The verdict with the missing ranks; None when all have come meanwhile."""
        world_size = self.mailbox.world_size
        missing = self.mailbox.missing(f"{generation}/facts")
        if not missing:
            return None
        here = sorted(set(range(world_size)) - set(missing))
        came = self.records(generation, here)
        what = f"{len(here)} of {world_size} ranks came to {self.where} within {self.timeout.total_seconds():g} s"
        why = "\n".join([*absent_lines(missing, came, self.start), *differences(came)])
        return self.verdict(what, why, _TOGETHER, missing)

    def fail(self, generation: int, verdict: dict[str, Any]) -> NoReturn:
        """Reports the failure to the ranks that came, before the store ends with this process, which may host it."""
        self.mailbox.put(f"{generation}/go", json.dumps(verdict))
        patience = time.monotonic() + _READ_GRACE
        others = self.mailbox.count(f"{generation}/waiting", 0)
        while self.mailbox.count(f"{generation}/seen", 0) < others and time.monotonic() < patience:
            time.sleep(_POLL_FIRST)
        self.give_up(verdict)

    # -- the others

    def follow(self) -> int:
        mailbox, rank, word = self.mailbox, self.mailbox.rank, uuid.uuid4().hex
        mailbox.put(f"hello/{mailbox.count('hello')}", word)
        answer = self.get(f"answer/{word}")
        if answer is None:
            self.give_up(self.without_rank_0())
        generation, world_size, seconds = answer.split()
        # From here on rank 0 says when it is enough: all ranks hear it at the same time.
        self.deadline = time.monotonic() + float(seconds) + _VERDICT_GRACE
        mailbox.count(f"{generation}/waiting")
        if self.declines is not None:
            verdict = self.declined(self.declines)
            self.mailbox.put(f"{generation}/failed", json.dumps(verdict))
            mailbox.count(f"{generation}/seen")
            self.give_up(verdict)
        if int(world_size) != self.mailbox.world_size:
            why = f"the world size is {self.mailbox.world_size} on rank {rank} and {world_size} on rank 0"
            self.protest(generation, f"{why}; rank {rank} is on {self.facts}")
        elif mailbox.count(f"{generation}/claims/{rank}") > 1:
            facts = self.get(f"{generation}/facts/{rank}")
            first = "unknown" if facts is None else RankFacts.from_json(facts)
            self.protest(generation, f"two processes say that they are rank {rank}: {first} and {self.facts}")
        else:
            mailbox.arrive(f"{generation}/facts", self.facts.to_json())
        go = self.get(f"{generation}/go")
        if go is None:
            self.give_up(
                {**self.without_rank_0(), "what": f"rank 0 at {self.where} stopped answering before all ranks came"}
            )
        verdict = json.loads(go)
        if verdict:
            mailbox.count(f"{generation}/seen")
            self.give_up(verdict)
        return int(generation)

    def protest(self, generation: str, why: str) -> None:
        fix = (
            "give each process its own RANK from 0 to WORLD_SIZE - 1 and the same WORLD_SIZE to all; a template "
            "that sets RANK must be evaluated inside each task"
        )
        what = f"the ranks do not fit together: {why}"
        self.mailbox.put(f"{generation}/failed", json.dumps(self.verdict(what, None, fix)))

    def without_rank_0(self) -> dict[str, Any]:
        what = f"rank 0 did not come to {self.where} within {self.timeout.total_seconds():g} s"
        host = f" on {self.start.rank_hosts[0]}" if self.start is not None and self.start.rank_hosts else ""
        why = f"missing: {ranks_text([0])}{host}"
        return self.verdict(what, why, _TOGETHER, [0])

    # -- all

    def verdict(self, what: str, why: str | None, fix: str | None, missing: Iterable[int] = ()) -> dict[str, Any]:
        return {"what": what, "why": why, "fix": fix, "missing": list(missing), "where": self.where}

    def give_up(self, verdict: Mapping[str, Any]) -> NoReturn:
        error = PreflightError(verdict["what"], where=verdict["where"], why=verdict["why"], fix=verdict["fix"])
        error.missing = tuple(verdict["missing"])
        raise error

    def get(self, key: str) -> str | None:
        """The text of a message; None when it did not come before the deadline."""
        try:
            return self.mailbox.get(key, max(0.05, self.deadline - time.monotonic()))
        except dist.DistError as error:
            raise RendezvousError(
                f"the store at {self.where} went away while rank {self.mailbox.rank} waited for the others",
                where=f"rank {self.mailbox.rank} of {self.mailbox.world_size}, on {self.facts}",
                why=str(error).splitlines()[0],
                fix="look at the output of rank 0 (or of torchrun), which hosts the store: it ended first",
            ) from error
