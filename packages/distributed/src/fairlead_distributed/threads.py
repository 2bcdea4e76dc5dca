"""The CPU threads of this rank, and the line that a fit begins with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fairlead.resolution import Resolution


def use_threads(resolution: Resolution, environ: Mapping[str, str]) -> None:
    """Has torch compute with as many threads as was resolved.

    OMP_NUM_THREADS was heeded by torch itself, and a script may have asked for fewer; without either, ranks that see
    all CPUs of a node would each take all of them.

    Args:
        resolution: The resolved settings.
        environ: The environment variables.
    """
    count = int(resolution.value("threads"))
    asked = resolution.trainer.threads != "auto"
    if asked or ("OMP_NUM_THREADS" not in environ and count < torch.get_num_threads()):
        torch.set_num_threads(count)


def start_line(resolution: Resolution) -> str:
    """What runs where.

    Example:
        >>> start_line(trainer.resolution)  # doctest: +SKIP
        'start       2 ranks on 1 node, ddp on cpu, 32-true, 1 thread each'
    """
    ranks, nodes = resolution.world_size, resolution.num_nodes
    parts = [
        f"{_count(ranks, 'rank')} on {_count(nodes, 'node')}",
        f"{resolution.strategy.name} on {resolution.accelerator.name}",
        resolution.precision.name,
        _count(torch.get_num_threads(), "thread") + (" each" if ranks > 1 else ""),
    ]
    return f"start       {', '.join(parts)}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
