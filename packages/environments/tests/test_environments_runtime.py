"""What Lightning gets: real Trainers and Fabrics, real process groups over gloo."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead import BuildContext, FairleadError, PluginManager, Topology
from fairlead.detect import choose_environment
from fairlead.install import install_line
from fairlead.interfaces import Setting
from fairlead_distributed import free_port
from fairlead_environments.runtime import ResolvedEnvironment, build

HERE = Path(__file__).parent


def context(topology: Topology, environ: Mapping[str, str], world_size: int = 1) -> BuildContext:
    """A build context with as much of a resolution as environments use."""
    settings = {
        "main_address": topology.main_address or Setting("127.0.0.1", "one machine"),
        "main_port": topology.main_port or Setting(29500, "the default"),
        "world_size": Setting(world_size, "the test"),
    }
    world = topology.world_size.value if topology.world_size else world_size
    resolution: Any = SimpleNamespace(
        topology=topology, settings=settings, world_size=world, value=lambda name: settings[name].value
    )
    return BuildContext(resolution=resolution, environ=environ, plugins=PluginManager([]))


def environment(environ: Mapping[str, str], world_size: int = 1) -> ResolvedEnvironment:
    """The runtime of the environment that these variables choose."""
    chosen = choose_environment("auto", environ, PluginManager())
    assert chosen.config is not None
    assert chosen.topology is not None
    return build(chosen.config, context(chosen.topology, environ, world_size))


@pytest.fixture(autouse=True)
def _restore_rank_zero() -> Any:
    """`build` tells Lightning's rank-zero helpers the rank, as it must; the tests are all rank 0."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    yield
    rank_zero_only.rank = 0  # type: ignore[attr-defined]


def test_a_launchers_ranks_are_fixed(recorded: Any) -> None:
    """Lightning's own arithmetic, node rank x devices + local rank, is wrong on uneven nodes (3,1)."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    found = environment(recorded("slurm/srun.direct.3"))
    found.set_global_rank(1 * 1 + 0)
    found.set_world_size(2 * 1)
    assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (4, 3, 0, 1)
    assert found.creates_processes_externally
    assert found.main_address == "n1"
    assert 20000 <= found.main_port < 30000
    assert rank_zero_only.rank == 3  # type: ignore[attr-defined]
    # Else Lightning would install its own signal handlers and requeue by itself.
    assert not isinstance(found, SLURMEnvironment)
    assert not found.detect()


def test_a_mismatch_is_refused_before_ranks_wait_for_each_other(recorded: Any) -> None:
    found = environment(recorded("slurm/srun.direct.3"))
    found.validate_settings(num_devices=1, num_nodes=2)
    with pytest.raises(FairleadError, match="devices is 4, but the launcher started 1"):
        found.validate_settings(num_devices=4, num_nodes=2)
    with pytest.raises(FairleadError, match="num_nodes is 1, but the launcher started 2"):
        found.validate_settings(num_devices=1, num_nodes=1)


def test_one_machine_follows_lightning() -> None:
    environ: dict[str, str] = {}
    found = environment(environ, world_size=2)
    assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (1, 0, 0, 0)
    assert not found.creates_processes_externally
    found.set_world_size(2)
    found.set_global_rank(1)
    assert (found.world_size(), found.global_rank()) == (2, 1)
    found.validate_settings(num_devices=2, num_nodes=1)
    environ["LOCAL_RANK"] = "0"  # Lightning's launcher has started the others: not again for a second fit
    assert found.creates_processes_externally
    found.teardown()


def test_the_port_of_one_machine_is_free_and_stays() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = ResolvedEnvironment(launched=False, main_address="127.0.0.1", preferred_port=port)
        assert found.main_port != port
        assert found.main_port == found.main_port
    assert ResolvedEnvironment(launched=False, main_address="127.0.0.1", preferred_port=port).main_port == port


def test_it_pickles_for_spawned_ranks_with_its_port() -> None:
    found = ResolvedEnvironment(launched=False, main_address="127.0.0.1", environ=os.environ)
    port = found.main_port
    copy = pickle.loads(pickle.dumps(found))
    assert copy.main_port == port


def test_ranks_without_a_port_are_refused() -> None:
    topology = Topology(launched=True, world_size=Setting(2, "x"), main_address=Setting("a", "x"))
    config = choose_environment("auto", {}, PluginManager()).config
    assert config is not None
    with pytest.raises(FairleadError, match="no port to meet on"):
        build(config, context(topology, {}))


def test_mpi4py_that_is_not_there_gives_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from fairlead_environments import MPIEnvironmentConfig
    from fairlead_environments.mpi_runtime import build as build_mpi

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(FairleadError) as raised:
        build_mpi(MPIEnvironmentConfig(use_mpi4py=True), context(Topology(launched=True), {}))
    assert install_line("mpi") in str(raised.value.fix)


SCRIPT = """
import os, sys
sys.path.insert(0, {here!r})
from test_environments_runtime import environment

def run(engine):
    plugin = environment(os.environ, world_size=2)
    if engine == "fabric":
        from lightning.fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices={devices}, num_nodes={nodes}, strategy="ddp", plugins=[plugin])
        fabric.launch()
        total = fabric.all_reduce(__import__("torch").tensor(fabric.global_rank + 1.0), reduce_op="sum")
        return fabric.world_size, fabric.global_rank, fabric.node_rank, total.item()
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    trainer = Trainer(accelerator="cpu", devices={devices}, num_nodes={nodes}, strategy="ddp", plugins=[plugin],
                      max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False)
    for _ in range(2):  # the second fit must not start ranks again
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(BoringModel())
    return trainer.world_size, trainer.global_rank, trainer.node_rank, 3.0

result = run({engine!r})
with open(os.path.join({out!r}, f"rank{{result[1]}}"), "w") as file:
    file.write(repr(result))
import torch.distributed as dist
if dist.is_initialized():  # else gloo's threads may abort the process as it ends
    dist.destroy_process_group()
"""


def results(
    tmp_path: Path, commands: list[tuple[list[str], dict[str, str]]], engine: str, *, devices: int, nodes: int
) -> dict[str, str]:
    """Starts the commands at once, waits for them, and returns what each rank wrote."""
    script, out = tmp_path / "run.py", tmp_path / "out"
    out.mkdir()
    script.write_text(SCRIPT.format(here=str(HERE), out=str(out), engine=engine, devices=devices, nodes=nodes))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_"))}
    clean["OMP_NUM_THREADS"] = "1"
    started = [
        subprocess.Popen(
            [*command, str(script)],
            env={**clean, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environ in commands
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return {path.name: path.read_text() for path in sorted(out.iterdir())}


EXPECTED = {"rank0": "(2, 0, 0, 3.0)", "rank1": "(2, 1, 0, 3.0)"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fabric", "trainer"])
def test_lightnings_own_launcher_starts_the_other_rank(engine: str, tmp_path: Path) -> None:
    """`python train.py` with two devices on one machine: both ranks, one process group."""
    assert results(tmp_path, [([sys.executable], {})], engine, devices=2, nodes=1) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fabric", "trainer"])
def test_torchrun_starts_both_ranks(engine: str, tmp_path: Path) -> None:
    """`torchrun --nproc_per_node=2`, the real agent."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert results(tmp_path, [(torchrun, {})], engine, devices=2, nodes=1) == EXPECTED


@pytest.mark.slow
def test_two_nodes_by_hand(tmp_path: Path) -> None:
    """One command per node; here both 'nodes' are this machine."""
    by_hand = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NNODES": "2",
    }
    commands = [([sys.executable], {**by_hand, "NODE_RANK": node}) for node in "01"]
    assert results(tmp_path, commands, "fabric", devices=1, nodes=2) == {
        "rank0": "(2, 0, 0, 3.0)",
        "rank1": "(2, 1, 1, 3.0)",
    }
