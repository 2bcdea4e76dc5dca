"""Is bfloat16 native on this machine's device? For choosing a precision in code (R48, R49)."""

from __future__ import annotations

__all__ = ["is_bf16_supported_no_emulation"]


def is_bf16_supported_no_emulation(device: int | None = None) -> bool:
    """Whether the CUDA or ROCm device computes in bfloat16 in hardware.

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
