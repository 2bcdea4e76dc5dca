"""What `fairlead bench comm` makes of given times, and real collectives between real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli import main
from fairlead.errors import ConfigError
from fairlead_diagnostics.bench.bandwidth import BUS_FACTORS, parse_size, slow_links
from fairlead_diagnostics.bench.collectives import measure
from fairlead_distributed.testing import run_ranks

pytestmark = pytest.mark.slow


def link(one: str, other: str, rate: float) -> dict[str, Any]:
    return {"nodes": [one, other], "bytes_per_s": rate}


def links(slow: dict[frozenset[str], float], nodes: int = 6) -> list[dict[str, Any]]:
    """Of every two nodes, 10 GB/s give or take 3 %, but for the slow ones."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    pairs = [(a, b) for n, a in enumerate(names) for b in names[n + 1 :]]
    return [link(a, b, slow.get(frozenset((a, b)), 1e10 * (0.97 + 0.06 * (i % 2)))) for i, (a, b) in enumerate(pairs)]


def test_a_slow_node_and_a_slow_link_are_named_with_how_slow_they_are() -> None:
    assert slow_links(links({})) == []
    bad_link = slow_links(links({frozenset(("n2", "n5")): 4e9}))
    assert [(one.nodes, round(one.below, 1)) for one in bad_link] == [(("n2", "n5"), 0.6)]
    of_n3 = {frozenset(("n3", f"n{number}")): 5e9 for number in (1, 2, 4, 5, 6)}
    bad_node = slow_links(links(of_n3 | {frozenset(("n1", "n2")): 2e9}))
    assert [one.nodes for one in bad_node] == [("n1", "n2"), ("n3",)]
    assert "all links of n3: 5 GB/s, 48% below the median" in str(bad_node[1])
    assert slow_links([link("n1", "n2", 1.0), link("n1", "n3", 10.0)]) == [], "two links say nothing of each other"


def test_sizes_and_bus_factors_are_those_of_nccl_tests() -> None:
    assert [parse_size(text) for text in ("8", "1K", "64MiB", "1.5G")] == [8, 1024, 2**26, 3 * 2**29]
    with pytest.raises(ConfigError, match="no size"):
        parse_size("big")
    assert [BUS_FACTORS[name](8) for name in ("all_reduce", "all_gather", "broadcast")] == [1.75, 0.875, 1.0]


def timed(rank: int) -> dict[str, Any] | None:
    return measure(list(BUS_FACTORS), [4096], 2, 4096, "gloo", os.environ)


def test_each_collective_is_timed_between_three_ranks() -> None:
    """Under torchrun's variables; rank 0 has the record."""
    record, *others = run_ranks(timed, 3, init=False)
    assert others == [None, None]
    assert record is not None
    assert [row["collective"] for row in record["collectives"]] == list(BUS_FACTORS)
    for row in record["collectives"]:
        assert "failed" not in row, row
        assert len(row["seconds"]) == 2
        assert 0 < min(row["seconds"]) < 1
        ratio = row["bus_bytes_per_s"] / row["algorithm_bytes_per_s"]
        assert ratio == pytest.approx(BUS_FACTORS[row["collective"]](3))
    assert [pair["nodes"] for pair in record["pairs"]] == [
        ["rank 0", "rank 1"],
        ["rank 0", "rank 2"],
        ["rank 1", "rank 2"],
    ]


def test_alone_it_starts_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, a plot of what was measured, and one JSON document."""
    words = [
        "bench",
        "comm",
        "--processes",
        "2",
        "--sizes",
        "1KiB,64KiB",
        "--collectives",
        "all_reduce",
        "--rounds",
        "1",
    ]
    assert main([*words, "--json", "--plot", "comm.svg"], environ=dict(os.environ), cwd=tmp_path) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(row["bytes"], len(row["seconds"])) for row in record["collectives"]] == [(1024, 1), (65536, 1)]
    assert record["ranks"] == 2
    assert "all_reduce" in (tmp_path / "comm.svg").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["comm.svg"]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m",
        f"mpirun --allow-run-as-root --oversubscribe -n 2 {sys.executable} -m",
    ],
    ids=["torchrun", "mpirun"],
)
def test_under_a_launcher_its_ranks_measure(launcher: str, tmp_path: Path) -> None:
    words = [*launcher.split(), "fairlead", "bench", "comm", "--sizes", "1KiB", "--rounds", "1", "--json"]
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["ranks"], len(record["collectives"])) == (2, len(BUS_FACTORS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--collectives", "all_reduce,gossip"), "gossip"),
        (("--processes", "1"), "no peer to communicate with"),
        (("--plot", "x.foo"), "a plot cannot be a .foo"),
        (("--plot", "none/x.svg"), "there is no folder"),
    ],
)
def test_what_is_wrong_is_said(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "comm", *words], environ={}, cwd=tmp_path) == 2
    assert said in capsys.readouterr().err
