"""The config of `accelerator: xla` and its second name `tpu`."""

from __future__ import annotations

from typing import Literal

from fairlead import AcceleratorConfigBase

__all__ = ["XLAAcceleratorConfig"]


class XLAAcceleratorConfig(AcceleratorConfigBase):
    """Compute on TPUs, or on what else PJRT drives, through PyTorch/XLA (R39, R40).

    Example:
        >>> XLAAcceleratorConfig().name
        'xla'
    """

    name: Literal["xla"] = "xla"
