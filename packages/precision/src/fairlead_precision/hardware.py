"""What a device can compute natively.

Checks go by its name, because they run where there is no torch; of one that is not recognised nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fairlead import Finding, Resolution

# NVIDIA's CUDA GPU compute capability table (developer.nvidia.com/cuda-gpus): bfloat16 since 8.0, FP8 since 8.9.
_BEFORE_8_0: Final = r"V100|P100|P40|P4|T4|K80|M60|TITAN|GTX|RTX 20\d\d|QUADRO (RTX|GV|GP)|T4G"
_BEFORE_8_9: Final = r"A100|A800|A40|A30|A16|A10G?|A2|RTX 30\d\d|RTX A\d+"
_FROM_8_9: Final = (
    r"H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300|L4|L40S?|L20|RTX [45]0\d\d|RTX 6000 ADA|RTX PRO"
)


def _matches(pattern: str, name: str) -> bool:
    return re.search(rf"(?<![A-Z0-9])({pattern})(?![0-9])(?![A-Z]\d)", name.upper()) is not None


def has_fp8(name: str) -> bool | None:
    """Whether a device computes in 8-bit floating point natively; None when its name is not known."""
    if _matches(f"{_BEFORE_8_0}|{_BEFORE_8_9}", name):  # first: a "Quadro RTX 4000" is no "RTX 4000 Ada"
        return False
    return True if _matches(_FROM_8_9, name) else None


def has_bf16(name: str) -> bool | None:
    """Whether a device computes in bfloat16 natively; None when its name is not known."""
    if _matches(_BEFORE_8_0, name):
        return False
    return True if _matches(f"{_BEFORE_8_9}|{_FROM_8_9}", name) else None


def emulated_bfloat16(resolution: Resolution) -> Iterator[Finding]:
    """Warns once when a device whose name is known has no native bfloat16."""
    old = sorted({name for name in resolution.devices_found.names if has_bf16(name) is False})
    if old:
        yield Finding(
            "warning",
            "precision-emulated",
            f"{', '.join(old)} has no native bfloat16; it would be emulated, slowly",
            where="trainer.precision",
            why="bfloat16 units came with compute capability 8.0 (A100)",
            fix="precision: 16-mixed",
        )


def is_bf16_supported_no_emulation(device: int | None = None) -> bool:
    """Whether this machine's CUDA or ROCm device computes in bfloat16 in hardware, for choosing a precision in code.

    True on NVIDIA GPUs of compute capability 8.0 (Ampere) and later and on AMD GPUs under ROCm;
    False on older GPUs, which only emulate it, and on a machine with a CPU alone.

    Args:
        device: Index of the device; None is the current one.

    Example:
        >>> precision = "bf16-mixed" if is_bf16_supported_no_emulation() else "32-true"
    """
    import torch

    if not torch.cuda.is_available():
        return False
    if torch.version.hip:
        return True
    return int(torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).major) >= 8
