"""Fixtures of this package's tests."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fairlead_launch.forked_child import run_python
from fairlead_launch.forkserver import shared

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def ranks() -> ModuleType:
    """The module `ranks.py` beside this file; tests folders are not packages."""
    spec = importlib.util.spec_from_file_location("fairlead_strategies_test_ranks", HERE / "ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two real processes over gloo made of every scenario in `scenarios.py`."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    server = shared(imports=("lightning.pytorch", "fairlead_strategies.ddp_runtime"))
    processes = []
    for rank, log in enumerate(logs):
        environ = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            command, said = (str(HERE / "scenarios.py"), str(folder / "out.json")), file.fileno()
            started = server.start(run_python, *command, environ=environ, cwd=folder, fds={1: said, 2: said})
            processes.append(started)
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill_group()
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    results: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return results
