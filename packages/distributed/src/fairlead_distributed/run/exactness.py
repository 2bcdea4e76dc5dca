"""What a start has seen that keeps a resume from being exact: written down for `explain`, and said once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from fairlead.errors import RunDirectoryError
from fairlead.exactness import EXACTNESS_FILE, inexact_kernels, record, sentence, verdict
from fairlead.findings import Inexact
from fairlead_distributed.run.registry import Registry
from fairlead_runs.commit import atomic_write

_SEEDED_BELOW = 2**32
"""People seed with smaller numbers; torch seeds itself with 53 random bits."""


def loop_reasons(registry: Registry) -> Iterator[Inexact]:
    """What of a custom training loop keeps a resume from being exact, or may."""
    if torch.initial_seed() >= _SEEDED_BELOW:
        yield Inexact(
            "the script's random numbers",
            why="nothing has seeded them: a start before the first checkpoint begins with other weights",
            fix="torch.manual_seed(1) as the script's first line",
        )
    modules, optimizers = registry.modules(), registry.optimizers()
    if modules and not optimizers:
        yield Inexact(
            "the optimizer",
            why="none is registered: what it keeps of earlier steps is in no checkpoint",
            fix="Run(..., optimizer=optimizer)",
        )
    held = {id(one) for module in modules.values() for one in module.parameters()}
    for name, optimizer in optimizers.items():
        groups = optimizer.param_groups
        if modules and any(id(one) not in held for group in groups for one in group["params"]):
            yield Inexact(
                f"the parameters of {name}",
                why="some belong to no registered module: they are in no checkpoint",
                fix="register their module: Run(..., head=head)",
            )
    if any(one.device.type == "cuda" for module in modules.values() for one in module.parameters()):
        asked = torch.are_deterministic_algorithms_enabled()
        warns = "warn" if asked and torch.is_deterministic_algorithms_warn_only_enabled() else asked
        yield from inexact_kernels(
            warns,
            torch.backends.cudnn.benchmark,
            lambda name, value: (
                f"torch.use_deterministic_algorithms({value})"
                if name == "deterministic"
                else f"torch.backends.cudnn.benchmark = {value}"
            ),
        )


def write_record(start: Path, settings: list[Inexact], state: list[Inexact], world_size: int, job: str) -> None:
    """Writes down, in the folder of this start, what was seen of settings, loaders and state; on rank 0."""
    content = record(settings=settings, seen=state, world_size=world_size, job=job)
    try:
        start.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError("cannot write what was seen", where=str(start), why=error.strerror) from error
    text = json.dumps(content, indent=1) + "\n"
    atomic_write(start / EXACTNESS_FILE, text.encode(), error=RunDirectoryError)


def reasons_text(reasons: list[Inexact]) -> str | None:
    """What to tell the user at a start; None where a resume is exact."""
    if not reasons:
        return None
    return "\n".join([f"resume is {verdict(reasons)}:", *(f"  {sentence(reason)}" for reason in reasons)])
