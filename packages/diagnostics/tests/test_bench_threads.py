"""What `fairlead bench threads` tries, and what it makes of given numbers; no torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairlead import JobConfig
from fairlead.jobs import load_job
from fairlead.plugins import PluginManager
from fairlead_diagnostics.bench.cpus import CPUs, cgroup_quota, usable_cpus
from fairlead_diagnostics.bench.layouts import Layout, Row, advise, layouts, table
from fairlead_diagnostics.bench.threads import batch_of_processes
from fairlead_diagnostics.bench.trials import Steps, TrialFailedError, as_words, plugins_as_fields, trial_settings


def rows(one: list[float], single: list[float], two: list[float], *, share: float | None = None) -> list[Row]:
    """What was measured on 8 CPUs: with 1 x 8, 1 x 1 and 2 x 4."""
    found = [Row(Layout(1, 8), 32, one), Row(Layout(1, 1), 32, single), Row(Layout(2, 4), 16, two)]
    found[2].communication = [share] * len(two) if share is not None else []
    return found


@pytest.mark.parametrize(
    ("cpus", "asked", "expected"),
    [
        (CPUs(8, ""), None, ["1 x 8", "1 x 1", "2 x 4", "4 x 2", "8 x 1"]),
        (CPUs(36, "", numa_nodes=6, sockets=2), None, [
            "1 x 36", "1 x 1", "2 x 18", "4 x 9", "6 x 6", "8 x 4", "16 x 2", "32 x 1",
        ]),
        (CPUs(8, ""), (2, 3, 9), ["1 x 8", "1 x 1", "2 x 4", "3 x 2"]),
    ],
)  # fmt: skip
def test_layouts_that_are_tried(cpus: CPUs, asked: tuple[int, ...] | None, expected: list[str]) -> None:
    """Powers of two, the NUMA nodes and the sockets; never more threads in all than there are CPUs."""
    assert [str(layout) for layout in layouts(cpus, asked)] == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/host/path\n", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/job\n", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_the_quota_of_a_container_counts(
    groups: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    """The smallest of all groups above, in both versions of control groups."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_quota(tmp_path) == expected
    if expected == 1.5:
        assert usable_cpus(tmp_path).count == 1
        assert "1.5" in usable_cpus(tmp_path).reason


def test_efficiency_and_speed_are_formed_round_by_round() -> None:
    """Against one thread of one process, and against one process; a machine that slows down changes neither."""
    found = rows([400.0, 200.0, 100.0], [100.0, 50.0, 25.0], [600.0, 300.0, 150.0], share=0.25)
    found[2].memory = 3 * 2**30
    found.append(Row(Layout(4, 2), failed="rank 1 of 4 failed"))
    lines = [line.split() for line in table(found)]
    assert lines[1] == ["1", "x", "8", "200", "100,", "400", "1.00", "50%", "-", "-"]
    assert lines[2] == ["1", "x", "1", "50", "25,", "100", "0.25", "100%", "-", "-"]
    assert lines[3] == ["2", "x", "4", "300", "150,", "600", "1.50", "75%", "25%", "3.00", "GiB"]
    assert lines[4] == ["4", "x", "2", "failed", "rank", "1", "of", "4", "failed"]


def test_what_is_faster_in_every_round_is_advised() -> None:
    """With all that has to be written, the batch of each process and the strategy included."""
    found = rows([100.0, 102.0, 98.0], [20.0] * 3, [130.0, 128.0, 126.0], share=0.2)
    advice = advise(found, batch_setting="data.args.batch_size", strategy="ddp")
    assert advice.certain
    assert advice.settings == {
        "trainer.devices": 2,
        "trainer.threads": 4,
        "trainer.strategy": "ddp",
        "data.args.batch_size": 16,
    }
    assert advice.text == (
        "take 2 processes with 4 threads each: 1.29 x the samples/s of one process with 8 threads [1.25, 1.30]; 20% of "
        "its step is communication. Write trainer.devices: 2, trainer.threads: 4, trainer.strategy: ddp, "
        "data.args.batch_size: 16"
    )


@pytest.mark.parametrize(
    ("one", "single", "two", "said", "certain"),
    [
        ([100.0] * 3, [20.0] * 3, [140.0, 150.0, 99.0], "stay with one process: .* within the noise", False),
        ([100.0] * 3, [20.0] * 3, [101.0, 102.0, 101.0], "stay with one process: .* not worth it below 1.03", True),
        ([100.0] * 3, [20.0] * 3, [80.0, 80.0, 90.0], "stay with one process: 2 processes .*, the next best", True),
        ([100.0] * 2, [20.0] * 2, [150.0] * 2, "until more is known: .* 2 rounds cannot tell", False),
        ([100.0] * 3, [104.0, 110.0, 90.0], [80.0] * 3, "stay with 8 threads: one process with 1 thread", False),
    ],
)
def test_what_is_not_surely_faster_is_not_advised(
    one: list[float], single: list[float], two: list[float], said: str, certain: bool
) -> None:
    """One round in which it was slower, too small a gain, or too few rounds: one process it stays."""
    advice = advise(rows(one, single, two))
    assert advice.settings == {"trainer.devices": 1, "trainer.threads": 8}
    assert advice.certain is certain
    assert re.search(said, advice.text), advice.text


def test_a_single_thread_may_win_and_what_failed_cannot() -> None:
    """Of a tiny model the threads cost more than they bring."""
    found = rows([100.0] * 3, [200.0] * 3, [])
    found[2].failed = "killed"
    assert advise(found).settings == {"trainer.devices": 1, "trainer.threads": 1}
    found[1].failed = "killed"
    assert "nothing else could be measured" in advise(found).text


@pytest.mark.parametrize(
    ("trainer", "asked", "each"),
    [
        ({}, None, (16, 8)),
        ({"devices": 2}, None, (32, 16)),
        ({"devices": 2}, "per_device", (16, 16)),
        ({"devices": 2, "batch_size": "global", "accumulate_grad_batches": 2}, None, (8, 4)),  # 16 are 2 x 2 x 4
        ({"batch_size_from": "model.args.bs"}, None, (6, 3)),
        ({"batch_size_from": "model.args.none"}, None, (None, None)),
    ],
)
def test_the_batch_is_what_the_job_means_by_its_number(
    trainer: dict[str, object], asked: str | None, each: tuple[int | None, int | None]
) -> None:
    """Of each of 1 and of 2 processes; a trial divides nothing once more, and scales no learning rate."""
    spec = {"model": {"class": "m:M", "args": {"bs": 6}}, "data": {"class": "m:D", "args": {"batch_size": 16}}}
    job = JobConfig.model_validate({**spec, "trainer": {**trainer, "base_batch_size": 4}})
    batch = batch_of_processes(job, asked)
    assert (batch.of(Layout(1, 4)), batch.of(Layout(2, 2))) == each
    settings = trial_settings(job, Layout(2, 2), Steps(3, 9), Path("runs"))
    assert (settings["trainer.batch_size"], settings["trainer.base_batch_size"]) == ("per_device", None)


def test_a_trial_changes_how_long_is_trained_and_saves_nothing() -> None:
    """A limit of the job that is longer stays, as schedules are made from it; a shorter one does not end the trial."""
    model = {"class": "m:M"}
    steps = Steps(3, 9)
    assert steps.blocks(Layout(1, 4)) == [10]
    assert steps.blocks(Layout(2, 2)) == [6, 6, 6, 6], "with communication, without, and both again"
    for trainer, expected in (
        ({"max_steps": 100_000}, (100_000, -1)),
        ({"max_steps": 5, "max_epochs": 1}, (270, -1)),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, (-1, 540)),
        ({}, (-1, 1000)),
        ({"max_epochs": -1}, (-1, -1)),
    ):
        job = JobConfig.model_validate({"model": model, "trainer": trainer})
        settings = trial_settings(job, Layout(2, 2), steps, Path("somewhere"))
        assert (settings["trainer.max_steps"], settings["trainer.max_epochs"]) == expected
        assert settings["trainer.enable_checkpointing"] is False
        assert settings["run.dir"] == "somewhere"
        assert [one["class"] for one in settings["trainer.callbacks"]] == [
            "fairlead_diagnostics.bench.step_times:StepTimes"
        ]


@pytest.mark.parametrize(
    ("text", "code", "short", "whole"),
    [
        ("loading\nerror: rank 1 failed\n  why:   x", 1, "rank 1 failed", "rank 1 failed\n  why:   x"),
        ("loading\nbad file", 1, "bad file", "loading\nbad file"),
        ("", 3, "exit code 3", "exit code 3"),
        ("loading", -9, "ended by SIGKILL: is there enough memory?", "loading\nended by SIGKILL"),
    ],
)
def test_why_a_trial_failed(text: str, code: int, short: str, whole: str) -> None:
    """Its error where it made one, else the end of its output."""
    error = TrialFailedError(text, code)
    assert error.short == short
    assert str(error).startswith(whole)


def test_plugins_of_a_job_file_become_fields(tmp_path: Path) -> None:
    """A trial sets the environment, which must not be there twice then."""
    file = tmp_path / "job.yaml"
    plugins = "[{name: environment.slurm, auto_requeue: false}, {name: strategy.ddp, bucket_cap_mb: 5}]"
    file.write_text(f"model: {{class: m:M}}\ntrainer: {{plugins: {plugins}}}\n")
    given = PluginManager()
    settings = plugins_as_fields(load_job(str(file), plugins=given, cwd=tmp_path, environ={}))
    assert settings["trainer.plugins"] == []
    assert settings["trainer.strategy"]["bucket_cap_mb"] == 5
    words = as_words(settings | {"trainer.environment": "lightning"})[1::2]
    loaded = load_job(str(file), plugins=given, cwd=tmp_path, environ={}, overrides=words)
    assert loaded.job is not None, loaded.findings
    assert loaded.job.trainer.environment.name == "lightning"  # type: ignore[union-attr]
    file.write_text("model: {class: m:M}\n")
    assert plugins_as_fields(load_job(str(file), plugins=given, cwd=tmp_path, environ={})) == {}
