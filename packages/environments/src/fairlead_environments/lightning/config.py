"""Settings of the environment `lightning`."""

from __future__ import annotations

from typing import Literal

from fairlead import EnvironmentConfigBase
from fairlead_environments.fields import Port

__all__ = ["LightningEnvironmentConfig"]


class LightningEnvironmentConfig(EnvironmentConfigBase):
    """One machine without a launcher: Fairlead, or Lightning, starts the ranks.

    Example:
        >>> LightningEnvironmentConfig(main_port=29501).main_port
        29501
    """

    name: Literal["lightning"] = "lightning"
    main_port: Port | None = None
    """TCP port on which the ranks meet; None takes MASTER_PORT if it is exported, else a free one."""
