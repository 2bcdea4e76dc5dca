"""Settings of the environment `torchelastic`."""

from __future__ import annotations

from typing import Literal

from fairlead import EnvironmentConfigBase

__all__ = ["TorchElasticEnvironmentConfig"]


class TorchElasticEnvironmentConfig(EnvironmentConfigBase):
    """Workers that `torchrun` (torch's elastic agent) started on this node.

    Ranks, address and port are the agent's; it may change them at each restart, so nothing here overrides them.

    Example:
        >>> TorchElasticEnvironmentConfig().name
        'torchelastic'
    """

    name: Literal["torchelastic"] = "torchelastic"
