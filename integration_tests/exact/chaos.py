"""Everything that can happen to a run at once: signals of every kind to any of its ranks, SIGKILL, a full disk.

`nox -s chaos -- --interruptions 200 --seed 1`; prints a table, exit code 1 if anything was lost, hung or ended unlike a
run that was not disturbed. A run is disturbed in several starts and then left to end. As root each run has a small
file system of its own, which a start may find full for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from fairlead_runs import read_history
from integration_tests.exact.attempts import Attempt
from integration_tests.exact.cases import Case, Starter, run, warm
from integration_tests.exact.compare import differences
from integration_tests.exact.jobs.probe import PAUSE
from integration_tests.exact.references import References

__all__ = ["Interruption", "Tally", "draw", "main"]

Kind = Literal["signals", "SIGKILL of one rank", "SIGKILL of all", "a full disk"]
KINDS: Final[tuple[Kind, ...]] = ("signals", "signals", "SIGKILL of one rank", "SIGKILL of all", "a full disk")
SIGNALS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# A start that is asked to stop ends with one of these, and has saved.
STOPPED: Final = (75, 130, 143)
CASES: Final = (
    Case("mlp", 2, 2),
    Case("mlp", 1, 0),
    Case("conv", 2, 0),
    Case("metrics", 2, 2),
    Case("metrics", 1, 2),
    Case("mlp", 3, 0),
)
_SIZE_MIB: Final = 64
_FULL_S: Final = 1.5


@dataclass(frozen=True)
class Interruption:
    """One thing that happens to one start.

    Args:
        kind: What.
        part: When: from 0 to 1 of what an undisturbed run takes.
        signals: With `signals`: (rank, number, seconds behind the first).
        rank: With a SIGKILL of one rank: which.
    """

    kind: Kind
    part: float
    signals: tuple[tuple[int, signal.Signals, float], ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        sent = ", ".join(f"{number.name} to {rank} after {late:.3f} s" for rank, number, late in self.signals)
        return f"{self.kind}{f' ({sent})' if sent else ''} at {self.part:.3f}"


@dataclass
class Tally:
    """What was seen of one kind."""

    came: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def draw(generator: random.Random, case: Case, kind: Kind) -> Interruption:
    """A random interruption; signals come to any of the ranks, together, in a burst or one after the other."""
    part = generator.random()
    if kind != "signals":
        return Interruption(kind, part, rank=generator.randrange(case.ranks))
    asked = generator.sample(range(case.ranks), generator.randint(1, case.ranks))
    spread = generator.choice((0.0, 0.002, 0.3))
    sent = [(rank, generator.choice(SIGNALS), generator.random() * spread) for rank in asked]
    if generator.random() < 0.3:  # a scheduler says it twice; a person who presses Ctrl-C twice means it, though
        again = generator.choice([number for number in SIGNALS if number != signal.SIGINT])
        sent.append((generator.choice(asked), again, generator.random() * spread))
    return Interruption(kind, part, tuple(sorted(sent, key=lambda one: one[2])))


class Disk:
    """A small file system for one run, where the system lets us have one."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MIB}m", "chaos", str(path)]
        self.own = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Nothing can be written inside the block."""
        ballast = self.path / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 65536):
                pass
        try:
            yield
        finally:
            ballast.unlink()

    def close(self) -> None:
        """Takes it away."""
        if self.own:
            subprocess.run(["umount", "-l", str(self.path)], check=True)
        shutil.rmtree(self.path, ignore_errors=True)


def inflict(one: Interruption, attempt: Attempt, disk: Disk, seconds: float) -> bool:
    """Waits for the moment and does it; False when the start had ended before."""
    until = time.monotonic() + one.part * seconds
    while time.monotonic() < until:
        if not attempt.running():
            return False
        time.sleep(0.01)
    if not attempt.running():
        return False
    if one.kind == "SIGKILL of all":
        attempt.kill_all()
    elif one.kind == "SIGKILL of one rank":
        return attempt.kill_rank(one.rank)
    elif one.kind == "a full disk":
        with disk.full():
            time.sleep(_FULL_S)
    else:
        began = time.monotonic()
        for rank, number, late in one.signals:
            time.sleep(max(0.0, late - (time.monotonic() - began)))
            pid = attempt.ranks().get(rank)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    return True


def events(run_directory: Path) -> list[dict[str, Any]]:
    """The history so far."""
    # A full disk may have cut a line off; it is no event then.
    return read_history(run_directory / "history.jsonl")


def lost_steps(history: Sequence[dict[str, Any]]) -> list[str]:
    """Starts that did not go on where the one before had stopped with everything saved."""
    found, stopped = [], None
    for event in history:
        if event["event"] == "training":
            if stopped is not None and event["step"] != stopped:
                found.append(f"stopped at step {stopped}, went on at {event['step']}")
            stopped = None
        elif event["event"] == "stop" and event.get("reason"):
            stopped = event["step"]
    return found


def disturbed(
    case: Case, disk: Disk, starter: Starter, drawn: Sequence[Interruption], seconds: float, tallies: dict[Kind, Tally]
) -> None:
    """Starts a run once for each interruption, and then until it ends.

    Raises:
        AssertionError: A start hangs, or leaves a process behind; a step was lost; the last start does not end well.
    """
    pause = {PAUSE: "train_batch_start=0.02 validation_batch_start=0.02"}
    for one in drawn:
        attempt = starter(case, disk.path, pause)
        came = inflict(one, attempt, disk, 1.3 * seconds)
        code = attempt.end().code
        if came:
            tallies[one.kind].came += 1
            tallies[one.kind].ends[str(code) if code >= 0 else signal.Signals(-code).name] += 1
            if one.kind == "signals":
                early = {-number for number in SIGNALS}  # before it had a handler
                assert code in {0, *STOPPED, *early}, f"ended with {code} after {one}"
    run(case, disk.path, starter)
    lost = lost_steps(events(case.directory(disk.path)))
    assert not lost, "\n".join(lost)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the table."""
    parser = argparse.ArgumentParser(prog="chaos.py", description=__doc__.splitlines()[0])
    parser.add_argument("--interruptions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    generator, began = random.Random(chosen.seed), time.monotonic()
    tallies: dict[Kind, Tally] = {kind: Tally() for kind in dict.fromkeys(KINDS)}
    kinds = itertools.cycle(generator.sample(KINDS, len(KINDS)))
    runs = 0
    with tempfile.TemporaryDirectory(prefix="fairlead-chaos-") as folder:
        starter = warm
        references = References(Path(folder) / "references", starter)
        for case in itertools.cycle(_with_codes(case) for case in CASES):
            if sum(tally.came for tally in tallies.values()) >= chosen.interruptions or runs > chosen.interruptions:
                break
            runs += 1
            reference = references.of(case)
            disk = Disk(Path(folder) / f"run-{runs:03}")
            drawn = [draw(generator, case, next(kinds)) for _ in range(generator.randint(2, 5))]
            drawn = [one for one in drawn if disk.own or one.kind != "a full disk"]
            try:
                disturbed(case, disk, starter, drawn, reference.seconds, tallies)
                found = differences(reference.run, case.directory(disk.path))
                assert not found, "\n".join(["not as if nothing had happened:", *found])
                print(f"{runs:4} {case}: {', '.join(map(str, drawn))}: equal", flush=True)
            except Exception as error:  # an assertion, or a file that is not there: the table goes on, and says it
                story = f"run {runs}, {case}: {'; '.join(map(str, drawn))}\n{type(error).__name__}: {error}"
                print(f"{story}\n{traceback.format_exc(limit=-2)}", flush=True)
                tallies[drawn[0].kind].wrong.append(story)
            finally:
                disk.close()
    print(table(tallies, runs, chosen.seed, time.monotonic() - began))
    return 1 if any(tally.wrong for tally in tallies.values()) else 0


def table(tallies: dict[Kind, Tally], runs: int, seed: int, seconds: float) -> str:
    """What came, and how the starts that it came to have ended."""
    lines = ["| interruption | came | exit codes | wrong |", "|---|---|---|---|"]
    for kind, tally in tallies.items():
        ends = ", ".join(f"{code}: {count}" for code, count in sorted(tally.ends.items()))
        lines.append(f"| {kind} | {tally.came} | {ends} | {len(tally.wrong)} |")
    came, wrong = (sum(numbers) for numbers in zip(*((t.came, len(t.wrong)) for t in tallies.values()), strict=True))
    lines.append(f"| all | {came} in {runs} runs | | {wrong} |")
    return "\n".join([*lines, "", f"seed {seed}, {seconds / 60:.0f} minutes"])


def _with_codes(case: Case) -> Case:
    """Where no scheduler is, an exit code asks for another start."""
    return case.setting("trainer.requeue={name: exit_code, max_without_progress: null}")


if __name__ == "__main__":
    sys.exit(main())
