"""Processes that load data outlive the signals that ask a run to stop: the training still needs their next batch.

A scheduler signals the workers of a DataLoader, too. One that dies of it takes the training down before it has saved.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

from fairlead_hpc_signals.flags import signal_number


class OutliveStops:
    """For `worker_init_fn` of a DataLoader: the worker ends when its loader says so, and not of a scheduler's signal.

    Args:
        signals: Names or numbers of those to outlive. SIGTERM from the process that made the worker still ends it.

    Example:
        >>> from torch.utils.data import DataLoader  # doctest: +SKIP
        >>> DataLoader(samples, num_workers=4, worker_init_fn=OutliveStops(guard.flags.signals))  # doctest: +SKIP
    """

    def __init__(self, signals: Iterable[str | int]) -> None:
        self.signals = tuple(dict.fromkeys(int(signal_number(name)) for name in signals))

    def __call__(self, worker: int) -> None:
        """Called in the worker, with its number."""
        parent = os.getppid()
        # A thread waits for them, as Python's handlers do not get the sender of a signal. A worker that was spawned has
        # threads of libraries already, which do not block them: there a handler keeps the process alive.
        for number in self.signals:
            signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        threading.Thread(target=self._wait, args=(parent,), name=f"fairlead-outlive-{worker}", daemon=True).start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around the start of workers: one that is spawned keeps what comes until it is called there.

        It would die of it otherwise, for it begins without handlers, and imports for seconds before it gets here.
        """
        resource_tracker.ensure_running()  # it unblocks SIGTERM when it starts, which may be with the first worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait(self, parent: int) -> None:
        while True:
            came = signal.sigwaitinfo(self.signals)
            if came.si_signo == signal.SIGTERM and came.si_pid == parent:
                os._exit(0)  # what torch's handler does in a worker that its loader ends


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler rather than SIG_IGN, which programs that the worker starts would inherit."""
