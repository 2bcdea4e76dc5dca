"""The plot of the checkpoints' times: what the loop waits for, and how long it takes until all is written."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

__all__ = ["checkpoint_plot", "checkpoint_section"]

# What is drawn: its name, what the loop waits for, and when it has ended; None: the loop waits for all of it.
LINES: Final = (
    ("copy in memory", None, "memcpy"),
    ("write + fsync", None, "write and fsync"),
    ("torch.save + fsync", None, "torch.save and fsync"),
    ("Lightning", None, "Lightning"),
    ("torch DCP", None, "torch DCP"),
    ("Fairlead torch", None, "Fairlead torch"),
    ("Lightning async", "Lightning async, blocked", "Lightning async, ended"),
    ("torch DCP async", "torch DCP async, blocked", "torch DCP async, ended"),
    ("Fairlead async", "Fairlead async, blocked", "Fairlead async, durable"),
)
_LEFT, _WIDTH, _ROW, _TOP = 150, 480, 26, 30
_WAITS, _BEHIND = "#b3423a", "#d9a9a5"


def checkpoint_section(document: Mapping[str, Any], image: str) -> str:
    """The part of the page about checkpoints: the medians in seconds, and the plot of them.

    Args:
        document: What `benchmarks/checkpoint.py --json` printed.
        image: Where the plot is, from the page.
    """
    seconds, raw = document["raw"]["seconds"], document["raw"]
    lines = [
        f"\n## Checkpoints\n\nMedians of one session, a state of {raw['gib']:g} GiB, in seconds on this machine.",
        "What Lightning and DCP have saved is not on the disk yet when they have ended.\n",
        "| | the loop waits | until it has ended |\n|---|---|---|",
    ]
    for label, blocked, ended in LINES:
        total = seconds[ended]["median"]
        waits = seconds[blocked]["median"] if blocked else total
        lines.append(f"| {label} | {waits:.2f} | {total:.2f} |")
    lines += [f"| load: {name} | {seconds[key]['median']:.2f} | |" for name, key in _LOADS]
    return "\n".join([*lines, f"\n![What the loop waits for, and until all is written]({image})\n"])


_LOADS: Final = (("`torch.load`", "torch.load"), ("Fairlead, checksums compared", "Fairlead load"))


def checkpoint_plot(document: Mapping[str, Any]) -> str:
    """The same as an SVG.

    Args:
        document: What `benchmarks/checkpoint.py --json` printed.
    """
    seconds = document["raw"]["seconds"]
    longest = max(seconds[ended]["median"] for _, _, ended in LINES)
    height = _TOP + _ROW * len(LINES) + 10
    box = f"0 0 {_LEFT + _WIDTH + 60} {height}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="13">']
    for x, colour, label in ((_LEFT, _WAITS, "the loop waits"), (_LEFT + 140, _BEHIND, "behind the loop")):
        parts += [
            f'<rect width="12" height="12" x="{x}" y="6" fill="{colour}"/>',
            f'<text x="{x + 18}" y="17" fill="currentColor">{label}</text>',
        ]
    for number, (label, blocked, ended) in enumerate(LINES):
        y = _TOP + _ROW * number
        total = seconds[ended]["median"]
        waits = seconds[blocked]["median"] if blocked else total
        whole, part = (round(_WIDTH * value / longest, 1) for value in (total, waits))
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end" fill="currentColor">{escape(label)}</text>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{whole}" height="16" fill="{_BEHIND}"/>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{part}" height="16" fill="{_WAITS}"/>',
            f'<text x="{_LEFT + whole + 6}" y="{y + 15}" fill="currentColor">{total:.2f} s</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
