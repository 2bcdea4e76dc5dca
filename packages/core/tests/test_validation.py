"""What a user reads when a job is wrong: the place with its line, the reason, and what to write instead."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from fairlead import LoggerConfigBase, LoggerPlugin, PluginManager, StrategyConfigBase, StrategyPlugin
from fairlead.errors import ConfigError, UserCodeError
from fairlead.findings import Finding
from fairlead.install import install_line
from fairlead.jobs import LoadedJob, load_job
from fairlead.testing import FakeEntryPoint, stand_ins


class RingStrategyConfig(StrategyConfigBase):
    """A ring."""

    name: Literal["ring"] = "ring"
    bucket_cap_mb: int = 25
    mode: Literal["fast", "exact"] = "fast"


class Ring(StrategyPlugin):
    """A ring."""

    config = RingStrategyConfig


class FileLoggerConfig(LoggerConfigBase):
    """A file."""

    name: Literal["file"] = "file"
    folder: str


class FileLogger(LoggerPlugin):
    """A file."""

    config = FileLoggerConfig


Load = Callable[..., LoadedJob]


@pytest.fixture
def load(fairlead_plugins: Callable[..., PluginManager], tmp_path: Path) -> Load:
    """Loads a job from its text."""
    plugins = fairlead_plugins(
        stand_ins(), Ring(), FileLogger(), FakeEntryPoint("strategy.broken", ImportError("no such thing"))
    )

    def make(text: str, *overrides: str) -> LoadedJob:
        (tmp_path / "job.yaml").write_text(textwrap.dedent(text))
        return load_job("job.yaml", plugins=plugins, cwd=tmp_path, environ={}, overrides=overrides)

    return make


def only(loaded: LoadedJob) -> Finding:
    """The one finding of an invalid job."""
    assert loaded.job is None
    (finding,) = loaded.findings
    assert finding.severity == "error"
    return finding


def test_a_valid_job(load: Load) -> None:
    loaded = load("model: {class: m:Net}\n")
    assert loaded.findings == ()
    assert loaded.job is not None
    assert loaded.job.run.name == "job"  # the stem of the file


def test_an_unknown_field(load: Load) -> None:
    finding = only(load("model: {class: m:Net}\ntrainer:\n  devices: 1\n  max_step: 3\n"))
    assert (finding.code, finding.where, finding.fix) == (
        "unknown-field",
        "job.yaml:4, trainer.max_step",
        "did you mean 'max_steps'?",
    )


def test_an_unknown_field_of_a_plugin_lists_what_it_takes(load: Load) -> None:
    finding = only(load("model: {class: m:Net}\ntrainer:\n  strategy:\n    name: ring\n    bucket_cap: 3\n"))
    assert finding.where == "job.yaml:5, trainer.strategy.bucket_cap"
    assert finding.why == "trainer.strategy takes: bucket_cap_mb, mode, name"
    assert finding.fix == "did you mean 'bucket_cap_mb'?"


def test_fields_of_a_list_item(load: Load) -> None:
    loaded = load(
        "model: {class: m:Net}\ntrainer:\n  loggers:\n    - {name: file, folder: x}\n    - {name: file, foldr: x}\n"
    )
    missing, unknown = sorted(loaded.findings, key=lambda finding: finding.code)
    assert (missing.code, missing.where, missing.fix) == (
        "missing-field",
        "job.yaml:5, trainer.loggers[1].folder",
        "add `folder: ...`",
    )
    assert (unknown.where, unknown.fix) == ("job.yaml:5, trainer.loggers[1].foldr", "did you mean 'folder'?")


def test_the_model_is_needed(load: Load) -> None:
    finding = only(load("trainer: {}\n"))
    assert (finding.code, finding.what) == ("missing-field", "'model' is not set")


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ('max_steps: "100"', "trainer.max_steps is the text '100': it should be a integer", "remove the quotes"),
        ("max_steps: many", "trainer.max_steps is the text 'many': it should be a integer", "write an integer"),
        ("barebones: 1", "trainer.barebones is 1: it should be a boolean", "write a boolean"),
        ("callbacks: {a: 1}", "trainer.callbacks is the mapping {'a': 1}: it should be a list", "write a list"),
    ],
)
def test_a_wrong_type(load: Load, text: str, what: str, fix: str | None) -> None:
    finding = only(load(f"model: {{class: m:Net}}\ntrainer:\n  {text}\n"))
    assert (finding.code, finding.fix, finding.where) == (
        "wrong-type",
        fix,
        f"job.yaml:3, trainer.{text.partition(':')[0]}",
    )
    assert finding.what.replace("an integer", "a integer").replace("a valid", "a") == what


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("gpus: 2", "unknown-field", "did you mean 'devices'?"),
        ("epochs: 3", "unknown-field", "did you mean 'max_epochs'?"),
        ("gradient_accumulation_steps: 3", "unknown-field", "did you mean 'accumulate_grad_batches'?"),
        ("frobnicate: 3", "unknown-field", "remove it, or write one of these instead"),
        ("max_epochs: -3", "wrong-value", "write a number from -1"),
        ("accumulate_grad_batches: 0", "wrong-value", "write a number above 0"),
        ("gradient_clip_val: -1.0", "wrong-value", "write a number from 0"),
        ("devices: -2", "wrong-value", "write a number from 1, a list of indices as [0, 2], or -1 or auto for all"),
        ("devices: one", "wrong-type", "write 1"),
        ("devices: many", "wrong-type", "write an integer or a list or 'auto'"),
        ("ckpt_path: last.ckpt", "unknown-field", "move it there: `run: {ckpt_path: ...}`"),
        ("seed: 3", "unknown-field", "move it there: `run: {seed: ...}`"),
    ],
)
def test_each_mistake_has_what_to_do(load: Load, text: str, code: str, fix: str) -> None:
    finding = only(load(f"model: {{class: m:Net}}\ntrainer:\n  {text}\n"))
    assert (finding.code, finding.fix) == (code, fix)
    assert (finding.why is not None) == ("frobnicate" in text)  # sixty names, where none is meant


def test_a_wrong_choice_has_a_suggestion(load: Load) -> None:
    finding = only(load("model: {class: m:Net}\ntrainer:\n  strategy: {name: ring, mode: exakt}\n"))
    assert (finding.code, finding.fix) == ("wrong-value", "did you mean 'exact'?")


def test_a_union_is_one_finding(load: Load) -> None:
    """`devices` may be three things; the user made one mistake."""
    finding = only(load("model: {class: m:Net}\ntrainer:\n  devices: {a: 1}\n"))
    assert finding.where == "job.yaml:3, trainer.devices"
    assert " or " in finding.what
    inside = only(load("model: {class: m:Net}\ntrainer:\n  devices: [0, x]\n"))  # a list is one of them
    assert inside.where == "job.yaml:3, trainer.devices[1]"


def test_unknown_and_missing_and_broken_plugins(load: Load) -> None:
    job = "model: {class: m:Net}\ntrainer:\n  strategy: "
    unknown, missing, broken = only(load(job + "rin")), only(load(job + "deepspeed")), only(load(job + "broken"))
    assert (unknown.code, unknown.fix) == ("unknown-tag", "did you mean 'ring'?")
    assert (missing.code, missing.fix) == ("plugin-missing", install_line("deepspeed"))
    assert broken.code == "plugin-broken"
    assert "ImportError: no such thing" in str(broken.why)
    assert {f.where for f in (unknown, missing, broken)} == {"job.yaml:3, trainer.strategy"}


def test_one_axis_twice(load: Load) -> None:
    finding = only(load("model: {class: m:Net}\ntrainer:\n  strategy: ring\n  plugins: [{name: strategy.ddp}]\n"))
    assert finding.code == "axis-set-twice"
    assert finding.what == "the strategy is set twice: in `strategy` and in `plugins[0]`"


def test_all_mistakes_are_shown_together(load: Load) -> None:
    loaded = load("model: {clas: m:Net}\nrun: {seed: -1}\ntrainer: {max_steps: x, strategy: {name: ring, mod: fast}}\n")
    assert sorted(finding.code for finding in loaded.findings) == [
        "missing-field",
        "unknown-field",
        "unknown-field",
        "wrong-type",
        "wrong-value",
    ]


def test_an_override_is_named_as_the_place(load: Load) -> None:
    finding = only(load("model: {class: m:Net}\n", "trainer.max_steps=x"))
    assert finding.where == "--set trainer.max_steps"
    loaded = load(
        "model: {class: m:Net}\ntrainer:\n  strategy: ddp\n", "trainer.strategy=ring", "trainer.strategy.mode=exact"
    )
    assert loaded.job is not None
    assert loaded.job.trainer.strategy == RingStrategyConfig(mode="exact")


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", "empty"), ("# nothing\n", "empty"), ("- a\n", "a list"), ("a job\n", "a str"), ("5\n", "a int")],
)
def test_what_is_no_job(load: Load, text: str, kind: str) -> None:
    finding = only(load(text))
    assert finding.code == "wrong-type"
    assert finding.what == f"job.yaml is {kind}, not a job"


def test_a_missing_file(load: Load, tmp_path: Path) -> None:
    load("model: {class: m:Net}\n")
    with pytest.raises(ConfigError) as caught:
        load_job("jbo.yaml", plugins=PluginManager([]), cwd=tmp_path, environ={})
    assert "job.yaml" in str(caught.value.fix)


PYTHON = """
    from fairlead import JobConfig, TrainerConfig

    job = JobConfig(model={"class": "m:Net"}, trainer=TrainerConfig(max_steps=3))

    def make():
        return job

    def needs(argument):
        return job

    def fails():
        raise RuntimeError("no data today")

    number = 3
    unplain = JobConfig(model={"class": "m:Net", "args": {"lock": object()}})
"""


@pytest.fixture
def python_job(tmp_path: Path, fake_dist: object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedJob]:
    """Loads a job from a Python module in the working directory."""
    (tmp_path / "my_python_job.py").write_text(textwrap.dedent(PYTHON))
    monkeypatch.syspath_prepend(tmp_path)
    plugins = PluginManager([FakeEntryPoint(name, target) for name, target in stand_ins().items()])
    return lambda name, *overrides: load_job(
        f"my_python_job:{name}", plugins=plugins, cwd=tmp_path, environ={}, overrides=overrides
    )


@pytest.mark.parametrize("name", ["job", "make"])
def test_a_job_in_python(python_job: Callable[..., LoadedJob], name: str) -> None:
    loaded = python_job(name, "trainer.max_steps=7")
    assert loaded.job is not None
    assert (loaded.job.trainer.max_steps, loaded.job.run.name) == (7, name)
    assert loaded.locate(("trainer", "max_steps")) == "--set trainer.max_steps"
    assert loaded.locate(("model",)) == f"my_python_job:{name}, model"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("number", ConfigError),
        ("needs", UserCodeError),
        ("fails", UserCodeError),
        ("absent", UserCodeError),
        ("unplain", ConfigError),
    ],
)
def test_what_is_no_job_in_python(python_job: Callable[..., LoadedJob], name: str, error: type[Exception]) -> None:
    with pytest.raises((ConfigError, UserCodeError)) as caught:
        python_job(name)
    assert caught.value.where
    assert caught.type in (error, ConfigError)
