"""The configs and plugins of the axis `requeue`."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

import fairlead_hpc_signals
from fairlead.config_bases import RequeueConfigBase
from fairlead.interfaces import BuildContext, Requeuer
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead.testing import minimal_resolution

OWN: dict[str, dict[str, Any]] = {
    "slurm": {},
    "lsf": {},
    "exit_code": {},
    "script": {},
    "command": {"argv": ["true"]},
    "none": {},
}


def config_of(tag: str, **fields: Any) -> Any:
    return parse_backend("requeue", {"name": tag, **OWN[tag], **fields}, PluginManager())


@pytest.mark.parametrize("tag", OWN)
def test_each_is_built_into_a_requeuer(tag: str) -> None:
    manager = PluginManager()
    config = config_of(tag)
    runtime = manager.of(config).runtime
    assert runtime is not None
    context = BuildContext(minimal_resolution(manager), {}, manager)
    assert isinstance(pkgutil.resolve_name(runtime)(config, context), Requeuer)
    assert manager.record("requeue", tag).available


def test_face_is_sorted_and_holds_every_config() -> None:
    assert fairlead_hpc_signals.__all__ == sorted(fairlead_hpc_signals.__all__)
    classes = {PluginManager().get("requeue", tag).config.__name__ for tag in OWN}
    assert classes <= set(fairlead_hpc_signals.__all__)


def test_nothing_here_imports_torch() -> None:
    points = [p for p in importlib.metadata.entry_points(group="fairlead") if p.name.startswith("requeue.")]
    modules = [p.value.partition(":")[0] for p in points if p.value.startswith("fairlead_hpc_signals.")]
    assert len(modules) == len(OWN)
    code = f"import sys, fairlead_hpc_signals, {', '.join(modules)}\n"
    code += "print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("tag", OWN)
def test_signals_are_names_in_any_spelling(tag: str) -> None:
    """The signal is a setting; its default is documented."""
    assert config_of(tag).signals is None
    assert config_of(tag, signals=["usr1", "SIGUSR1", "SigTerm"]).signals == ("SIGUSR1", "SIGTERM")
    description = type(config_of(tag)).model_fields["signals"].description
    assert all(name in description for name in ("SIGUSR1", "SIGUSR2", "SIGTERM"))


@pytest.mark.parametrize(
    ("tag", "fields", "message"),
    [
        ("slurm", {"signals": ["SIGNONSENSE"]}, "not a signal of this system"),
        ("slurm", {"signals": ["KILL"]}, "cannot be caught"),
        ("slurm", {"signals": []}, "at least 1 item"),
        ("slurm", {"max_requeues": -1}, "greater than or equal to 0"),
        ("lsf", {"timeout_s": 0}, "greater than 0"),
        ("exit_code", {"code": 0}, "greater than or equal to 3"),
        ("exit_code", {"code": 256}, "less than or equal to 255"),
        ("exit_code", {"code": 143}, "no other start is wanted"),
        ("command", {"argv": []}, "at least 1 item"),
        ("command", {"argv": "rm -rf"}, "valid tuple"),
        ("none", {"code": 75}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused(tag: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(tag, **fields)


def test_configs_survive_a_dump() -> None:
    for tag in OWN:
        config = config_of(tag, max_requeues=3, signals=["SIGUSR2"])
        assert isinstance(config, RequeueConfigBase)
        assert parse_backend("requeue", config.model_dump(mode="json"), PluginManager()) == config
