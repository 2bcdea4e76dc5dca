"""Messages between the launchers of a job: a line of JSON each, over TCP."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any, Final

from fairlead.errors import ConfigError, FairleadError, RunFailedError

ALIVE_S: Final = 1.0
"""Seconds between two signs of life."""
SILENT_S: Final = 10.0
"""After so many seconds without one a machine is lost: a killed launcher is noticed at once, by its connection."""
_LONGEST: Final = 1 << 17
"""Bytes of a message; who sends more is no launcher."""

_SAID: Final = ("what", "where", "why", "fix")

Message = dict[str, Any]


class Line:
    """One end of a connection between two launchers.

    Example:
        >>> a, b = (Line(end) for end in socket.socketpair())
        >>> a.send({"kind": "alive"})
        >>> b.receive()
        [{'kind': 'alive'}]
        >>> a.close()
        >>> b.receive() is None
        True
        >>> b.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._data = b""

    def send(self, message: Message) -> None:
        """Sends; nothing where the other end is gone, which `receive` tells."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come, after waiting for something; None: the other end is gone, or no launcher."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        lines = (self._data + data).split(b"\n")
        self._data = lines.pop()
        if not data or len(self._data) > _LONGEST:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(one, dict) and "kind" in one for one in messages) else None

    def close(self) -> None:
        """Closes it, for both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def packed(error: FairleadError) -> Message:
    """An error as a message."""
    return {name: getattr(error, name) for name in (*_SAID, "exit_code")}


def unpacked(message: Message) -> FairleadError:
    """The error of a message."""
    kind = ConfigError if message["exit_code"] == ConfigError.exit_code else RunFailedError
    return kind(message["what"], **{name: message[name] for name in _SAID[1:]})
