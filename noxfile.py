"""How Fairlead is set up, tested, built and measured: `nox -l` lists the sessions, `nox` runs the default ones.

A package is found by its folder in packages/; adding one needs no edit here. Environments live in .nox/ and are reused;
one is installed again when something that decides its content has changed (see `install`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
ENV = ROOT / ".nox" / "env"  # where nox puts the session `env`; the sessions that need torch share it
RAN = ROOT / ".nox" / "ran"  # what became of each test, a folder for each session (`conftest.py`)
FLAKY = ROOT / ".nox" / "flaky.txt"  # the tests that failed and then passed, since this checkout was made
WORKSPACE = nox.project.load_toml(ROOT / "pyproject.toml")
# Extras that the shared environment leaves to `isolated`: two engines that cannot be imported on the test machine, and
# mpi4py, with which Lightning does not start where there is no MPI library; transformers has a session of its own.
NOT_SHARED = {"mpi", "transformer-engine", "transformers", "xla"}
TORCH_FREE = ("core", "runs", "launch")
HOSTS = ("-e", "packages/environments")  # without its engines: it reads hosts in brackets
HUGGING_FACE = ("integration_tests/huggingface", "integration_tests/verify/test_hugging_face.py")
INTEGRATION = [
    "integration_tests",
    *(f"--ignore={path}" for path in ("integration_tests/slurm", "integration_tests/xla", *HUGGING_FACE)),
]
LONG = {"packages": ["packages"], "integration": INTEGRATION, "slurm": ["integration_tests/slurm"]}
BENCHMARKED = {"checkpoint": [["--gib", "0.1"], ["--gib", "1"], ["--gib", "4", "--rounds", "5"]]}
"""The options with which a benchmark is run, one result each, where that is more than once."""

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "virtualenv"  # pip installs, as it does for a user
nox.options.reuse_existing_virtualenvs = True
nox.options.allow_parallel = True  # under `nox -j 2`; none writes where another reads
nox.options.error_on_missing_interpreters = bool(os.environ.get("CI"))
nox.options.sessions = [  # what takes longest comes first, so that `nox -j 2` is busy to the end
    "lint", "integration", "slurm", "isolated", "smoke_oldest", "tests", "types", "huggingface(short)",
    "torch_free(smoke)", "minimums(smoke)", "docs",
]  # fmt: skip

# One file pins what is tested, in every session; pip >= 25.3 reads the second name for the environments it builds in.
os.environ["PIP_CONSTRAINT"] = os.environ["PIP_BUILD_CONSTRAINT"] = str(ROOT / "constraints.txt")
os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"


def group(*names: str) -> list[str]:
    """The requirements of the root's dependency groups."""
    return list(nox.project.dependency_groups(WORKSPACE, *names))


def editable(package: str, *, every_extra: bool = False) -> list[str]:
    """Arguments that install one package in place, with its extra `run` or with every extra that works here."""
    project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
    extras = set(project.get("optional-dependencies", {}))
    # The core's extras only name the other packages, which are installed in place themselves.
    wanted = set() if package == "core" else (extras - NOT_SHARED if every_extra else extras & {"run"})
    return ["-e", f"packages/{package}" + (f"[{','.join(sorted(wanted))}]" if wanted else "")]


def install(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """`pip install`, unless this environment was last installed with the same arguments, pins and package metadata."""
    decides = [ROOT / "constraints.txt", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    digest = hashlib.sha256(repr(arguments).encode() + b"".join(path.read_bytes() for path in decides)).hexdigest()
    stamp = Path(session.virtualenv.location) / "fairlead-installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    session.install(*arguments, env=env)
    stamp.write_text(digest)


def run(session: nox.Session, *command: str, **environ: str) -> None:
    """Run a command in the shared environment."""
    environ |= {"PATH": f"{ENV / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(ENV)}
    session.run(str(ENV / "bin" / command[0]), *command[1:], env=environ, external=True)


IN_TWO = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")
"""Two processes; a file stays in one, as its tests share what a fixture has trained. One that dies ends the tests."""


def pytest(session: nox.Session, *arguments: str, python: Path = ENV) -> None:
    """Run tests in an environment; one that fails is run again, and reported as FLAKY if it passes then."""
    environ = {"PATH": f"{python / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(python)}
    command = [str(python / "bin" / "python"), "integration_tests/ci/run_tests.py", str(RAN / session.name)]
    session.run(*command, *arguments, *session.posargs, env=environ, external=True)


def build_into(session: nox.Session, folder: Path) -> None:
    """A wheel and an sdist of every package; the wheel is built from the sdist, as an index's users would."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        run(session, "python", "-m", "build", "--no-isolation", "--outdir", str(folder), f"packages/{package}")
    run(session, "python", "integration_tests/isolated/metadata.py", str(folder))


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Install every package in place and train the GPT of examples/ in two processes."""
    places = [part for package in PACKAGES for part in editable(package)]
    install(session, *group("examples"), *places)
    session.run("fairlead", "fit", "examples/gpt/job.yaml", *session.posargs)


@nox.session(default=False)
def env(session: nox.Session) -> None:
    """Make the environment that the sessions below share."""
    places = [part for package in PACKAGES for part in editable(package, every_extra=True)]
    groups = (
        "test", "types", "docs", "build", "release", "examples", "nox", "data", "store", "kubernetes", "spmd", "cli",
        "browser",
    )  # fmt: skip
    install(session, *group(*groups), *places)
    # Once for all processes of the tests, also where PYTHONDONTWRITEBYTECODE is set.
    session.run("python", "-m", "compileall", "-q", *map(str, sorted(ROOT.glob("packages/*/src"))))


@nox.session(default=False, venv_backend="none", requires=["lint", "types"])
def quick(session: nox.Session) -> None:
    """After an edit, in 3 minutes: style, types, the rules, and the short tests of the packages that changed."""
    changed = str(session.run("git", "diff", "--name-only", "HEAD", external=True, silent=True)).splitlines()
    packages = sorted({name.split("/")[1] for name in changed if name.startswith("packages/")}) or TORCH_FREE
    rules = [f"integration_tests/test_{name}.py" for name in ("architecture", "acceptance", "workspace")]
    tests = [f"packages/{package}/tests" for package in packages]
    pytest(session, "-m", "not full and not slow", *rules, *tests, *IN_TWO)


@nox.session(venv_backend="none", requires=["env"])
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """The unit tests of one package."""
    pytest(session, f"packages/{package}/tests", *IN_TWO)


EXTENT = {
    "smoke": ["core/tests/test_cli.py", "core/tests/test_plugins.py", "core/tests/test_resolve.py",
              "runs/tests/test_run_directory.py", "launch/tests/test_launcher.py"],
    "whole": ["core/tests", "runs/tests", "launch/tests"],
}  # fmt: skip
"""What shows that the packages without torch work on an interpreter; and all of their tests, in `full`."""


def without_torch(session: nox.Session, tests: list[str], *versions: str) -> None:
    """Run tests in an environment with the packages that need no torch, and without it."""
    places = [*(part for package in TORCH_FREE for part in editable(package)), *HOSTS]
    # The pins name the newest versions: they cannot hold where others are asked for.
    install(session, *group("test"), *versions, *places, env={"PIP_CONSTRAINT": ""} if versions else None)
    pytest(session, *(f"packages/{test}" for test in tests), *IN_TWO, python=Path(session.virtualenv.location))


@nox.session(python="3.13")
@nox.parametrize("extent", list(EXTENT), ids=list(EXTENT))
def torch_free(session: nox.Session, extent: str) -> None:
    """The packages without torch on the newest interpreter, in an environment where it is not installed."""
    without_torch(session, EXTENT[extent])


@nox.session(python="3.12")
@nox.parametrize("extent", list(EXTENT), ids=list(EXTENT))
def minimums(session: nox.Session, extent: str) -> None:
    """The core with the oldest versions that it declares, on the interpreter between the others."""
    project = nox.project.load_toml(ROOT / "packages" / "core" / "pyproject.toml")["project"]
    oldest = [re.sub(r">=([^,]+).*", r"==\1", requirement) for requirement in project["dependencies"]]
    without_torch(session, [test for test in EXTENT[extent] if test.startswith("core")], *oldest)


@nox.session(venv_backend="none", requires=["env"])
def integration(session: nox.Session) -> None:
    """What needs two packages, two processes or a scheduler."""
    pytest(session, *INTEGRATION, *IN_TWO)


@nox.session(venv_backend="none", requires=["env"])
def slurm(session: nox.Session) -> None:
    """What needs a SLURM: a real one of four nodes, on this machine (`integration_tests/slurm/README.md`)."""
    pytest(session, "integration_tests/slurm")


@nox.session
@nox.parametrize("mark", ["not full", "full"], ids=["short", "long"])
def huggingface(session: nox.Session, mark: str) -> None:
    """Hugging Face's Trainer, and `fairlead verify` on Hugging Face's models."""
    places = [part for package in PACKAGES for part in editable(package, every_extra=package == "strategies")]
    install(session, *group("test", "huggingface"), *places)
    pytest(session, "-m", mark, *HUGGING_FACE, python=Path(session.virtualenv.location))


@nox.session(default=False)
def xla(session: nox.Session) -> None:
    """Trainings on XLA devices of PJRT on the CPU; torch-xla needs an older torch than the other sessions (7 GB)."""
    with_torch(session, OLDEST, "torch-xla==2.9.0")
    pytest(session, "integration_tests/xla", python=Path(session.virtualenv.location))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, common mistakes and layers; `nox -s lint -- --fix` repairs what it can."""
    install(session, *group("lint"))
    session.run("ruff", "check", ".", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})  # which package and module may import which


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Strict typing of everything, tests included."""
    homes = [*ROOT.glob("packages/*"), *ROOT.glob("examples/plugins/*")]
    sources = sorted(str((home / "src").relative_to(ROOT)) for home in homes if (home / "src").exists())
    targets = [name for name in ("integration_tests", "benchmarks", "examples") if (ROOT / name).exists()]
    # Folders of tests together as far as no two have a module of the same name, as of a conftest: a run has its price.
    apart: list[dict[str, str]] = []
    for folder in sorted(home / "tests" for home in homes if any(home.glob("tests/*.py"))):
        modules = {path.stem: str(folder.relative_to(ROOT)) for path in folder.glob("*.py")}
        room = next((one for one in apart if not one.keys() & modules.keys()), None)
        apart.append(modules) if room is None else room.update(modules)
    skip = ["--exclude", r"/tests/"]
    ours = [source for source in sources if "examples" not in source]  # the examples' are found in `examples`
    run(session, "mypy", *ours, *targets, "noxfile.py", *skip, *session.posargs, MYPYPATH=os.pathsep.join(sources))
    for modules in apart:
        folders = sorted(set(modules.values()))
        run(session, "mypy", *folders, *session.posargs, MYPYPATH=os.pathsep.join([*sources, *folders]))


@nox.session(venv_backend="none", requires=["env"])
def docs(session: nox.Session) -> None:
    """Build the site into site/; a warning fails."""
    run(session, "mkdocs", "build", "--strict", "--quiet", *session.posargs, NO_MKDOCS_2_WARNING="1")


@nox.session(default=False, venv_backend="none", requires=["env"])
def build(session: nox.Session) -> None:
    """Wheels and sdists of every package into dist/, their metadata and content checked."""
    build_into(session, ROOT / "dist")


@nox.session(venv_backend="none", requires=["env"])
def isolated(session: nox.Session) -> None:
    """The README's install lines, as they stand there, in fresh environments."""
    run(session, "python", "-m", "integration_tests.isolated.run", "--readme", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def extras(session: nox.Session) -> None:
    """Each extra of the core, from wheels, in a fresh environment with only what it declares; `-- EXTRA...`."""
    wheels = ROOT / ".nox" / "wheels"
    build_into(session, wheels)
    run(session, "python", "-m", "integration_tests.isolated.run", str(wheels), *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def bench(session: nox.Session) -> None:
    """Run benchmarks, compare them with the table that the docs quote, and write it; `-- step ddp` runs these two."""
    results = ROOT / "benchmarks" / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    for script in sorted(ROOT.glob("benchmarks/[!_]*.py")):
        if session.posargs and script.stem not in session.posargs:
            continue
        for options in BENCHMARKED.get(script.stem, ([],)):
            result = results / f"{''.join([script.stem, *options])}.json"
            run(session, "python", "benchmarks/_measure.py", str(script), str(result), *options)
    run(session, "python", "benchmarks/_table.py", str(results), "docs/reference/measured.md")


@nox.session(name="plan-table", default=False, venv_backend="none", requires=["env"])
def plan_table(session: nox.Session) -> None:
    """How wrong a plan is on published runs, as a page; `-- FILE.csv` prints the tables of another file."""
    run(session, "python", "benchmarks/plan/table.py", *session.posargs)
    if not session.posargs:
        run(session, "python", "benchmarks/plan/memory_table.py")


@nox.session(default=False, venv_backend="none", requires=["env"])
def exact(session: nox.Session) -> None:
    """Kill runs at 100 random moments, and write whether each ended as if nothing had happened; about half an hour."""
    run(session, "python", "-m", "integration_tests.exact.table", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def matrix(session: nox.Session) -> None:
    """Kill jobs as people write them, and say what was called exact and did not end the same; about twenty minutes."""
    run(session, "python", "-m", "integration_tests.exact.matrix", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def chaos(session: nox.Session) -> None:
    """Disturb runs 200 times by signals, kills and full disks, and write whether anything was lost; half an hour."""
    run(session, "python", "-m", "integration_tests.exact.chaos", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def kills(session: nox.Session) -> None:
    """SIGKILL at 200 random moments of saving, retention and commit; with an error and a death at every system call."""
    tests = [f"packages/runs/tests/test_commit_{name}.py" for name in ("crash", "replay")]
    run(session, "python", "-m", "pytest", *tests, *session.posargs, FAIRLEAD_KILLS="200")


@nox.session(default=False, venv_backend="none", requires=["env"])
@nox.parametrize("part", list(LONG), ids=list(LONG))
def long(session: nox.Session, part: str) -> None:
    """The tests with the mark `full`, which CI leaves out for their length."""
    pytest(session, "-m", "full", *LONG[part], *(() if part == "slurm" else IN_TWO))


OLDEST = "2.9.1"
NEWEST = "2.15.0"
"""The torch of the sessions below: the first and the last that `fairlead.engines` calls tested."""
ON_TORCH = [
    f"packages/{name}/tests" for name in ("distributed", "strategies", "precision", "checkpoint-io", "lightning")
]


def with_torch(session: nox.Session, version: str, *more: str, engines: bool = False) -> None:
    """Installs all packages in place with one version of torch, a build for CUDA: gigabytes. `engines`: and extras."""
    # The pins, without those of torch and of what is built for one torch.
    apart = r"(torch|torch-xla|torchao|transformer_engine|fsspec|setuptools|sympy|networkx|filelock)=="
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = Path(session.create_tmp()) / "constraints.txt"
    pins.write_text("\n".join([*(line for line in lines if not re.match(apart, line)), f"torch=={version}\n"]))
    places = [part for package in PACKAGES for part in editable(package, every_extra=engines)]
    groups = ("test", "data", *(("store", "spmd") if engines else ()))
    wanted = (*group(*groups), f"torch=={version}", *more, *places, "fsspec")
    install(session, *wanted, env={"PIP_CONSTRAINT": str(pins)})


@nox.session
def smoke_oldest(session: nox.Session) -> None:
    """On the oldest torch, jobs in two ranks train, save and resume."""
    with_torch(session, OLDEST)
    session.run("python", "-m", "integration_tests.isolated.smoke", *session.posargs)


@nox.session(default=False)
def oldest(session: nox.Session) -> None:
    """The tests of the packages that torch matters to, on the oldest torch that is supported."""
    with_torch(session, OLDEST, engines=True)
    # Today's torchao and spmd-types cannot be imported on it.
    apart = ("packages/precision/tests/test_torchao.py", "packages/distributed/tests/test_spmd_types.py")
    ignored = (f"--ignore={path}" for path in apart)
    pytest(session, *ON_TORCH, *ignored, *IN_TWO, python=Path(session.virtualenv.location))


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """The same on the newest torch that is tested."""
    with_torch(session, NEWEST, engines=True)
    pytest(session, *ON_TORCH, *IN_TWO, python=Path(session.virtualenv.location))


@nox.session(default=False, venv_backend="none", requires=["env"])
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device."""
    pytest(session, "-m", "gpu", "packages", "integration_tests")


TESTED = [
    "integration", "slurm", "huggingface(short)", "huggingface(long)", *(f"tests({package})" for package in PACKAGES),
    *(f"long({part})" for part in LONG), "xla",
]  # fmt: skip
"""The sessions whose tests `acceptance.toml` may name."""
REST = [
    "lint", "types", "docs", "build", "isolated", "extras", "torch_free(whole)", "minimums(whole)", "oldest", "newest",
]  # fmt: skip


@nox.session(default=False, venv_backend="none", requires=["env", *TESTED, *REST])
def full(session: nox.Session) -> None:
    """Everything, before an issue is resolved: each test that `acceptance.toml` names has passed."""
    run(session, "python", "integration_tests/acceptance.py", *map(str, sorted(RAN.glob("*/tests.txt"))))
    print("FLAKY since this checkout was made:", FLAKY.read_text() if FLAKY.exists() else "none", sep="\n")
