"""Says, as JSON in one line, who this process is; each rank of a step writes its own file.

`python who.py FOLDER [allreduce]`
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from fairlead.detect import choose_environment
from fairlead.plugins import default_plugins


def main(folder: Path, meet: bool) -> None:
    chosen = choose_environment("auto", os.environ, default_plugins(), starting=True)
    found: dict[str, Any] = {
        "environment": chosen.setting.value,
        "claims": list(chosen.claims),
        "findings": [finding.code for finding in chosen.findings],
        "host": socket.gethostname(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    topology = chosen.topology
    for field in dataclasses.fields(topology) if topology is not None else ():
        setting = getattr(topology, field.name)
        found[field.name] = getattr(setting, "value", setting)
    if meet:
        found["sum"] = _sum()
    # Node and rank may be the same in two steps; a process is not.
    (folder / f"{socket.gethostname()}-{os.getpid()}.json").write_text(json.dumps(found))


def _sum() -> float:
    """The sum of 1 over all ranks, through a group that Fairlead makes."""
    import torch
    import torch.distributed as dist

    from fairlead_distributed import process_group

    with process_group():
        one = torch.ones(1)
        dist.all_reduce(one)
        return float(one.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), "allreduce" in sys.argv[2:])
