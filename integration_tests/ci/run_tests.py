"""Run tests, and those that failed once more: `python integration_tests/ci/run_tests.py FOLDER ARGUMENT...`.

The arguments are pytest's. FOLDER gets what `conftest.py` writes with FAIRLEAD_RAN; other sessions have theirs beside
it. A test that fails is run again when the tests of other sessions have ended. If it passes then, it is flaky: its
first failure is printed in full, and its name is added to `flaky.txt`. The exit code is pytest's, of the second run
where there was one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MOST: Final = 20
"""More failures than this are no accident: none of the tests is run again."""


@contextmanager
def beside_others(sessions: Path, *, alone: bool) -> Iterator[None]:
    """Runs beside the tests of other sessions, or, `alone`, when those have ended and before others begin."""
    sessions.mkdir(parents=True, exist_ok=True)
    with (sessions / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def pytest(ran: Path, arguments: Sequence[str]) -> int:
    """Runs pytest with these arguments; its exit code."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, env={**os.environ, "FAIRLEAD_RAN": str(ran)}, check=False).returncode


def main(ran: Path, arguments: Sequence[str]) -> int:
    """Runs the tests, and those that failed once more."""
    sessions = ran.parent
    shutil.rmtree(ran, ignore_errors=True)
    with beside_others(sessions, alone=False):
        code = pytest(ran, arguments)
    names = ran / "failed.txt"  # is not there where a test hung and ended the process
    failed = names.read_text(encoding="utf-8").splitlines() if code == 1 and names.exists() else []
    if not failed or len(failed) > MOST:
        return code
    print(f"{len(failed)} failed: run again, alone", flush=True)
    # Whatever was selected before: these are named.
    with beside_others(sessions, alone=True):
        code = pytest(ran / "again", ["-m", "", f"@{names}"])
    if code == 0:
        print((ran / "failures.txt").read_text(encoding="utf-8"))
        outcomes = (ran / "tests.txt").read_text(encoding="utf-8").splitlines()
        passed = [f"passed {line.partition(' ')[2]}" if line.startswith("failed ") else line for line in outcomes]
        (ran / "tests.txt").write_text("".join(f"{line}\n" for line in passed), encoding="utf-8")
        for test in failed:
            print(f"FLAKY {test}: failed as printed above, and passed when it was run again")
        with (sessions.parent / "flaky.txt").open("a", encoding="utf-8") as known:
            known.writelines(f"{time.strftime('%Y-%m-%d %H:%M')} {test}\n" for test in failed)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
