"""Settings of NCCL and gloo, and the backend that carries the messages, as `explain` shows them."""

from __future__ import annotations

from datetime import timedelta

from fairlead import TrainerConfig
from fairlead.plugins import PluginManager
from fairlead.resolve import resolve


def test_explain_shows_them_and_the_backend_that_was_asked_for() -> None:
    trainer = TrainerConfig.model_validate(
        {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {"name": "ddp", "process_group_backend": "mpi"},
            "environment": {"name": "lightning", "nccl": {"debug": "INFO"}, "preflight_timeout": "00:02:00"},
        }
    )
    resolution = resolve(trainer, environ={}, plugins=PluginManager())
    assert resolution.environment.preflight_timeout == timedelta(minutes=2)
    assert resolution.settings["NCCL_DEBUG"].value == "INFO"
    assert resolution.settings["NCCL_DEBUG"].reason == "trainer.environment.nccl.debug"
    assert resolution.backend == resolution.value("backend") == "mpi"
    assert resolution.settings["backend"].reason == "trainer.strategy.process_group_backend"
    assert "network-setting-unused" in [finding.code for finding in resolution.findings]
    by_device = resolve(TrainerConfig(accelerator="cpu"), environ={}, plugins=PluginManager())
    assert by_device.settings["backend"].value == "gloo"
    assert by_device.settings["backend"].reason == "for the device cpu"
