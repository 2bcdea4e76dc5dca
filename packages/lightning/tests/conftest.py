"""Makes `tiny_job` importable, as a user's own module beside the script is, and keeps signal handlers to a test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def handlers_of_before() -> Iterator[None]:
    """A stop leaves its handlers in place, as the process is to end; that of the tests goes on."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
