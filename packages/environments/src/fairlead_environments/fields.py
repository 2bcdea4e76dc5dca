"""Config fields and requirements that several environments share. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fairlead import EnvironmentConfigBase

__all__ = ["LIGHTNING", "MainAddressConfig", "Port"]

LIGHTNING = ("torch>=2.13", "lightning>=2.6.6,<2.7")
"""The engines that every environment's runtime needs."""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""


class MainAddressConfig(EnvironmentConfigBase):
    """An environment whose meeting point can be set by hand."""

    main_address: Annotated[str, Field(min_length=1)] | None = None
    """Host name or address of the node with rank 0, as the other nodes reach it; None asks the launcher."""
    main_port: Port | None = None
    """TCP port on that node; None takes MASTER_PORT if it is exported, else one that fits the environment."""
