"""What all ranks do when one of them fails or hangs: report which one, dump their stacks, and exit.

A rank that fails wakes the control planes of all others, also where the main thread sits in a collective. Each dumps
its stacks and torch's flight recorder, and ends itself after a grace. The one that failed first speaks for all.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from fairlead.errors import ConfigError
from fairlead_distributed.alarms import NO_REPORT, Alarm, Alarms, end_process, is_requested_stop, to_stderr, trouble_of
from fairlead_distributed.control_plane import ControlPlane
from fairlead_distributed.info import get_rank, get_world_size
from fairlead_distributed.process_group import group_store
from fairlead_distributed.stacks import StackDump
from fairlead_runs.mailbox import LONG, StoreMailbox
from fairlead_runs.waiting import ranks_text

GRACE: Final = timedelta(seconds=10)
"""How long a rank may continue in the block after another has failed: it mostly fails by itself, of the absence."""
_GRACES: Final = 6  # so many of them may pass after another rank has left by an exception: all may be about to
_HEARD_S: Final = 3.0  # how long a rank that fails waits until the others have heard of it: it may host the store
_SECOND_S: Final = 1.0  # how long a rank that only lost its peers lets the one that failed first speak first
_PATIENCE_S: Final = 8.0  # how long the store may take for all that: the node that hosts it may be gone
_HANGS: Final = 5  # so often in one block are stacks dumped because nothing moves


class RankWatch:
    """Watches a block of work that all ranks do together; made on all ranks, after the process group.

    As a context manager it is left by the end of the block, or by an exception: that is a failure of this rank, unless
    it is one that stops a program (Ctrl-C, `SystemExit` with 0, 75, 130 or 143). `isolated` says why this rank hears
    nothing of the others, or is None.

    Args:
        stacks: The folder that gets `rank-00003.txt` of every rank after a failure, or when nothing moves.
        store: A store that all ranks share; None: there is no other rank.
        rank: This rank.
        world_size: The number of ranks.
        flight_recorder: The folder for torch's flight recorder; None: it is not dumped.
        grace: How long a rank may continue after another has failed. It then ends with exit code 1, without clean-up.
        progress: Something that changes while the rank gets on; polled in a thread.
        hang_after: When nothing has changed there for so long, the stacks of all ranks are dumped, and nothing else
            happens. Best shorter than the process group's timeout, after which there may be no rank left to ask.
        say: Gets what a person should read; None: stderr.
        local_rank: With it, only the first rank of each other node names the one that failed; None: every rank does.
        heard: Called with each alarm that came from another rank, and a hang or a `gone` that this one tells.
        plane: The control plane of these ranks; None: the watch makes one.

    Example:
        >>> with RankWatch.of_process_group(Path("runs/gpt/stacks")):  # doctest: +SKIP
        ...     train()
    """

    def __init__(
        self,
        stacks: Path,
        store: dist.Store | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        flight_recorder: Path | None = None,
        grace: timedelta = GRACE,
        progress: Callable[[], object] | None = None,
        hang_after: timedelta | None = None,
        say: Callable[[str], None] | None = None,
        local_rank: int | None = None,
        heard: Callable[[Alarm], None] | None = None,
        plane: ControlPlane | None = None,
    ) -> None:
        self.path = stacks / f"rank-{rank:05d}.txt"
        self.rank = rank
        self.isolated: str | None = "there is no other rank"
        self._grace_s = grace.total_seconds()
        self._say = say if say is not None else to_stderr
        self._dump = StackDump(self.path, rank, flight_recorder, self._say)
        self._local_rank = local_rank
        self._listener = heard
        self._pid = os.getpid()
        self._number = 1  # of the alarm that comes next
        self._first: Alarm | None = None
        self._learning = threading.Lock()
        self._left = threading.Event()
        self._reported = False
        self._own_number: int | None = None
        self._alarmed = time.monotonic()
        self._alarms: Alarms | None = None
        self._plane = plane
        self._looking: threading.Thread | None = None
        if store is not None and world_size > 1:
            try:
                self._plane = plane if plane is not None else ControlPlane(store, rank, world_size)
                self._alarms = Alarms(self._plane.open("watch"))
            except ConfigError as error:  # not every store can be shared between threads
                self.isolated = error.why
            else:
                self.isolated = None
                self._plane.listen(self._alarms.mailbox, self._hear, self._lost)
        if progress is not None and hang_after is not None:
            arguments = progress, hang_after.total_seconds()
            self._looking = threading.Thread(target=self._look, args=arguments, name="fairlead-watch-look", daemon=True)
            self._looking.start()
        # A thread that comes back from torch while the interpreter ends would take the process down.
        atexit.register(self.close)

    @classmethod
    def of_process_group(cls, stacks: Path, **options: Any) -> RankWatch:
        """The watch of torch's default process group, over its store; of this process alone where there is none."""
        store, rank, world_size = group_store(), get_rank(), get_world_size()
        if store is None or world_size == 1:
            return cls(stacks, **options)
        try:
            plane = ControlPlane.of_process_group()
        except ConfigError:  # the watch gets the same error, and stores its reason
            plane = None
        return cls(stacks, store, rank, world_size, plane=plane, **options)

    # -- how the block ends

    def close(self) -> None:
        """The block has ended as it should."""
        if os.getpid() != self._pid:
            return
        self.leave()
        atexit.unregister(self.close)
        if self.rank == 0 and not self._reported and self._first is None:
            self._reported = True
            # The store may go with this process: the others must not take that for its death.
            trouble_of(_PATIENCE_S, self._announce, Alarm("over", 0, "", "", "", time.time()))

    def leave(self, error: BaseException | None = None) -> None:
        """This rank has left the block, perhaps by an exception that may yet be caught, and is not ended any more.

        Ranks that are still in it long after such an error time out waiting for this one, and exit.
        """
        if self._left.is_set() or os.getpid() != self._pid:  # a forked child shares our connections
            return
        if error is not None:
            trouble_of(_PATIENCE_S, self._announce_left, replace(Alarm.of_error(self.rank, error), kind="left"))
        self._left.set()
        trouble_of(_PATIENCE_S, self._leave)  # where it fails, no rank is left to notify
        if self._looking is not None and self._looking is not threading.current_thread():
            self._looking.join(2.0)

    def failed(
        self,
        error: BaseException | str,
        *,
        secondary: bool = False,
        exits: bool = False,
        report: Callable[[], object] = lambda: None,
    ) -> None:
        """This rank has failed: tells all ranks, and returns once they have dumped their stacks, or after seconds.

        Where another rank has failed before, it only waits for it. `secondary`: the error says no more than that
        another rank went away, which may speak first. `exits`: this process, which is about to end, is ended after the
        grace. `report` shows the error, and is called where this rank speaks for all.
        """
        if os.getpid() != self._pid:
            report()
            return
        if self._reported:
            return
        self._reported = True
        if exits:
            threading.Thread(target=self._exit, name="fairlead-watch-exit", daemon=True).start()
        alarm = Alarm.of_error(self.rank, error, secondary=secondary and self._alarms is not None)
        trouble = None
        if self._first is None:
            trouble = trouble_of(_PATIENCE_S, self._put, alarm, _SECOND_S if secondary else 0.0)
        if self._first is None or (self._first.kind != "failed" and alarm.kind == "failed"):
            if alarm.kind == "failed":
                if self._alarms is not None:  # a single process only shows its error
                    self._say(str(alarm))
                report()
            trouble = trouble or trouble_of(_PATIENCE_S, self._spread, alarm)
            if trouble is not None:
                self._say(f"{alarm}\ncannot notify the other ranks: {trouble}")
        self._dump.write(alarm)
        self._dump.detail(alarm)
        self.leave()

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or is_requested_stop(error):
            self.close()
        else:
            self.failed(error)

    # -- the threads

    def _leave(self) -> None:
        if self._plane is not None and self._alarms is not None:
            self._alarms.leave()
            self._plane.leave(self._alarms.mailbox)

    def _hear(self, mailbox: StoreMailbox) -> float | None:
        alarms = Alarms(mailbox)
        while not self._left.is_set() and (alarm := alarms.read(self._number)) is not None:
            if alarm.kind == "left":
                self._number += 1
                if alarm.rank != self.rank:
                    threading.Thread(
                        target=self._end_left, args=(alarm,), name="fairlead-watch-left", daemon=True
                    ).start()
                continue
            if alarm.kind == "hang" or alarm.rank != self.rank:
                self._alarmed = time.monotonic()
                if alarm.kind != "over":
                    self._dump.write(alarm)
                alarms.acknowledge(self._number)
                self._dump.detail(alarm)
            if alarm.kind != "hang":  # the last one: a rank that fails from now on finds it under this number
                self._last(alarm)
                return None
            self._number += 1
            self._take_in(alarm)
        return None if self._left.is_set() else LONG

    def _lost(self, error: Exception) -> None:
        """The store has gone, or a message could not be dealt with."""
        if not isinstance(error, RuntimeError):
            self._say(f"rank {self.rank} hears nothing of the other ranks any more: {error!r}")
        elif not self._left.is_set():
            what = "the process that hosts this run's store has died (rank 0, or torchrun's agent)"
            alarm = Alarm("lost", -1, "", what, f"{what}\n{error}", time.time())
            self._dump.write(alarm)
            self._last(alarm)

    def _last(self, alarm: Alarm) -> None:
        if alarm.rank == self.rank:
            return
        if alarm.kind == "over":
            self.isolated, self._alarms = "the rank that may host the store has left the block", None
            return
        threading.Thread(target=self._end, name="fairlead-watch-end", daemon=True).start()
        self._take_in(alarm)

    def _take_in(self, alarm: Alarm) -> None:
        if alarm.kind != "hang":
            self._learn(alarm)
        if self._listener is not None and alarm.kind != "gone":  # the rank that raised it has called its own
            self._listener(alarm)

    def _end(self) -> None:
        if not self._left.wait(self._grace_s):
            self._say(f"rank {self.rank} ends, {self._grace_s:g} s after that; its stacks are in {self.path}")
            end_process()

    def _end_left(self, alarm: Alarm) -> None:
        if self._left.wait(self._grace_s) or self._first is not None:
            return
        patience = (_GRACES - 1) * self._grace_s
        if self._local_rank in (None, 0):  # a supervisor hears of it at the end
            to_stderr(f"{alarm}\nrank {self.rank} still waits for it, and exits in {patience:g} s")
        if not self._left.wait(patience) and self._first is None:
            self._dump.write(alarm)
            self._say(f"{alarm}\nrank {self.rank} timed out waiting for it, and exits; its stacks are in {self.path}")
            if self._listener is not None:
                self._listener(alarm)
            end_process()

    def _exit(self) -> None:
        time.sleep(_PATIENCE_S + self._grace_s)
        end_process()

    def _look(self, progress: Callable[[], object], seconds: float) -> None:
        """Raises an alarm when this rank has made no progress for so long."""
        last, self._alarmed, hangs = progress(), time.monotonic(), 0
        while hangs < _HANGS and not self._left.wait(min(30.0, seconds / 10)):
            now = progress()
            if now != last:
                last, self._alarmed = now, time.monotonic()
            elif time.monotonic() - self._alarmed >= seconds:
                hangs, self._alarmed = hangs + 1, time.monotonic()
                self._hang(seconds)

    def _hang(self, seconds: float) -> None:
        what = f"nothing has moved for {seconds:g} s; the stacks of all ranks are in {self.path.parent}"
        alarm = Alarm("hang", self.rank, os.uname().nodename, what, what, time.time())
        trouble = trouble_of(_PATIENCE_S, self._announce, alarm)
        if trouble is not None or self.isolated is not None:  # this rank's control plane does not hear it
            self._dump.write(alarm)
            self._take_in(alarm)

    # -- what they do

    def _announce(self, alarm: Alarm) -> None:
        self._put(alarm)
        if alarm.kind == "hang" and (self._own_number is not None or self._alarms is None):
            self._say(str(alarm))
        self._spread(alarm)

    def _put(self, alarm: Alarm, patience_s: float = 0.0) -> None:
        """Has all ranks agree on which alarm counts; another rank's may have come first."""
        self._own_number = None
        if self._alarms is None:
            return
        raised, number = self._alarms.put(alarm, self._number, patience_s)
        if raised == alarm:
            self._own_number = number
        elif raised.kind in ("failed", "gone"):
            self._learn(raised)

    def _spread(self, alarm: Alarm) -> None:
        """Wakes the others, where this rank's alarm counts, and reports who does not answer."""
        alarms, number = self._alarms, self._own_number
        if alarms is None or number is None:
            return
        alarms.mailbox.ring()
        silent = alarms.unheard(number, _HEARD_S)
        if alarm.kind == "gone":
            if silent:
                alarm = replace(alarm, rank=min(silent), what=f"{ranks_text(silent)} {NO_REPORT}")
            self._say(str(alarm))
            if self._listener is not None:
                self._listener(alarm)
        elif silent and alarm.kind != "over":
            self._say(f"no stacks of {ranks_text(silent)}: it has died, or C code holds the interpreter's lock")

    def _announce_left(self, alarm: Alarm) -> None:
        if self._alarms is not None:
            self._alarms.put(alarm, self._number)
            self._alarms.mailbox.ring()

    def _learn(self, alarm: Alarm) -> None:
        """Another rank has failed first: its line is printed once a node, not by thousands of ranks."""
        with self._learning:
            if self._first is not None:
                return
            self._first = alarm
        elsewhere = alarm.host != os.uname().nodename
        of_store = alarm.kind == "lost" and self.rank == 1  # rank 0 may have died with it
        if self._local_rank is None or (self._local_rank == 0 and elsewhere) or of_store:
            self._say(str(alarm))
