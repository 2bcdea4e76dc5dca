"""Nested launches do not see the job that they are started from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead import FairleadError
from fairlead.detect import ChosenEnvironment
from fairlead_environments import (
    DEVICE_VARIABLES,
    clean_environment,
    remove_launcher_environment_variables,
    remove_lsf_environment_variables,
    remove_slurm_environment_variables,
)
from fairlead_environments.launchers import LAUNCHERS, Launcher
from fairlead_environments.lsf.hosts import idle_job as idle_lsf_job
from fairlead_environments.scrubbing import HiddenVariables
from fairlead_environments.slurm.step import idle_allocation

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Recorded = Callable[[str], dict[str, str]]

NAMES = sorted(path.name for path in (Path(__file__).parent / "recorded" / "slurm").iterdir())


def variables(text: str) -> dict[str, str]:
    """`A=1 B=2` as a mapping."""
    return dict(word.split("=", 1) for word in text.split())


# What the other tests of this folder use, by the launcher that sets it.
RANKS = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500"
LAUNCHED: list[tuple[Launcher, str, str]] = [
    (
        "torchrun",
        "torchelastic",
        f"{RANKS} GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_WORLD_SIZE=4 ROLE_NAME=default "
        "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 "
        "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_ERROR_FILE=/tmp/e TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM",
    ),
    (  # as `mpirun -n 1 env` of Debian's Open MPI 4.1.4 shows them
        "mpi",
        "mpi",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
        "OMPI_COMM_WORLD_NODE_RANK=0 OMPI_UNIVERSE_SIZE=2 OMPI_NUM_APP_CTX=1 OMPI_FIRST_RANKS=0 "
        "OMPI_APP_CTX_NUM_PROCS=1 OMPI_COMMAND=env OMPI_FILE_LOCATION=/tmp/0 OMPI_MCA_pmix=^s1,s2,cray,isolated "
        "OMPI_MCA_orte_precondition_transports=9c-cf OMPI_MCA_orte_hnp_uri=12.0;tcp://192.0.2.2:5 "
        "OMPI_MCA_orte_local_daemon_uri=12.0;tcp://192.0.2.2:5 OMPI_MCA_orte_launch=1 OMPI_MCA_ess=^singleton "
        "OMPI_MCA_ess_base_jobid=12 OMPI_MCA_ess_base_vpid=0 OMPI_MCA_orte_ess_node_rank=0 "
        "OMPI_MCA_shmem_RUNTIME_QUERY_hint=mmap OMPI_MCA_initial_wdir=/ OMPI_MCA_mpi_oversubscribe=0 "
        "PMIX_NAMESPACE=12 PMIX_RANK=0 PMIX_ID=12.0 PMIX_SERVER_URI4=12.0;tcp4://127.0.0.1:5 PMIX_VERSION=4.2.2rc2",
    ),
    ("mpi", "mpi", "PMI_RANK=1 PMI_SIZE=2 PMI_FD=7 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 HYDI_CONTROL_FD=5"),
    (
        "mpi",
        "mpi",
        "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
    ),
    ("mpi", "mpi", "PMIX_RANK=1 PMIX_NAMESPACE=prterun-n1-7@1 PRTE_LAUNCHED=1"),
    (
        "lsf",
        "lsf",
        "LSB_JOBID=4711 LSB_HOSTS=b3,h1,h2 JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 "
        "JSM_NAMESPACE_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=jsm",
    ),
    ("lsf", "lsf", "LSB_JOBID=4712 LSB_HOSTS=h1 LSF_PM_TASKID=1"),
    (
        "lsf",
        "lightning",
        "LSB_JOBID=4713 LSB_MCPU_HOSTS=h1,2,h2,2 LSB_JOBINDEX=3 LSB_BATCH_JID=4713[3] LSB_DJOB_NUMPROC=4 "
        "LSB_DJOB_RANKFILE=/r LSB_DJOB_HOSTFILE=/h LSB_AFFINITY_HOSTFILE=/a LSB_QUEUE=normal LSB_RESTART=Y "
        "LS_JOBPID=11 LS_SUBCWD=/home LS_EXEC_T=START LSF_INVOKE_CMD=bsub LSF_PJL_TYPE=openmpi BSUB_BLOCK=1",
    ),
    (
        "kubeflow",
        "kubeflow",
        "PET_NNODES=3 PET_NPROC_PER_NODE=4 PET_NODE_RANK=2 PET_MASTER_ADDR=j-0 PET_MASTER_PORT=29500",
    ),
    ("kubeflow", "kubeflow", "MASTER_ADDR=j-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=4"),
    ("kubernetes", "kubernetes", "JOB_COMPLETION_INDEX=1 MASTER_ADDR=j-0.j MASTER_PORT=29500 WORLD_SIZE=8 NNODES=2"),
    ("manual", "manual", "MASTER_ADDR=a NODE_RANK=1 NNODES=4"),
    ("lightning", "lightning", f"{RANKS.replace('=a', '=127.0.0.1').replace('RANK=3 ', '', 1)} NODE_RANK=0"),
    ("lightning", "lightning", "LOCAL_RANK=0 LT_CLI_USED=1 LT_DEVICES=2 LT_NUM_NODES=1 LT_STRATEGY=ddp"),
    (
        "fairlead",
        "lightning",
        "FAIRLEAD_LAUNCHED=1 FAIRLEAD_RUN={} FAIRLEAD_STORE_FD=5 FAIRLEAD_REPORT_FD=6 FAIRLEAD_ALIVE_FD=7 "
        f"NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR=/x {RANKS} NODE_RANK=1",
    ),
    ("fairlead", "manual", f"FAIRLEAD_ENVIRONMENT=manual {RANKS}"),
]

KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}

KEPT = variables(
    # The schedulers' commands: where the cluster is, and who asks.
    "SLURM_CONF=/etc/slurm.conf SLURM_CONF_SERVER=ctl:6817 SLURM_JWT=token SLURM_SACK_SOCKET=/s SLURM_CLUSTERS=a "
    "LSF_ENVDIR=/l LSF_SERVERDIR=/l LSF_BINDIR=/l LSF_LIBDIR=/l LSF_VERSION=10.1 LSF_LOGDIR=/l LSF_EGO_ENVDIR=/l "
    "XLSF_UIDDIR=/l EGO_TOP=/l EGO_BINDIR=/l EGO_CONFDIR=/l EGO_LIBDIR=/l EGO_SERVERDIR=/l BINARY_TYPE=x86 "
    # How they print and fail.
    "SQUEUE_FORMAT=%i SINFO_FORMAT=%N SACCT_FORMAT=JobID SCANCEL_INTERACTIVE=1 SLURM_TIME_FORMAT=relative "
    "SLURM_DEBUG_FLAGS=gres SLURM_EXIT_ERROR=9 SLURM_JSON=compact LSB_BJOBS_FORMAT=jobid BSUB_QUIET=1 "
    # A person's defaults for all jobs.
    "SBATCH_ACCOUNT=me SLURM_ACCOUNT=me SALLOC_ACCOUNT=me SBATCH_PARTITION=p SLURM_QOS=q SBATCH_RESERVATION=r "
    "SBATCH_EXPORT=NONE LSB_DEFAULTQUEUE=q LSB_DEFAULTPROJECT=p LSB_DEFAULT_JOBGROUP=/g "
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_MCA_btl=^openib PMIX_MCA_gds=hash I_MPI_FABRICS=shm HYDRA_BOOTSTRAP=ssh "
    # The machine, the devices of this process, and what has nothing to do with launchers.
    "CUDA_VISIBLE_DEVICES=1 ROCR_VISIBLE_DEVICES=1 GPU_DEVICE_ORDINAL=1 ZE_AFFINITY_MASK=1 NCCL_DEBUG=INFO "
    "TPU_WORKER_ID=0 PL_GLOBAL_SEED=1 OMP_NUM_THREADS=4 PATH=/bin HOME=/root LS_COLORS=di=34 MY_RANK=1 RANKING=1"
)

# Inputs of srun and sbatch that a job has inherited: a nested job would get the outer one's shape.
SHAPE = variables(
    "SLURM_NTASKS= SLURM_CPU_BIND= SLURM_CPU_BIND_LIST= SLURM_MEM_PER_CPU= SLURM_MEM_PER_NODE= "
    "SLURM_TRES_PER_TASK= SLURM_CPUS_PER_TASK= SRUN_CPUS_PER_TASK= SLURM_GPUS= SLURM_HINT= SLURM_EXPORT_ENV= "
    "SLURM_HOSTFILE= SLURM_UMASK= SLURM_TIMELIMIT= SBATCH_TIMELIMIT= SBATCH_JOB_NAME= SBATCH_MEM_BIND= "
    "SBATCH_GPUS= SALLOC_GPUS= SRUN_DEBUG= SRUN_CONTAINER= SLURM_WORKING_CLUSTER= SLURM_RLIMIT_NOFILE= "
    "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image= _SLURM_SPANK_OPTION_pyxis_container_image= "
    "SLURM_JOB_ID_HET_GROUP_1= SLURM_JOB_ACCOUNT= SLURM_A_LATER_RELEASE="
)


@pytest.fixture
def inside() -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Puts variables into `os.environ` for a test."""
    with mock.patch.dict(os.environ, {}):
        yield os.environ.update


def seen_by_a_child() -> dict[str, str]:
    """The environment that a child process really gets."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded: dict[str, str] = json.loads(found.stdout)
    return loaded


def assert_nothing_is_seen(environ: Mapping[str, str], choose: Choose) -> None:
    chosen = choose(environ)
    assert set(chosen.claims) == {"lightning"}
    assert chosen.setting.value == "lightning"
    assert not chosen.findings
    assert not chosen.inside_job
    assert chosen.topology is not None
    assert not chosen.topology.launched
    assert idle_allocation(environ) is None
    assert idle_lsf_job(environ) is None


# -- what is hidden, and what is not


@pytest.mark.parametrize("launchers", [("slurm",), ()], ids=["slurm", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_recorded_slurm_job_is_left(
    name: str, launchers: tuple[Launcher, ...], recorded: Recorded, choose: Choose
) -> None:
    """Any process of a job, step, shell or array; only the way to the cluster and the devices remain."""
    environ = recorded(f"slurm/{name}")
    clean = clean_environment(environ, *launchers)
    assert_nothing_is_seen(clean, choose)
    assert clean["SLURM_CONF"] == environ["SLURM_CONF"]
    assert set(clean) <= {"SLURM_CONF", "HOSTNAME", *DEVICE_VARIABLES}
    assert set(DEVICE_VARIABLES) & set(environ) <= set(clean)


@pytest.mark.parametrize("all_of_them", [False, True], ids=["named", "all"])
@pytest.mark.parametrize(("launcher", "claimed", "text"), LAUNCHED, ids=[f"{h[0]}: {h[2][:24]}" for h in LAUNCHED])
def test_nothing_of_another_launcher_is_left(
    launcher: Launcher, claimed: str, text: str, all_of_them: bool, choose: Choose
) -> None:
    """The launcher is seen before, and not a variable of it is left after."""
    environ = {**variables(text.replace(",", "\0")), **(KUBERNETES if launcher.startswith("kube") else {})}
    environ = {name: value.replace("\0", " " if name.startswith("LSB_") else ",") for name, value in environ.items()}
    assert claimed in choose(environ).claims
    clean = clean_environment(environ, *(() if all_of_them else (launcher,)))
    assert_nothing_is_seen(clean, choose)
    assert set(clean) <= set(KUBERNETES)


@pytest.mark.parametrize("name", KEPT)
def test_what_the_commands_need_and_a_person_sets_is_kept(name: str) -> None:
    """No launcher hides it."""
    assert clean_environment({name: KEPT[name]}) == {name: KEPT[name]}


@pytest.mark.parametrize("name", SHAPE)
def test_the_shape_of_the_outer_job_is_not_handed_on(name: str) -> None:
    assert clean_environment({name: "1"}, "slurm") == {}


def test_one_launcher_is_hidden_without_the_others() -> None:
    environ = variables("SLURM_JOB_ID=1 LSB_JOBID=2 RANK=3 TORCHELASTIC_RUN_ID=none")
    assert set(clean_environment(environ, "slurm")) == {"LSB_JOBID", "RANK", "TORCHELASTIC_RUN_ID"}
    assert set(clean_environment(environ, "lsf", "torchrun")) == {"SLURM_JOB_ID"}


def test_names_are_kept_or_hidden_on_request() -> None:
    environ = variables("SLURM_MPI_TYPE=pmix SLURM_JOB_ID=1 CUDA_VISIBLE_DEVICES=1 MY_PORT=5 MY_HOST=a")
    assert set(clean_environment(environ, keep=["SLURM_MPI_TYPE"], also=DEVICE_VARIABLES)) == {
        "SLURM_MPI_TYPE",
        "MY_PORT",
        "MY_HOST",
    }
    assert set(clean_environment(environ, also="MY_*", keep="SLURM_*")) == {*environ} - {"MY_PORT", "MY_HOST"}
    assert clean_environment({"A": "1"}, also=["A"], keep=["A"]) == {"A": "1"}


def test_an_unknown_launcher_is_named_at_once() -> None:
    """Not only when the block is entered."""
    calls: list[Callable[..., object]] = [partial(clean_environment, {}), remove_launcher_environment_variables]
    for call in calls:
        with pytest.raises(FairleadError, match="unknown launcher 'slrum'") as raised:
            call("slrum")
        assert raised.value.fix == "write 'slurm'"
    with pytest.raises(FairleadError) as raised:
        clean_environment({}, "SGE")  # type: ignore[arg-type]
    assert all(name in str(raised.value.fix) for name in LAUNCHERS)


WORDS = [*KEPT, *SHAPE, *(name for _, _, text in LAUNCHED for name in variables(text))]
ENVIRONS = st.dictionaries(
    st.sampled_from(WORDS) | st.text("ABL_SM", min_size=1, max_size=8), st.text("a=\n", max_size=3)
)


@given(ENVIRONS, st.sets(st.sampled_from(LAUNCHERS)))
def test_a_copy_is_a_part_of_the_original(environ: dict[str, str], launchers: set[Launcher]) -> None:
    """Pure: the mapping is not changed, no value is, and a second time changes nothing."""
    before = dict(environ)
    clean = clean_environment(environ, *launchers)
    assert environ == before
    assert clean is not environ
    assert clean.items() <= environ.items()
    assert clean_environment(clean, *launchers) == clean
    assert clean_environment(environ).items() <= clean.items()


# -- blocks


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (remove_slurm_environment_variables, "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 PMIX_RANK=1 SLURM_EMPTY="),
        (remove_lsf_environment_variables, "LSB_JOBID=7 LSF_PM_TASKID=1 JSM_NAMESPACE_RANK=0 PMIX_RANK=1"),
        (remove_launcher_environment_variables, f"{RANKS} SLURM_JOB_ID=7 LSB_JOBID=7"),
    ],
)
@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_hides_and_restores(
    block: Callable[[], HiddenVariables],
    text: str,
    ending: type[BaseException] | None,
    inside: Callable[[Mapping[str, str]], None],
) -> None:
    """For this process and real children, exactly, also after an exception."""
    job = variables(text)
    inside({**job, "SLURM_CONF": "/c", "LSF_ENVDIR": "/l", "UNRELATED": "1"})
    before = dict(os.environ)
    with nullcontext() if ending is None else pytest.raises(ending):  # noqa: SIM117
        with block() as hidden:
            assert dict(os.environ) == {name: value for name, value in before.items() if name not in job}
            if ending is None:
                assert not set(job) & set(seen_by_a_child())
            assert hidden == job
            if ending is not None:
                raise ending
    assert dict(os.environ) == before
    assert job.items() <= seen_by_a_child().items()


def test_variables_that_the_block_sets(inside: Callable[[Mapping[str, str]], None]) -> None:
    """A launcher's are as before, whatever a launch in the block exported; all others stay as the block left them."""
    inside(variables("RANK=3 SLURM_JOB_ID=7 GONE=1"))
    os.environ.pop("MASTER_PORT", None)
    with remove_launcher_environment_variables():
        os.environ.update(
            variables("RANK=0 MASTER_PORT=29501 SLURM_JOB_ID=8 MINE=1 CUDA_VISIBLE_DEVICES=0 SLURM_CONF=/d")
        )
        del os.environ["GONE"]
    assert os.environ["RANK"] == "3"
    assert os.environ["SLURM_JOB_ID"] == "7"
    assert "MASTER_PORT" not in os.environ
    assert (os.environ["MINE"], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURM_CONF"]) == ("1", "0", "/d")
    assert "GONE" not in os.environ


def test_blocks_in_blocks(inside: Callable[[Mapping[str, str]], None]) -> None:
    inside(variables("SLURM_JOB_ID=7 LSB_JOBID=8"))
    before = dict(os.environ)
    with remove_slurm_environment_variables() as outer:
        os.environ.update(SLURM_JOB_ID="inner", RANK="1")
        with remove_launcher_environment_variables() as inner:
            assert inner == {"SLURM_JOB_ID": "inner", "LSB_JOBID": "8", "RANK": "1"}
            assert not set(inner) & set(os.environ)
        assert os.environ["SLURM_JOB_ID"] == "inner"
        assert os.environ["LSB_JOBID"] == "8"
    assert outer == {"SLURM_JOB_ID": "7"}
    assert dict(os.environ) == {**before, "RANK": "1"}  # no variable of SLURM, so it stays


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_blocks_that_overlap_lose_nothing(order: list[int], inside: Callable[[Mapping[str, str]], None]) -> None:
    """Blocks of several threads end in any order: hidden until the last has ended, then as before."""
    inside(variables("SLURM_JOB_ID=7 LSB_JOBID=8 RANK=3"))
    before = dict(os.environ)
    stacks = [ExitStack() for _ in range(3)]
    stacks[0].enter_context(remove_slurm_environment_variables())
    os.environ.update(SLURM_SET_IN_THE_FIRST="1")
    stacks[1].enter_context(remove_launcher_environment_variables("slurm", "torchrun"))
    stacks[2].enter_context(remove_launcher_environment_variables())
    hiding = [{"SLURM_JOB_ID"}, {"SLURM_JOB_ID", "RANK"}, {"SLURM_JOB_ID", "LSB_JOBID", "RANK"}]
    left = {0, 1, 2}
    for index in order:
        stacks[index].close()
        left.discard(index)
        hidden = set().union(*(hiding[other] for other in left))
        assert {"SLURM_JOB_ID", "LSB_JOBID", "RANK"} - set(os.environ) == hidden
    assert dict(os.environ) == before


def test_threads_that_submit_at_once(inside: Callable[[Mapping[str, str]], None]) -> None:
    """A pool that submits jobs: no block sees the outer job, and it is there at the end."""
    inside(variables("SLURM_JOB_ID=7 SLURM_PROCID=1"))
    before = dict(os.environ)
    seen: list[str] = []
    start = threading.Barrier(8)

    def submit() -> None:
        start.wait(timeout=60)
        for _ in range(200):
            with remove_slurm_environment_variables():
                seen.extend({"SLURM_JOB_ID", "SLURM_PROCID"} & set(os.environ.copy()))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert seen == []
    assert dict(os.environ) == before


def test_as_a_decorator(inside: Callable[[Mapping[str, str]], None]) -> None:
    """Each call is a block of its own, also a recursive one."""
    inside(variables("SLURM_JOB_ID=7"))

    @remove_slurm_environment_variables()
    def launch(depth: int) -> list[str | None]:
        found = os.environ.get("SLURM_JOB_ID")
        os.environ.update(SLURM_JOB_ID=str(depth))
        below = launch(depth - 1) if depth else []
        return [found, os.environ["SLURM_JOB_ID"], *below]

    for _ in range(2):
        assert launch(2) == [None, "2", None, "1", None, "0"]
        assert os.environ["SLURM_JOB_ID"] == "7"


@pytest.mark.skipif(
    shutil.which("mpirun") is None and not os.environ.get("CI"), reason="needs Open MPI's mpirun (Debian: openmpi-bin)"
)
def test_a_real_mpirun_inside_a_real_mpirun() -> None:
    """Open MPI refuses the inner one ("mpirun does not support recursive calls") until its variables are hidden."""
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n"]
    code = (
        "import os, subprocess; from fairlead_environments import clean_environment\n"
        f"inner = {[*mpirun, '2', 'printenv', 'OMPI_COMM_WORLD_RANK']}\n"
        "for environ in (None, clean_environment(os.environ)):\n"
        "    ran = subprocess.run(inner, env=environ, capture_output=True, text=True, timeout=60)\n"
        "    print(ran.returncode != 0, sorted(ran.stdout.split()))"
    )
    command = [*mpirun, "1", sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    assert found.stdout == "True []\nFalse ['0', '1']\n"


def test_it_needs_neither_torch_nor_a_plugin() -> None:
    """For any script."""
    code = (
        "import sys; from fairlead_environments import clean_environment, remove_slurm_environment_variables\n"
        "clean_environment({}); print(sorted({'torch', 'lightning', 'numpy', 'mpi4py'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "[]\n"
