"""Expanding a list of 100,000 hosts, and resolving one rank of 16,384, in seconds: the ratio is to one second.

The peer beside the expansion is a parser that most training scripts have: one regular expression and a loop, for one
bracket. It knows nothing of several brackets, and is here to show that the whole grammar costs little.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import options, paired_ratio, report, take_turns
from fairlead import TrainerConfig
from fairlead.hostlist import expand
from fairlead.plugins import PluginManager
from fairlead.resolve import resolve

BOUND = 0.2
RACKS, NODES = 100, 1000
NAME = f"rack[001-{RACKS:03}]n[0001-{NODES:04}]"
ONE_BRACKET = f"n[000001-{RACKS * NODES:06}]"
RANKS, PER_NODE = 16_384, 4


def simple(hostlist: str) -> list[str]:
    """The peer."""
    found = re.fullmatch(r"([^\[]+)\[(\d+)-(\d+)\]", hostlist)
    assert found is not None
    head, first, last = found.groups()
    return [f"{head}{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def environ() -> dict[str, str]:
    """The variables of one task of the step, as SLURM 22.05 sets them."""
    nodes = RANKS // PER_NODE
    step = {
        "NODELIST": f"n[0001-{nodes:04}]",
        "NUM_NODES": str(nodes),
        "NUM_TASKS": str(RANKS),
        "TASKS_PER_NODE": f"{PER_NODE}(x{nodes})",
    }
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_PROCID": str(RANKS - 1),
        "SLURM_LOCALID": str(PER_NODE - 1),
        "SLURM_NODEID": str(nodes - 1),
        "SLURM_NTASKS": str(RANKS),
        "SLURM_NPROCS": str(RANKS),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": step["NODELIST"],
        "SLURM_NODELIST": step["NODELIST"],
        "SLURM_TASKS_PER_NODE": step["TASKS_PER_NODE"],
        "SLURMD_NODENAME": f"n{nodes:04}",
        **{f"SLURM_STEP_{name}": value for name, value in step.items()},
    }


def main() -> None:
    given = options(__doc__, rounds=15)
    if len(expand(NAME)) != RACKS * NODES or expand(ONE_BRACKET) != simple(ONE_BRACKET):
        raise RuntimeError("the list is not what it should be")
    variables, plugins, config = environ(), PluginManager(), TrainerConfig(accelerator="cpu")
    resolution = resolve(config, environ=variables, plugins=plugins)
    if (resolution.world_size, resolution.value("global_rank")) != (RANKS, RANKS - 1):
        raise RuntimeError("the environment is not what it should be")
    sides = {
        "100,000 hosts": lambda: timed(lambda: expand(NAME)),
        "one bracket": lambda: timed(lambda: expand(ONE_BRACKET)),
        "one bracket, a simple parser": lambda: timed(lambda: simple(ONE_BRACKET)),
        "one rank of 16,384": lambda: timed(lambda: resolve(config, environ=variables, plugins=plugins)),
    }
    found = take_turns(sides, given.rounds)
    second = [1.0] * given.rounds
    ratios = {
        "seconds_100k": paired_ratio(found["100,000 hosts"], second, bound=BOUND),
        "seconds_resolve_16k": paired_ratio(found["one rank of 16,384"], second, bound=BOUND),
        "expand_vs_simple": paired_ratio(found["one bracket"], found["one bracket, a simple parser"]),
    }
    report("hostlist", ratios, found, given, hosts=RACKS * NODES, ranks=RANKS)


if __name__ == "__main__":
    main()
