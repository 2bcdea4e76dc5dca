"""Findings that several precisions make. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from fairlead import Finding, Resolution
from fairlead_precision.hardware import has_bf16

__all__ = ["emulated_bfloat16"]


def emulated_bfloat16(resolution: Resolution, where: str, fix: str) -> Iterator[Finding]:
    """Warns once when a device whose name is known has no native bfloat16 (R47)."""
    old = sorted({name for name in resolution.devices_found.names if has_bf16(name) is False})
    if old:
        yield Finding(
            "warning",
            "precision-emulated",
            f"{', '.join(old)} has no native bfloat16; it would be emulated, slowly",
            where=where,
            why="bfloat16 units came with compute capability 8.0 (A100)",
            fix=fix,
        )
