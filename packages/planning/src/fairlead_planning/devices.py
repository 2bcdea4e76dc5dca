"""What devices and networks reach, as data with sources: `devices.csv` and `networks.csv` beside this file.

Which devices there are, and what they can compute in, is `fairlead_runs.device_models`; here is how fast they are.
Peaks are those of dense products, in TFLOP/s; a rate of a network is what collectives of large tensors reach.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar

from fairlead.errors import ConfigError, did_you_mean
from fairlead_runs.device_models import find_device

DTYPES: Final = ("float32", "float16", "bfloat16", "float8", "float4")
_ALIKE: Final = {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float64": "float32"}


@dataclass(frozen=True, slots=True)
class Device:
    """How fast one model of a device is, and how it is connected where it is usually found."""

    name: str
    model: str
    """As in `fairlead_runs.device_models`; empty: a CPU."""
    family: str
    """What is built alike: `hopper`."""
    peak: dict[str, float]
    """TFLOP/s of dense products by number format; a format that is missing is computed in the next wider one."""
    units: int
    """How many tiles of a product it works on at the same time: its multiprocessors."""
    bandwidth_gb_s: float
    memory_gib: float
    """What a process can use, GiB."""
    power_w: float
    link: str
    """The network within a node or an NVLink domain."""
    between: str
    """The usual network between nodes."""
    node: int
    """How many are usually in a node."""
    domain: int
    """How many `link` connects; 1: each stands alone."""
    source: str

    def peak_of(self, dtype: str) -> float:
        """TFLOP/s in a number format, or in the next wider one that the device has."""
        dtype = _ALIKE.get(dtype, dtype)
        if dtype == "tfloat32":
            return self.peak["bfloat16"] / 2 if self.model and "bfloat16" in self.peak else self.peak["float32"]
        order = {"float4": ("float4", "float8", "bfloat16"), "float8": ("float8", "bfloat16", "float16")}
        wider = order.get(dtype, (dtype, "float16" if dtype == "bfloat16" else "float32"))
        return next((self.peak[one] for one in wider if one in self.peak), self.peak["float32"])


@dataclass(frozen=True, slots=True)
class Network:
    """What a network reaches."""

    name: str
    latency_us: float
    """Of one message."""
    device_gb_s: float | None
    """What each device reaches; None: those of a node share `node_gb_s`."""
    node_gb_s: float | None
    source: str

    def rate(self, node: int) -> float:
        """GB/s a device, if all `node` devices of a node send."""
        return self.device_gb_s if self.device_gb_s is not None else (self.node_gb_s or 0.0) / node


def _rows(name: str) -> Iterable[dict[str, Any]]:
    return csv.DictReader(files("fairlead_planning").joinpath(name).read_text(encoding="utf-8").splitlines())


@cache
def devices() -> dict[str, Device]:
    """All known devices by name, the fastest first."""
    return {
        row["name"]: Device(
            row["name"],
            row["model"],
            row["family"],
            {dtype: float(row[dtype]) for dtype in DTYPES if row[dtype]},
            int(row["units"]),
            float(row["bandwidth_gb_s"]),
            float(row["memory_gib"]),
            float(row["power_w"]),
            row["link"],
            row["between"],
            int(row["node"]),
            int(row["domain"]),
            row["source"],
        )
        for row in _rows("devices.csv")
    }


@cache
def networks() -> dict[str, Network]:
    """All known networks by name: those within a node, and those between nodes."""
    return {
        row["name"]: Network(
            row["name"],
            float(row["latency_us"]),
            float(row["device_gb_s"]) if row["device_gb_s"] else None,
            float(row["node_gb_s"]) if row["node_gb_s"] else None,
            row["source"],
        )
        for row in _rows("networks.csv")
    }


def device_facts(name: str) -> Device:
    """The facts of a device by a name that a user, a scheduler or a driver gives it.

    `a100` is the one with 80 GB, `h100` the SXM module with 80 GB.

    Raises:
        ConfigError: Nothing is known of it.

    Example:
        >>> device_facts("NVIDIA H100 80GB HBM3").name, device_facts("a100-pcie-40gb").name
        ('h100', 'a100 40gb pcie')
    """
    known = devices()
    words = " ".join(re.split(r"[\s_-]+", name.strip().lower()))
    if words in known:
        return known[words]
    model = find_device(name)
    variants = [one for one in known.values() if model is not None and one.model == model.name]
    if not variants:
        return _unknown("device", words, known)
    text = words.replace(" gb", "gb")

    def matched(one: Device) -> tuple[int, int]:
        """Its own words that the name has, less those that it lacks; of equals the first in the table."""
        own = one.name.removeprefix(one.model).split()
        return sum(1 if word in text else -1 for word in own), 0

    best = max(variants, key=matched)
    plain = next((one for one in variants if one.name == one.model), variants[0])
    return best if matched(best) > (0, 0) else plain


def network_facts(name: str) -> Network:
    """The facts of a network by its name in `networks.csv`.

    Raises:
        ConfigError: Nothing is known of it.
    """
    known = networks()
    words = " ".join(re.split(r"[\s_-]+", name.strip().lower()))
    return known[words] if words in known else _unknown("network", words, known)


_T = TypeVar("_T")


def _unknown(what: str, name: str, known: dict[str, _T]) -> _T:
    near = did_you_mean(name, known)
    raise ConfigError(
        f"unknown {what} {name!r}" + (f"; did you mean {near!r}?" if near else ""),
        why=f"known are {', '.join(known)}",
        fix=f"choose one of them, or the one that is nearest to yours in speed, and calibrate: fairlead plan "
        f"--calibration FILE takes what `fairlead bench` measured on your own {what}",
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one model in nodes, and what connects them."""

    device: Device
    between: Network
    """Between nodes, or between NVLink domains where these are larger."""
    node: int
    """Devices in a node."""
    domain: int
    """Devices that reach each other by the device's own link."""

    @classmethod
    def of(cls, device: str, network: str | None = None, node: int | None = None) -> Cluster:
        """A cluster by names; what is not given is what is usual for the device.

        Raises:
            ConfigError: A name is unknown.

        Example:
            >>> cluster = Cluster.of("h100")
            >>> cluster.node, cluster.between.name
            (8, 'infiniband ndr')
        """
        facts = device_facts(device)
        size = facts.node if node is None else node
        # A node that is smaller than usual is no larger domain; a rack's domain spans nodes of any size.
        domain = max(size, 1) if facts.domain == facts.node else facts.domain
        return cls(facts, network_facts(network or facts.between), size, domain)

    @property
    def link(self) -> Network:
        """Within a node, or a domain."""
        return network_facts(self.device.link)


@dataclass(frozen=True)
class Machines:
    """How many devices of which kind.

    Example:
        >>> one = Machines.of("64xh100")
        >>> one.count, one.cluster.device.name, one.nodes
        (64, 'h100', 8)
    """

    count: int
    cluster: Cluster

    @classmethod
    def of(cls, text: str, *, nodes: int | None = None, network: str | None = None) -> Machines:
        """From `64xh100`, or with `nodes` from `8xh100` for each node.

        Raises:
            ConfigError: It is not of that form, or a device or network is unknown.
        """
        found = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S.*?)\s*", text)
        if found is None or int(found[1]) < 1:
            raise ConfigError(
                f"{text!r} says no number of devices", where="--gpus", fix="write it as 64xh100, or 8xa100-40gb"
            )
        count = int(found[1])
        cluster = Cluster.of(found[2], network, count if nodes is not None else None)
        if nodes is not None:
            return cls(count * nodes, cluster)
        if count < cluster.node or cluster.device.model == "":  # processes on the CPUs of one machine
            cluster = Cluster.of(found[2], network, count)
        elif count % cluster.node:
            each = max(size for size in range(1, cluster.node) if count % size == 0)
            raise ConfigError(
                f"{count} devices do not fill nodes of {cluster.node}",
                where="--gpus",
                fix=f"--gpus {count - count % cluster.node}x{found[2]}, or fewer on each node: "
                f"--nodes {count // each} --gpus {each}x{found[2]}",
            )
        return cls(count, cluster)

    @property
    def nodes(self) -> int:
        """Of them."""
        return -(-self.count // self.cluster.node)
