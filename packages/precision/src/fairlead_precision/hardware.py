"""What a device can compute natively.

Checks go by its name, because they run where there is no torch; of one that is not recognised nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from fairlead import Finding, Resolution
from fairlead.errors import ConfigError
from fairlead_runs.device_models import DeviceModel, find_device

# Families of which the table has some models only: NVIDIA's compute capability 7.5 and before, 8.6, 8.9 and later.
_BEFORE_8_0: Final = r"GTX|RTX 20\d\d|QUADRO (RTX|GV|GP)|TITAN|T4G"
_BEFORE_8_9: Final = r"RTX 30\d\d|RTX A\d+"
_FROM_8_9: Final = r"RTX [45]0\d\d|RTX PRO"


def _family(name: str) -> tuple[bool, bool] | None:
    """(bfloat16, FP8) of a device by the family that its name says."""
    for pattern, computes in ((_BEFORE_8_0, (False, False)), (_BEFORE_8_9, (True, False)), (_FROM_8_9, (True, True))):
        if re.search(rf"(?<![A-Z0-9])({pattern})(?![0-9])", name.upper()):
            return computes
    return None


def _known(name: str) -> tuple[bool, bool] | None:
    model: DeviceModel | None = find_device(name)
    return _family(name) if model is None else (model.bf16, model.fp8)


def has_fp8(name: str) -> bool | None:
    """Whether a device computes in 8-bit floating point natively; None when its name is not known."""
    known = _known(name)
    return None if known is None else known[1]


def has_bf16(name: str) -> bool | None:
    """Whether a device computes in bfloat16 natively; None when its name is not known."""
    known = _known(name)
    return None if known is None else known[0]


@dataclass(frozen=True)
class WithoutFP8:
    """Devices without 8-bit units: which, why, and the precision that fits them."""

    names: str
    instead: str
    why: str = "8-bit units came with NVIDIA's compute capability 8.9 (H100, L40, RTX 40) and AMD's MI300"


def without_fp8(names: Iterable[str]) -> WithoutFP8 | None:
    """Those of some devices that are known to have no 8-bit floating point; None: there is none."""
    old = sorted({name for name in names if has_fp8(name) is False})
    if not old:
        return None
    return WithoutFP8(", ".join(old), "16-mixed" if any(has_bf16(name) is False for name in old) else "bf16-mixed")


def refuse_without_fp8() -> None:
    """Raises a `ConfigError` on a GPU of NVIDIA without 8-bit units; where the checks did not know it by its name."""
    import torch

    if torch.version.hip or not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):  # the first with FP8 units, Ada; Hopper is 9.0
        raise ConfigError(
            f"{torch.cuda.get_device_name()} cannot compute in 8-bit floating point",
            where="trainer.precision",
            why=f"its compute capability is {capability[0]}.{capability[1]}; 8.9 is needed (H100-class)",
            fix=f"precision: {'bf16-mixed' if capability >= (8, 0) else '16-mixed'}",
        )


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
