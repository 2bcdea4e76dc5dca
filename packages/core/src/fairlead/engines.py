"""The engines that Fairlead's own plugins run on: the versions that each may have, and those that were tested.

A plugin names its engines (`engines = (*LIGHTNING, "deepspeed")`), this table has the versions. The extras of the
packages declare the same ranges, and docs/reference/versions.md shows the table; tests hold all of them together.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Final

from fairlead.errors import MissingDependencyError
from fairlead.findings import Finding

LIGHTNING: Final = ("torch", "lightning")
"""The engines of every plugin that is built for Lightning's Trainer or Fabric."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

    Args:
        name: Its distribution, as pip knows it.
        accepts: The versions that a plugin runs with. With any other the plugin counts as not installed.
        tested: Versions that the tests have run with, the oldest first. Between the first and the last, each with all
            its patch releases, counts as tested; any other accepted version is the finding `engine-untested`.
        why: Why the range begins, or ends, where it does.
        paired: The engine of which it needs the same minor version.
    """

    name: str
    accepts: str
    _: KW_ONLY
    tested: tuple[str, ...] = ()
    why: str = ""
    paired: str | None = None

    @property
    def requirement(self) -> str:
        """The requirement that the packages declare, `torch>=2.9,<3`."""
        return f"{self.name}{self.accepts}"


_TABLE: Final = (
    Engine(
        "torch",
        ">=2.9,<3",
        tested=("2.9.1", "2.13.0", "2.15.0"),
        why="2.9 is the torch of the newest torch-xla. A new major version may change anything.",
    ),
    Engine(
        "lightning",
        ">=2.6.6,<3",
        tested=("2.6.6",),
        why="2.6.2 and 2.6.3 were malicious releases; 2.6.6 closes code execution through checkpoint hyperparameters.",
    ),
    Engine("numpy", ">=1.26", tested=("2.4.6",)),
    Engine("rich", ">=13", tested=("15.0.0",)),
    Engine("vl-convert-python", ">=1.9", tested=("1.9.0.post1",)),
    Engine("safetensors", ">=0.5,<1", tested=("0.8.0",)),
    Engine("torchmetrics", ">=1.7", tested=("1.9.0",)),
    Engine("xxhash", ">=4,<5", tested=("4.1.0",)),
    Engine("zlib-ng", ">=1.0,<2", tested=("1.1.0",)),
    Engine("fsspec", ">=2025.3", tested=("2026.9.0",)),
    Engine(
        "deepspeed",
        ">=0.19.8,<1",
        tested=("0.19.8",),
        why="Older ones were not tried.",
    ),
    Engine("bitsandbytes", ">=0.50,<1", tested=("0.50.2",), why="Older ones were not tried."),
    Engine("torchao", ">=0.18,<1", tested=("0.18.0",), why="Older ones were not tried."),
    Engine("transformer-engine", ">=2.20,<3", tested=("2.20.2",), why="Older ones were not tried."),
    Engine(
        "torch-xla",
        ">=2.9,<2.10",
        tested=("2.9.0",),
        why="The newest. It is built for the torch of its own minor version and cannot be imported with another.",
        paired="torch",
    ),
    Engine("mpi4py", ">=4.1,<5", tested=("4.1.2",)),
    Engine("tensorboard", ">=2.18", tested=("2.21.0",)),
    Engine("wandb", ">=0.19", tested=("0.31.0",)),
    Engine("mlflow-skinny", ">=2.14", tested=("3.17.2",)),
    Engine("onnx", ">=1.18", tested=("1.23.2",)),
    Engine("onnxscript", ">=0.5", tested=("0.7.2",)),
    Engine("onnxruntime", ">=1.20", tested=("1.32.0",)),
    Engine("copier", ">=9.10,<10", tested=("9.19.1",)),
    Engine("prometheus-client", ">=0.22,<1", tested=("0.26.0",), why="Older ones were not tried."),
    Engine("opentelemetry-sdk", ">=1.35,<2", tested=("1.45.2",), why="Older ones were not tried."),
    Engine("opentelemetry-exporter-otlp-proto-http", ">=1.35,<2", tested=("1.45.2",), why="Older ones were not tried."),
    Engine("transformers", ">=5.20,<6", tested=("5.23.0",), why="Older ones were not tried."),
    Engine("accelerate", ">=1.15,<2", tested=("1.15.0",), why="Older ones were not tried."),
)

ENGINES: Final = {engine.name: engine for engine in _TABLE}
"""All engines by name."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that needs a newer engine than its plugin.

    Args:
        title: As a message names it, in the singular.
        engine: The name of the engine.
        since: The first version that has what the feature needs.
        why: What that is.
    """

    title: str
    engine: str
    since: str
    why: str


FEATURES: Final = {
    "pipeline": Feature(
        "pipeline parallelism",
        "torch",
        "2.12",
        "stages find out shapes in torch's PipelineStage, which can be extended from that version on",
    ),
    "expert": Feature(
        "expert parallelism", "torch", "2.12", "experts are sharded as one list, which `fully_shard` takes since then"
    ),
}
"""By the name by which the code asks for them."""


def too_old(name: str, *, where: str | None = None) -> MissingDependencyError | None:
    """The error that the engine of a feature is too old for it; None: it is not, or it is not installed.

    Args:
        name: A key of `FEATURES`.
        where: The config path to name in the error.
    """
    feature = FEATURES[name]
    try:
        version = importlib.metadata.version(feature.engine)
    except importlib.metadata.PackageNotFoundError:
        return None
    if _numbers(version) >= _numbers(feature.since):
        return None
    return MissingDependencyError(
        f"{feature.title} needs {feature.engine} {feature.since} or newer; {version} is installed",
        where=where,
        why=feature.why,
        fix=f"pip install '{feature.engine}>={feature.since}'",
    )


def requirement(engine: str) -> str:
    """What an entry of `engines` asks for: the range of this table where it is a name in it, else the entry itself.

    Example:
        >>> requirement("mpi4py"), requirement("horovod>=0.28")
        ('mpi4py>=4.1,<5', 'horovod>=0.28')
    """
    return ENGINES[engine].requirement if engine in ENGINES else engine


def untested(engine: Engine, version: str) -> str | None:
    """Whether a version is `older` or `newer` than those that were tested; None: it is one of them.

    Example:
        >>> untested(ENGINES["lightning"], "2.6.9"), untested(ENGINES["lightning"], "2.7.0")
        (None, 'newer')
    """
    minor = _numbers(version)
    return "older" if minor < _numbers(engine.tested[0]) else "newer" if minor > _numbers(engine.tested[-1]) else None


def version_findings(versions: Iterable[tuple[str, str, str]]) -> Iterable[Finding]:
    """Findings on the installed engines that a job selects; each is `(engine, version, where it is selected)`."""
    installed = {name: version for name, version, _ in versions}
    for name, version, where in versions:
        engine = ENGINES[name]
        other = installed.get(engine.paired or "")
        if engine.paired is not None and other is not None and _minor(version) != _minor(other):
            yield Finding(
                "error",
                "engine-mismatch",
                f"{name} {version} needs {engine.paired} {_minor(version)}, but {engine.paired} {other} is installed",
                where=where,
                why=engine.why,
                fix=f"pip install '{engine.paired}=={_minor(version)}.*'",
            )
        elif (which := untested(engine, version)) is not None:
            first, last = engine.tested[0], engine.tested[-1]
            yield Finding(
                "info",
                "engine-untested",
                f"{name} {version} is {which} than Fairlead was tested with",
                where=where,
                why=f"tested: {first}" if first == last else f"tested: {first} to {last}",
                fix=f"nothing, if the job works; else try {name} {last if which == 'newer' else first}",
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version, without what a build adds to them."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _minor(version: str) -> str:
    return ".".join(map(str, _numbers(version)))
