"""What several plugins of this package share. Torch-free."""

from __future__ import annotations

LIGHTNING = ("torch>=2.13", "lightning>=2.6.6,<2.7")
"""The engines that every runtime of this package needs."""
