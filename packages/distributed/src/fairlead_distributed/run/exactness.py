"""Reasons why a resume is not exact, as a start has seen them: recorded for `explain`, and reported once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch.optim import Optimizer

from fairlead.errors import RunDirectoryError
from fairlead.exactness import EXACTNESS_FILE, inexact_kernels, record, sentence
from fairlead.findings import Inexact
from fairlead_distributed.plain_data import is_engines
from fairlead_distributed.run.registry import ALL_GROUPS, Registry
from fairlead_runs.commit import atomic_write

_SEEDED_BELOW = 2**32
"""People seed with smaller numbers; torch seeds itself with 53 random bits."""


def loop_reasons(registry: Registry, seed: int) -> Iterator[Inexact]:
    """Reasons why a resume of a custom training loop that began with a seed is not exact, or may not be."""
    if seed >= _SEEDED_BELOW:
        yield unseeded("torch.manual_seed(1)")
    modules, optimizers = registry.modules(), registry.optimizers()
    if modules and not registry.saved_optimizers():
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
    yield from nested_optimizers(optimizers.values())
    for name in registry.grown_optimizers():
        yield Inexact(
            f"the parameter groups that the loop has added to {name}",
            why="a resume is refused, since the script makes it without them",
            fix=f"make {name} with all its groups; {ALL_GROUPS}",
        )
    yield from registry.attributes.reasons()
    if any(one.device.type == "cuda" for module in modules.values() for one in module.parameters()):
        yield from kernel_reasons(
            lambda name, value: (
                f"torch.use_deterministic_algorithms({value})"
                if name == "deterministic"
                else f"torch.backends.cudnn.benchmark = {value}"
            )
        )


def nested_optimizers(optimizers: Iterable[Optimizer]) -> Iterator[Inexact]:
    """Optimizers around another (Lookahead, SAM): the two share groups and state, and a resume gives each its own."""
    for one in optimizers:
        if not is_engines(type(one)) and any(isinstance(value, Optimizer) for value in vars(one).values()):
            yield Inexact(
                f"the optimizer {type(one).__name__}",
                why="it holds another optimizer, and a resume restores each of them separately",
                fix="share param_groups and state in its load_state_dict; --prove-resume shows whether that does",
                certain=False,
            )


def unseeded(line: str) -> Inexact:
    """That of a script which seeds nothing; `line` would do so."""
    return Inexact(
        "the script's random numbers",
        why="nothing has seeded them: a start before the first checkpoint begins with other weights",
        fix=f"{line} as the script's first line",
    )


def kernel_reasons(written: Callable[[str, object], str]) -> Iterator[Inexact]:
    """Reasons why this process's GPU kernels may not repeat their bits; `written` formats a setting."""
    requested = torch.are_deterministic_algorithms_enabled()
    warns = "warn" if requested and torch.is_deterministic_algorithms_warn_only_enabled() else requested
    yield from inexact_kernels(warns, torch.backends.cudnn.benchmark, written)


class ExactnessRecord:
    """What a start has seen against an exact resume, in `starts/N/exactness.json` for `explain`; each is reported once.

    Args:
        start: The folder of this start.
        job: Its `job_digest`.
        say: Prints for the user.
    """

    def __init__(self, start: Path, job: str, say: Callable[[str], None]) -> None:
        self._start, self._job, self._say = start, job, say
        self._written: object = None
        self._reported: set[Inexact] = set()

    def update(
        self, settings: list[Inexact], seen: list[Inexact], world_size: int, *, silent: Collection[Inexact] = ()
    ) -> None:
        """The reasons as they are now, on rank 0; `silent` are reported elsewhere."""
        content = record(settings=settings, seen=seen, world_size=world_size, job=self._job)
        if content != self._written:
            self._written = content
            self._write(json.dumps(content, indent=1) + "\n")
        new = [one for one in dict.fromkeys((*settings, *seen)) if one not in self._reported and one not in silent]
        self._reported.update(new)
        if new:
            head = f"resume is {'not' if any(one.certain for one in new) else 'not known to be'} exact:"
            self._say("\n".join([head, *(f"  {sentence(one)}" for one in new)]))

    def _write(self, text: str) -> None:
        try:
            self._start.mkdir(parents=True, exist_ok=True)
            atomic_write(self._start / EXACTNESS_FILE, text.encode(), error=RunDirectoryError)
        except (OSError, RunDirectoryError) as error:
            warnings.warn(f"whether a resume is exact was not written down: {error}", stacklevel=3)
