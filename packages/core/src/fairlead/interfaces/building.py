"""What a runtime is built with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution

__all__ = ["BuildContext"]


@dataclass(frozen=True)
class BuildContext:
    """What a runtime is built with, besides its config.

    Args:
        resolution: All settings of the run, resolved.
        environ: The environment variables of the process.
        plugins: The plugin manager, to find what another package offers.
        engine: Which of Lightning's two class families is wanted.
        run_dir: The run directory; None when nothing is recorded.
        extras: What an engine passes through, such as `{"wrapped": checkpoint_io}`.
    """

    resolution: Resolution
    environ: Mapping[str, str]
    plugins: PluginManager
    engine: Literal["trainer", "fabric"] = "trainer"
    run_dir: Path | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
