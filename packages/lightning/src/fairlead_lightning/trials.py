"""How `fit --prove-resume` and `verify` start a job as `fairlead fit` would, with some settings changed; torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead.errors import ConfigError
from fairlead.resolution import Resolution


def require_own_start(resolution: Resolution, command: str, *, nodes: int) -> None:
    """Raises where the ranks are there already, or would be on several nodes."""
    if not resolution.topology.launched and nodes == 1:
        return
    launched = resolution.topology.launched
    raise ConfigError(
        f"{command} starts its ranks itself, on one machine",
        where=command,
        why=f"the ranks were started by the environment {resolution.environment.name!r}"
        if launched
        else f"the job has {nodes} nodes",
        fix="run it without a launcher; with --set trainer.num_nodes=1 where the job has more nodes",
    )


def fit_words(job: Sequence[str], overrides: Sequence[str], sets: Mapping[str, Any]) -> list[str]:
    """`fit JOB` with the user's settings, and then those of the trial."""
    settings = [*overrides, *(f"{path}={json.dumps(value)}" for path, value in sets.items())]
    return ["fit", *job, *(word for one in settings for word in ("--set", one))]
