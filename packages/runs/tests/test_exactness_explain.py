"""`explain` says whether a resume is exact, with its scope: in words, as JSON, and what the last start saw."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest

from fairlead import (
    PluginManager,
    PrecisionConfigBase,
    PrecisionPlugin,
    Resolution,
    StrategyConfigBase,
    StrategyPlugin,
    hookimpl,
)
from fairlead.cli import commands, main
from fairlead.exactness import EXACTNESS_FILE, TRIAL, job_digest, last_record, record
from fairlead.findings import CODES, Inexact
from fairlead.jobs import load_job
from fairlead.testing import stand_ins
from fairlead_runs import RunDirectory, fingerprint
from fairlead_runs.checks import run_directory
from fairlead_runs.commands.plugins import runs

CORE = {
    **{f"command.{name}": getattr(commands, name) for name in commands.__all__},
    "check.run_directory": run_directory,
    "command.runs": runs,
}
APP = """
class Net: pass
class Data:
    def __init__(self, stream: bool = False): pass
"""
JOB = """\
model: app:Net
data:
  class: app:Data
  args: {stream: false}
trainer: {max_steps: 3}
"""
NOT_YET = "resume: not known before the first start (fit --set trainer.fast_dev_run=true is enough)"
STREAM = Inexact("the IterableDataset Stream", why="it begins anew", fix="use another")


class SingleConfig(StrategyConfigBase):
    name: Literal["single_device"] = "single_device"


class Single(StrategyPlugin):
    config = SingleConfig

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class FullConfig(PrecisionConfigBase):
    name: Literal["32-true"] = "32-true"


class Full(PrecisionPlugin):
    config = FullConfig

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class Project:
    """A folder with a job, and the command line in it."""

    def __init__(self, path: Path, plugins: PluginManager, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.plugins, self._capsys = path, plugins, capsys
        self.write("app.py", APP)
        self.write("job.yaml", JOB)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def __call__(self, *words: str) -> str:
        main(words, plugins=self.plugins, environ={}, cwd=self.path)
        out, err = self._capsys.readouterr()
        assert "Traceback" not in out + err
        return out

    def explained(self, *words: str) -> tuple[str, list[dict[str, Any]]]:
        """The verdict, and the findings that belong to it."""
        document = json.loads(self("explain", "job.yaml", "--json", *words))
        codes = ("resume-not-exact", "resume-exactness-unknown")
        return document["settings"]["exact"]["value"], [f for f in document["findings"] if f["code"] in codes]

    @property
    def run(self) -> Path:
        return self.path / "runs" / "job"

    def start(
        self,
        *reasons: Inexact,
        settings: Iterable[Inexact] = (),
        world_size: int = 1,
        age_s: float = -60,
        trial: bool = False,
    ) -> None:
        """Records a start of the job that saw this, `age_s` before its source was written."""
        loaded = load_job("job.yaml", plugins=self.plugins, cwd=self.path, environ={})
        assert loaded.job is not None
        job = loaded.job.model_dump(mode="json")
        number = TRIAL
        if not trial:
            with RunDirectory.open(self.run, job=job, fingerprint=fingerprint(job)) as run:
                number = run.begin(resolution={}, provenance={})
        file = self.run / "starts" / str(number) / EXACTNESS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        content = record(settings=settings, seen=reasons, world_size=world_size, job=job_digest(job))
        file.write_text(json.dumps(content))
        written = (self.path / "app.py").stat().st_mtime - age_s
        os.utime(file, (written, written))


@pytest.fixture
def project(
    tmp_path: Path, fairlead_plugins: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> Project:
    made = {**stand_ins(), "strategy.single_device": Single(), "precision.32-true": Full()}
    return Project(tmp_path, fairlead_plugins(CORE, made), capsys)


def last_line(project: Project, *words: str) -> str:
    return project("explain", "job.yaml", *words).splitlines()[-1]


def test_nothing_is_known_before_the_first_start(project: Project) -> None:
    assert last_line(project) == NOT_YET
    value, (finding,) = project.explained()
    assert (value, finding["severity"], finding["code"]) == ("not known", "info", "resume-exactness-unknown")
    assert finding["fix"] == "fairlead fit --set trainer.fast_dev_run=true is enough"
    assert finding["where"].startswith("job.yaml:2")


def test_exact_is_said_with_its_scope(project: Project) -> None:
    """In the line and in the reason of the setting: nobody reads more into the word than was seen."""
    project.start()
    scope = (
        "settings, loaders and what is in the checkpoint, as start 1 saw them; a state of your own outside of it is"
        " not seen (fairlead fit JOB --prove-resume tries it)"
    )
    assert last_line(project) == f"resume: exact for {scope}"
    assert project.explained() == ("exact", [])
    settings = json.loads(project("explain", "job.yaml", "--json"))["settings"]
    assert settings["exact"] == {"value": "exact", "reason": scope}


def test_explain_says_not_exact_because_and_do(project: Project) -> None:
    project.start(STREAM)
    assert last_line(project) == (
        "resume: not exact, because of the IterableDataset Stream (it begins anew), do: use another"
    )
    value, (finding,) = project.explained()
    assert value == "not exact"
    assert (finding["severity"], finding["code"], finding["where"]) == (
        "info",
        "resume-not-exact",
        "job.yaml:5, trainer",
    )
    assert all(finding.values())


def test_what_may_be_exact_is_not_known(project: Project) -> None:
    project.start(dataclasses.replace(STREAM, certain=False))
    value, (finding,) = project.explained()
    assert (value, finding["code"], finding["fix"]) == ("not known", "resume-exactness-unknown", STREAM.fix)


def test_a_setting_is_named_with_its_line(project: Project) -> None:
    """Settings are judged before the first start too; then what is not known comes behind them."""
    value, (finding, unknown) = project.explained("--set", "trainer.enable_checkpointing=false")
    assert (value, finding["where"]) == ("not exact", "--set trainer.enable_checkpointing")
    assert unknown["code"] == "resume-exactness-unknown"
    assert last_line(project, "--set", "trainer.enable_checkpointing=false") == NOT_YET
    project.start()
    project.write("job.yaml", JOB.replace("max_steps: 3", "max_steps: 3, overfit_batches: 2"))
    _, findings = project.explained()
    assert [finding["where"] for finding in findings] == ["job.yaml:5, trainer.overfit_batches"]


def test_certain_reasons_come_first(project: Project) -> None:
    project.start(STREAM)
    project.write("job.yaml", JOB.replace("max_steps: 3", "max_steps: 3, overfit_batches: 2"))
    value, findings = project.explained()
    assert value == "not exact"
    assert [f["code"] for f in findings] == ["resume-not-exact", "resume-exactness-unknown"]


def test_the_setting_does_not_take_the_place_of_resume(project: Project) -> None:
    settings = json.loads(project("explain", "job.yaml", "--json"))["settings"]
    assert settings["resume"]["value"] == "auto"
    assert set(settings["exact"]) == {"value", "reason"}


def test_check_says_nothing_of_it(project: Project) -> None:
    """It stops nothing, and a check is silent where nothing is wrong."""
    project.start(STREAM)
    assert "exact" not in project("check", "job.yaml")
    found = json.loads(project("check", "job.yaml", "--json"))["findings"]
    assert [finding for finding in found if finding["code"].startswith("resume")] == []


@pytest.mark.parametrize("text", ["model: 3", "model: {class: app:Nothing}", "model: app:Net\ndata: app:Nothing", "[]"])
def test_a_wrong_job_is_never_exact(project: Project, text: str) -> None:
    project.write("job.yaml", text)
    settings = json.loads(project("explain", "job.yaml", "--json"))["settings"]
    assert settings.get("exact", {"value": "not known"})["value"] == "not known"


# -- what a start saw


def test_a_trial_is_enough(project: Project) -> None:
    """`fast_dev_run` leaves what it saw, and no run: the real job begins as if it had not been tried."""
    project.start(trial=True)
    assert project.explained() == ("exact", [])
    assert ", as fast_dev_run saw them;" in last_line(project)
    assert "no runs" in project("runs")
    project.start(STREAM, age_s=-120)
    assert (project.run / "starts" / "1").is_dir()
    assert project.explained()[0] == "not exact", "the start is newer than the trial"
    project.start(trial=True, age_s=-180)
    assert project.explained()[0] == "exact", "this trial is newer than the start"


def test_settings_still_count_after_a_start(project: Project) -> None:
    """What the start found in its settings may not be what these settings are."""
    project.start(settings=[Inexact("trainer.benchmark: true", why="it was set then", fix="unset it")])
    assert project.explained()[0] == "exact"
    assert project.explained("--set", "trainer.enable_checkpointing=false")[0] == "not exact"


def test_code_that_is_newer_than_the_start_was_not_seen(project: Project) -> None:
    project.start()
    os.utime(project.path / "app.py", (2e9, 2e9))
    value, (finding,) = project.explained()
    assert value == "not known"
    assert finding["what"].endswith("app.py")
    assert "changed after start 1" in finding["why"]


def test_another_job_was_not_seen(project: Project) -> None:
    """Other data, another model, other callbacks; another learning rate schedule is the settings' matter."""
    project.start()
    assert project.explained("--set", "run.seed=7")[0] == "exact"
    assert last_line(project, "--set", "data.args.stream=true") == NOT_YET


def test_other_ranks(project: Project) -> None:
    """They add in another order; of a trial, they may have other loaders."""
    project.start(world_size=2)
    value, (finding,) = project.explained()
    assert value == "not exact"
    assert finding["what"].endswith("1 rank after 2")
    project.start(world_size=2, trial=True, age_s=-120)
    value, (finding,) = project.explained()
    assert (value, finding["why"]) == ("not known", "fast_dev_run saw the loaders of 2 ranks")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        '{"exact": true}',
        '{"exact": "yes", "reasons": []}',
        '{"exact": true, "reasons": [3]}',
        '{"exact": true, "reasons": {"what": "x"}}',
        '{"exact": false, "reasons": []}',
        '{"exact": false, "reasons": [{"what": "x"}]}',
        '{"exact": false, "reasons": [{"what": 1, "why": "y", "fix": "z"}]}',
    ],
)
def test_a_record_that_cannot_be_read_is_none(project: Project, content: str) -> None:
    """A start that was killed while it wrote, or another version: then the one before counts."""
    project.start(STREAM)
    project.start()
    (project.run / "starts" / "2" / EXACTNESS_FILE).write_text(content)
    found = last_record(project.run)
    assert found is not None
    assert (found.start, found.seen) == (1, (STREAM,))
    (project.run / "starts" / "1" / EXACTNESS_FILE).unlink()
    assert last_record(project.run) is None
    assert last_line(project) == NOT_YET


def test_a_record_in_the_shape_of_the_contract(project: Project) -> None:
    """`{"exact": bool, "reasons": [{"what", "why", "fix"}]}`: what else there is, is more."""
    project.start()
    file = project.run / "starts" / "1" / EXACTNESS_FILE
    file.write_text('{"exact": false, "reasons": [{"what": "a", "why": "b", "fix": "c"}]}')
    found = last_record(project.run)
    assert found is not None
    assert found.seen == (Inexact("a", why="b", fix="c"),)
    assert found.world_size is None


def test_the_newest_start_counts_not_the_last_by_name(project: Project) -> None:
    for number in range(11):
        project.start(*([STREAM] if number == 10 else []))
    found = last_record(project.run)
    assert found is not None
    assert (found.start, found.seen) == (11, (STREAM,))


def test_a_record_says_what_is_of_the_settings() -> None:
    made = record(
        settings=[Inexact("a", why="b", fix="c")], seen=[Inexact("d", why="e", fix="f", certain=False)], world_size=2
    )
    assert made["exact"] is False
    assert [(one["what"], one["about"], one["certain"]) for one in made["reasons"]] == [
        ("a", "settings", True),
        ("d", "seen", False),
    ]
    assert record(settings=[], seen=[], world_size=1)["exact"] is True
    doubtful = record(settings=[], seen=[Inexact("d", why="e", fix="f", certain=False)], world_size=1)
    assert doubtful["exact"] is False, "what is not known is not exact"


# -- what it costs


def test_codes_are_documented() -> None:
    assert {"resume-not-exact", "resume-exactness-unknown"} <= CODES.keys()


def test_only_explain_loads_it() -> None:
    """`check` does not pay for it, nor does a plugin that names its reasons."""
    code = (
        "import sys, fairlead.checks, fairlead.cli.job\nfrom fairlead.findings import Inexact\n"
        "print(sorted(m for m in sys.modules if m.startswith('fairlead.exactness')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
