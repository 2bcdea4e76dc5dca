"""`fairlead explain` says whether a resume is exact: in words, as JSON, and what the last start saw."""

from __future__ import annotations

import json
import os
import re
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
from fairlead.exactness import EXACTNESS_FILE, last_record, record
from fairlead.findings import CODES, Inexact
from fairlead.jobs import load_job
from fairlead.testing import stand_ins
from fairlead_runs import RunDirectory, fingerprint
from fairlead_runs.commit import checkpoint_name, publish, stage, write_file

CORE = {f"command.{name}": getattr(commands, name) for name in commands.__all__}
APP = """
import lightning.pytorch as L
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Net(L.LightningModule):
    def training_step(self, batch, batch_idx): return batch.sum()
class Numbers(Dataset):
    def __getitem__(self, i): return i
    def __len__(self): return 8
class Stream(IterableDataset):
    def __iter__(self): yield 1
class Data(L.LightningDataModule):
    def __init__(self, stream: bool = False):
        super().__init__()
        self.stream = stream
    def train_dataloader(self):
        return DataLoader(Stream() if self.stream else Numbers(), batch_size=2)
"""
JOB = """\
model: app:Net
data:
  class: app:Data
  args: {stream: %s}
trainer: {max_steps: 3}
"""
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
        self.write("job.yaml", JOB % "false")

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
        self, *reasons: Inexact, settings: Iterable[Inexact] = (), world_size: int = 1, age_s: float = -60
    ) -> None:
        """Records a start of the job that saw these loaders, `age_s` after the source was written."""
        loaded = load_job("job.yaml", plugins=self.plugins, cwd=self.path)
        assert loaded.job is not None
        job = loaded.job.model_dump(mode="json")
        with RunDirectory.open(self.run, job=job, fingerprint=fingerprint(job)) as run:
            number = run.begin(resolution={}, provenance={})
        file = self.run / "starts" / str(number) / EXACTNESS_FILE
        file.write_text(json.dumps(record(settings=settings, loaders=reasons, world_size=world_size)))
        written = (self.path / "app.py").stat().st_mtime - age_s
        os.utime(file, (written, written))


@pytest.fixture
def project(
    tmp_path: Path, fairlead_plugins: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> Project:
    made = {**stand_ins(), "strategy.single_device": Single(), "precision.32-true": Full()}
    return Project(tmp_path, fairlead_plugins(CORE, made), capsys)


def test_explain_says_exact(project: Project) -> None:
    assert (
        project("explain", "job.yaml")
        .splitlines()[-1]
        .startswith("resume: exact (the settings, and what was read: app.py")
    )
    assert project.explained() == ("exact", [])


def test_explain_says_not_exact_because_and_do(project: Project) -> None:
    project.write("job.yaml", JOB % "true")
    last = project("explain", "job.yaml").splitlines()[-1]
    assert re.fullmatch(
        r"resume: not exact, because of the IterableDataset Stream in app.py:16 \(a stream .+\), do: use torchdata.+",
        last,
    )
    value, (finding,) = project.explained()
    assert value == "not exact"
    assert (finding["severity"], finding["code"], finding["where"]) == ("info", "resume-not-exact", "app.py:16")
    assert all(finding.values())


def test_explain_says_not_known(project: Project) -> None:
    project.write("app.py", APP.replace("Numbers(), batch", "make(), batch"))
    assert project("explain", "job.yaml").splitlines()[-1].startswith("resume: not known, because of the dataset of")
    value, (finding,) = project.explained()
    assert (value, finding["severity"], finding["code"]) == ("not known", "info", "resume-exactness-unknown")
    assert "start it once" in finding["fix"]


def test_a_setting_is_named_with_its_line(project: Project) -> None:
    value, (finding,) = project.explained("--set", "trainer.enable_checkpointing=false")
    assert (value, finding["where"]) == ("not exact", "--set trainer.enable_checkpointing")
    project.write(
        "job.yaml", (JOB % "false").replace("max_steps: 3", "max_steps: 3, reload_dataloaders_every_n_epochs: 2")
    )
    _, (finding,) = project.explained()
    assert finding["where"] == "job.yaml:5, trainer.reload_dataloaders_every_n_epochs"


def test_certain_reasons_come_first(project: Project) -> None:
    project.write("job.yaml", JOB % "true")
    value, findings = project.explained("--set", "trainer.overfit_batches=2")
    assert value == "not exact"
    assert [(f["code"], f["where"]) for f in findings] == [
        ("resume-not-exact", "app.py:16"),
        ("resume-exactness-unknown", "--set trainer.overfit_batches"),
    ]


def test_the_setting_does_not_take_the_place_of_resume(project: Project) -> None:
    settings = json.loads(project("explain", "job.yaml", "--json"))["settings"]
    assert settings["resume"]["value"] == "auto"
    assert set(settings["exact"]) == {"value", "reason"}


def test_check_says_nothing_of_it(project: Project) -> None:
    """It stops nothing, and a check is silent where nothing is wrong."""
    project.write("job.yaml", JOB % "true")
    assert "resume" not in project("check", "job.yaml")
    found = json.loads(project("check", "job.yaml", "--json"))["findings"]
    assert [finding for finding in found if finding["code"].startswith("resume")] == []


@pytest.mark.parametrize("text", ["model: 3", "model: {class: app:Nothing}", "model: app:Net\ndata: app:Nothing", "[]"])
def test_a_wrong_job_is_never_exact(project: Project, text: str) -> None:
    project.write("job.yaml", text)
    settings = json.loads(project("explain", "job.yaml", "--json"))["settings"]
    assert settings.get("exact", {"value": "not known"})["value"] == "not known"


def test_a_source_that_does_not_parse_is_not_known(project: Project) -> None:
    project.write("app.py", APP + "def broken(:\n")
    assert project.explained()[0] == "not known"


# -- what a start saw


def test_a_start_knows_better_than_the_sources(project: Project) -> None:
    """The sources could not tell, the start could; and it is said which start it was."""
    project.write("app.py", APP.replace("Numbers(), batch", "make(), batch"))
    assert project.explained()[0] == "not known"
    project.start()
    assert project.explained()[0] == "exact"
    assert "the loaders as start 1 saw them" in project("explain", "job.yaml").splitlines()[-1]
    project.start(STREAM)
    value, (finding,) = project.explained()
    assert (value, finding["why"]) == ("not exact", STREAM.why)


def test_settings_still_count_after_a_start(project: Project) -> None:
    """What the start found in its settings may not be what these settings are."""
    project.start(settings=[Inexact("trainer.benchmark: true", why="it was set then", fix="unset it")])
    assert project.explained()[0] == "exact"
    assert project.explained("--set", "trainer.enable_checkpointing=false")[0] == "not exact"


def test_the_models_code_still_counts_after_a_start(project: Project) -> None:
    """A start sees loaders, not that the model keeps a generator."""
    keeps = "    def __init__(self):\n        super().__init__()\n        self.rng = random.Random(0)\n"
    project.write("app.py", "import random" + APP.replace("class Numbers", keeps + "class Numbers"))
    project.start()
    assert project.explained()[0] == "not exact"


def test_a_generator_that_a_start_did_not_find_is_not_forgotten(project: Project) -> None:
    """It may lie where a start does not look; or in a class that this job does not use."""
    keeps = "    def __init__(self): self.rng = random.Random(0)\n"
    source = "import random" + APP.replace("class Numbers(Dataset):\n", "class Numbers(Dataset):\n" + keeps)
    project.write("app.py", source)
    assert project.explained()[0] == "not exact"
    project.start()
    value, (finding,) = project.explained()
    assert value == "not known"
    assert "start 1 did not find it" in finding["why"]


def test_code_that_changed_after_the_start_is_read(project: Project) -> None:
    project.start()
    project.write("app.py", APP.replace("Numbers(), batch", "Stream(), batch"))
    os.utime(project.path / "app.py", (2e9, 2e9))
    value, (finding,) = project.explained()
    assert (value, finding["where"]) == ("not exact", "app.py:16")


def test_a_start_with_other_ranks_saw_other_loaders(project: Project) -> None:
    project.write("app.py", APP.replace("Numbers(), batch", "make(), batch"))
    project.start(world_size=4)
    assert project.explained()[0] == "not known"


def test_a_start_of_another_job_says_nothing(project: Project) -> None:
    project.start()
    project.write("app.py", APP.replace("Numbers(), batch", "make(), batch"))
    os.utime(project.path / "app.py", (1e9, 1e9))
    assert project.explained()[0] == "exact"
    assert project.explained("--set", "run.seed=7")[0] == "not known", "the run directory belongs to another job"


def test_going_on_with_other_ranks_is_not_exact(project: Project) -> None:
    project.start()
    staged = stage(project.run / "checkpoints", checkpoint_name(3), token="s1")
    digest = write_file(staged / "state.ckpt", lambda file: file.write(b"x"))
    publish(staged, {"step": 3, "start": 1, "world_size": 2}, hashes={"state.ckpt": digest})
    value, findings = project.explained()
    assert value == "not exact"
    assert findings[0]["what"].endswith("1 ranks after 2")


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
    """A start that was killed while it wrote, or another version: then the one before counts, or the sources."""
    project.start(STREAM)
    project.start()
    (project.run / "starts" / "2" / EXACTNESS_FILE).write_text(content)
    found = last_record(project.run)
    assert found is not None
    assert (found.start, found.loaders) == (1, (STREAM,))
    (project.run / "starts" / "1" / EXACTNESS_FILE).unlink()
    assert last_record(project.run) is None
    assert project.explained()[0] == "exact"


def test_a_record_in_the_shape_of_the_contract(project: Project) -> None:
    """`{"exact": bool, "reasons": [{"what", "why", "fix"}]}`: what else there is, is more."""
    project.start()
    file = project.run / "starts" / "1" / EXACTNESS_FILE
    file.write_text('{"exact": false, "reasons": [{"what": "a", "why": "b", "fix": "c"}]}')
    found = last_record(project.run)
    assert found is not None
    assert found.loaders == (Inexact("a", why="b", fix="c"),)
    assert found.world_size is None


def test_the_newest_start_counts_not_the_last_by_name(project: Project) -> None:
    for number in range(11):
        project.start(*([STREAM] if number == 10 else []))
    found = last_record(project.run)
    assert found is not None
    assert (found.start, found.loaders) == (11, (STREAM,))


def test_a_record_says_what_the_loaders_are_to_blame_for() -> None:
    made = record(
        settings=[Inexact("a", why="b", fix="c")], loaders=[Inexact("d", why="e", fix="f", certain=False)], world_size=2
    )
    assert made["exact"] is False
    assert [(one["what"], one["about"], one["certain"]) for one in made["reasons"]] == [
        ("a", "settings", True),
        ("d", "loaders", False),
    ]
    assert record(settings=[], loaders=[], world_size=1)["exact"] is True
    doubtful = record(settings=[], loaders=[Inexact("d", why="e", fix="f", certain=False)], world_size=1)
    assert doubtful["exact"] is False, "what is not known is not exact"


# -- what it costs


def test_codes_are_documented() -> None:
    assert {"resume-not-exact", "resume-exactness-unknown"} <= CODES.keys()


def test_only_explain_loads_the_reader_of_sources() -> None:
    """`check` and `fit` do not pay for it, nor does a plugin that names its reasons."""
    code = (
        "import sys, fairlead.checks, fairlead.cli.job\nfrom fairlead.findings import Inexact\n"
        "print(sorted(m for m in sys.modules if m.startswith('fairlead.exactness')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_sources_imports_no_engine() -> None:
    """Rule 1, where torch is installed: nothing of the user's or of torch's is imported."""
    code = (
        "import sys, fairlead.exactness.told\nprint([m for m in ('torch', 'numpy', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
