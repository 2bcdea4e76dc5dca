"""The screen of several nodes: real processes and real groups of gloo, each node a thread of this test."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairlead_diagnostics.checking import Bench, Check, Requested, Result
from fairlead_diagnostics.checks import LOCAL, PAIR
from fairlead_diagnostics.outcome import Outcome, decide
from fairlead_diagnostics.screen import Place, Screen, Screened
from fairlead_diagnostics.verdict import Verdict
from fairlead_launch.ports import free_port


def wrong_matmul(bench: Bench) -> Result:
    """The real check, on a device that adds wrongly."""
    import torch

    from fairlead_diagnostics.checks.devices import matmul

    right = torch.Tensor.__matmul__

    def broken(one: torch.Tensor, other: Any) -> torch.Tensor:
        product = right(one, other)
        product[3, 5] += 1
        return product

    torch.Tensor.__matmul__ = broken  # type: ignore[method-assign, assignment]
    return matmul(bench)


def fine(bench: Bench, *partner: object) -> Result:
    return Result(True, "fine")


class Nodes:
    """Nodes on this machine, that meet at one port."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder, self.port = count, folder, free_port()
        self.seen: list[Screened] = []
        self.codes: dict[int, int] = {}

    def screen(self, node: int, **more: Any) -> Screen:
        hosts = [f"127.0.0.{number + 1}" for number in range(self.count)]  # all of them are this machine
        main = more.pop("main", hosts[0])
        place = Place(node, self.count, hosts[node], main, [self.port], "test", hosts)
        given = {
            "requested": Requested(folder=str(self.folder / "run")),
            "folder": self.folder / "run/screens/1",
            **more,
        }
        return Screen(place, decide=self.decide, show=self.seen.append, **{"environ": os.environ, **given})

    def decide(self, verdict: Verdict, hosts: Mapping[int, str]) -> Outcome:
        return decide(verdict, hosts, self.folder / "run", lambda: None)

    def run(self, *screens: Screen) -> Screened:
        def one(screen: Screen) -> None:
            self.codes[screen.position.node] = screen.run()

        threads = [threading.Thread(target=one, args=(screen,)) for screen in screens]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return self.seen[-1]


def test_bad_nodes_among_five(tmp_path: Path) -> None:
    """One computes wrongly, one has no network for gloo, one never comes; the other two are told from them."""
    nodes = Nodes(5, tmp_path)
    loopback = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    broken = [check if check.name != "matmul" else Check("matmul", f"{__name__}:wrong_matmul") for check in LOCAL]
    common: dict[str, Any] = {"environ": loopback, "pair": Check(PAIR.name, PAIR.run, limit_s=10.0), "arrive_s": 5.0}
    found = nodes.run(
        nodes.screen(0, **common),
        nodes.screen(1, **{**common, "environ": {**loopback, "GLOO_SOCKET_IFNAME": "none0"}}),
        nodes.screen(2, **common, local=broken),
        nodes.screen(3, **common),
    )
    said = {found.hosts[node]: " ".join(reasons) for node, reasons in found.verdict.bad.items()}
    assert said.keys() == {"127.0.0.2", "127.0.0.3", "127.0.0.5"}, (said, found.verdict.unclear)
    assert said["127.0.0.2"].startswith("all-reduce: 127.0.0.")
    assert "none0" in said["127.0.0.2"]  # gloo's own words
    assert said["127.0.0.3"] == "matmul: cpu: 1 of 1048576 numbers are wrong"
    assert said["127.0.0.5"] == "not there: it did not come within 10 s"
    assert found.verdict.unclear == []
    assert nodes.codes == dict.fromkeys(range(4), 1)


def test_a_node_without_a_network_says_so_in_the_run_directory_and_ends_with_the_others(tmp_path: Path) -> None:
    nodes = Nodes(2, tmp_path)
    found = nodes.run(
        nodes.screen(0, local=(), arrive_s=60.0),
        nodes.screen(1, local=(), arrive_s=1.0, main="no-such-host.invalid"),
    )
    assert found.verdict.bad == {}  # of two nodes nobody can tell
    (said,) = found.verdict.unclear
    assert "its name no-such-host.invalid does not resolve" in said
    assert found.seconds < 30
    assert nodes.codes == {0: 1, 1: 1}


def test_a_run_directory_that_no_node_can_write_is_no_nodes_fault(tmp_path: Path) -> None:
    """A file is in its way."""
    (tmp_path / "run").write_text("a file")
    nodes = Nodes(2, tmp_path)
    only = tuple(check for check in LOCAL if check.name == "write")
    no_torch = Check(PAIR.name, f"{__name__}:fine")
    found = nodes.run(*(nodes.screen(node, local=only, pair=no_torch) for node in range(2)))
    assert found.verdict.bad == {}
    assert [text.partition(":")[0] for text in found.verdict.unclear] == ["write fails on every node"]
    assert nodes.codes == {0: 1, 1: 1}
