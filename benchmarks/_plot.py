"""The table and the plot of the checkpoints' times: what the loop waits for, and how long until all is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_LOADS: Final = (("load: `torch.load`", "torch.load"), ("load: Fairlead, checksums compared", "Fairlead load"))
_SLOWER: Final = (
    ("Fairlead async, a thread", "step_slowdown_while_saving"),
    ("the same in a process", "step_slowdown_of_a_process"),
    ("Lightning async", "step_slowdown_of_lightning"),
    ("torch DCP async", "step_slowdown_of_dcp"),
)
_MEMORY: Final = (
    ("torch.save + fsync", "torch_save"),
    ("Lightning", "lightning_save"),
    ("torch DCP", "dcp_save"),
    ("Fairlead torch", "our_save"),
    ("Lightning async", "lightning_async"),
    ("torch DCP async", "dcp_async"),
    ("Fairlead async, kept for the next save", "our_async"),
    ("load: `torch.load`", "torch_load"),
    ("load: Fairlead", "our_load"),
)
_LEFT, _WIDTH, _ROW, _TOP = 150, 480, 26, 30
_WAITS, _BEHIND = "#b3423a", "#d9a9a5"

Document = Mapping[str, Any]
"""What `benchmarks/checkpoint.py --json` printed."""


def checkpoint_section(documents: Sequence[Document], image: str) -> str:
    """The part of the page about checkpoints: the medians in seconds, and the plot of them.

    Args:
        documents: One for each size of the state.
        image: Where the plot is, from the page.
    """
    sizes = [f"{document['raw']['gib']:g} GiB" for document in documents]
    lines = [
        "\n## Checkpoints\n\nMedians in seconds, by the size of the state: the loop waits / until the save has ended.",
        "What Lightning and DCP have saved is not on the disk yet when they have ended.\n",
        f"| | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}",
    ]
    for label, blocked, ended in LINES:
        lines.append(_line(label, [_waits_and_ends(document, blocked, ended) for document in documents]))
    for label, key in _LOADS:
        lines.append(_line(label, [_seconds(_median(document, key)) for document in documents]))
    slower = [(label, [f"{doc['ratios'][key]['median']:.2f} x" for doc in documents]) for label, key in _SLOWER]
    lines += _table("A step that keeps all cores busy takes so much longer while a save goes on:", sizes, slower)
    memory = [(label, [f"{doc['raw']['peak_memory_gib'][key]:.2f}" for doc in documents]) for label, key in _MEMORY]
    lines += _table("Host memory that it takes at most, in GiB, besides the state itself:", sizes, memory)
    return "\n".join([*lines, f"\n![What the loop waits for, and until all is written]({image})\n"])


def checkpoint_plot(documents: Sequence[Document]) -> str:
    """The same as an SVG, one group of bars for each size, each group to a scale of its own.

    Args:
        documents: One for each size of the state.
    """
    height = _TOP + (_TOP + _ROW * len(LINES)) * len(documents)
    box = f"0 0 {_LEFT + _WIDTH + 60} {height}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="13">']
    for x, colour, label in ((_LEFT, _WAITS, "the loop waits"), (_LEFT + 140, _BEHIND, "behind the loop")):
        parts += [
            f'<rect width="12" height="12" x="{x}" y="6" fill="{colour}"/>',
            f'<text x="{x + 18}" y="17" fill="currentColor">{label}</text>',
        ]
    for number, document in enumerate(documents):
        parts += _bars(document, _TOP + (_TOP + _ROW * len(LINES)) * number)
    return "\n".join([*parts, "</svg>", ""])


def _bars(document: Document, top: int) -> list[str]:
    longest = max(_median(document, ended) for _, _, ended in LINES)
    size = f"{document['raw']['gib']:g} GiB"
    parts = [
        f'<text x="{_LEFT - 8}" y="{top + 18}" text-anchor="end" font-weight="bold" fill="currentColor">{size}</text>'
    ]
    for number, (label, blocked, ended) in enumerate(LINES):
        y = top + _TOP + _ROW * number
        total = _median(document, ended)
        whole, part = (round(_WIDTH * seconds / longest, 1) for seconds in (total, _median(document, blocked or ended)))
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end" fill="currentColor">{escape(label)}</text>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{whole}" height="16" fill="{_BEHIND}"/>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{part}" height="16" fill="{_WAITS}"/>',
            f'<text x="{_LEFT + whole + 6}" y="{y + 15}" fill="currentColor">{total:.2f} s</text>',
        ]
    return parts


def _waits_and_ends(document: Document, blocked: str | None, ended: str) -> str:
    return f"{_seconds(_median(document, blocked or ended))} / {_seconds(_median(document, ended))}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _median(document: Document, key: str) -> float:
    return float(document["raw"]["seconds"][key]["median"])


def _table(title: str, sizes: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    head = [f"\n{title}\n", f"| | {' | '.join(sizes)} |", f"|---|{'---|' * len(sizes)}"]
    return head + [_line(label, cells) for label, cells in rows]


def _line(label: str, cells: Sequence[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"
