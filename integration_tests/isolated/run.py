"""Install Fairlead into environments with nothing else, by the README's lines and extra by extra, and use it.

`python -m integration_tests.isolated.run --readme [EXTRAS...]` runs the lines of README.md that install a clone, each
as it stands, or those with these extras (`check`, `slurm,deepspeed`): with pip 23.2, which Python 3.11 has, or today's.

`python -m integration_tests.isolated.run WHEELS [EXTRA...]` installs extras from wheels. pip resolves every extra on
its own. Extras that resolve to the same distributions are the same environment, made once; each of them is then used in
it. What pip installed is compared with what it resolved. An extra whose engine cannot be imported on this machine is
resolved only, and the table says so.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from integration_tests.isolated.tutorial import write_tutorial

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# An extra that brings one of these is only resolved, and without the engine's own extras: the sdist behind
# transformer-engine[pytorch] cannot even say what it requires where there is no CUDA.
CANNOT_RUN = {
    "torch-xla": "torch-xla needs an older torch than the other tests",
    "transformer-engine": "Transformer Engine builds against CUDA",
}
# Distributions whose versions in constraints.txt go with its torch.
OF_ONE_TORCH = ("torch", "torch-xla", "torchao", "setuptools", "sympy", "networkx", "filelock", "fsspec")
# An extra that needs a shared library of the system; .ci/run installs it, elsewhere the extra is only resolved.
LIBRARIES = {"mpi4py": "mpi"}
# What an extra adds is used in the run, not only imported.
SETTINGS = {
    "tensorboard": ["trainer.loggers=[csv, tensorboard]"],
    "mlflow": ["trainer.loggers=[csv, mlflow]"],
    "wandb": ["trainer.loggers=[csv, {name: wandb, project: isolated}]"],
    "prometheus": ["trainer.loggers=[{name: prometheus, port: 0}]"],
    "otel": ["trainer.loggers=[{name: otel, timeout: 1}]"],
}


# The pip that runs a line of the README, by its extras; else today's.
OLD_PIP = {"lightning": "23.2.1"}

CI = bool(os.environ.get("CI"))  # what is lacking there is a failure


def library(engine: str) -> str | None:
    """The system's shared library behind an engine."""
    return ctypes.util.find_library(LIBRARIES[engine])


class PromiseError(Exception):
    """An extra does not do what it promises."""


@dataclass
class Outcome:
    """One line of the table."""

    extra: str
    state: str
    notes: list[str] = field(default_factory=list)


def run(
    *command: str | Path, cwd: Path | None = None, expect: int = 0, environ: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run a command in a clean environment; another exit code than `expect` is a fault with its output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"WANDB_MODE": "offline"} | dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != expect:
        text = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        called = " ".join(str(part) for part in command)
        raise PromiseError(f"{called}\nexit code {done.returncode}, not {expect}:\n{text}")
    return done


class Wheels:
    """The wheels under test, and pip made to take Fairlead from them and from nowhere else."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.by_name = {parse_wheel_filename(path.name)[0]: path for path in sorted(folder.resolve().glob("*.whl"))}
        self.constraints = scratch / "wheels.txt"
        self.constraints.write_text(
            "".join(f"{name} @ {path.as_uri()}\n" for name, path in self.by_name.items() if name != "fairlead")
        )

    def extras(self) -> list[str]:
        """Every extra that the core's metadata provides, after "" for none."""
        return ["", *(self.metadata("fairlead").provides_extra or [])]

    def metadata(self, name: str) -> Metadata:
        """What one of the wheels declares."""
        with zipfile.ZipFile(self.by_name[canonicalize_name(name)]) as wheel:
            [file] = [file for file in wheel.namelist() if file.endswith(".dist-info/METADATA")]
            return Metadata.from_email(wheel.read(file))

    def engines(self, name: str, extras: frozenset[str]) -> set[Requirement]:
        """Every requirement on somebody else's distribution that `name[extras]` has, through our own wheels."""
        found: set[Requirement] = set()
        for requirement in self.metadata(name).requires_dist or []:
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in extras | {""}):
                continue
            if canonicalize_name(requirement.name) in self.by_name:
                found |= self.engines(requirement.name, frozenset(requirement.extras))
            else:
                found.add(requirement)
        return found

    def requirement(self, extra: str) -> str:
        """What is asked of pip."""
        brackets = f"[{extra}]" if extra else ""
        return f"fairlead{brackets} @ {self.by_name[canonicalize_name('fairlead')].as_uri()}"

    def pip(
        self,
        *arguments: str | Path,
        python: Path | str = sys.executable,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """What pip prints, run for the environment of `python`."""
        return run(sys.executable, "-m", "pip", "--python", python, *arguments, environ=environ).stdout

    def held(self) -> tuple[str | Path, ...]:
        """The option by which pip takes our other distributions from the wheels."""
        return ("--constraint", self.constraints)

    def resolve(self, extra: str) -> frozenset[str]:
        """The distributions, as name==version, that an empty environment gets."""
        wanted = [self.requirement(extra)]
        if self.not_here(extra):
            engines = self.engines("fairlead", frozenset({extra}))
            wanted = [self.requirement(""), *sorted(f"{engine.name}{engine.specifier}" for engine in engines)]
        report = self.constraints.with_name(f"report-{extra}.json")  # not stdout: pip may colour that
        environ = {}
        if "torch-xla" in {canonicalize_name(engine.name) for engine in self.engines("fairlead", frozenset({extra}))}:
            pins = self.constraints.with_name("pins-of-another-torch.txt")
            pins.write_text(pins_without(*OF_ONE_TORCH), encoding="utf-8")
            environ = {"PIP_CONSTRAINT": str(pins)}
        options = ("-qq", "--dry-run", "--ignore-installed", "--report", report)
        self.pip("install", *options, *self.held(), *wanted, environ=environ)
        found = set()
        for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
            name, url = canonicalize_name(item["metadata"]["name"]), item["download_info"]["url"]
            if name.startswith("fairlead") and url != self.by_name[name].as_uri():
                raise PromiseError(f"{name} came from {url}, not from the wheels under test")
            found.add(f"{name}=={item['metadata']['version']}")
        return frozenset(found)

    def not_here(self, extra: str) -> list[str]:
        """Why the extra cannot be used on this machine."""
        names = {canonicalize_name(engine.name) for engine in self.engines("fairlead", frozenset({extra}))}
        lacking = [f"no lib{LIBRARIES[name]} on this machine" for name in LIBRARIES.keys() & names if not library(name)]
        return [reason for engine, reason in CANNOT_RUN.items() if engine in names] + ([] if CI else lacking)

    def environment(self, place: Path, extra: str, resolved: frozenset[str]) -> Path:
        """The environment at `place` with `extra`; its `bin` folder. A fault unless it holds exactly what was resolved.

        From the extra that was there before it loses what this one does not bring: torch is unpacked once a place.
        """
        python = place / "bin" / "python"
        if python.exists():
            if left := sorted(installed(python) - resolved):
                self.pip("uninstall", "-qq", "--yes", *(one.partition("==")[0] for one in left), python=python)
        else:
            run(sys.executable, "-m", "venv", "--without-pip", place)
        # Modules are compiled when they are imported: most of torch never is.
        self.pip("install", "-qq", "--no-compile", *self.held(), self.requirement(extra), python=python)
        self.pip("check", python=python)
        if (found := installed(python)) != resolved:
            raise PromiseError(f"installed and resolved differ: {sorted(found ^ resolved)}")
        return python.parent


def installed(python: Path) -> frozenset[str]:
    """The distributions of an environment, as name==version."""
    listing = "import importlib.metadata as m\nfor d in m.distributions(): print(d.name, d.version)"
    lines = run(python, "-P", "-c", listing).stdout.splitlines()
    return frozenset(f"{canonicalize_name(name)}=={version}" for name, version in map(str.split, lines))


def pins_without(*names: str) -> str:
    """The pins of constraints.txt but those of some distributions."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if canonicalize_name(line.partition("==")[0]) not in names) + "\n"


def probe(bin_: Path) -> str:
    """Every module imports, or waits for an engine that this extra does not declare."""
    report = json.loads(run(bin_ / "python", "-P", HERE / "probe.py").stdout)
    return f"{report['imported']} modules imported, {len(report['waiting'])} wait for another extra's engine"


def use_core(bin_: Path, work: Path, extra: str) -> None:
    """Bare `fairlead`: plugins are listed, and `fit` names the pip line that brings it."""
    run(bin_ / "fairlead", "plugins")
    refused = run(bin_ / "fairlead", "fit", "examples/gpt/job.yaml", cwd=work, expect=2)
    wanted = re.search(r"pip install --find-links \S+ 'fairlead\[lightning\]'", refused.stderr)  # these are wheels
    if wanted is None or "Traceback" in refused.stderr:
        raise PromiseError(f"fairlead fit without its plugin says:\n{refused.stderr}")


def use_check(bin_: Path, work: Path, extra: str) -> None:
    """The login node: no torch, every plugin loads, jobs are checked and explained."""
    run(bin_ / "python", "-c", "import torch", expect=1)
    broken = [p for p in json.loads(run(bin_ / "fairlead", "plugins", "--json").stdout) if p["error"]]
    if broken:
        raise PromiseError(f"plugins that do not load: {broken}")
    for job in sorted(work.glob("examples/*/*.yaml")):
        run(bin_ / "fairlead", "check", job.relative_to(work), cwd=work)
    explained = json.loads(run(bin_ / "fairlead", "explain", "examples/gpt/job.yaml", "--json", cwd=work).stdout)
    if explained["settings"]["strategy"]["value"] != "ddp":
        raise PromiseError(f"explain says {explained['settings']['strategy']}")


def use_fit(bin_: Path, work: Path, extra: str) -> None:
    """A job trains in two processes and leaves its metrics and a checkpoint."""
    runs = work / "runs" / extra
    settings = [f"run.dir={runs}", *SETTINGS.get(extra, [])]
    overrides = [part for setting in settings for part in ("--set", setting)]
    run(bin_ / "fairlead", "fit", "examples/gpt/tiny.yaml", *overrides, cwd=work)
    [directory] = [path.parent for path in runs.glob("*/job.yaml")]
    wanted = ("metrics.csv", "history.jsonl", "checkpoints/latest")
    missing = [name for name in wanted if not (directory / name).exists()]
    if missing:
        raise PromiseError(f"{directory} has no {', '.join(missing)}")


def use_loop(bin_: Path, work: Path, extra: str) -> None:
    """The script of the page on custom training loops trains, is finished, and Lightning is not there."""
    run(bin_ / "python", "-c", "import lightning", expect=1)
    _use_page(bin_, work / "loop", "custom-loop.md", "--max-steps", "8")


def use_hugging_face(bin_: Path, work: Path, extra: str) -> None:
    """The same of the page on Hugging Face's Trainer."""
    _use_page(bin_, work / "huggingface", "hugging-face.md")


def _use_page(bin_: Path, folder: Path, page: str, *words: str) -> None:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    folder.mkdir()
    script = text.partition('```python title="train.py"\n')[2].partition("\n```\n")[0]
    (folder / "train.py").write_text(script + "\n", encoding="utf-8")
    said = run(bin_ / "python", "train.py", *words, cwd=folder)
    [directory] = [path.parent for path in (folder / "runs").glob("*/job.yaml")]
    run(bin_ / "fairlead", "status", directory)
    again = run(bin_ / "python", "train.py", *words, cwd=folder)
    if "is finished: step" not in said.stdout or "is finished: step" not in again.stdout:
        raise PromiseError(f"the script of {page} says:\n{said.stdout}{again.stdout}")


def use_new(bin_: Path, work: Path, extra: str) -> None:
    """A plugin and a job are made, without torch; the job is right."""
    run(bin_ / "fairlead", "new", "plugin", "mine", "--axis", "logger", cwd=work)
    run(bin_ / "fairlead", "new", "job", "first", cwd=work)
    run(bin_ / "fairlead", "check", "first/job.yaml", cwd=work)
    if not list(work.glob("fairlead-mine/src/fairlead_mine/mine.py")):
        raise PromiseError("fairlead new plugin made no module")


USES: dict[str, Callable[[Path, Path, str], None]] = {
    "": use_core,
    "check": use_check,
    "torch": use_loop,
    "huggingface": use_hugging_face,
    "new": use_new,
}


def examine(wheels: Wheels, extras: list[str], resolved: frozenset[str], place: Path) -> Iterator[Outcome]:
    """One environment in the folder `place`, and what the extras that share it promise."""
    size = f"{len(resolved)} distributions"
    if reasons := wheels.not_here(extras[0]):
        yield from (Outcome(extra, "skipped", [f"resolved only, {size}", *reasons]) for extra in extras)
        return
    env, work = place / "env", place / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        # Not the repository: a job finds its code from its own place, and nothing is found by accident.
        shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
        (work / "pyproject.toml").touch()
        bin_ = wheels.environment(env, extras[0], resolved)
        imported = probe(bin_)
    except PromiseError as fault:
        shutil.rmtree(env, ignore_errors=True)
        yield from (Outcome(extra, "failed", [str(fault)]) for extra in extras)
        return
    used: dict[tuple[object, ...], str] = {}
    for extra in extras:
        use = USES.get(extra, use_fit)
        key = (use, *SETTINGS.get(extra, []))
        try:
            if key not in used:
                use(bin_, work, extra)
            alike = [f"as fairlead[{used[key]}]: the same environment"] if key in used else []
            used.setdefault(key, extra)
            yield Outcome(extra, "passed", [size, imported, *alike])
        except PromiseError as fault:
            yield Outcome(extra, "failed", [str(fault)])


def readme_lines() -> dict[str, str]:
    """The lines of README.md that install a clone, by their extras: `{"check": "pip install ...", ...}`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.partition("<!-- --8<-- [start:install] -->")[2].partition("<!-- --8<-- [end:install] -->")[0]
    return {found[1]: found[0] for found in re.finditer(r"^pip install .*'\.\[([a-z,-]+)\]'.*$", part, re.MULTILINE)}


def examine_line(extras: str, line: str, place: Path) -> Outcome:
    """A line of the README in an environment of its own, in this clone; then what the extras promise."""
    env, work = place / "env", place / "work"
    shutil.rmtree(place, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        run(sys.executable, "-m", "venv", env)
        version = f"pip=={OLD_PIP[extras]}" if extras in OLD_PIP else "pip"
        # pip of a venv is the one that Python brings; nothing of the pins but what the line itself says.
        unpinned = {"PIP_CONSTRAINT": "", "PIP_BUILD_CONSTRAINT": ""}
        run(env / "bin" / "python", "-m", "pip", "install", "-qq", "--upgrade", version, environ=unpinned)
        path = f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}"
        run("bash", "-c", line, cwd=ROOT, environ={**unpinned, "PATH": path, "PIP_QUIET": "1", "PIP_NO_COMPILE": "1"})
        run(env / "bin" / "python", "-m", "pip", "check")
        shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
        (work / "pyproject.toml").touch()
        notes = [line.partition("#")[0].strip(), pip_of(env), probe(env / "bin")]
        if extras == "check":
            use_check(env / "bin", work, extras)
            refused = run(env / "bin" / "fairlead", "fit", "examples/gpt/job.yaml", cwd=work, expect=2)
            if f"pip install '{ROOT}[lightning]'" not in refused.stderr:
                raise PromiseError(f"fairlead fit without torch says:\n{refused.stderr}")
        elif extras == "torch":
            use_loop(env / "bin", work, extras)
        else:
            use_tutorial(env / "bin", work, extras)
    except PromiseError as fault:
        return Outcome(extras, "failed", [line, str(fault)])
    return Outcome(extras, "passed", notes)


def pip_of(env: Path) -> str:
    """`pip 23.2.1`."""
    return " ".join(run(env / "bin" / "python", "-m", "pip", "--version").stdout.split()[:2])


def use_tutorial(bin_: Path, work: Path, extras: str) -> None:
    """The tutorial's job is checked and trains, with each engine that was asked for."""
    write_tutorial(work / "sine")
    more = ["--set", "trainer.strategy=deepspeed", "--set", "trainer.max_steps=3"] if "deepspeed" in extras else []
    run(bin_ / "fairlead", "check", "job.yaml", cwd=work / "sine")
    said = run(bin_ / "fairlead", "fit", "job.yaml", *more, cwd=work / "sine")
    if "engine-untested" in said.stdout + said.stderr:
        raise PromiseError(f"the pins are not what was tested:\n{said.stdout}{said.stderr}")
    if not list((work / "sine" / "runs").glob("*/checkpoints/latest")):
        raise PromiseError(f"fairlead fit of the tutorial's job left no checkpoint:\n{said.stdout}{said.stderr}")


def run_readme(chosen: list[str]) -> int:
    """The README's lines, two at a time; 1 when one failed."""
    lines = readme_lines()
    if unknown := sorted(set(chosen) - set(lines)):
        raise SystemExit(f"README.md has no line with {unknown}; it has {sorted(lines)}")
    wanted = [extras for extras in lines if not chosen or extras in chosen]
    prefix = "fairlead-readme-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=ROOT / ".nox") as scratch, ThreadPoolExecutor(2) as pool:
        places = [Path(scratch, str(number)) for number in range(len(wanted))]
        outcomes = list(pool.map(examine_line, wanted, [lines[extras] for extras in wanted], places))
        for number, first in enumerate(outcomes):
            if first.state != "failed":
                continue
            # Once more, as a test that fails: an index that could not be reached is no fault of the line.
            outcomes[number] = examine_line(first.extra, lines[first.extra], places[number])
            if outcomes[number].state == "passed":
                print(*first.notes, sep="\n")
                print(f"FLAKY isolated[{first.extra}]: failed as printed above, and passed when it was run again")
        return report(outcomes)


def attempt(resolve: Callable[[str], frozenset[str]]) -> Callable[[str], frozenset[str] | PromiseError]:
    """`resolve`, with its error as a result: one extra that cannot be resolved does not hide the others."""

    def attempted(extra: str) -> frozenset[str] | PromiseError:
        try:
            return resolve(extra)
        except PromiseError as error:
            return error

    return attempted


def main(folder: Path, chosen: list[str]) -> int:
    """Examine every extra, two environments at a time; 1 when one failed."""
    with tempfile.TemporaryDirectory(prefix="fairlead-isolated-", dir=ROOT / ".nox") as scratch:
        wheels = Wheels(folder, Path(scratch))
        extras = chosen or wheels.extras()
        groups: dict[frozenset[str], list[str]] = defaultdict(list)
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(2) as pool:
            for extra, resolved in zip(extras, pool.map(attempt(wheels.resolve), extras), strict=True):
                if isinstance(resolved, PromiseError):
                    outcomes.append(Outcome(extra, "failed", [str(resolved)]))
                else:
                    groups[resolved].append(extra)
            places: SimpleQueue[Path] = SimpleQueue()
            for name in ("one", "other"):
                places.put(Path(scratch, name))

            def examined(item: tuple[frozenset[str], list[str]]) -> list[Outcome]:
                free = places.get()
                try:
                    return list(examine(wheels, item[1], item[0], free))
                finally:
                    places.put(free)

            by_size = sorted(groups.items(), key=lambda item: len(item[0]))
            outcomes += [outcome for result in pool.map(examined, by_size) for outcome in result]
    outcomes.sort(key=lambda outcome: extras.index(outcome.extra))
    return report(outcomes)


def report(outcomes: list[Outcome]) -> int:
    """Prints the table and its sums; 1 when one failed."""
    for outcome in outcomes:
        requirement = f"fairlead[{outcome.extra}]" if outcome.extra else "fairlead"
        print(f"{requirement:30} {outcome.state:8} {'; '.join(outcome.notes)}")
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in ("passed", "failed", "skipped")}
    print(f"isolated: {count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    place = ROOT / ".nox"  # ignored by git, and on the disk where the environments are
    place.mkdir(exist_ok=True)
    sys.exit(run_readme(sys.argv[2:]) if sys.argv[1] == "--readme" else main(Path(sys.argv[1]), sys.argv[2:]))
