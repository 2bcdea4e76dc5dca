"""Functions that have another name in an older torch, which Fairlead supports from 2.9 on, under their new one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_HERE = vars(dist)

all_gather_single: Any = _HERE.get("all_gather_single") or dist.all_gather_into_tensor
"""`torch.distributed.all_gather_single`, which warns of its old name, `all_gather_into_tensor`."""
reduce_scatter_single: Any = _HERE.get("reduce_scatter_single") or dist.reduce_scatter_tensor
"""`torch.distributed.reduce_scatter_single`, formerly `reduce_scatter_tensor`."""
