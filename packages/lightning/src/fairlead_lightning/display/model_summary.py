"""Lightning's table of the model, without a count of operations that was never made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import RichModelSummary


def leave_out_zeros(callbacks: Iterable[L.Callback]) -> None:
    """Takes `Total FLOPs: 0` out of what Lightning's own summary prints with rich; without rich see `quiet.hush`."""
    for callback in callbacks:
        if type(callback) is RichModelSummary:
            vars(callback)["summarize"] = _summarize


def _summarize(*arguments: Any, **options: Any) -> None:
    from rich import get_console  # there where this callback is

    console = get_console()
    with console.capture() as captured:
        RichModelSummary.summarize(*arguments, **options)
    shown = (line for line in captured.get().splitlines(keepends=True) if not line.rstrip().endswith("Total FLOPs: 0"))
    console.file.write("".join(shown))
