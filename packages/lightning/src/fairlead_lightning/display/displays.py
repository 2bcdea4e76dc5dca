"""Where progress is shown: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

REFRESH_S: Final = 0.5


class Display(Protocol):
    """What the progress callback needs of a display."""

    interval: float
    """Seconds between two updates."""

    def update(self, task: str, done: int, total: int | None, text: str) -> None:
        """Shows where a task is; a task that was not shown yet begins."""

    def remove(self, task: str) -> None:
        """A task is over; it need not be shown any longer."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""

    def close(self) -> None:
        """Leaves the terminal to others; `update` opens it again."""


def choose_display(interval: float, console: Console | None, environ: Mapping[str, str]) -> Display:
    """Bars where a person looks at a terminal; lines in a file, a pipe, a notebook, or under CI.

    Args:
        interval: Seconds between plain lines.
        console: Where to write; None: the standard output.
        environ: The environment variables; `CI` asks for lines.
    """
    console = console or Console()
    # Rich also says "terminal" for a file when FORCE_COLOR is set.
    terminal = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    return Bars(console) if terminal and not environ.get("CI") else Lines(console, interval)


class Lines:
    """A plain line every few seconds.

    Args:
        console: Where to write; only its file is used.
        interval: Seconds between lines.
    """

    def __init__(self, console: Console, interval: float) -> None:
        self._console = console
        self.interval = interval

    def update(self, task: str, done: int, total: int | None, text: str) -> None:
        """Prints the line."""
        label = "step" if task == "train" else task
        self.say("  ".join(part for part in (f"{label} {done}{'' if total is None else f'/{total}'}", text) if part))

    def remove(self, task: str) -> None:
        """Nothing: a line stays."""

    def say(self, text: str) -> None:
        """Prints a line."""
        print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class Bars:
    """One bar a task, drawn by the training process itself: a thread that draws could hold locks when workers fork.

    Args:
        console: The terminal.
    """

    interval = REFRESH_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, task: str, done: int, total: int | None, text: str) -> None:
        """Moves the bar."""
        live = self._open()
        if task not in self._tasks:
            self._tasks[task] = live.add_task(task, total=total, count="", text="")
        count = f"{done}{'' if total is None else f'/{total}'}"
        live.update(self._tasks[task], completed=done, total=total, count=count, text=text)
        live.refresh()

    def remove(self, task: str) -> None:
        """Takes the bar away."""
        if self._live is not None and task in self._tasks:
            self._live.remove_task(self._tasks.pop(task))
            self._live.refresh()

    def say(self, text: str) -> None:
        """Prints a line above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bars as they are and gives the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._tasks = {}

    def _open(self) -> Progress:
        if self._live is None:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}  {task.fields[text]}", markup=False),
                console=self._console,
                auto_refresh=False,
            )
            self._live.start()
        return self._live
