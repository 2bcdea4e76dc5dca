"""The ranks of PyTorch/XLA are known only in the processes that it starts: Lightning asks torch_xla for them."""

from __future__ import annotations

from lightning.fabric.plugins.environments import XLAEnvironment

from fairlead.interfaces import BuildContext
from fairlead_environments.xla.config import XLAEnvironmentConfig

__all__ = ["build"]


def build(config: XLAEnvironmentConfig, context: BuildContext) -> XLAEnvironment:
    """Lightning's own environment for PyTorch/XLA; it raises ModuleNotFoundError without torch_xla."""
    return XLAEnvironment()
