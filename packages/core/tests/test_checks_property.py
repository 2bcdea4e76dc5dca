"""Random structures thrown at `check`: never a traceback, never an internal error, always 0 or 2."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead import (
    LoggerConfigBase,
    LoggerPlugin,
    PluginManager,
    StrategyConfigBase,
    StrategyPlugin,
    SubmitterConfigBase,
    SubmitterPlugin,
    own_checks,
)
from fairlead.checks import check_job
from fairlead.cli.job import run_check
from fairlead.cli.session import Session
from fairlead.config import JobConfig, ResourcesConfig, RunConfig, TrainerConfig
from fairlead.errors import FairleadError
from fairlead.jobs import load_job
from fairlead.overrides import apply_override, parse_override
from fairlead.testing import FakeEntryPoint, stand_ins
from fairlead.yaml import dump


class RingStrategyConfig(StrategyConfigBase):
    """A ring."""

    name: Literal["ring"] = "ring"
    bucket_cap_mb: int = 25


class Ring(StrategyPlugin):
    """A ring."""

    config = RingStrategyConfig


class FileLoggerConfig(LoggerConfigBase):
    """A file."""

    name: Literal["file"] = "file"
    folder: str = "x"


class FileLogger(LoggerPlugin):
    """A file."""

    config = FileLoggerConfig


class QueueSubmitterConfig(SubmitterConfigBase):
    """A queue."""

    name: Literal["queue"] = "queue"


class Queue(SubmitterPlugin):
    """A queue."""

    config = QueueSubmitterConfig


OWN = {"check.code": own_checks.user_code}
TARGETS = {
    **stand_ins(),
    **OWN,
    "strategy.ring": Ring(),
    "logger.file": FileLogger(),
    "submitter.queue": Queue(),
    "strategy.bad": ImportError("no"),
}
PLUGINS = PluginManager([FakeEntryPoint(name, target) for name, target in TARGETS.items()])
NAMES = sorted(
    {
        "class",
        "args",
        "name",
        "plugins",
        "model",
        "data",
        "trainer",
        "run",
        "resources",
        "submit",
        "ring",
        "queue",
        "to",
        "file",
        "bad",
        "ddp",
    }
    | {name for model in (JobConfig, TrainerConfig, RunConfig, ResourcesConfig) for name in model.model_fields}
)
TEXTS = st.one_of(
    st.sampled_from(
        [*NAMES, "auto", "24:00:00", "net:Net", "json:loads", "strategy.ring", "{model.args}", "1e-3", "", "a" * 300]
    ),
    st.text(max_size=8),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from([0, -1, 1, 2, 10**30]), st.floats(), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), inner, max_size=4),
    ),
    max_leaves=12,
)
VALID: dict[str, Any] = {
    "run": {"name": "a-{model.args.layers}", "dir": "runs", "seed": 1, "resume": "auto"},
    "model": {"class": "net:Net", "args": {"layers": 4, "inner": {"class": "net:Net", "args": {}}}},
    "data": {"class": "json:loads", "args": {"s": "x"}},
    "trainer": {
        "devices": 2,
        "strategy": {"name": "ring", "bucket_cap_mb": 1},
        "loggers": ["file", {"name": "file", "folder": "y"}],
        "callbacks": [{"class": "net:Net", "args": {}}],
        "max_time": "24:00:00",
        "checkpoint": {"every_n_steps": 5},
        "plugins": [{"name": "precision.32-true"}],
    },
    "resources": {"nodes": 2, "devices_per_node": 1, "device": "cpu"},
    "submit": {"to": "queue", "time": "1-00:00:00", "extra": {"qos": "high"}},
}


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a structure."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [path, *(place for key, child in items for place in places(child, (*path, key)))]


PLACES = [place for place in places(VALID) if place]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A valid job with up to three values replaced, removed, or put under another name."""
    job = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(PLACES))
        node: Any = job
        for part in parents:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                break
        how = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if isinstance(node, dict):
            last = str(last)  # an index, where a list was replaced by a mapping
            old = node.pop(last, None)
            if how == "replace":
                node[last] = draw(VALUES)
            elif how == "rename":
                node[draw(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)))] = old
            elif how == "add":
                node.update({last: old, draw(st.sampled_from(NAMES)): draw(VALUES)})
        elif isinstance(node, list) and node:
            node[draw(st.integers(0, len(node) - 1))] = draw(VALUES)
    return job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model."""
    made = tmp_path_factory.mktemp("jobs")
    (made / "net.py").write_text("class Net:\n    def __init__(self, layers: int = 2, inner: object = None): ...\n")
    return made


class Arguments:
    """What argparse would give."""

    job, strict, json, profile, overrides = "job.yaml", False, True, None, ()


def check(folder: Path, text: bytes, profile: str | None = None) -> int:
    """Runs `check --json` as the command does, without its net for unexpected errors: they fail the test."""
    (folder / "job.yaml").write_bytes(text)
    session = Session(PLUGINS, {}, folder, stdout=io.StringIO(), stderr=io.StringIO())
    arguments: Any = Arguments()
    arguments.profile = profile
    try:
        code = run_check(arguments, session)
    except FairleadError as error:
        return error.exit_code
    document = json.loads(session.stdout.getvalue())  # type: ignore[attr-defined]  # a StringIO
    errors = [finding for finding in document["findings"] if finding["severity"] == "error"]
    assert document["ok"] is (not errors)
    assert all(finding["code"] and finding["what"] for finding in document["findings"])
    return code


def written(value: Any) -> bytes | None:
    """The value as YAML, or None where YAML cannot hold it."""
    try:
        return dump(value).encode()
    except FairleadError:
        return None


SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def test_the_unmutated_job_is_valid(folder: Path) -> None:
    """Otherwise the mutations would only ever be tried on a job that fails early."""
    assert check(folder, dump(VALID).encode()) == 0
    assert check(folder, dump(VALID).encode(), "resources") == 2  # two devices a node, the resources have one


@SETTINGS
@given(value=VALUES)
def test_any_structure(folder: Path, value: Any) -> None:
    text = written(value)
    if text is not None:
        assert check(folder, text) in (0, 2)


@SETTINGS
@given(value=mutated(), profile=st.sampled_from([None, "resources", "x"]))
def test_any_mutation_of_a_valid_job(folder: Path, value: Any, profile: str | None) -> None:
    text = written(value)
    if text is not None:
        assert check(folder, text, profile) in (0, 2)


@SETTINGS
@given(text=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_any_bytes(folder: Path, text: bytes) -> None:
    assert check(folder, text) in (0, 2)


@SETTINGS
@given(path=st.sampled_from(PLACES), more=st.sampled_from(["", ".name", ".x", "[0]", "[7].y"]), value=TEXTS)
def test_any_override(folder: Path, path: tuple[Any, ...], more: str, value: str) -> None:
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    (folder / "job.yaml").write_bytes(dump(VALID).encode())
    code = 2
    try:
        loaded = load_job("job.yaml", plugins=PLUGINS, cwd=folder, environ={}, overrides=[f"{dotted}{more}={value}"])
        check_job(loaded, environ={}, plugins=PLUGINS)
    except FairleadError as error:
        code = error.exit_code
    assert code == 2


@SETTINGS
@given(
    text=st.one_of(
        st.text(max_size=20), st.from_regex(r"[a-z.\[\]0-9]{1,12}=[a-z0-9:{}\[\],' ]{0,10}", fullmatch=True)
    ),
    data=VALUES,
)
def test_any_text_after_set(text: str, data: Any) -> None:
    before, said = copy.deepcopy(data), ""
    try:
        apply_override(data, *parse_override(text))
    except FairleadError as error:
        said = error.block()
    assert said == "" or "do:" in said or "why:" in said
    assert repr(data) == repr(before)
