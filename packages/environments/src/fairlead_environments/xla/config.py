"""Settings of the environment `xla`."""

from __future__ import annotations

from typing import Literal

from fairlead import EnvironmentConfigBase

__all__ = ["XLAEnvironmentConfig"]


class XLAEnvironmentConfig(EnvironmentConfigBase):
    """Hosts of a TPU slice: one process per host, in which PyTorch/XLA starts a rank per chip.

    The ranks meet through the TPU runtime, so there is no main address or port to set.

    Example:
        >>> XLAEnvironmentConfig().name
        'xla'
    """

    name: Literal["xla"] = "xla"
