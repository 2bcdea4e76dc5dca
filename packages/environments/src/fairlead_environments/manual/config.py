"""Settings of the environment `manual`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fairlead_environments.fields import MainAddressConfig

__all__ = ["ManualEnvironmentConfig"]


class ManualEnvironmentConfig(MainAddressConfig):
    """Nodes or ranks that a person starts one by one, with variables exported by hand.

    One command per node, Fairlead starts the ranks of each: MASTER_ADDR, NODE_RANK and NNODES. One
    command per rank: MASTER_ADDR, RANK, WORLD_SIZE and LOCAL_RANK. MASTER_PORT is 29500 unless set.

    Example:
        >>> ManualEnvironmentConfig(main_address="n1", node_rank=1).node_rank
        1
    """

    name: Literal["manual"] = "manual"
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """Index of this node, from 0; None takes NODE_RANK. Differs per node, so set it on the command line."""
