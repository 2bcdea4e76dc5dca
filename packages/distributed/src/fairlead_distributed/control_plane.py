"""The one thread in which a rank hears what the others have to say: a failure, a hang, the end, a stop.

It blocks on one key of the store, the rank's bell, and costs the steps nothing. It takes the bell away before its
listeners look, so that nothing is missed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

import torch.distributed as dist

from fairlead_distributed.process_group import group_store
from fairlead_runs.mailbox import LONG, StoreMailbox

_of_groups: weakref.WeakSet[ControlPlane] = weakref.WeakSet()
"""Those of process groups, as long as they are used."""

_END_S: Final = 15.0


class _Listener(NamedTuple):
    hear: Callable[[StoreMailbox], float | None]
    lost: Callable[[Exception], None]


class ControlPlane:
    """A rank's thread for messages, and its connections to the store. The thread runs while there are listeners.

    A ConfigError where this kind of store cannot be shared between threads.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._mailbox = StoreMailbox(store, rank, world_size)
        self._listening = self._mailbox.reconnect()
        self._listeners: dict[StoreMailbox, _Listener] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._group_store: dist.Store | None = None

    @classmethod
    def of_process_group(cls) -> ControlPlane:
        """That of torch's default process group: one for all callers; a ValueError where there is no group."""
        rank, store = dist.get_rank(), group_store()
        assert store is not None  # or `get_rank` would have raised
        for plane in _of_groups:
            if plane._pid == os.getpid() and plane._group_store is store:
                return plane
        plane = cls(dist.PrefixStore("fairlead/control", store), rank, dist.get_world_size())
        plane._group_store = store
        _of_groups.add(plane)
        return plane

    def open(self, name: str) -> StoreMailbox:
        """A mailbox for one thread at a time, over its own connection.

        Its messages are mixed up with no other's, also of the same name: all ranks open those in the same order.
        """
        number = self._mailbox.count(f"{name}/opened/{self._mailbox.rank}")
        return self._mailbox.reconnect().under(f"{name}/{number}")

    def listen(
        self,
        mailbox: StoreMailbox,
        hear: Callable[[StoreMailbox], float | None],
        lost: Callable[[Exception], None],
    ) -> None:
        """Has the thread call `hear` over its own connection, at once and whenever a rank rings.

        `hear` returns after how many seconds it wants to look without being rung, or None when it has heard all.
        `lost` is called instead, once, when the store has gone, or `hear` has raised.
        """
        with self._lock:
            self._listeners[mailbox] = _Listener(hear, lost)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="fairlead-control", daemon=True)
                self._thread.start()
                return
        mailbox.ring([mailbox.rank])

    def leave(self, mailbox: StoreMailbox) -> None:
        """Ends what `listen` began; the thread ends with the last listener. A RuntimeError where the store has gone."""
        self._forget(mailbox)
        with self._lock:
            thread = self._thread if not self._listeners else None
        if thread is not None and thread is not threading.current_thread():
            try:
                mailbox.ring([mailbox.rank])
            finally:
                # A thread that returns from torch while the interpreter ends aborts the process ("terminate called
                # without an active exception"). It ends at once, also where the store has gone, or soon on a busy node.
                thread.join(_END_S)

    def _run(self) -> None:
        while True:
            patience = [self._look(*listener) for listener in list(self._listeners.items())]
            with self._lock:
                if not self._listeners:
                    self._thread = None
                    return
            try:
                self._listening.await_bell(min(patience, default=0.0))
            except RuntimeError as error:
                for mailbox, listener in list(self._listeners.items()):
                    self._lose(mailbox, listener, error)

    def _look(self, mailbox: StoreMailbox, listener: _Listener) -> float:
        try:
            patience = listener.hear(mailbox.over(self._listening))
        except Exception as error:  # whatever it is, the main thread must not wait for this one
            self._lose(mailbox, listener, error)
            return LONG
        if patience is None:
            self._forget(mailbox)
        return LONG if patience is None else patience

    def _lose(self, mailbox: StoreMailbox, listener: _Listener, error: Exception) -> None:
        self._forget(mailbox)
        listener.lost(error)

    def _forget(self, mailbox: StoreMailbox) -> None:
        with self._lock:
            self._listeners.pop(mailbox, None)
