"""The config of the requeuer `none`."""

from __future__ import annotations

from typing import Literal

from fairlead.bases import RequeueConfigBase

__all__ = ["NoneRequeueConfig"]


class NoneRequeueConfig(RequeueConfigBase):
    """Nobody starts the job again; it still saves and stops when a signal comes."""

    name: Literal["none"] = "none"
