"""The rules of the design, held over every module of every package.

Each test reads sources (`ast`) and claims only what a source proves, so that a failure is always a breach. Packages are
found by their folders. A named exception carries its reason, and one that is no longer needed fails too.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fairlead.errors import MissingDependencyError

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "fairlead_distributed"}
# Modules of a distribution that is itself declared: pydantic brings these and pins them.
PART_OF = {"pydantic_core": "pydantic", "annotated_types": "pydantic", "_pytest": "pytest"}
LOWER: dict[str, set[str]] = {
    "core": set(),
    "runs": {"fairlead"},
    "launch": {"fairlead", "fairlead_runs"},
    "distributed": {"fairlead", "fairlead_runs", "fairlead_launch"},
    "planning": {
        *("fairlead", "fairlead_runs", "fairlead_launch", "fairlead_distributed"),
        *("fairlead_lightning", "fairlead_strategies"),
    },
}
"""What the packages below the plugins, and the one above them, may import of their siblings."""
TEST_TOOLS = {"pytest", "_pytest", "hypothesis"}

# Where a process may touch its own environment other than as the default of an injectable `environ`.
ENVIRONMENT_PLACES = {
    ("fairlead_lightning.commands.local", "setdefault"): "what torch reads at its import, in a rank's own process",
    (
        "fairlead_lightning.verify.reference",
        "Call",
    ): "a user's configure_optimizers that asks there is told of other ranks",
    ("fairlead_environments.runtime", "Assign"): "a rank of `ddp_spawn` has its own, which does not travel in a pickle",
    ("fairlead_distributed.testing", "Dict"): "the processes of a test have the variables of the test, and their own",
    ("fairlead_launch.forkserver", "items"): "a server has the variables of its process",
    ("fairlead_launch.forkserver", "clear"): "or those that it is given, when it imports for others",
    ("fairlead_launch.forkserver", "update"): "which are then all",
    ("fairlead_launch.launcher", "update"): "a process that is a rank already becomes the script's",
    ("fairlead_launch.hosts", "update"): "a launcher over ssh gets the variables that its command line must not show",
    ("fairlead_launch.worker", "Call"): "a rank's own, before the user's script changes them",
    ("fairlead_launch.preloading", "Subscript"): "torch is told not to start a driver when it is imported",
    ("fairlead_launch.preloading", "AnnAssign"): "what a module asks for when it is imported is noted",
    ("fairlead_launch.preloading", "Assign"): "and then no more",
    ("fairlead_launch.preloading", "Call"): "in a mapping of the same class",
    ("fairlead_launch.forked_child", "clear"): "a forked process gets other variables than its server",
    ("fairlead_launch.forked_child", "update"): "which are all that it gets",
    (
        "fairlead_distributed.run.failure_watch",
        "setdefault",
    ): "torch reads its flight recorder's folder from nowhere else",
    (
        "fairlead_lightning.loggers.mlflow_runtime",
        "setdefault",
    ): "MLflow asks only there whether files may be written",
    (
        "fairlead_distributed.run.opening",
        "Subscript",
    ): "the ranks that Lightning starts from here inherit the run",
    ("fairlead_distributed.run.opening", "pop"): "and after they have started, it is taken back",
    ("fairlead_checkpoint_io.commands.other_tools", "Subscript"): "torch has no other switch against unpickling",
    ("fairlead_checkpoint_io.commands.other_tools", "get"): "which is set back to what it was",
}
# Module-level state that the design allows.
STATE_PLACES = {
    ("fairlead.plugins", "_default"): "the one default plugin manager, made when a public function first needs it",
    ("fairlead_distributed.control_plane", "_of_groups"): "that of the process group, as long as somebody uses it",
    ("fairlead_launch.forkserver", "_servers"): "the fork servers of this process, which end with it",
    ("fairlead_hpc_signals.flags", "_wakeups"): "the files that Python's one `set_wakeup_fd` was told of here",
    ("fairlead_distributed.parallel._local", "_derived"): "classes, of which one is enough for all layers of a kind",
    ("fairlead_environments.scrubbing", "_open"): "which blocks hide what of os.environ, which all threads share",
}
SHIPPED_FACTS = {
    ("fairlead_planning.calibration", "shipped"),
    ("fairlead_planning.devices", "devices"),
    ("fairlead_planning.devices", "networks"),
}
"""Data files of a package, of which one reading is enough: nothing changes them."""


@dataclass(frozen=True)
class Source:
    """One module of a package."""

    package: str  # the folder in packages/
    module: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def imports(self, *, typing_only: bool = False) -> Iterator[tuple[str, str | None, int]]:
        """Every import as (absolute module, imported name or None, line); inside functions too."""
        skipped = set() if typing_only else {node for block in type_checking(self.tree) for node in ast.walk(block)}
        for node in ast.walk(self.tree):
            if node in skipped:
                continue
            if isinstance(node, ast.Import):
                yield from ((alias.name, None, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = self.module.split(".")[: None if self.is_package else -1]
                    parents = parents[: len(parents) - node.level + 1]
                    base = ".".join([*parents, *([node.module] if node.module else [])])
                yield from ((base, alias.name, node.lineno) for alias in node.names)

    def at(self, line: int, what: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}: {what}"


def type_checking(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that only a type checker sees."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from node.body


def read_sources() -> list[Source]:
    found = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        package, _, *parts = path.relative_to(ROOT / "packages").with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(package, module, path))
    return found


SOURCES = read_sources()
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS: dict[str, dict[str, Any]] = {
    name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in PACKAGES
}
MODULE_OF = {canonicalize_name(p["name"]): p["name"].replace("-", "_") for p in PROJECTS.values()}
FACES = [source for source in SOURCES if source.module == source.top]


def declared(package: str) -> set[str]:
    """Canonical names of every distribution that a package may import, extras included, and of its siblings' own."""
    project = PROJECTS[package]
    lines = list(project.get("dependencies", []))
    for extra in project.get("optional-dependencies", {}).values():
        lines += extra
    names = {canonicalize_name(Requirement(line).name) for line in lines}
    by_dist = {canonicalize_name(p["name"]): folder for folder, p in PROJECTS.items()}
    for name in list(names):
        if name in by_dist and by_dist[name] not in {package, "core"}:
            names |= {canonicalize_name(Requirement(line).name) for line in PROJECTS[by_dist[name]]["dependencies"]}
    if package != "core":
        names |= {canonicalize_name(Requirement(line).name) for line in PROJECTS["core"]["dependencies"]}
    return {str(name) for name in names}


def allowed(top: str, names: set[str], installed: dict[str, list[str]] | Any) -> bool:
    """Whether a top-level module is the standard library's or comes from one of the declared distributions."""
    if top in sys.stdlib_module_names or top == "__future__":
        return True
    top = PART_OF.get(top, top)
    return bool({canonicalize_name(dist) for dist in installed.get(top, [top])} & names)


# Rule 1


def test_the_core_imports_only_what_it_declares() -> None:
    """The core imports the standard library, its four requirements and itself; its test tools also pytest."""
    names, installed = declared("core") - set(MODULE_OF), packages_distributions()
    breaches = [
        source.at(line, f"imports {module}")
        for source in SOURCES
        if source.package == "core"
        for module, _, line in source.imports()
        if (top := module.partition(".")[0]) != "fairlead"
        and not allowed(top, names, installed)
        and not (source.module.startswith("fairlead.testing") and top in TEST_TOOLS)
    ]
    assert not breaches, "\n".join(breaches)


def test_loading_every_installed_plugin_imports_no_torch() -> None:
    """In a fresh interpreter, every entry point of the group loads and the heavy modules stay out."""
    program = (
        "import importlib.metadata, json, sys, fairlead\n"
        "failed = {}\n"
        "for point in importlib.metadata.entry_points(group='fairlead'):\n"
        "    try: point.load()\n"
        "    except Exception as error: failed[point.name] = repr(error)\n"
        "print(json.dumps({'failed': failed, 'modules': sorted({name.partition('.')[0] for name in sys.modules})}))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert not report["failed"]
    assert not HEAVY & set(report["modules"])


# Rule 2


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_lower_layers_and_what_it_declares(package: str) -> None:
    """Core <- runs <- distributed <- lightning and the plugins; no plugin package imports another."""
    own = MODULE_OF[canonicalize_name(PROJECTS[package]["name"])]
    names, installed = declared(package), packages_distributions()
    lower = LOWER.get(package, {"fairlead", "fairlead_runs", "fairlead_launch", "fairlead_distributed"})
    siblings = set(MODULE_OF.values()) - {own} - lower
    breaches = []
    for source in (source for source in SOURCES if source.package == package):
        for module, _, line in source.imports():
            top = module.partition(".")[0]
            if top in siblings:
                breaches.append(source.at(line, f"imports the sibling {top}"))
            elif package == "distributed" and top in {"lightning", "pytorch_lightning", "lightning_fabric"}:
                breaches.append(source.at(line, f"imports {top}: this layer has no Lightning"))
            elif top in {"pytorch_lightning", "lightning_fabric"}:
                breaches.append(source.at(line, f"imports {top}: another class tree than lightning's"))
            elif top in TEST_TOOLS and ".testing" in source.module:
                continue
            elif top != own and top not in lower and not allowed(top, names, installed):
                breaches.append(source.at(line, f"imports {top}, which {package} does not declare"))
    assert not breaches, "\n".join(breaches)


def test_import_linter_knows_every_package() -> None:
    """Layers and cycles are its own session's business (`nox -s lint`); it looks at what it is told of."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    cycles = next(one for one in linter["contracts"] if one["type"] == "acyclic_siblings")
    assert linter["root_packages"] == cycles["ancestors"] == sorted(MODULE_OF.values())
    layers = next(one for one in linter["contracts"] if one["type"] == "layers")["layers"]
    assert sorted(name for layer in layers for name in layer.split(" | ")) == sorted(MODULE_OF.values())


# Rule 3


def plugin_modules() -> Iterator[Source]:
    """The modules that the entry points of the packages name, and the packages around them."""
    by_module = {source.module: source for source in SOURCES}
    for project in PROJECTS.values():
        for value in project.get("entry-points", {}).get("fairlead", {}).values():
            parts = value.partition(":")[0].split(".")
            yield from (by_module[".".join(parts[:end])] for end in range(1, len(parts) + 1))


def imports_at_load(source: Source) -> Iterator[tuple[str, str | None, int]]:
    """The imports that run when a module is loaded: those outside of functions."""
    inside = {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    yield from (found for found in source.imports() if found[2] not in inside)


def engines_at_load(source: Source, seen: set[str]) -> Iterator[str]:
    """Imports that run when a plugin is loaded, and are not pydantic, the core or free of engines themselves."""
    by_module = {other.module: other for other in SOURCES if other.top == source.top}
    seen.add(source.module)
    for module, name, line in imports_at_load(source):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or PART_OF.get(top, top) in {"pydantic", "fairlead", "fairlead_runs"}:
            continue
        own = by_module.get(f"{module}.{name}") or by_module.get(module)
        if own is None or own.module.endswith("_runtime"):
            yield source.at(line, f"imports {module}{'.' + name if name else ''}")
        elif own.module not in seen:
            yield from engines_at_load(own, seen)


def test_a_plugin_names_its_runtime_only_by_string() -> None:
    """What is loaded with a plugin imports no runtime and no engine, other than in `build`."""
    seen: set[str] = set()
    breaches = [
        line for source in plugin_modules() if source.module not in seen for line in engines_at_load(source, seen)
    ]
    assert not breaches, "\n".join(breaches)
    assert len(seen) > len(PACKAGES)


# Rule 4


def test_nothing_imports_examples_tests_benchmarks_or_docs() -> None:
    outside = {"examples", "integration_tests", "benchmarks", "docs", "tests", "noxfile"}
    breaches = [
        source.at(line, f"imports {module}")
        for source in SOURCES
        for module, _, line in source.imports(typing_only=True)
        if module.partition(".")[0] in outside
    ]
    assert not breaches, "\n".join(breaches)


# Rule 5


def is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.environb"}


def environment_uses(source: Source) -> Iterator[tuple[str, int]]:
    """Uses of the process's own environment as (kind, line), but for the default of an injectable mapping."""
    defaults = {
        id(part)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.IfExp) and re.fullmatch(r"[\w.]*environ is (not )?None", ast.unparse(node.test))
        for part in (node.body, node.orelse)
    }
    # `environ is os.environ` asks which mapping was injected; it reads nothing.
    defaults |= {
        id(part)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        for part in (node.left, *node.comparators)
    }
    parents = {id(child): node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_environ(node) and id(node) not in defaults:
            parent = parents[id(node)]
            kind = parent.attr if isinstance(parent, ast.Attribute) else type(parent).__name__
            yield kind, node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.getenv", "os.putenv", "os.unsetenv"}:
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv", "unsetenv"}
            yield from ((name, node.lineno) for name in sorted(names))


def test_the_environment_is_read_through_an_injected_mapping() -> None:
    """Only as the default of `environ`, or at a place named above with its reason; never deep inside."""
    # The public test tools start processes with the environment of the test, and compare it: reads, by kind.
    reading = {"Dict", "keyword", "Call"}
    tools = [source for source in SOURCES if source.module.startswith("fairlead.testing")]
    reads = {(source.module, kind) for source in tools for kind, _ in environment_uses(source) if kind in reading}
    uses = {
        (source.module, kind): source.at(line, kind) for source in SOURCES for kind, line in environment_uses(source)
    }
    breaches = [place for key, place in uses.items() if key not in ENVIRONMENT_PLACES and key not in reads]
    assert not breaches, "\n".join(breaches)
    assert not ENVIRONMENT_PLACES.keys() - uses.keys(), "an exception that nothing needs"


# Rule 6


MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


def module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr, bool]]:
    """Assignments at the top of a module as (name, value, annotated Final)."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value, False) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value, "Final" in ast.unparse(node.annotation)


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_no_module_holds_mutable_state() -> None:
    """A container at module level is a constant by name or annotation, and nothing in the module changes it."""
    breaches, needed = [], set()
    for source in SOURCES:
        containers = set()
        for name, value, final in module_assignments(source.tree):
            if (source.module, name) in STATE_PLACES:
                needed.add((source.module, name))
            elif is_mutable(value) and not name.startswith("__"):
                containers.add(name)
                if not final and not name.isupper():
                    breaches.append(source.at(value.lineno, f"{name} is mutable and not a constant"))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                breaches.append(source.at(node.lineno, f"global {', '.join(node.names)}"))
            if isinstance(node, ast.FunctionDef) and node in source.tree.body:
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                facts = (source.module, node.name) in SHIPPED_FACTS
                if not facts and any(re.match(r"(functools\.)?(lru_)?cache\b", one) for one in decorators):
                    breaches.append(source.at(node.lineno, f"{node.name} is cached for the life of the process"))
            target: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                target = node.func.value
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = node.value
            if isinstance(target, ast.Name) and target.id in containers and not shadowed(source.tree, target.id):
                breaches.append(source.at(target.lineno, f"changes the module's {target.id}"))
    assert not breaches, "\n".join(breaches)
    assert not STATE_PLACES.keys() - needed, "an exception that nothing needs"


def shadowed(tree: ast.Module, name: str) -> bool:
    """Whether some function binds the name itself: then a use of it proves nothing."""
    return any(
        (isinstance(node, ast.arg) and node.arg == name)
        or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    )


# Rule 8


def exported(source: Source) -> list[str] | None:
    """The literal `__all__` of a module."""
    values = [value for name, value, _ in module_assignments(source.tree) if name == "__all__"]
    return ast.literal_eval(values[0]) if values else None


def public_names(source: Source) -> set[str]:
    """What a face binds without an underscore: definitions, and imports from its own distribution or a sibling."""
    names: set[str] = set()
    for node in [*source.tree.body, *type_checking(source.tree)]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fairlead")):
            names |= {alias.asname or alias.name for alias in node.names}
    names |= {name for name, _, _ in module_assignments(source.tree)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.module)
def test_the_face_of_a_package_lists_its_public_names(face: Source) -> None:
    """`__all__` is sorted, equals the public names, and each of them is there."""
    listed = exported(face)
    assert listed is not None, f"{face.module} has no __all__"
    assert listed == sorted(set(listed))
    assert set(listed) == public_names(face) | ({"__version__"} & set(listed))
    module = importlib.import_module(face.module)
    for name in listed:
        with suppress(MissingDependencyError):  # transformers is not in this environment
            getattr(module, name)


def test_every_package_has_a_face() -> None:
    assert sorted(face.package for face in FACES) == PACKAGES


# Lightning's private parts, and errors


def test_private_parts_of_engines_are_used_in_one_room() -> None:
    """What Lightning and transformers may change without notice is in `compat`, where each use is tested."""
    breaches = []
    for source in SOURCES:
        if source.module.startswith(("fairlead_lightning.compat", "fairlead_huggingface.compat")):
            continue
        for module, name, line in source.imports(typing_only=True):
            parts = [*module.split("."), *([name] if name else [])]
            if parts[0] == "lightning" and any(part.startswith("_") and not part.endswith("__") for part in parts):
                breaches.append(source.at(line, f"imports {'.'.join(parts)}"))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner in {"trainer", "fabric", "pl_module", "lightning_module"}:
                    breaches.append(source.at(node.lineno, f"uses {owner}.{node.attr}"))
    assert not breaches, "\n".join(breaches)


def test_no_error_is_swallowed() -> None:
    """A handler for everything does something with it."""
    breaches = []
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
                empty = all(isinstance(part, ast.Pass | ast.Continue) or is_ellipsis(part) for part in node.body)
                if broad and empty:
                    breaches.append(source.at(node.lineno, "swallows every error"))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
                suppressed = {ast.unparse(argument) for argument in node.args}
                if suppressed & {"Exception", "BaseException"}:
                    breaches.append(source.at(node.lineno, "suppresses every error"))
    assert not breaches, "\n".join(breaches)


def is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
