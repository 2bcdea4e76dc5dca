"""Facts of devices and networks: by every name that a user writes, and one home for each."""

from __future__ import annotations

import pytest

from fairlead.errors import ConfigError
from fairlead_planning.devices import Cluster, device_facts, devices, network_facts, networks
from fairlead_runs.device_models import find_device


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H100 NVL", "h100 nvl"),
        ("a100", "a100 80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100 40gb"),
        ("a100-pcie-40gb", "a100 40gb pcie"),
        ("GB200", "gb200"),
        ("Tesla V100-SXM2-16GB", "v100 16gb"),
        ("rtx4090", "rtx 4090"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_found_by_the_names_that_drivers_schedulers_and_people_give_it(written: str, name: str) -> None:
    assert device_facts(written).name == name


def test_an_unknown_device_or_network_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'") as error:
        device_facts("h100x")
    assert "mi300x" in str(error.value)
    assert "--calibration" in str(error.value)
    with pytest.raises(ConfigError, match="did you mean 'infiniband ndr'"):
        network_facts("infiniband-ndrr")


@pytest.mark.parametrize("facts", devices().values(), ids=list(devices()))
def test_each_device_agrees_with_the_table_of_models_and_has_networks_and_a_source(facts: object) -> None:
    from fairlead_planning.devices import Device

    assert isinstance(facts, Device)
    assert {facts.link, facts.between} <= networks().keys()
    assert facts.source
    assert facts.peak_of("float8") >= facts.peak_of("bfloat16") >= facts.peak_of("float32") > 0
    if facts.model:
        model = find_device(facts.model)
        assert model is not None
        # What a process can use is less than the data sheet's decimal GB, by a tenth at most.
        assert any(0.88 * gb < facts.memory_gib * 1.0737 < 1.08 * gb for gb in model.memory_gb), model.memory_gb
        assert ("bfloat16" in facts.peak) == model.bf16
        assert ("float8" in facts.peak) == model.fp8


def test_a_format_that_a_device_lacks_is_computed_in_the_next_wider_one() -> None:
    a100, v100, cpu = (device_facts(name) for name in ("a100", "v100", "cpu"))
    assert a100.peak_of("float8_e4m3fn") == a100.peak_of("bfloat16") == 312
    assert v100.peak_of("bfloat16") == v100.peak_of("float16") == 125
    assert (a100.peak_of("tfloat32"), v100.peak_of("tfloat32")) == (156, v100.peak_of("float32"))
    assert cpu.peak_of("tfloat32") == cpu.peak_of("float32")


def test_a_cluster_has_what_is_usual_for_its_devices_unless_it_is_given() -> None:
    usual = Cluster.of("gb200")
    assert (usual.node, usual.domain) == (4, 72)
    assert Cluster.of("h100", "efa 3200", 4).node == 4
    assert network_facts("ethernet 100").rate(8) == pytest.approx(network_facts("ethernet 100").rate(1) / 8)
