"""Settings of NCCL and gloo: from the config to variables, reasons and findings."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.errors import FairleadError
from fairlead.network import library_variables, network_findings, network_settings


def environment(**fields: Any) -> EnvironmentConfigBase:
    return EnvironmentConfigBase(name="slurm", **fields)


def test_names_and_values() -> None:
    """With and without the prefix, in any case; true and false are 1 and 0."""
    config = environment(nccl={"debug": "INFO", "NCCL_IB_DISABLE": True, "Socket_NThreads": 4}, gloo={"x": False})
    expected = {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "GLOO_X": "0"}
    assert library_variables(config) == expected
    assert library_variables(environment()) == {}
    again = type(config).model_validate(config.model_dump(mode="json"))
    assert again == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"socket-ifname": "ib0"}, "not the name of a variable"),
        ({"": 1}, "not the name of a variable"),
        ({"debug": "INFO", "NCCL_DEBUG": "WARN"}, "is set twice"),
        ({"debug": 0.5}, "valid string"),
        ({"debug": None}, "valid string"),
        ({"debug": "a\nb"}, "line break"),
        ("INFO", "dictionary"),
    ],
)
def test_what_is_no_setting(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment(nccl=settings)


def test_the_environment_wins_and_it_is_said() -> None:
    config = environment(nccl={"debug": "INFO", "socket_ifname": "ib0"})
    environ = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0"}
    settings = network_settings(config, environ)
    assert settings["NCCL_DEBUG"].value == "WARN"
    assert "set already" in settings["NCCL_DEBUG"].reason
    (finding,) = network_findings(config, "nccl", environ)
    assert (finding.severity, finding.code) == ("warning", "network-setting-overridden")
    assert "NCCL_DEBUG is 'WARN' in the environment and 'INFO' in the config" in finding.what


@pytest.mark.parametrize(
    ("backend", "codes"), [("nccl", []), ("cpu:gloo,cuda:nccl", []), ("gloo", ["network-setting-unused"])]
)
def test_settings_of_nccl_without_nccl(backend: str, codes: list[str]) -> None:
    config = environment(nccl={"debug": "INFO"}, gloo={"socket_ifname": "eth0"})
    assert [finding.code for finding in network_findings(config, backend, {})] == codes


def test_a_deadline_that_is_none() -> None:
    for wrong in (0, "-1", "soon"):
        with pytest.raises((ValueError, FairleadError)):
            environment(preflight_timeout=wrong)
