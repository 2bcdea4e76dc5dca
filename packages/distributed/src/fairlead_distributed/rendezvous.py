"""How the ranks of one start find each other, and only each other, and who is missing when they do not.

torch keeps one key-value store over all restarts of a torchrun job and gives every attempt the same keys, so that a
restarted worker can read the address of a dead one and dial it (torch 2.13: 2 of 12 restarts after a `kill -9` were
clean). Here every attempt gets a prefix of its own. The restart count alone does not tell attempts apart: it stays the
same when the membership of an elastic job changes, and when one process initialises twice. So rank 0 opens a numbered
attempt, and every other rank proves that it is alive by a random word that only rank 0 of this attempt answers.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from fairlead_distributed import _environ
from fairlead_distributed.errors import PortError, RendezvousError

__all__ = ["Endpoint", "connect", "meet"]

_POLL_FIRST, _POLL_LAST = 0.002, 0.1  # seconds between two looks of rank 0 into the store


@dataclass(frozen=True)
class Endpoint:
    """Where the store of a run is: the address and port of its master."""

    host: str
    port: int

    def __str__(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def connect(endpoint: Endpoint, *, rank: int, environ: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """The store of the run: hosted by rank 0, or by torchrun's agent when it says so, and connected to by the others.

    Raises:
        PortError: Rank 0 cannot listen on the port.
        RendezvousError: Nothing answered within the timeout.
    """
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not agent
    deadline = time.monotonic() + timeout.total_seconds()
    if not hosts:
        _await_listener(endpoint, rank, "torchrun's agent" if agent else "rank 0", deadline)
    try:
        return dist.TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=hosts,
            wait_for_workers=False,  # `meet` waits, and can name who is missing
            multi_tenant=True,
            timeout=_left(deadline),
        )
    except dist.DistNetworkError as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            raise PortError(
                f"rank 0 cannot listen on port {endpoint.port}: it is in use",
                where=f"MASTER_PORT={endpoint.port}",
                why="another run on this machine uses it, or an earlier one has not ended",
                fix=f"give another port to all ranks (MASTER_PORT={endpoint.port + 1}), or end the process that "
                f"holds it: ss -ltnp 'sport = :{endpoint.port}'",
            ) from error
        raise RendezvousError(
            f"rank {rank} could not open the store at {endpoint}", where=str(endpoint), why=reason
        ) from error


def _await_listener(endpoint: Endpoint, rank: int, host_name: str, deadline: float) -> None:
    # A plain connect tells "name unknown", "refused" and "no answer" apart; the store's own client says one thing.
    started, pause = time.monotonic(), 0.02
    while True:
        try:
            socket.create_connection(
                (endpoint.host, endpoint.port), timeout=min(5.0, max(0.1, _seconds(deadline)))
            ).close()
            return
        except socket.gaierror as error:
            reason, advice = f"the name {endpoint.host!r} does not resolve ({error.strerror})", "check MASTER_ADDR"
        except ConnectionRefusedError:
            reason = f"the machine answers, but nothing listens on port {endpoint.port}"
            advice = f"check that {host_name} has started and that MASTER_PORT is the same on all ranks"
        except OSError as error:
            reason = f"no answer: {error}"
            advice = "check the network and the firewall between the machines, and MASTER_ADDR"
        if _seconds(deadline) <= pause:
            waited = time.monotonic() - started
            raise RendezvousError(
                f"rank {rank} could not reach {host_name} at {endpoint} within {waited:.0f} s",
                where=f"MASTER_ADDR={endpoint.host}, MASTER_PORT={endpoint.port}",
                why=reason,
                fix=advice,
            )
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


def meet(
    store: dist.Store, *, rank: int, world_size: int, environ: Mapping[str, str], timeout: timedelta, where: str
) -> dist.PrefixStore:
    """Waits until all ranks of this attempt are here; returns the part of the store that is theirs alone.

    Args:
        store: A store that all ranks share, of any age.
        where: The store's address, for messages.

    Raises:
        RendezvousError: Not all ranks came within the timeout (`missing` names them), two processes have the same
            rank, or the ranks disagree on the world size. All ranks that did come get the same error.
    """
    attempt = dist.PrefixStore(f"fairlead/restart_{_environ.restart_count(environ)}", store)
    meeting = _Meeting(attempt, rank, world_size, time.monotonic() + timeout.total_seconds(), timeout, where)
    generation = meeting.lead() if rank == 0 else meeting.follow()
    return dist.PrefixStore(f"{generation}/group", attempt)


@dataclass
class _Meeting:
    store: dist.Store
    rank: int
    world_size: int
    deadline: float
    timeout: timedelta
    where: str

    def lead(self) -> int:
        generation = self.store.add("generation", 1)
        self.store.set(f"{generation}/who/0", _me())
        read, unread, pause = 0, set[int](), _POLL_FIRST
        while self.store.add(f"{generation}/here", 0) < self.world_size - 1:
            if self.store.check([f"{generation}/failed"]):
                self.fail(generation, json.loads(self.store.get(f"{generation}/failed")))
            if time.monotonic() >= self.deadline:
                self.fail(generation, self.absent(generation))
            written = self.store.add("hello", 0)
            unread.update(range(read + 1, written + 1))
            read = written
            # A process that died between taking a number and writing its word leaves a gap: never wait for one.
            for index in [i for i in sorted(unread) if self.store.check([f"hello/{i}"])]:
                word = self.store.get(f"hello/{index}").decode()
                self.store.set(f"answer/{word}", f"{generation} {self.world_size}")
                unread.discard(index)
                pause = _POLL_FIRST
            time.sleep(pause)
            pause = min(_POLL_LAST, pause * 1.3)
        self.store.set(f"{generation}/go", "{}")
        return generation

    def follow(self) -> int:
        word = uuid.uuid4().hex
        index = self.store.add("hello", 1)
        self.store.set(f"hello/{index}", word)
        if not self.wait(f"answer/{word}"):
            self.give_up({"what": "rank 0 did not come", "missing": [0]})
        generation, world_size = map(int, self.store.get(f"answer/{word}").split())
        if world_size != self.world_size:
            what = f"the world size is {self.world_size} on rank {self.rank} and {world_size} on rank 0"
            self.store.set(f"{generation}/failed", json.dumps({"what": what, "missing": []}))
        elif self.store.add(f"{generation}/claims/{self.rank}", 1) > 1:
            first = (
                self.store.get(f"{generation}/who/{self.rank}").decode()
                if self.wait(f"{generation}/who/{self.rank}")
                else "unknown"
            )
            what = f"two processes say that they are rank {self.rank}: {first} and {_me()}"
            self.store.set(f"{generation}/failed", json.dumps({"what": what, "missing": []}))
        else:
            self.store.set(f"{generation}/who/{self.rank}", _me())
            self.store.add(f"{generation}/here", 1)
        if not self.wait(f"{generation}/go"):
            self.give_up(self.absent(generation))
        verdict = json.loads(self.store.get(f"{generation}/go"))
        if verdict:
            self.store.add(f"{generation}/seen", 1)
            self.give_up(verdict)
        return generation

    def absent(self, generation: int) -> dict[str, object]:
        missing = [r for r in range(self.world_size) if not self.store.check([f"{generation}/who/{r}"])]
        return {"what": f"{self.world_size - len(missing)} of {self.world_size} ranks came", "missing": missing}

    def fail(self, generation: int, verdict: dict[str, object]) -> NoReturn:
        """Tells those who came before the store, which rank 0 may host, goes down with this process."""
        self.store.set(f"{generation}/go", json.dumps(verdict))
        patience = time.monotonic() + 1.0
        others = self.store.add(f"{generation}/here", 0)
        while self.store.add(f"{generation}/seen", 0) < others and time.monotonic() < patience:
            time.sleep(_POLL_FIRST)
        self.give_up(verdict)

    def give_up(self, verdict: dict[str, object]) -> NoReturn:
        missing = tuple(int(str(r)) for r in verdict["missing"]) if isinstance(verdict["missing"], list) else ()
        if missing:
            error = RendezvousError(
                f"{verdict['what']} to {self.where} within {self.timeout.total_seconds():g} s",
                where=f"rank {self.rank} of {self.world_size}, on {_me()}",
                why=f"missing: {_ranks(missing)}",
                fix="look at the output of the missing ranks: they did not start, ended early, or were given another "
                "MASTER_ADDR or MASTER_PORT; a slow start needs a longer timeout",
            )
        else:
            error = RendezvousError(
                f"the processes do not fit together: {verdict['what']}",
                where=f"{self.where}, rank {self.rank} of {self.world_size}",
                fix="give each process a RANK of its own from 0 to WORLD_SIZE - 1 and the same WORLD_SIZE to all; a "
                "template that sets RANK must be evaluated inside each task",
            )
        error.missing = missing
        raise error

    def wait(self, key: str) -> bool:
        """Whether the key came before the deadline."""
        try:
            self.store.wait([key], _left(self.deadline))
        except dist.DistError as error:
            if time.monotonic() < self.deadline - 0.05:
                raise RendezvousError(
                    f"the store at {self.where} went away while rank {self.rank} waited for the others",
                    where=f"rank {self.rank} of {self.world_size}",
                    why=str(error).splitlines()[0],
                    fix="look at the output of rank 0 (or of torchrun), which hosts the store: it ended first",
                ) from error
            return False
        return True


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown} and {len(ranks) - 16} more" if len(ranks) > 16 else f"rank{'s'[: len(ranks) > 1]} {shown}"


def _me() -> str:
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _seconds(deadline: float) -> float:
    return deadline - time.monotonic()


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.05, _seconds(deadline)))
