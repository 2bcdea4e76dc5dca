"""What makes a run another run, and what may change on a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.interfaces import Job
from fairlead_runs import Fingerprint, fingerprint, render_name
from fairlead_runs.fingerprints import MAY_CHANGE
from fairlead_runs.naming import run_path, safe_name


def job(**trainer: Any) -> dict[str, Any]:
    return {
        "run": {"name": "gpt", "dir": "runs", "seed": 1, "resume": "auto"},
        "model": {"class": "m:M", "args": {"layers": [4, 8], "lr": 1e-3}},
        "data": {"class": "m:D", "args": {"batch_size": 16}},
        "trainer": {"precision": "32-true", "strategy": {"name": "ddp", "bucket_cap_mb": 25}, **trainer},
        "resources": {"nodes": 4},
        "submit": {"to": "slurm"},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    the_job = job()
    *parents, last = path.split(".")
    node: Any = the_job
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return the_job


@pytest.mark.parametrize("path", [*MAY_CHANGE, "run.name", "run.dir", "run.resume", "resources", "submit"])
def test_what_may_change_on_a_resume(path: str) -> None:
    """CLI.md: devices, num_nodes, max_*, time limits, loggers, checkpoint settings."""
    assert fingerprint(changed(path, {"name": "something else"})) == fingerprint(job())
    assert MAY_CHANGE.get(path, "not a part of it") != ""


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("model.class", "m:N", "model.class: m:M -> m:N"),
        ("model.args.lr", 0.01, "model.args.lr: 0.001 -> 0.01"),
        ("model.args.layers", [4, 9], "model.args.layers[1]: 8 -> 9"),
        ("model.args.dropout", None, "model.args.dropout: (not set) -> null"),
        ("data", None, None),
        ("run.seed", 2, "run.seed: 1 -> 2"),
        ("trainer.precision", "bf16-mixed", "trainer.precision: 32-true -> bf16-mixed"),
        ("trainer.strategy.bucket_cap_mb", 50, "trainer.strategy.bucket_cap_mb: 25 -> 50"),
        ("trainer.callbacks", [{"class": "m:Ema", "args": {}}], None),
    ],
)
def test_what_makes_another_run_is_shown_by_path(path: str, value: Any, shown: str | None) -> None:
    old, new = fingerprint(job()), fingerprint(changed(path, value))
    assert old.digest != new.digest
    differences = [str(difference) for difference in old.differences(new)]
    assert differences
    if shown is not None:
        assert differences == [shown]


def test_callbacks_are_compared_by_what_they_are() -> None:
    """One line for a callback that was removed or added, and none for those behind it or for their order."""
    stop = {"class": "lightning.pytorch.callbacks:EarlyStopping", "args": {"monitor": "loss", "patience": 3}}
    ema, other = {"class": "m:Ema", "args": {"decay": 0.9}}, {"class": "m:Ema", "args": {"decay": 0.99}}
    old = fingerprint(changed("trainer.callbacks", [stop, ema, other]))
    assert old == fingerprint(changed("trainer.callbacks", [ema, other, stop]))
    removed = fingerprint(changed("trainer.callbacks", [ema, other]))
    assert [str(one) for one in old.differences(removed)] == [
        "trainer.callbacks.EarlyStopping: lightning.pytorch.callbacks:EarlyStopping -> (not set)"
    ]
    slower = fingerprint(changed("trainer.callbacks", [stop, ema, {"class": "m:Ema", "args": {"decay": 0.999}}]))
    assert [str(one) for one in old.differences(slower)] == ["trainer.callbacks.Ema-2.args.decay: 0.99 -> 0.999"]


def test_it_does_not_depend_on_order_or_on_how_a_number_is_written() -> None:
    one = {"model": {"a": 1, "b": (1.0, 2)}, "trainer": {}, "run": {"seed": 1}}
    two = {"run": {"seed": 1.0}, "trainer": {}, "model": {"b": [1, 2.0], "a": 1.0}}
    assert fingerprint(one) == fingerprint(two)
    assert fingerprint({"model": float("nan")}) == fingerprint({"model": float("nan")})
    assert fingerprint({"model": 1}) != fingerprint({"model": "1"})
    assert fingerprint({"model": 1.5}) != fingerprint({"model": 1})


def test_a_difference_in_type_alone_is_a_difference_that_is_shown() -> None:
    (difference,) = fingerprint({"model": 1}).differences(fingerprint({"model": "1"}))
    assert str(difference) == 'model: 1 -> "1"'


def test_every_process_computes_the_same(tmp_path: Path) -> None:
    code = "import json, sys; from fairlead_runs import *; j = json.load(sys.stdin); print(fingerprint(j).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(job()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {fingerprint(job()).digest}


def test_it_is_stored_without_secrets_and_read_back(tmp_path: Path) -> None:
    secret = fingerprint(changed("model.args.api_token", "hunter2"))
    path = tmp_path / "fingerprint.json"
    path.write_bytes(secret.dump())
    assert b"hunter2" not in path.read_bytes()
    assert Fingerprint.load(path) == secret
    assert secret == fingerprint(changed("model.args.api_token", "renewed"))
    path.write_text(path.read_text().replace("m:M", "m:X"))
    with pytest.raises(RunDirectoryError, match="damaged"):
        Fingerprint.load(path)


def test_a_value_that_no_job_file_can_hold_is_named() -> None:
    with pytest.raises(ConfigError, match="is a set") as caught:
        fingerprint(changed("model.args.layers", [{1, 2}]))
    assert caught.value.where == "model.args.layers.0"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("gpt-lr{model.args.lr}", "gpt-lr0.001"),
        ("{trainer.strategy.name}-{model.args.layers.1}x", "ddp-8x"),
        ("{{{run.seed}}}", "_1_".strip("_")),
        ("a/b\\c d\te\x00f", "a_b_c_d_e_f"),
        ("../../etc/passwd", "etc_passwd"),
        ("-rf", "rf"),
        ("größe 実験 🚀", "größe_実験_🚀"),
        ("$(rm -rf ~);'\"", "rm_-rf"),
    ],
)
def test_names_are_rendered_from_the_job_and_safe(template: str, expected: str) -> None:
    assert render_name(template, job()) == expected


def test_a_long_name_is_cut_between_letters_and_stays_unique() -> None:
    one, two = safe_name("é" * 300 + "1"), safe_name("é" * 300 + "2")
    assert len(one.encode()) <= 200
    assert one != two
    assert one == safe_name("é" * 300 + "1")


@pytest.mark.parametrize(
    ("template", "message", "fix"),
    [
        ("{model.args.lrr}", "does not have", "write 'model.args.lr'"),
        ("{modle.args.lr}", "does not have", "write 'model'"),
        ("{model.args.layers.7}", "does not have", "use a path"),
        ("{run.seed.x}", "does not have", "use a path"),
        ("{model.args}", "has several", None),
        ("{run.name", "a single '{'", "double it: {{"),
        ("...", "is empty", "use letters"),
    ],
)
def test_a_wrong_name_is_a_config_error(template: str, message: str, fix: str | None) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        render_name(template, job())
    assert fix is None or fix in (caught.value.fix or "")


def test_a_name_does_not_show_a_secret() -> None:
    with pytest.raises(ConfigError, match="secret"):
        render_name("{model.args.api_key}", changed("model.args.api_key", "hunter2"))


def test_tasks_of_an_array_get_a_directory_each() -> None:
    assert run_path("runs", "gpt") == Path("runs/gpt")
    assert run_path("runs", "gpt", Job("slurm:17")) == Path("runs/gpt")
    assert run_path("runs", "gpt", Job("slurm:17", array_task="3")) == Path("runs/gpt-task-3")
