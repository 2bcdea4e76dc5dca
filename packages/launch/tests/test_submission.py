"""`fairlead submit` from the job to a scheduler, whose commands are stand-ins: what is refused, copied, recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fairlead
from fairlead import PluginManager, yaml
from fairlead.cli import commands as core_commands
from fairlead.cli import main
from fairlead.errors import ConfigError, RunFailedError
from fairlead.own_checks import user_code
from fairlead.testing import FakeEntryPoint, stand_ins
from fairlead_launch.commands import plugin as commands
from fairlead_launch.submission import lsf, read_submission, slurm
from fairlead_launch.submission.requests import members
from fairlead_runs import collect_provenance
from fairlead_runs.checks import run_directory
from fairlead_runs.commands.plugins import runs
from fairlead_runs.history import History
from fairlead_runs.submitted import LOCAL, VARIABLE, Record

SBATCH = 'cp "${@: -1}" "$0.script"; echo 17'


class Site:
    """A user's folder, `sbatch` on a PATH of its own, and the plugins without which nothing is resolved."""

    def __init__(self, folder: Path, *, git: bool = True) -> None:
        self.folder = folder / "user"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.environ = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(folder)}
        targets = {
            **stand_ins(),
            "submitter.slurm": slurm.slurm,
            "submitter.lsf": lsf.lsf,
            "command.submit": commands.submit,
            "command.check": core_commands.check,
            "command.runs": runs,
            "check.code": user_code,
            "check.run_directory": run_directory,
        }
        self.plugins = PluginManager([FakeEntryPoint(name, target) for name, target in targets.items()])
        self.program("sbatch", SBATCH)
        self.write(
            "net.py", "import helper\n\n\nclass Net:\n    def __init__(self, width=1):\n        self.width = width\n"
        )
        self.write("helper.py", "")
        self.job()
        if git:
            self.write(".gitignore", "runs/\n*.bin\n")
            self.git("init", "-q")
            self.git("add", "-A")
            self.git("commit", "-qm", "first")

    def job(self, *, submit: Any = None, **sections: Any) -> None:
        data = {
            "run": {"name": "sine"},
            "model": {"class": "net:Net"},
            "trainer": {"max_steps": 10},
            "resources": {"nodes": 2, "devices_per_node": 2, "device": "cpu"},
            "submit": {"to": "slurm", "python": sys.executable, **(submit or {})},
            **sections,
        }
        self.write("job.yaml", yaml.dump({name: section for name, section in data.items() if section is not None}))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f'#!/bin/bash\necho "$*" >> "$0.calls"\n{body}\n')
        (self.bin / name).chmod(0o755)

    def git(self, *words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def main(self, *words: str) -> int:
        return main(list(words), plugins=self.plugins, environ=self.environ, cwd=self.folder)

    def submit(self, *words: str) -> int:
        return self.main("submit", "job.yaml", *words)

    def queued(self) -> bool:
        return (self.bin / "sbatch.calls").exists()

    def copied(self, number: int = 1, name: str = "sine") -> set[str]:
        code = self.folder / "runs" / name / "submissions" / str(number) / "code"
        return {str(file.relative_to(code)) for file in code.rglob("*") if not file.is_dir()}


def content(file: Path) -> dict[str, Any]:
    """A job file's."""
    data = yaml.load_file(file).data
    assert isinstance(data, dict)
    return data


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# -- what is refused, before anything is queued


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"model": {"class": "net:Nett"}}, (), "did you mean"),
        ({"submit": {"partion": "x"}}, (), "did you mean 'partition'?"),
        ({"submit": {"name": "slurm"}}, (), "a mapping with `name`"),
        ({"submit": {"to": "slrum"}}, (), "did you mean 'slurm'?"),
        ({"submit": {"network": "efaa"}}, (), "did you mean 'efa'?"),
        ({}, ("--set", "submit=null"), "the job does not say where it is to be submitted to"),
        ({"submit": {"time": "00:02:30"}}, (), "too short to be warned 120 seconds before its end"),
        ({"submit": {"env": {"A B": 1}}}, (), "'A B' is not the name of a variable"),
        ({"submit": {"env": {"API_KEY": "x"}}}, (), "the secret API_KEY would be written to a file"),
        ({"model": {"class": "net:Net", "args": {"width": {"api_key": "x"}}}}, (), "where: model.args.width.api_key"),
        ({}, ("--max-parallel", "2"), "--max-parallel is for the members of a sweep"),
        ({"resources": None}, (), "the job does not say on what it is to run"),
        ({}, ("--sweep", "run.seed"), "is not PATH=VALUES"),
        ({}, ("--sweep", "run.seed=range(0)"), "has no value"),
        ({}, ("--sweep", "run.seed=1,-1"), "-1"),
        ({}, ("--sweep", "submit.time=1,2"), "all members of a sweep share"),
        ({"trainer": {"max_steps": 10, "logger": 3}}, (), "unknown field 'logger'"),
    ],
)
def test_a_mistake_is_said_and_nothing_is_queued(
    site: Site, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    site.job(**changes)
    assert site.submit(*words) == 2
    assert said in capsys.readouterr().err
    assert not site.queued()
    assert not (site.folder / "runs").exists()


def test_what_the_scheduler_says_is_shown_and_nothing_is_left(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.program("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid qos" >&2; exit 1')
    assert site.submit() == 1
    assert "Invalid qos" in capsys.readouterr().err
    assert not list((site.folder / "runs/sine/submissions").iterdir())
    assert read_submission(site.folder / "runs/sine") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairlead_launch.submission.batch.TIMEOUT_S", 0.2)
        site.program("sbatch", "sleep 5")
        assert site.submit() == 1
    assert "the job may be queued or not" in capsys.readouterr().err
    assert (site.folder / "runs/sine/submissions/1/job.yaml").exists()  # which it would need


def test_a_run_with_other_settings_is_in_the_way(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The check looks into the directory of each member, not into that of another run of the name."""
    fingerprint = {"digest": "x", "settings": {}}
    site.write("runs/sine-task-1/fingerprint.json", json.dumps(fingerprint))
    assert site.submit("--sweep", "run.seed=1") == 0
    assert site.submit("--sweep", "run.seed=1,2") == 2
    assert "a run's fingerprint is damaged" in capsys.readouterr().err


# -- what is written


def test_a_dry_run_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.submit("--dry-run") == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert f"srun {sys.executable} -m fairlead fit {site.folder}/runs/sine/submissions/1/job.yaml &" in script
    assert site.submit("--dry-run", "--to", "lsf", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["to"], shown["id"], list(shown["files"])) == ("lsf", None, ["job.lsf"])
    assert not (site.folder / "runs").exists()
    assert not site.queued()


def test_the_job_is_frozen_and_found_again(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.submit("--set", "trainer.max_steps=20", "--set", "submit.partition=gpu") == 0
    said = capsys.readouterr().out
    assert "submitted to slurm: job 17" in said
    assert "output:  runs/sine/submissions/1/logs/slurm-17.out" in said
    folder = site.folder / "runs/sine/submissions/1"
    record = read_submission(site.folder / "runs/sine")
    assert record is not None
    assert (record.to, record.id, record.index, record.folder) == ("slurm", "17", None, str(folder))
    job = content(folder / "job.yaml")
    assert job["trainer"]["max_steps"] == 20
    assert job["run"] == {"name": "sine", "dir": str(site.folder / "runs"), "code": [str(folder / "code")]}
    assert "#SBATCH --partition=gpu" in (site.bin / "sbatch.script").read_text()
    assert site.main("check", str(folder / "job.yaml"), "--for", "resources") == 0
    site.program("squeue", "echo 'PENDING|Priority|N/A|9:00|0|'")
    assert site.submit() == 2
    assert "the run is submitted already: job 17 is queued" in capsys.readouterr().err
    site.program("squeue", "")
    assert site.submit() == 0  # again: beside the first
    again = read_submission(site.folder / "runs/sine")
    assert again is not None
    assert again.folder == str(folder.with_name("2"))


def test_a_sweep_on_this_machine_stands_in_no_schedulers_way(site: Site) -> None:
    """It leaves its record in the folder of its base name, which is the directory of the run that is submitted."""
    home = site.folder / "runs/sine"
    local = Record(to=LOCAL, id="7", index=0, run=str(home), runs=(), submitted="2026-01-01T00:00:00+00:00")
    local.write(home / "submissions/1")
    assert site.submit() == 0
    record = read_submission(home)
    assert record is not None
    assert record.to == "slurm"


def test_from_python_as_from_the_command_line(site: Site) -> None:
    job = fairlead.JobConfig.model_validate(
        {**content(site.folder / "job.yaml"), "run": {"name": "mine"}}, context={"plugins": site.plugins}
    )
    given: dict[str, Any] = {"environ": site.environ, "plugins": site.plugins, "cwd": site.folder}
    submission = fairlead.submit(job, to="slurm", overrides=["trainer.max_steps=5"], **given)
    assert (submission.id, submission.runs) == ("17", [site.folder / "runs/mine"])
    for name, says in (("squeue", "RUNNING|None|N/A|9:00|0|n1"), ("sacct", "FAILED|1:0|a|b|n1"), ("scancel", "")):
        site.program(name, f"echo '{says}'")
    assert submission.state().phase == "running"
    with pytest.raises(TimeoutError, match="job 17 is running after 0 s"):
        submission.result(timeout=0)
    site.program("squeue", "")
    site.write("runs/mine/submissions/1/logs/slurm-17.out", "Boom: the last words\n")
    with pytest.raises(RunFailedError) as failed:
        submission.result(timeout=5)
    assert "Boom: the last words" in str(failed.value)
    submission.cancel()
    assert (site.bin / "scancel.calls").read_text() == "17\n"
    with pytest.raises(ConfigError, match="1 of its settings is wrong"):
        fairlead.submit("job.yaml", overrides=["model.class=net:Nett"], **given)


@pytest.mark.parametrize("job", [None, {"model": "a:B"}])
def test_what_is_no_job_is_refused(job: Any) -> None:
    with pytest.raises(ConfigError, match="is no job"):
        fairlead.submit(job)


def test_the_warning_comes_early_enough_for_a_measured_save(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.folder / "runs/sine").mkdir(parents=True)
    history = History(site.folder / "runs/sine/history.jsonl")
    for seconds in (3.0, 200.0, 7.5):
        history.append("checkpoint", step=1, seconds=seconds)
    site.submit("--dry-run", "--json")
    assert "--signal=USR1@660\n" in json.loads(capsys.readouterr().out)["files"]["job.sh"]
    site.submit("--dry-run", "--json", "--set", "submit.warn=30")
    assert "--signal=USR1@30\n" in json.loads(capsys.readouterr().out)["files"]["job.sh"]


# -- the code as submitted


def test_what_is_copied_is_the_working_tree(site: Site) -> None:
    """Committed, changed and new files, not what git ignores; later changes of the folder are not seen."""
    site.write("net.py", (site.folder / "net.py").read_text().replace("import helper\n", "") + "# changed\n")
    site.write("new.py", "")
    site.write("big.bin", "data")
    (site.folder / "helper.py").unlink()
    (site.folder / "link.py").symlink_to("net.py")
    assert site.submit() == 0
    assert site.copied() == {".gitignore", "job.yaml", "link.py", "net.py", "new.py"}
    copy = site.folder / "runs/sine/submissions/1/code"
    assert (copy / "net.py").read_text().endswith("# changed\n")
    assert (copy / "link.py").is_symlink()
    pointer = str(copy.with_name("code.json"))
    git = collect_provenance({**site.environ, VARIABLE: pointer})["git"]
    assert git["commit"] == site.git("rev-parse", "HEAD").strip()
    assert git["snapshot"]["path"] == str(copy)
    assert "# changed" in git["diff"]
    assert f"export {VARIABLE}={pointer}" in (site.bin / "sbatch.script").read_text()
    site.job(submit={"snapshot": ["*.bin"]})
    assert site.submit() == 0
    assert site.copied(2) == {".gitignore", "big.bin", "job.yaml", "net.py"}
    site.job(submit={"snapshot": False})
    assert site.submit() == 0
    assert site.copied(3) == set()
    job = content(site.folder / "runs/sine/submissions/3/job.yaml")
    assert job["run"]["code"] == [str(site.folder)]


def test_a_copy_without_the_class_is_refused(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write("ignored.bin", "")
    site.write(".gitignore", "runs/\nsecret_model.py\n")
    site.write("secret_model.py", "class Net:\n    pass\n")
    site.job(model={"class": "secret_model:Net"})
    assert site.submit() == 2
    said = capsys.readouterr().err
    assert "the copy of the code is not enough to run the job" in said
    assert "secret_model" in said
    assert not site.queued()
    assert not list((site.folder / "runs/sine/submissions").iterdir())


def test_without_git_the_folder_is_copied_up_to_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, git=False)
    site.write("venv/pyvenv.cfg", "")
    site.write("venv/lib.py", "")
    assert site.submit() == 0
    assert "which is no git repository" in capsys.readouterr().out
    assert site.copied() == {"helper.py", "job.yaml", "net.py"}
    monkeypatch.setattr("fairlead_launch.submission.snapshot.MOST_BYTES", 1000)
    site.write("data.bin", "x" * 2000)
    assert site.submit() == 2
    assert "data.bin" in capsys.readouterr().err


# -- sweeps


def test_a_sweep_has_a_file_and_a_record_for_each_member(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.submit("--sweep", "model.args.width=2,4", "--sweep", "run.seed=range(2)", "--max-parallel", "3") == 0
    assert "4 runs, runs/sine-task-0 to runs/sine-task-3" in capsys.readouterr().out
    assert "#SBATCH --array=0-3%3" in (site.bin / "sbatch.script").read_text()
    folder = site.folder / "runs/sine/submissions/1"
    jobs = [content(folder / f"members/{n}.yaml") for n in range(4)]
    assert [(job["model"]["args"]["width"], job["run"]["seed"]) for job in jobs] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    record = read_submission(site.folder / "runs/sine-task-3")
    assert record is not None
    assert (record.id, record.job, record.index) == ("17_3", "17", 3)
    assert record.sweep == ("model.args.width=4", "run.seed=1")
    assert site.main("runs", "runs/sine", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in shown] == [f"sine-task-{n}" for n in range(4)]  # which have not begun
    assert shown[3]["settings"] == {"model.args.width": 4, "run.seed": 1}


def test_the_values_of_a_sweep_are_those_of_set() -> None:
    grid = members(["a.b=1e-3,'x, y',[1, 2],null,.inf", "c=range(1,6,2)"])
    assert len(grid) == 15
    assert [one[0] for one in grid[::3]] == ["a.b=0.001", 'a.b="x, y"', "a.b=[1, 2]", "a.b=null", "a.b=.inf"]
    assert [one[1] for one in grid[:3]] == ["c=1", "c=3", "c=5"]
    with pytest.raises(ConfigError, match="is there twice"):
        members(["a=1", "a=2"])
    with pytest.raises(ConfigError, match="more than"):
        members(["a=range(200)", "b=range(200)"])


def test_a_job_of_several_files_is_submitted_as_a_whole(site: Site) -> None:
    """A later change of the base changes nothing that is queued, and variables are those of the submission."""
    site.write("conf/big.yaml", "extends: ../job.yaml\nmodel: {args: {width: 2}}\nrun: {name: big}\n")
    site.write("env.yaml", "trainer:\n  max_steps: ${env:STEPS}\nsubmit: {setup: ['echo $HOME']}\nrun: {seed: 3}\n")
    site.environ["STEPS"] = "30"
    assert site.main("submit", "conf/big.yaml", "env.yaml", "--set", "model.args.width=3") == 0
    file = site.folder / "runs/big/submissions/1/job.yaml"
    site.job(model={"class": "net:Other"})
    del site.environ["STEPS"]
    job = content(file)
    assert "extends" not in job
    assert (job["trainer"]["max_steps"], job["model"]["args"]["width"], job["run"]["seed"]) == (30, 3, 3)
    assert job["submit"]["setup"] == ["echo $HOME"]
    assert site.main("check", str(file), "--for", "resources") == 0
