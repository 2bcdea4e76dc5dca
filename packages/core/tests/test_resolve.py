"""From a config and an environment to decisions, each with its reason; detection and the capability table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from fairlead import (
    AcceleratorConfigBase,
    AcceleratorPlugin,
    CheckpointIOConfigBase,
    CheckpointIOPlugin,
    Claim,
    Devices,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    Finding,
    PluginManager,
    RequeueConfigBase,
    RequeuePlugin,
    Resolution,
    ResourcesConfig,
    Setting,
    Specificity,
    StrategyConfigBase,
    StrategyPlugin,
    Topology,
    TrainerConfig,
    Unused,
    hookimpl,
)
from fairlead.by_hand import commands_by_hand
from fairlead.checks import check_trainer
from fairlead.detect import choose_environment, find_jobs
from fairlead.errors import ConfigError
from fairlead.install import install_line
from fairlead.interfaces import Job
from fairlead.testing import FakeEntryPoint, FakeEnviron, stand_ins
from fairlead.threads import choose_threads

IN_JOB = {"CLUSTER_RANK": "3", "CLUSTER_WORLD": "8", "CLUSTER_NODES": "4"}


def first_job(environ: Mapping[str, str], plugins: PluginManager, **more: Any) -> Job | None:
    """The job that counts."""
    return next(iter(find_jobs(environ, plugins, **more).values()), None)


class ClusterEnvironmentConfig(EnvironmentConfigBase):
    """A cluster."""

    name: Literal["cluster"] = "cluster"


class Cluster(EnvironmentPlugin):
    """Four nodes with two ranks each."""

    config = ClusterEnvironmentConfig
    requeue = "cluster"

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """A task of the cluster's."""
        return Claim("CLUSTER_RANK") if "CLUSTER_RANK" in environ else None

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the cluster's variables."""
        if "CLUSTER_RANK" not in environ:
            raise ConfigError("CLUSTER_RANK is not set")
        rank = int(environ["CLUSTER_RANK"])
        world, nodes = int(environ["CLUSTER_WORLD"]), int(environ["CLUSTER_NODES"])
        return Topology(
            True,
            num_nodes=Setting(nodes, "CLUSTER_NODES"),
            local_world_size=Setting(world // nodes, "CLUSTER_WORLD / CLUSTER_NODES"),
            world_size=Setting(world, "CLUSTER_WORLD"),
            global_rank=Setting(rank, "CLUSTER_RANK"),
            node_rank=Setting(rank // 2, "CLUSTER_RANK"),
            local_rank=Setting(rank % 2, "CLUSTER_RANK"),
            main_address=Setting("node1", "CLUSTER_HOSTS"),
        )

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """The job around its tasks."""
        return Job(f"cluster:{environ['CLUSTER_JOB']}") if "CLUSTER_JOB" in environ else None

    @hookimpl
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """A job of several nodes, in the process that runs its script."""
        nodes = environ.get("CLUSTER_NODES", "1")
        started = "CLUSTER_RANK" in environ
        return None if nodes == "1" or started else Unused(f"the cluster gave {nodes} nodes", "no crun", "crun")


class AgentEnvironmentConfig(EnvironmentConfigBase):
    """An agent."""

    name: Literal["agent"] = "agent"


class Agent(EnvironmentPlugin):
    """An agent inside a task of the cluster's."""

    config = AgentEnvironmentConfig
    specificity = Specificity.AGENT

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """A worker of the agent's."""
        return Claim("AGENT_ID", self.specificity) if "AGENT_ID" in environ else None


class ClusterRequeueConfig(RequeueConfigBase):
    """The cluster's own."""

    name: Literal["cluster"] = "cluster"


class ClusterRequeue(RequeuePlugin):
    """The cluster's own."""

    config = ClusterRequeueConfig


class CUDAAcceleratorConfig(AcceleratorConfigBase):
    """A GPU."""

    name: Literal["cuda"] = "cuda"


class CUDA(AcceleratorPlugin):
    """GPUs, as many as FAKE_GPUS says."""

    config = CUDAAcceleratorConfig
    priority = 10
    backend = "nccl"

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """Counts them."""
        count = int(environ.get("FAKE_GPUS", "0"))
        return Devices(count, "FAKE_GPUS", ("H100",) * count)


@pytest.fixture
def plugins(fairlead_plugins: Callable[..., PluginManager]) -> PluginManager:
    """A CPU, a GPU, a cluster and an agent."""
    return fairlead_plugins(
        stand_ins(), Cluster(), Agent(), ClusterRequeue(), CUDA(), {"accelerator.gpu": CUDA(name="cuda")}
    )


def resolve(plugins: PluginManager, environ: Mapping[str, str] | None = None, **trainer: Any) -> Resolution:
    """Resolves and checks a trainer; `findings` holds both."""
    resolution, findings = check_trainer(TrainerConfig(**trainer), environ=FakeEnviron(environ or {}), plugins=plugins)
    object.__setattr__(resolution, "findings", tuple(findings))
    return resolution


def codes(resolution: Resolution) -> list[tuple[str, str]]:
    """Severity and code of each finding, without the one of every scheduler's job until signals are handled."""
    return [(f.severity, f.code) for f in resolution.findings]


def shown(resolution: Resolution, *names: str) -> dict[str, tuple[Any, str]]:
    """Some settings with their reasons."""
    return {name: (resolution.settings[name].value, resolution.settings[name].reason) for name in names}


def test_a_laptop(plugins: PluginManager) -> None:
    """Every setting of CLI.md's contract has a value and a reason."""
    resolution = resolve(plugins)
    assert codes(resolution) == []
    names = [
        "environment",
        "accelerator",
        "devices",
        "num_nodes",
        "world_size",
        "global_rank",
        "local_rank",
        "node_rank",
        "main_address",
        "main_port",
        "strategy",
        "precision",
        "checkpoint_io",
        "requeue",
        "resume",
    ]
    assert set(names) <= resolution.as_dict().keys()
    assert all(setting.reason for setting in resolution.settings.values())
    assert shown(resolution, "environment", "accelerator", "devices", "strategy", "precision") == {
        "environment": ("lightning", "nothing says otherwise"),
        "accelerator": ("cpu", "no other device was found"),
        "devices": (1, "one process uses all cores through threads"),
        "strategy": ("single_device", "one rank"),
        "precision": ("32-true", "the default"),
    }


def test_the_best_device_is_taken(plugins: PluginManager) -> None:
    resolution = resolve(plugins, {"FAKE_GPUS": "4"})
    assert shown(resolution, "accelerator", "devices", "world_size", "strategy", "backend") == {
        "accelerator": ("cuda", "4 found by FAKE_GPUS"),
        "devices": (4, "FAKE_GPUS"),
        "world_size": (4, "4 devices x 1 nodes"),
        "strategy": ("ddp", "world_size=4"),
        "backend": ("nccl", "for the device cuda"),
    }


def test_gpu_is_a_name_of_cuda(plugins: PluginManager) -> None:
    resolution = resolve(plugins, {"FAKE_GPUS": "2"}, accelerator="gpu", devices=-1)
    assert (resolution.accelerator, resolution.devices) == (CUDAAcceleratorConfig(), 2)
    assert resolution.value("accelerator") == "cuda"


@pytest.mark.parametrize(
    ("devices", "asked"), [(9, "9 devices"), ([0, 7], "the indices [7]"), ([2], "the indices [2]"), (3, "3 devices")]
)
def test_an_unavailable_index_names_what_is_there(plugins: PluginManager, devices: Any, asked: str) -> None:
    resolution = resolve(plugins, {"FAKE_GPUS": "2"}, devices=devices)
    assert codes(resolution) == [("error", "devices-count")]
    (finding,) = resolution.findings
    assert finding.what.startswith(asked)
    assert finding.why == "found by FAKE_GPUS: H100, H100"
    assert finding.fix == "write `devices: 2` or `auto` (indices 0 to 1)"


def test_an_unavailable_accelerator_is_an_error_only_where_the_job_is_to_run(plugins: PluginManager) -> None:
    """An info on a login node, an error inside a job; what is available is named."""
    login = resolve(plugins, accelerator="cuda")
    assert codes(login) == [("info", "accelerator-unavailable")]
    assert login.findings[0].why == "FAKE_GPUS; available here: cpu"
    inside = resolve(plugins, IN_JOB, accelerator="cuda")
    assert codes(inside) == [("error", "accelerator-unavailable")]


def test_more_ranks_than_cores(plugins: PluginManager) -> None:
    assert codes(resolve(plugins, devices=9999)) == [("info", "devices-count")]
    assert codes(resolve(plugins, devices=9999, accelerator="cpu")) == [("warning", "oversubscribed")]


@pytest.mark.parametrize(("num_nodes", "world"), [(1, 8), (4, 32)])
def test_world_size_is_devices_times_nodes(plugins: PluginManager, num_nodes: int, world: int) -> None:
    resolution = resolve(plugins, {"FAKE_GPUS": "8"}, devices=8, num_nodes=num_nodes)
    assert (resolution.num_nodes, resolution.devices, resolution.world_size) == (num_nodes, 8, world)
    assert resolution.value("world_size") == world


def test_a_launcher_says_who_this_rank_is(plugins: PluginManager) -> None:
    resolution = resolve(plugins, IN_JOB)
    assert codes(resolution) == []
    assert resolution.inside_job
    assert shown(
        resolution, "environment", "num_nodes", "devices", "world_size", "global_rank", "main_address", "requeue"
    ) == {
        "environment": ("cluster", "CLUSTER_RANK"),
        "num_nodes": (4, "CLUSTER_NODES"),
        "devices": (2, "CLUSTER_WORLD / CLUSTER_NODES"),
        "world_size": (8, "CLUSTER_WORLD"),
        "global_rank": (3, "CLUSTER_RANK"),
        "main_address": ("node1", "CLUSTER_HOSTS"),
        "requeue": ("cluster", "the requeuer of cluster"),
    }


def test_explicit_numbers_are_checked_against_the_launch(plugins: PluginManager) -> None:
    """A mismatch is reported, and the launcher's number is what holds."""
    assert codes(resolve(plugins, IN_JOB, num_nodes=4, devices=2)) == []
    nodes = resolve(plugins, IN_JOB, num_nodes=2)
    assert codes(nodes) == [("error", "launch-mismatch")]
    assert nodes.findings[0].what == "trainer.num_nodes is 2, but the launcher started 4 nodes"
    assert nodes.findings[0].why == "4 comes from CLUSTER_NODES"
    assert (nodes.num_nodes, nodes.value("num_nodes")) == (4, 4)
    assert codes(resolve(plugins, IN_JOB, devices=4)) == [("error", "launch-mismatch")]
    assert codes(resolve(plugins, IN_JOB, auto_determine_num_nodes=False)) == [("error", "launch-mismatch")]
    assert codes(resolve(plugins, num_nodes=4)) == [("info", "launch-mismatch")]


def test_the_command_of_each_node_is_told(plugins: PluginManager) -> None:
    """Several nodes and no launcher: what to type where."""
    (told,) = resolve(plugins, num_nodes=2).findings
    assert told.what == "trainer.num_nodes is 2, but nothing started ranks on other nodes"
    commands = (told.fix or "").splitlines()[1:]
    assert [c.split()[1:4] for c in commands] == [["MASTER_PORT=29500", "NNODES=2", f"NODE_RANK={n}"] for n in (0, 1)]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ("/opt/bin/fairlead fit job.yaml --set trainer.devices=4", "fairlead fit job.yaml --set trainer.devices=4"),
        ("fairlead --debug fit job.yaml", "fairlead fit job.yaml"),
        ("fairlead check job.yaml --for h100 --strict --set a=1 --json", "fairlead fit job.yaml --set a=1"),
        ("/x/fairlead/__main__.py explain my:job --set=a=1", "fairlead fit my:job --set=a=1"),
        ("train.py --lr 1", "python train.py --lr 1"),
        ("/usr/bin/pytest -q", "fairlead fit JOB"),
    ],
)
def test_the_command_by_hand_is_the_one_that_trains(argv: str, command: str) -> None:
    lines = commands_by_hand(64, argv=argv.split(), host="a")
    meeting = "MASTER_ADDR=a MASTER_PORT=29500 NNODES=64"
    assert lines == [f"{meeting} NODE_RANK={rank} {command}" for rank in range(64)]


@pytest.mark.parametrize(
    ("asked", "environ", "ranks", "cpus", "threads", "reason"),
    [
        ("auto", {}, 1, 8, 8, "8 CPUs for this rank"),
        ("auto", {}, 2, 8, 4, "8 CPUs for 2 ranks on this node"),
        ("auto", {}, 16, 8, 1, "8 CPUs for 16 ranks on this node"),
        ("auto", {"OMP_NUM_THREADS": "3"}, 2, 8, 3, "OMP_NUM_THREADS"),
        ("auto", {"OMP_NUM_THREADS": "6,2"}, 2, 8, 6, "OMP_NUM_THREADS"),
        ("auto", {"OMP_NUM_THREADS": "many"}, 2, 8, 4, "8 CPUs for 2 ranks on this node"),
        (5, {"OMP_NUM_THREADS": "3"}, 2, 8, 5, "trainer.threads"),
    ],
)
def test_ranks_share_the_cpus_of_their_node(
    asked: int | str, environ: dict[str, str], ranks: int, cpus: int, threads: int, reason: str
) -> None:
    """The user's number, else no more threads than CPUs."""
    setting = choose_threads(asked, environ, ranks, cpus=cpus)
    assert (setting.value, setting.reason) == (threads, reason)


def test_a_job_is_known_whichever_environment_is_chosen(plugins: PluginManager) -> None:
    """Under an agent, and in a batch script, which no environment claims."""
    environ = {"CLUSTER_JOB": "7", "AGENT_ID": "1"}
    chosen = choose_environment("auto", environ, plugins)
    assert (chosen.setting.value, chosen.job) == ("agent", Job("cluster:7"))
    assert choose_environment("auto", {"CLUSTER_JOB": "7"}, plugins).job == Job("cluster:7")
    assert choose_environment("auto", {"AGENT_ID": "1"}, plugins).job is None


class Machine(EnvironmentPlugin):
    """Any machine; it knows some schedulers that have no environment."""

    config = AgentEnvironmentConfig

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim:
        """Always."""
        return Claim("any machine", Specificity.MACHINE)

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Any:
        """A job, or what no plugin may return."""
        return Job("guess:1") if environ.get("GUESS") == "1" else environ.get("GUESS")


def test_the_most_specific_job_counts_and_a_wrong_answer_is_passed_over() -> None:
    plugins = PluginManager(
        [FakeEntryPoint("environment.agent", Machine()), FakeEntryPoint("environment.cluster", Cluster())]
    )
    assert first_job({"GUESS": "1", "CLUSTER_JOB": "7"}, plugins) == Job("cluster:7")
    assert first_job({"GUESS": "1"}, plugins) == Job("guess:1")
    assert first_job({}, plugins) is None
    findings: list[Finding] = []
    assert first_job({"GUESS": "many", "CLUSTER_JOB": "7"}, plugins, findings=findings) == Job("cluster:7")
    assert [found.code for found in findings] == ["plugin-broken"]
    assert "fairlead_job of environment.agent gave a str, not a Job" in findings[0].what


@pytest.mark.parametrize(
    ("for_task", "cpus", "threads", "reason"),
    [
        # A task bound to its own CPUs, and one that sees all of the node's though the job has but some.
        (None, 4, 4, "4 CPUs for this rank"),
        (None, 64, 4, "8 CPUs for 2 ranks on this node"),
        (3, 64, 3, "CLUSTER_CPUS"),
        (3, 2, 2, "CLUSTER_CPUS"),
    ],
)
def test_ranks_share_the_cpus_that_their_job_has(for_task: int | None, cpus: int, threads: int, reason: str) -> None:
    """The scheduler's number, whatever the scheduler is."""
    per_rank = Setting(for_task, "CLUSTER_CPUS") if for_task is not None else None
    job = Job("cluster:1", cpus_per_rank=per_rank, cpus_on_node=Setting(8, "CLUSTER_NODE_CPUS"))
    setting = choose_threads("auto", {}, 2, job=job, cpus=cpus)
    assert (setting.value, setting.reason) == (threads, reason)


def test_resources_stand_for_the_hardware(plugins: PluginManager) -> None:
    """`check --for resources`: nothing of this machine counts."""

    def profiled(trainer: TrainerConfig, **resources: Any) -> tuple[Resolution, list[str]]:
        profile = ResourcesConfig(**resources)
        resolution, found = check_trainer(trainer, environ=IN_JOB, plugins=plugins, profile=profile)
        return resolution, [f"{f.severity} {f.code}" for f in found]

    resolution, found = profiled(TrainerConfig(), nodes=4, devices_per_node=8, device="h100")
    assert found == []
    assert (resolution.world_size, resolution.accelerator.name, resolution.num_nodes) == (32, "cuda", 4)
    assert profiled(TrainerConfig(num_nodes=2), nodes=4, device="h100")[1] == []
    assert profiled(TrainerConfig(num_nodes=8), nodes=4, device="h100")[1] == ["error profile-mismatch"]
    assert profiled(TrainerConfig(devices=9), nodes=4, devices_per_node=8, device="h100")[1] == [
        "error profile-mismatch"
    ]
    assert profiled(TrainerConfig(accelerator="cpu"), device="h100")[1] == ["error profile-mismatch"]


def test_a_named_environment_on_a_login_node(plugins: PluginManager) -> None:
    """CLI.md's own job file names `environment: {name: slurm}`; checking it before submitting finds nothing wrong."""
    resolution = resolve(plugins, environment={"name": "cluster", "auto_requeue": False})
    assert codes(resolution) == [("info", "environment-unclaimed")]
    assert resolution.settings["global_rank"] == Setting(0, "here; cluster says when it starts the ranks")
    assert shown(resolution, "environment", "requeue") == {
        "environment": ("cluster", "trainer.environment"),
        "requeue": ("none", "trainer.environment.auto_requeue=false"),
    }


def test_a_named_environment_that_did_not_start_this_run(plugins: PluginManager) -> None:
    chosen = choose_environment(ClusterEnvironmentConfig(), {}, plugins, starting=True)
    assert [(f.severity, f.code) for f in chosen.findings] == [("error", "environment-malformed")]


def test_the_most_specific_claim_wins(plugins: PluginManager) -> None:
    chosen = choose_environment("auto", {**IN_JOB, "AGENT_ID": "1"}, plugins)
    assert chosen.setting == Setting("agent", "AGENT_ID; it is inside cluster (CLUSTER_RANK)")
    assert list(chosen.claims) == ["agent", "cluster", "lightning"]


def test_a_tie_is_a_finding(plugins: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "specificity", Specificity.SCHEDULER)
    chosen = choose_environment("auto", {**IN_JOB, "AGENT_ID": "1"}, plugins)
    (finding,) = chosen.findings
    assert (finding.severity, finding.code) == ("warning", "environment-tie")
    assert chosen.setting.value == "agent"
    assert finding.why == "agent: AGENT_ID; cluster: CLUSTER_RANK"


def test_a_variable_decides_when_nothing_else_should(plugins: PluginManager) -> None:
    environ = {**IN_JOB, "AGENT_ID": "1", "FAIRLEAD_ENVIRONMENT": "cluster"}
    assert choose_environment("auto", environ, plugins).setting == Setting("cluster", "FAIRLEAD_ENVIRONMENT")
    wrong = choose_environment("auto", {"FAIRLEAD_ENVIRONMENT": "clutser"}, plugins)
    (finding,) = wrong.findings
    assert (finding.code, finding.where, finding.fix) == (
        "unknown-tag",
        "FAIRLEAD_ENVIRONMENT",
        "did you mean 'cluster'?",
    )


def test_a_malformed_variable_is_a_finding(plugins: PluginManager) -> None:
    chosen = choose_environment("auto", {**IN_JOB, "CLUSTER_WORLD": "eight"}, plugins)
    (finding,) = chosen.findings
    assert (finding.severity, finding.code) == ("error", "plugin-broken")
    assert "fairlead_topology of environment.cluster raised ValueError" in finding.what


def test_requeue_shorthands(plugins: PluginManager) -> None:
    config = resolve(plugins, IN_JOB, environment={"name": "cluster", "requeue_signal": "usr1"}).requeue
    assert config == ClusterRequeueConfig(signals=("SIGUSR1",))
    twice = resolve(plugins, IN_JOB, environment={"name": "cluster", "auto_requeue": False}, requeue="cluster")
    assert codes(twice) == [("error", "axis-set-twice")]


def test_single_device_with_several_ranks(plugins: PluginManager) -> None:
    """Of several devices it takes one; several ranks have to be asked for to be an error."""
    resolution = resolve(plugins, {"FAKE_GPUS": "2"}, strategy="single_device")
    assert codes(resolution) == []
    assert shown(resolution, "devices") == {"devices": (1, "the strategy single_device trains one rank")}
    resolution = resolve(plugins, {"FAKE_GPUS": "2"}, strategy="single_device", devices=2)
    assert codes(resolution) == [("error", "capability")]


class WaferAcceleratorConfig(AcceleratorConfigBase):
    """A wafer."""

    name: Literal["wafer"] = "wafer"


class Wafer(AcceleratorPlugin):
    """As many as WAFERS says."""

    config = WaferAcceleratorConfig

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """Counts them."""
        count = int(environ.get("WAFERS", "0"))
        return Devices(count, "WAFERS", ("wafer",) * count)


class WaferStrategyConfig(StrategyConfigBase):
    """All wafers of a machine."""

    name: Literal["wafer"] = "wafer"


class WaferStrategy(StrategyPlugin):
    """One process drives all of them, and writes its own checkpoints."""

    config = WaferStrategyConfig
    accelerator = "wafer"
    checkpoint_io = "wafer"
    one_process = True


class WaferCheckpointIOConfig(CheckpointIOConfigBase):
    """Of wafers."""

    name: Literal["wafer"] = "wafer"


class WaferCheckpointIO(CheckpointIOPlugin):
    """Of wafers."""

    config = WaferCheckpointIOConfig


def test_what_a_strategy_leaves_no_choice_in_is_resolved(fairlead_plugins: Callable[..., PluginManager]) -> None:
    """By what a third party's plugin says of itself; what is asked for stays as it is."""
    plugins = fairlead_plugins(stand_ins(), CUDA(), Wafer(), WaferStrategy(), WaferCheckpointIO())
    resolution = resolve(plugins, {"FAKE_GPUS": "8", "WAFERS": "4"}, strategy="wafer")
    assert codes(resolution) == []
    assert shown(resolution, "accelerator", "devices", "world_size", "checkpoint_io") == {
        "accelerator": ("wafer", "the strategy wafer drives no other"),
        "devices": (4, "WAFERS"),
        "world_size": (1, "one process drives all 4 devices (strategy wafer)"),
        "checkpoint_io": ("wafer", "the strategy wafer accepts no other"),
    }
    assert (resolution.devices, resolution.devices_per_rank, resolution.world_size) == (1, 4, 1)
    several = resolve(plugins, {"WAFERS": "4"}, strategy="wafer", num_nodes=2)
    assert (several.devices, several.devices_per_rank, several.world_size) == (4, 1, 8)
    absent = resolve(plugins, {"FAKE_GPUS": "8"}, strategy="wafer")
    assert codes(absent) == [("error", "accelerator-unavailable")]
    assert absent.findings[0].where == "trainer.strategy"
    assert absent.findings[0].fix is not None
    assert absent.findings[0].fix.startswith("write `strategy: auto`")


def test_with_only_the_core_each_absent_plugin_is_named(fairlead_plugins: Callable[..., PluginManager]) -> None:
    resolution = resolve(fairlead_plugins(), devices=9)
    assert {f.code for f in resolution.findings} == {"plugin-missing"}
    assert all(f.fix == install_line("lightning") for f in resolution.findings)


def test_a_scheduler_of_a_third_party_gets_the_finding_and_the_requeuer(plugins: PluginManager) -> None:
    """In its batch script, which no environment claims: by hooks, not by names."""
    batch = {"CLUSTER_JOB": "7", "CLUSTER_NODES": "4"}
    resolution = resolve(plugins, batch)
    assert ("warning", "allocation-unused") in codes(resolution)
    assert shown(resolution, "requeue") == {"requeue": ("cluster", "this is the job cluster:7")}
    assert ("warning", "allocation-unused") not in codes(
        resolve(plugins, {**batch, "CLUSTER_RANK": "1", "AGENT_ID": "1"})
    )
    assert shown(resolve(plugins, {**batch, "AGENT_ID": "1"}), "requeue") == shown(resolution, "requeue")


def test_what_an_environment_plans_for_a_node_counts(plugins: PluginManager) -> None:
    """Three ranks on this node, which Fairlead is to start; other `devices` count, and are told."""

    class Planned(Cluster):
        config = ClusterEnvironmentConfig

        @hookimpl
        def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
            return Topology(launched=False, local_world_size=Setting(3, "CLUSTER_PLAN"))

    planning = PluginManager(
        [
            *(FakeEntryPoint(name, target) for name, target in stand_ins().items()),
            FakeEntryPoint("environment.cluster", Planned()),
            FakeEntryPoint("requeue.cluster", ClusterRequeue()),
        ]
    )
    environ = {"CLUSTER_RANK": "0"}
    resolution = resolve(planning, environ, accelerator="cpu")
    assert shown(resolution, "devices") == {"devices": (3, "CLUSTER_PLAN")}
    assert resolution.world_size == 3
    other = resolve(planning, environ, accelerator="cpu", devices=2)
    assert other.world_size == 2
    assert ("warning", "launch-mismatch") in codes(other)


class Broken(Cluster):
    """Its module loads, its detection does not work."""

    config = ClusterEnvironmentConfig

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Raises."""
        raise RuntimeError("no libcluster.so")


@pytest.mark.parametrize("broken", [Broken(), "no plugin at all"])
def test_a_broken_environment_in_a_job_that_nobody_else_knows_is_an_error(broken: Any) -> None:
    """Every host would train alone."""
    sound = [FakeEntryPoint(name, target) for name, target in stand_ins().items()]
    mixed = PluginManager([*sound, FakeEntryPoint("environment.cluster", broken)])
    environ = {"NOVA_JOB_ID": "7"}

    def said(**more: Any) -> list[tuple[str, str]]:
        found = choose_environment(more.pop("asked", "auto"), more.pop("environ", environ), mixed, **more)
        return [(f.severity, f.code) for f in found.findings if "every host would train alone" in f.what]

    assert said(starting=True) == [("error", "plugin-broken")]
    assert said() == [("warning", "plugin-broken")]
    assert said(starting=True, environ={}) == []  # a laptop
    assert said(starting=True, environ={**environ, "FAIRLEAD_ENVIRONMENT": "lightning"}) == []
    known = PluginManager(
        [*sound, FakeEntryPoint("environment.cluster", broken), FakeEntryPoint("environment.agent", Knows())]
    )
    found = choose_environment("auto", {**environ, "CLUSTER_JOB": "7"}, known, starting=True)
    assert [f for f in found.findings if f.severity == "error"] == []


class Knows(Agent):
    """An environment that works, and knows the job."""

    config = AgentEnvironmentConfig

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """The job."""
        return Job("agent:7")


def test_what_is_not_in_a_resolution_is_said_to_be_elsewhere(plugins: PluginManager) -> None:
    """The author of a logger looks for the run directory there."""
    found = resolve(plugins)
    for name, advice in (("run_dir", "it is context.run_dir"), ("threads", r"it is resolution.value\('threads'\)")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {advice}"):
            getattr(found, name)
    assert not hasattr(found, "nonsense")
    assert copy.deepcopy(found).world_size == found.world_size
