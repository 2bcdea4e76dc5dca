"""SLURM's notation for lists of hosts, `rack[1-2]n[03-04,7],login`, expanded.

The grammar is that of `scontrol show hostnames`: entries divided by commas or white space; in an
entry, any number of brackets with numbers and ranges, among text; the last bracket varies
fastest, then the first, the second and so on; numbers keep the zero padding of the lower end.
Steps, `[1-9:2]`, and text behind the last bracket are taken as well, which Slurm 22.05 refuses.
Duplicates and the order stay as they are.
"""

from __future__ import annotations

import re

MOST_HOSTS = 1_000_000
"""A list that stands for more hosts is a mistake (`n[1-99999999]`), not a cluster."""

_SEPARATORS = re.compile(r"[\s,]+")
_ENTRY = re.compile(r"(?:[^\s,\[\]]++|\[[^\[\]]*+\])++")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand(hostlist: str) -> list[str]:
    """The hosts of a list, in order: `n[1-2]` is n1 and n2; a ValueError where it is not in this notation."""
    if "[" not in hostlist and "]" not in hostlist:  # also the fast way for long plain lists
        return [host for host in _SEPARATORS.split(hostlist) if host]
    hosts: list[str] = []
    position = 0
    for match in _ENTRY.finditer(hostlist):
        _check_gap(hostlist, position, match.start())
        position = match.end()
        hosts += _expand_entry(match[0], MOST_HOSTS - len(hosts))
    _check_gap(hostlist, position, len(hostlist))
    return hosts


def _check_gap(hostlist: str, start: int, end: int) -> None:
    if hostlist[start:end].strip(", \t\n\r\v\f"):
        raise ValueError(f"unbalanced bracket at {hostlist[start:][:40]!r}")


def _expand_entry(entry: str, room: int) -> list[str]:
    if "[" not in entry:
        return [entry]
    prefix, _, rest = entry.partition("[")
    number, _, suffix = rest.partition("]")
    if (
        number.isascii() and number.isdigit() and "[" not in suffix and room
    ):  # `n[07]`: long lists of such are slow below
        return [prefix + number + suffix]
    hosts, last = [""], [""]
    for match in _PIECE.finditer(entry):
        if match[2] is not None:
            last = [number + match[2] for number in last]
            continue
        numbers = _numbers(match[1], room)
        if len(hosts) * len(last) * len(numbers) > room:
            raise ValueError(f"{entry[:40]!r} stands for more than {MOST_HOSTS} hosts")
        hosts = [host + number for number in last for host in hosts]  # SLURM's order: see above
        last = numbers
    return [host + number for host in hosts for number in last]


def _numbers(bracket: str, room: int) -> list[str]:
    """The numbers of one bracket, `03-05,7`, padded as their lower ends are."""
    numbers: list[str] = []
    for item in bracket.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in [{bracket[:40]}] is not a number or a range such as 3-5")
        low, high, step = match[1], match[2] or match[1], int(match[3] or 1)
        first, last = int(low), int(high)
        if last < first or step == 0:
            raise ValueError(f"the range {item!r} is empty")
        span = range(first, last + 1, step)
        if (last - first) // step >= room - len(numbers):  # not len(): that of a mistake may be too large for one
            raise ValueError(f"[{bracket[:40]}] stands for more than {MOST_HOSTS} hosts")
        width = len(low)
        # Without a leading zero no padding can be needed, and str() is three times as fast.
        numbers += [str(n).zfill(width) for n in span] if low[0] == "0" else map(str, span)
    return numbers


def tasks_per_node(tasks: str) -> list[int]:
    """The number of tasks on each node, from `3,1` or `1,2(x2)`; a ValueError where it is not in this notation."""
    counts: list[int] = []
    for item in tasks.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or len(counts) + int(match[2] or 1) > MOST_HOSTS:
            raise ValueError(f"{item!r} is not a number of tasks such as 4 or 4(x2)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
