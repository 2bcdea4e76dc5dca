"""What the ranks tell each other before they form a group, and what has to be the same on all of them.

A difference that is found here has one line with rank, host and both values. Later it would be a hang in a collective,
a crash in a library, or a model that is half of one experiment and half of another.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType

import torch

import fairlead
from fairlead.starts import Start
from fairlead_runs.waiting import listed, ranks_text

_SHOWN = 16  # lines of hosts


@dataclass(frozen=True)
class RankFacts:
    """What one rank says of itself.

    Args:
        host: The name of its machine.
        pid: Its process.
        same: What has to be the same on all ranks, by a name for messages; what a rank does not know is left out.
        gpu: What no other rank may have as well: the UUID of its GPU.
        gpu_name: That GPU in words.

    Example:
        >>> facts = RankFacts("n1", 7, {"torch": "2.13.0"})
        >>> RankFacts.from_json(facts.to_json()) == facts
        True
    """

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
    """What this process says of itself.

    Args:
        device: The device that it computes on.
        start: What it knows of its start.
        config_hash: A digest of everything that decides what is computed.
        exclusive: Whether no other rank may use its GPU, as with NCCL.
    """
    same = {
        "job": start.identity if start is not None else None,
        "config": config_hash,
        "device": device.type,
        "python": ".".join(platform.python_version_tuple()[:2]),  # the third number changes nothing that ranks share
        "torch": torch.__version__,
        "fairlead": fairlead.__version__,
        "lightning": _version(sys.modules.get("lightning")),
    }
    gpu, name = _gpu(device) if exclusive and device.type == "cuda" else (None, None)
    return RankFacts(socket.gethostname(), os.getpid(), {k: v for k, v in same.items() if v is not None}, gpu, name)


def _version(module: ModuleType | None) -> str | None:
    return getattr(module, "__version__", None)


def _gpu(device: torch.device) -> tuple[str | None, str]:
    properties = torch.cuda.get_device_properties(device)
    # The same index is another GPU where each task sees one only, so the UUID counts; old ROCm has none.
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid), f"{device} ({properties.name})"


def differences(ranks: Mapping[int, RankFacts]) -> list[str]:
    """Every difference in one line, with ranks, hosts and both values; what most ranks have is the reference.

    Args:
        ranks: What each rank that came says of itself.

    Example:
        >>> ranks = {r: RankFacts("n1", r, {"torch": "2.13.0"}) for r in range(3)}
        >>> differences({**ranks, 3: RankFacts("n2", 9, {"torch": "2.12.1"})})
        ['torch: rank 3 on n2 has 2.12.1; the other 3 ranks have 2.13.0']
    """
    lines = []
    for name in dict.fromkeys(name for facts in ranks.values() for name in facts.same):
        values = {rank: facts.same[name] for rank, facts in sorted(ranks.items()) if name in facts.same}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual, number = counts.most_common(1)[0]  # of two equally frequent ones, that of the lowest rank
        others = f"the other {number} ranks have" if number > 1 else f"rank {_first(values, usual)} has"
        for value in counts:
            if value != usual:
                who = [rank for rank, has in values.items() if has == value]
                lines.append(f"{name}: {_on_hosts(who, ranks)} {value}; {others} {usual}")
    return lines + _shared_gpus(ranks)


def _first(values: Mapping[int, str], value: str) -> int:
    return next(rank for rank, has in values.items() if has == value)


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
    """Who did not come, with their hosts where the launcher tells them.

    Example:
        >>> start = Start("job 12", hosts=("n1", "n2"), rank_hosts=("n1", "n1", "n2", "n2"))
        >>> absent_lines([2, 3], {0: RankFacts("n1", 7), 1: RankFacts("n1", 8)}, start)
        ['missing: ranks 2, 3 on n2', 'nobody came from n2']
    """
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
    return [*lines, f"nobody came from {listed(empty)}"] if empty else lines


def _short(host: str) -> str:
    return host.partition(".")[0].lower()
