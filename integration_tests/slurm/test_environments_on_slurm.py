"""Who a process is, asked in real steps and allocations of a real SLURM."""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.hostlist import expand
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import submit

pytestmark = [pytest.mark.slow, pytest.mark.full]

WHO = f"{sys.executable} -P {Path(__file__).with_name('who.py')}"


def answers(folder: Path) -> list[dict[str, Any]]:
    """What the processes said, by rank."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: (one.get("global_rank") or 0, one["host"]))


def step(cluster: Cluster, folder: Path, *options: str, words: str = "") -> list[dict[str, Any]]:
    """The answers of the tasks of one `srun`."""
    cluster.run("srun", *options, *WHO.split(), str(folder), *words.split(), cwd=folder)
    return answers(folder)


def column(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in found]


def test_a_step_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks, nodes, main address and port, the same for all, without a word of configuration."""
    found = step(cluster, tmp_path, "-N2", "--ntasks-per-node=2")
    assert column(found, "environment") == ["slurm"] * 4
    assert column(found, "global_rank") == [0, 1, 2, 3]
    assert column(found, "node_rank") == [0, 0, 1, 1]
    assert column(found, "local_rank") == [0, 1, 0, 1]
    assert column(found, "world_size") == [4] * 4
    assert column(found, "num_nodes") == [2] * 4
    assert column(found, "main_address") == [found[0]["host"]] * 4
    assert len(set(column(found, "main_port"))) == 1


def test_a_step_meets(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks find each other over the network of the cluster, by what they were told."""
    assert column(step(cluster, tmp_path, "-N2", "-n3", words="allreduce"), "sum") == [3.0] * 3


def test_nodes_with_unequal_numbers_of_tasks(cluster: Cluster, tmp_path: Path) -> None:
    """`-N2 -n4` on nodes of four CPUs: three tasks and one."""
    found = step(cluster, tmp_path, "-N2", "-n4")
    assert column(found, "local_world_size") == [3, 3, 3, 1]
    assert column(found, "node_rank") == [0, 0, 0, 1]
    assert column(found, "local_rank") == [0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["none", "pmi2", "pmix"])
def test_every_kind_of_mpi_support(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    found = step(cluster, tmp_path, f"--mpi={kind}", "-N2", "-n2", "--ntasks-per-node=1")
    assert column(found, "environment") == ["slurm", "slurm"]
    assert column(found, "global_rank") == [0, 1]


def test_one_gpu_a_task(cluster: Cluster, tmp_path: Path) -> None:
    """`--gpus-per-task`: each task sees one, whose index may be any."""
    found = step(cluster, tmp_path, "-N1", "-n2", "--gpus-per-task=1")
    assert column(found, "local_world_size") == [2, 2]
    assert sorted(column(found, "gpus")) == ["0", "1"]


def test_a_heterogeneous_job(cluster: Cluster, tmp_path: Path) -> None:
    """`srun --het-group=0,1` is one step over both components."""
    script = (
        f"#SBATCH -N1 -n1\n#SBATCH hetjob\n#SBATCH -N2 --ntasks-per-node=2\nsrun --het-group=0,1 {WHO} {tmp_path}\n"
    )
    job = submit(cluster, script, tmp_path)
    assert job.wait() == "COMPLETED", job.text()
    found = answers(tmp_path)
    assert column(found, "global_rank") == [0, 1, 2, 3, 4]
    assert column(found, "world_size") == [5] * 5
    assert column(found, "local_world_size") == [1, 2, 2, 2, 2]
    assert len(set(column(found, "main_address"))) == 1


def test_tasks_of_an_array(cluster: Cluster, tmp_path: Path) -> None:
    """Each is a job of its own, with a port of its own."""
    job = submit(cluster, f"srun {WHO} {tmp_path}\n", tmp_path, "--array=0-1", "-n2", "-N1")
    job.wait("COMPLETED")
    found = answers(tmp_path)
    assert column(found, "global_rank") == [0, 0, 1, 1]
    assert len(set(column(found, "main_port"))) == 2


@pytest.mark.parametrize(
    "command",
    [
        "salloc -N2 -n2 {who}",
        "srun -n1 --pty {shell}",
        "sbatch --wait -N2 -n2 --output=/dev/null --wrap '{who}'",
    ],
    ids=["salloc", "a shell of srun", "batch script"],
)
def test_an_allocation_is_no_step(cluster: Cluster, tmp_path: Path, command: str) -> None:
    """Shells, notebooks and scripts live in allocations, and are ranks of nothing."""
    who = f"{WHO} {tmp_path}"
    shell = f'bash -c "{who}; true"'
    # `--pty` wants a terminal: script(1) gives it one.
    cluster.run("script", "-qec", command.format(who=who, shell=shell), "/dev/null", cwd=tmp_path)
    (found,) = answers(tmp_path)
    assert found["environment"] == "lightning"
    assert "slurm" not in found["claims"]


def test_srun_in_a_shell_of_srun(cluster: Cluster, tmp_path: Path) -> None:
    """It is a step, whatever it inherits from the shell."""
    inner = f"srun --overlap -n1 {WHO} {tmp_path}"
    cluster.run("script", "-qec", f"srun -n1 --pty bash -c '{inner}; true'", "/dev/null", cwd=tmp_path)
    assert column(answers(tmp_path), "environment") == ["slurm"]


def test_torchrun_in_a_step(cluster: Cluster, tmp_path: Path) -> None:
    """The innermost launcher says who a process is."""
    torchrun = f"{Path(sys.executable).parent}/torchrun --standalone --nproc-per-node=2"
    cluster.run("srun", "-N1", "-n1", *torchrun.split(), *WHO.split()[2:], str(tmp_path), cwd=tmp_path)
    found = answers(tmp_path)
    assert column(found, "environment") == ["torchelastic"] * 2
    assert column(found, "global_rank") == [0, 1]
    assert "slurm" in found[0]["claims"]


def test_two_steps_share_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """At the same time, of one job: another port each, and both meet."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    steps = "\n".join(f"srun --overlap -N1 -n2 {WHO} {tmp_path}/{name} allreduce &" for name in "ab")
    job = submit(cluster, f"{steps}\nwait\n", tmp_path, "-N1", "-n2")
    assert job.wait() == "COMPLETED", job.text()
    found = [answers(tmp_path / name) for name in "ab"]
    assert [column(one, "sum") for one in found] == [[2.0, 2.0]] * 2
    assert len({one["main_port"] for one in [*found[0], *found[1]]}) == 2


NESTED = """
import os, subprocess, sys
from fairlead_environments import clean_environment
if os.environ["SLURM_PROCID"] == "0":
    subprocess.run(sys.argv[1:], env=clean_environment(os.environ), check=True)
"""


@pytest.mark.parametrize("command", ["srun -N2 -n2", "sbatch --wait -N2 -n2 --output=nested.out"])
def test_a_job_from_within_a_job(cluster: Cluster, tmp_path: Path, command: str) -> None:
    """Without the outer step's variables it is a job of its own, with a shape of its own."""
    outer = step(cluster, tmp_path, "-N1", "-n1")[0]
    next(tmp_path.glob("*.json")).unlink()
    who = [*WHO.split(), str(tmp_path)]
    words = [*command.split(), *(["--wrap", f"srun {' '.join(who)}"] if command.startswith("sbatch") else who)]
    cluster.run("srun", "-N1", "-n2", "--mem-per-cpu=100", sys.executable, "-c", NESTED, *words, cwd=tmp_path)
    found = answers(tmp_path)
    assert column(found, "world_size") == [2, 2]
    assert column(found, "num_nodes") == [2, 2]
    assert len(set(column(found, "job"))) == 1
    assert int(found[0]["job"]) > int(outer["job"]) + 1  # that one was the step that asked


def test_node_lists_are_those_of_scontrol(cluster: Cluster, tmp_path: Path) -> None:
    """Two thousand generated lists: several brackets, padding, ranges and single numbers."""
    generator = random.Random(55)
    lists = [_hostlist(generator) for _ in range(2000)]
    script = tmp_path / "script"  # too long for an argument
    script.write_text("".join(f"scontrol show hostnames '{one}'; echo -\n" for one in lists))
    said = cluster.run("bash", str(script))
    names = [block.split() for block in said.split("-\n")[:-1]]
    assert [text for text, one in zip(lists, names, strict=True) if not one] == []
    assert [expand(text) for text in lists] == names


def _hostlist(generator: random.Random) -> str:
    """What scontrol 22.05 takes; it refuses text behind the last bracket, which `expand` understands as well."""

    def word() -> str:
        return "n" + "".join(generator.choices(string.ascii_lowercase + "-", k=generator.randint(0, 2))) + "a"

    def numbers() -> str:
        parts = []
        for _ in range(generator.randint(1, 3)):
            low, width = generator.randint(0, 120), generator.choice([1, 2, 3])
            text = f"{low:0{width}d}"
            high = f"{low + generator.randint(0, 4):0{len(text)}d}"
            parts.append(text if generator.random() < 0.4 else f"{text}-{high}")
        return f"[{','.join(parts)}]"

    def entry() -> str:
        return word() + word().join(numbers() for _ in range(generator.randint(0, 3)))

    return ",".join(entry() for _ in range(generator.randint(1, 3)))


RANKS_OF_A_LAUNCHER = """
import json, os, pathlib, socket, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
found = {name: os.environ.get(name) for name in names} | {"host": socket.gethostname()}
pathlib.Path(sys.argv[1], f"{found['RANK']}.json").write_text(json.dumps(found))
if sys.argv[2:] == ["fail"] and found["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(0.5 if found["RANK"] == "3" else 60)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("tasks", "words"), [("2", ()), ("1", ("--nproc", "2", "--start-method", "spawn"))], ids=["ranks", "launchers"]
)
def test_fairlead_launch_in_a_step(cluster: Cluster, tmp_path: Path, tasks: str, words: tuple[str, ...]) -> None:
    """Each task is a rank, or the launcher of its node: nothing to type. Launchers start all again when one fails."""
    script = tmp_path / "train.py"
    script.write_text(RANKS_OF_A_LAUNCHER)
    launch = [sys.executable, "-m", "fairlead", "launch", *words, str(script), str(tmp_path)]
    said = cluster.run("srun", "-N2", f"--ntasks-per-node={tasks}", *launch, *(["fail"] if words else []), cwd=tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert column(found, "RANK") == ["0", "1", "2", "3"]
    assert column(found, "WORLD_SIZE") == ["4"] * 4
    assert column(found, "LOCAL_RANK") == ["0", "1", "0", "1"]
    assert column(found, "MASTER_ADDR") == [found[0]["host"]] * 4
    assert len(set(column(found, "MASTER_PORT"))) == 1
    assert len(set(column(found, "host"))) == 2
    assert column(found, "TORCHELASTIC_RESTART_COUNT") == (["1"] * 4 if words else [None] * 4), said
