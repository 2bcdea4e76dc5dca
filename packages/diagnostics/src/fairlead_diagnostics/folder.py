"""The second way between the nodes: small files in the run directory, which may hang as any other check's."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

_WRITE_S: Final = 10.0
"""Seconds that a small file may take."""
_LOOK_S: Final = 1.0
GONE_S: Final = 120.0
"""Seconds without a sign of life of node 0 after which no node waits for it; network file systems show files late."""
_ALIVE: Final = "alive.json"
_REPORT: Final = "report.json"


def within(seconds: float, work: Callable[[], T], otherwise: T) -> T:
    """What some work gives; where it is not done in time, as with a dead file server, it is left behind.

    Raises:
        Exception: What the work raises.
    """
    done: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # re-raised below
            raised.append(error)

    thread = threading.Thread(target=run, name="fairlead-doctor-files", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return done[0] if done else otherwise


class Folder:
    """The files of one screen.

    Node 0 shows in one that it is alive, and in another how it ends; a node that cannot reach it reports so in its own.

    Args:
        path: The folder; None: there is none, and nothing is written or found.
        nodes: How many there are.
    """

    def __init__(self, path: Path | None, nodes: int) -> None:
        self._path, self._nodes = path, nodes
        self._reported: dict[int, str] = {}
        self._over = threading.Event()

    def watch(self) -> None:
        """On node 0: shows that it lives and looks for what others say, in a thread, until `close`."""

        def work() -> None:
            self._forget()
            while not self._over.wait(_LOOK_S):
                self._put(_ALIVE, {"at": time.time()})
                for node in range(1, self._nodes):
                    if (ended := self._get(f"node-{node}.json")) is not None:
                        self._reported[node] = str(ended["why"])

        if self._path is not None:
            threading.Thread(target=work, name="fairlead-doctor-watch", daemon=True).start()

    def why(self, node: int) -> str | None:
        """On node 0: why a node does not come, as it says itself."""
        return self._reported.get(node)

    def report(self, code: int, lines: tuple[str, ...]) -> None:
        """On node 0: how it ends."""
        self.close()
        within(_WRITE_S, lambda: self._put(_REPORT, {"code": code, "lines": lines}), None)

    def close(self) -> None:
        """On node 0: shows no more that it lives."""
        self._over.set()

    def cut_off(self, node: int, why: str, *, gone_s: float = GONE_S) -> int | None:
        """Says why a node cannot reach node 0, and waits for how the others end; None: node 0 lives no more."""
        last, since = None, time.monotonic()
        while time.monotonic() - since < gone_s and self._path is not None:
            # Repeatedly: node 0 may come later, and removes what it takes for an earlier screen's.
            within(_WRITE_S, lambda: self._put(f"node-{node}.json", {"why": why}), None)
            if (report := within(_WRITE_S, lambda: self._get(_REPORT), None)) is not None:
                return int(report["code"])
            alive = within(_WRITE_S, lambda: self._get(_ALIVE), None)
            if alive is not None and alive != last:
                last, since = alive, time.monotonic()
            time.sleep(_LOOK_S)
        return None

    def _forget(self) -> None:
        """Removes what an earlier screen of the same name has left, as of nodes that are given by hand."""
        for file in self._path.glob("*.json") if self._path is not None else ():
            with contextlib.suppress(OSError):  # as in `_put`
                file.unlink()

    def _put(self, name: str, document: Mapping[str, Any]) -> None:
        # This is only a second way, which may be as broken as the first; that is what a check looks at.
        with contextlib.suppress(OSError):
            if self._path is not None:
                self._path.mkdir(parents=True, exist_ok=True)
                part = self._path / f".{name}.part"
                part.write_text(json.dumps(document))
                os.replace(part, self._path / name)

    def _get(self, name: str) -> dict[str, Any] | None:
        if self._path is None:
            return None
        try:
            found: dict[str, Any] = json.loads((self._path / name).read_text())
        except (OSError, ValueError):
            return None
        return found
