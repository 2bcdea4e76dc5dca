"""Where progress is shown: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

REFRESH_S: Final = 0.5


def choose_display(interval: float, console: Console | None, ci: bool) -> Lines:
    """Bars where a person looks at a terminal; lines in a file, a pipe, a notebook, or under `CI`."""
    console = console or Console()
    # Rich also says "terminal" for a file when FORCE_COLOR is set.
    terminal = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    return Bars(console) if terminal and not ci else Lines(console, interval)


class Lines:
    """A plain line every `interval` seconds; only the file of the console is used."""

    def __init__(self, console: Console, interval: float) -> None:
        self._console = console
        self.interval = interval

    def update(self, task: str, done: int, total: int | None, text: str) -> None:
        """Shows where a task is; a task that was not shown yet begins."""
        label = "step" if task == "train" else task
        self.say("  ".join(part for part in (f"{label} {_count(done, total)}", text) if part))

    def remove(self, task: str) -> None:
        """A task is over; it need not be shown any longer."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Leaves the terminal to others; `update` reopens it."""


class Bars(Lines):
    """One bar a task, drawn by the training process itself: a thread that draws could hold locks when workers fork."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, REFRESH_S)
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, task: str, done: int, total: int | None, text: str) -> None:
        """Moves the bar."""
        live = self._open()
        if task not in self._tasks:
            self._tasks[task] = live.add_task(task, total=total, count="", text="")
        live.update(self._tasks[task], completed=done, total=total, count=_count(done, total), text=text)
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


def _count(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done}/{total}"
