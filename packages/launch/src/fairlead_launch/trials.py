"""What the commands share that try a training: a separate folder, and `fairlead` with a plan in its environment.

`--prove-resume` and `verify` start the user's job or script as it would be started, change some settings, and compare
what the ranks have left.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from fairlead.cli.session import Session
from fairlead_launch.forkserver import SERVER_FD

_GRACE: Final = 20.0
"""Seconds from SIGTERM to SIGKILL, for ranks that wait for each other."""


@contextmanager
def trial_folder(parent_folder: Path, prefix: str) -> Iterator[tuple[Path, list[Path]]]:
    """A new folder in `parent_folder`, and a list: if that stays empty, the folder goes at the end, also on SIGTERM."""
    made = [parent for parent in (parent_folder, *parent_folder.parents) if not parent.exists()]
    parent_folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent_folder))
    retained: list[Path] = []

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield folder, retained
    finally:
        signal.signal(signal.SIGTERM, before)
        if not retained:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made:
                if not any(parent.iterdir()):
                    parent.rmdir()


def run_fairlead(
    words: Sequence[str],
    session: Session,
    environ: Mapping[str, str],
    log: Path,
    look: Callable[[], bool] = lambda: True,
) -> int:
    """Runs `fairlead WORDS` to its end, with all of its output in a file; its exit code. It ends when this call does.

    Args:
        look: Called every second meanwhile; False ends it.
    """
    # -P: the working directory is searched for code only if the rules for user code say so.
    command = [sys.executable, "-P", "-m", "fairlead", *words]
    variables = {name: value for name, value in environ.items() if name != SERVER_FD}  # no open file is inherited
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=session.cwd, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            while True:
                try:
                    return process.wait(1)
                except subprocess.TimeoutExpired:
                    if not look():
                        return -signal.SIGTERM
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()  # its ranks see that it is gone
                    process.wait()
