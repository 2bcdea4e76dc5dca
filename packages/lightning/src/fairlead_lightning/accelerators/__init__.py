"""The kinds of devices that Lightning drives, and how each is found without importing torch."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from fairlead import AcceleratorConfigBase, AcceleratorPlugin
from fairlead.engines import LIGHTNING
from fairlead.interfaces import BuildContext

__all__ = ["LightningAccelerator", "build"]


class LightningAccelerator(AcceleratorPlugin):
    """An accelerator that Lightning has under the same name."""

    runtime = "fairlead_lightning.accelerators:build"
    engines: ClassVar[tuple[str, ...]] = LIGHTNING
    extra = "lightning"


def build(config: AcceleratorConfigBase, context: BuildContext) -> Any:
    """Lightning's accelerator, of the engine's class family."""
    family = "pytorch" if context.engine == "trainer" else "fabric"
    return getattr(importlib.import_module(f"lightning.{family}.accelerators"), f"{config.name.upper()}Accelerator")()
