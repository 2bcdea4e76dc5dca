"""A check before a start: the classes of layers that a strategy's fields name are there, by reading their sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fairlead import CheckPlugin, Resolution
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.user_code.lookup import Problem, find_callable
from fairlead.user_code.source import Sources

_FIELDS = ("auto_wrap_policy", "activation_checkpointing")


def check_classes(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """Each that cannot be found is an error; what cannot be known without an import is left to the start."""
    return CheckResult(tuple(_missing(loaded, resolution)))


def _missing(loaded: LoadedJob, resolution: Resolution) -> Iterator[Finding]:
    sources = Sources(loaded.root)
    for field in _FIELDS:
        paths = getattr(resolution.strategy, field, None)
        for path in paths if isinstance(paths, tuple) else ():
            found = find_callable(path, loaded.root, sources=sources)
            if isinstance(found, Problem) and found.code != "class-unchecked":
                where = f"trainer.strategy.{field}"
                yield Finding("error", found.code, found.what, where=where, why=found.why, fix=found.fix)


named_classes = CheckPlugin("fairlead_strategies.named_classes:check_classes")
