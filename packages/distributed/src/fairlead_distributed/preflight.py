"""What the ranks tell each other before they form a group, and what has to be the same on all of them."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

import fairlead
from fairlead.starts import Start
from fairlead_runs.waiting import listed, ranks_text

_SHOWN = 16  # lines of hosts


@dataclass(frozen=True)
class RankFacts:
    """What one rank says of itself: what has to be the same on all, and `gpu`, a UUID that no other may have too."""

    host: str
    pid: int
    same: Mapping[str, str] = field(default_factory=dict)
    gpu: str | None = None
    gpu_name: str | None = None

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid})"

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankFacts:
        """Back from the store."""
        return cls(**json.loads(text))


def own_facts(
    device: torch.device, *, start: Start | None = None, config_hash: str | None = None, exclusive: bool = False
) -> RankFacts:
    """What this process says of itself; with `exclusive`, as for NCCL, no other rank may use its GPU."""
    same = {
        "job": start.identity if start is not None else None,
        "config": config_hash,
        "device": device.type,
        "python": ".".join(platform.python_version_tuple()[:2]),  # the third number changes nothing that ranks share
        "torch": torch.__version__,
        "fairlead": fairlead.__version__,
        "lightning": getattr(sys.modules.get("lightning"), "__version__", None),
    }
    gpu, name = _gpu(device) if exclusive and device.type == "cuda" else (None, None)
    return RankFacts(socket.gethostname(), os.getpid(), {k: v for k, v in same.items() if v is not None}, gpu, name)


def _gpu(device: torch.device) -> tuple[str | None, str]:
    properties = torch.cuda.get_device_properties(device)
    # The same index is another GPU where each task sees one only, so the UUID counts; old ROCm has none.
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid), f"{device} ({properties.name})"


def differences(ranks: Mapping[int, RankFacts]) -> list[str]:
    """Every difference in one line, with ranks, hosts and both values; what most ranks have is the reference."""
    lines = []
    for name in dict.fromkeys(name for facts in ranks.values() for name in facts.same):
        values = {rank: facts.same[name] for rank, facts in sorted(ranks.items()) if name in facts.same}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual, number = counts.most_common(1)[0]  # of two equally frequent ones, that of the lowest rank
        first = next(rank for rank, has in values.items() if has == usual)
        others = f"the other {number} ranks have" if number > 1 else f"rank {first} has"
        for value in counts:
            if value != usual:
                who = [rank for rank, has in values.items() if has == value]
                lines.append(f"{name}: {_on_hosts(who, ranks)} {value}; {others} {usual}")
    return lines + _shared_gpus(ranks)


def _shared_gpus(ranks: Mapping[int, RankFacts]) -> list[str]:
    users: dict[str, list[int]] = {}
    for rank, facts in sorted(ranks.items()):
        if facts.gpu is not None:
            users.setdefault(facts.gpu, []).append(rank)
    return [
        f"{ranks_text(who)} on {ranks[who[0]].host} use one GPU, {ranks[who[0]].gpu_name}: each rank needs its own"
        for who in users.values()
        if len(who) > 1
    ]


def _on_hosts(who: Sequence[int], ranks: Mapping[int, RankFacts]) -> str:
    hosts = list(dict.fromkeys(ranks[rank].host for rank in who))
    return f"{ranks_text(who)} on {listed(hosts)} {'has' if len(who) == 1 else 'have'}"


def absent_lines(missing: Sequence[int], came: Mapping[int, RankFacts], start: Start | None) -> list[str]:
    """The missing ranks, with their hosts where the launcher provides them."""
    lines = []
    if start is not None and start.rank_hosts and max(missing) < len(start.rank_hosts):
        by_host: dict[str, list[int]] = {}
        for rank in missing:
            by_host.setdefault(start.rank_hosts[rank], []).append(rank)
        lines += [f"missing: {ranks_text(ranks)} on {host}" for host, ranks in list(by_host.items())[:_SHOWN]]
        if len(by_host) > _SHOWN:
            lines.append(f"missing: ranks on {len(by_host) - _SHOWN} more hosts")
    else:
        lines.append(f"missing: {ranks_text(missing)}")
    there = {_short(facts.host) for facts in came.values()}
    empty = [host for host in (start.hosts if start is not None else ()) if _short(host) not in there]
    return [*lines, f"no rank came from {listed(empty)}"] if empty else lines


def _short(host: str) -> str:
    return host.partition(".")[0].lower()
