"""Files of ranks that do not share rank 0's file system, sent to rank 0 through the process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch.distributed as dist

from fairlead_distributed.info import get_rank
from fairlead_distributed.objects import gather_objects
from fairlead_runs.commit import FileWriter
from fairlead_runs.commit.files import replace_file

_PIECE: Final = 16 << 20


def send_missing(folder: Path, own: Sequence[str], sees: bool) -> list[str]:
    """Brings to rank 0's folder the files that only other ranks have; returns those this one has sent. A collective."""
    everyone = gather_objects((sees, list(own) if not sees else []))
    if all(seen for seen, _ in everyone):
        return []
    there = set(gather_objects(os.listdir(folder) if get_rank() == 0 else [])[0])
    sent: list[str] = []
    for rank, (_, names) in enumerate(everyone):
        for name in names:
            if name in there:
                continue
            there.add(name)
            if get_rank() == rank:
                _send(folder / name)
                sent.append(name)
            elif get_rank() == 0:
                replace_file(folder / name, partial(_receive, rank))
    return sent


def _send(path: Path) -> None:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            dist.send_object_list([piece], dst=0)
    dist.send_object_list([b""], dst=0)


def _receive(rank: int, file: FileWriter) -> None:
    box = [b""]
    while True:
        dist.recv_object_list(box, src=rank)
        if not box[0]:
            return
        file.write(box[0])
