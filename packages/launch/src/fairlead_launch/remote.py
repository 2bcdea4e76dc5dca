"""What ssh starts on a host of `--hosts`: a launcher that lives as long as whoever started it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Final

from fairlead.cli import main

STARTED: Final = "fairlead-launch: the launcher of this host has started"
"""The first line on stderr, for whoever has started this."""
_GRACE_S: Final = 30.0
"""How long ranks may take to save and stop when that one has gone."""


def run() -> int:
    """Reads what to do from standard input, and does it; a number there is a signal, its end a stop."""
    order = json.loads(sys.stdin.readline())
    try:
        os.chdir(order["cwd"])
    except OSError as error:
        print(f"the working directory is not there: {error}", file=sys.stderr)
        return 2
    os.environ.update(order["environ"])
    print(STARTED, file=sys.stderr, flush=True)
    threading.Thread(target=_obey, name="fairlead-remote", daemon=True).start()
    return main(order["words"])


def _obey() -> None:
    for line in sys.stdin:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)  # and with it the ranks, which watch it


if __name__ == "__main__":
    sys.exit(run())
