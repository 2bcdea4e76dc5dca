"""Folders of `.npy` files: the settings, and what this plugin contributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fairlead import CheckpointIOConfigBase, CheckpointIOPlugin, Resolution, hookimpl
from fairlead.findings import Inexact


class NpyCheckpointIOConfig(CheckpointIOConfigBase):
    """A folder with one `.npy` file for each tensor, which NumPy reads without torch."""

    name: Literal["npy"] = "npy"
    """The tag."""


class Npy(CheckpointIOPlugin):
    """Folders of `.npy` files."""

    config = NpyCheckpointIOConfig
    runtime = "fairlead_npy.npy_runtime:build"
    formats = ("fairlead_npy.npy_format:npy",)
    engines = ("torch", "lightning", "numpy")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """Every bit comes back; without this hook a resume is called *not known*."""
        return ()


npy = Npy()
