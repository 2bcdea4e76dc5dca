"""The settings of PBS."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead import EnvironmentConfigBase


class PBSEnvironmentConfig(EnvironmentConfigBase):
    """Ranks started by `pbsdsh`, one for each line of PBS_NODEFILE."""

    name: Literal["pbs"] = "pbs"
    """The tag."""
    main_port: int = Field(default=29500, ge=1024, le=65535)
    """The TCP port of the ranks' store on the first host."""
