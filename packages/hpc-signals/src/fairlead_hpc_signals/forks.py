"""Forked children have none of our handlers, from their first moment on."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Protocol

__all__ = ["Disownable", "watch_forks"]


class Disownable(Protocol):
    """Something with signal handlers."""

    signals: tuple[signal.Signals, ...]

    def disown(self) -> None:
        """Takes its handlers back, in a child."""
        ...


def watch_forks(there: weakref.ref[Disownable]) -> None:
    """Has a forked child disown what it inherits; a hook cannot be taken back, so it keeps nothing alive.

    A signal that came to the child before that would be lost: it would meet our handler, and Python forgets in a child
    what it has not handled yet. (Seen: a pool that ends a worker right after its start waits for ever.) So the signals
    wait while this thread forks.
    """
    masks = threading.local()

    def before() -> None:
        one = there()
        masks.earlier = None if one is None else signal.pthread_sigmask(signal.SIG_BLOCK, one.signals)

    def after() -> None:
        if masks.earlier is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.earlier)

    def after_in_child() -> None:
        if (one := there()) is not None:
            one.disown()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)
