"""The documentation and the code say the same: parity of the reference, and every example is tried."""

from __future__ import annotations

import argparse
import ast
import doctest
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import fairlead
from docs.gen_reference import PARTS, expand, first_party_plugins, models, written
from fairlead import yaml
from fairlead.composition import compose
from fairlead.config import JobConfig
from fairlead.config_bases import AXES
from fairlead.findings import CODES
from fairlead.hookspecs import HookSpecs
from fairlead.install import first_party
from fairlead.interpolation import interpolate
from fairlead.jobs import load_job
from fairlead.own_checks import check_user_code
from fairlead.plugin_classes import AXIS_PLUGINS
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.testing import FakeEntryPoint, write_dist
from fairlead_launch.submission.plan import make_plan
from fairlead_runs.fingerprints import MAY_CHANGE
from integration_tests.isolated.run import OLD_PIP, readme_lines

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [ROOT / "README.md", *DOCS.rglob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("examples/**/README.md")]
)
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_ANY_COMMAND = {"--debug", "--help"}
NOT_YET: set[str] = set()  # commands that the docs name as missing


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.title or self.text.splitlines()[0]}"


def blocks(*languages: str, pages: list[Path] = PAGES) -> list[Block]:
    found = [Block(page, *match) for page in pages for match in FENCE.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if block.language in languages]


@functools.cache
def ours() -> PluginManager:
    return first_party_plugins()


@functools.cache
def page(name: str) -> str:
    return expand((DOCS / name).read_text(encoding="utf-8"))


# -- parity of the reference (rule 8)


def test_every_hook_is_documented() -> None:
    text = page("write-a-plugin.md")
    hooks = [name for name in vars(HookSpecs) if name.startswith("fairlead_")]
    assert hooks
    assert [name for name in hooks if f"### {name}\n" not in text or not getattr(HookSpecs, name).__doc__] == []


@pytest.mark.parametrize("name", ours().names("command"))
def test_every_command_and_option_is_documented(name: str) -> None:
    text = page("reference/cli.md")
    section = text.partition(f"### fairlead {name}\n")[2].partition("\n### ")[0]
    options = options_of(parser_of(name))
    assert section
    assert [option for option in options if option not in {"-h", "--help"} and f"`{option}" not in section] == []
    assert [action.dest for action in parser_of(name)._actions if not action.help] == []


def test_every_config_field_is_documented() -> None:
    """Each has a description in its source, and stands in a table with it."""
    text = page("reference/job.md") + page("reference/plugins.md")
    undescribed, absent = [], []
    for place, model in models().items():
        for name, field in model.model_fields.items():
            if name == "name" and "." in place:
                continue  # the tag
            undescribed += [] if field.description else [f"{place}: {name}"]
            absent += [] if f"| `{field.alias or name}` |" in text else [f"{place}: {name}"]
    assert (undescribed, absent) == ([], [])


def test_every_plugin_preset_and_alias_is_documented() -> None:
    text, migrating = page("reference/plugins.md"), page("migrating.md")
    manager = ours()
    names = [key.split(".") for key in first_party() if key.partition(".")[0] in AXES]
    assert [n for axis, n in names if f"### {axis}: {n} " not in text and f"- `{n}` is " not in text] == []
    aliases = {alias for axis, name in names for alias in manager.get(axis, name).aliases}
    assert [alias for alias in aliases if f"| `{alias}` |" not in migrating] == []


def test_every_finding_code_is_documented() -> None:
    """Those that the tables list, and those that the sources make."""
    text = page("reference/findings.md")
    manager = ours()
    listed = set(CODES)
    for axis in AXIS_PLUGINS:
        for plugin in manager.distinct(axis).values() if axis != "command" else ():
            listed |= set(plugin.codes)
    for name in manager.names("check"):
        listed |= set(manager.check(name).codes)
    made = {code for source in ROOT.glob("packages/*/src/**/*.py") for code in codes_made_in(source)}
    assert len(made) > 20
    assert made - listed == set()
    assert [code for code in listed if f"| `{code}` |" not in text] == []


def codes_made_in(source: Path) -> Iterator[str]:
    """The codes that are written in calls of `Finding(severity, code, ...)`."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Finding":
            code = node.args[1] if len(node.args) > 1 else None
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield code.value


def test_every_environment_variable_of_ours_is_documented() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py")]
    variables = {name for text in sources for name in re.findall(r"\"(FAIRLEAD_[A-Z_]+)\"", text)}
    assert variables
    assert [name for name in variables if f"`{name}`" not in page("reference/cli.md")] == []


def test_every_public_name_is_documented() -> None:
    text = page("reference/python.md")
    documented = {line.split(".")[-1] for line in text.splitlines() if line.startswith("::: ")}
    assert set(fairlead.__all__) - documented == {"__version__"}


def test_what_may_change_in_a_run_is_documented() -> None:
    assert [path for path in MAY_CHANGE if f"| `{path}` |" not in page("reference/run-directory.md")] == []


def test_every_generated_part_is_used() -> None:
    """A part that no page shows is not documentation."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    assert [name for name in PARTS if f"<!-- generated: {name} -->" not in text] == []


def test_the_generated_parts_in_the_repository_are_fresh() -> None:
    stale = [path.name for path in DOCS.rglob("*.md") if (text := path.read_text(encoding="utf-8")) != written(text)]
    assert stale == [], "python docs/gen_reference.py writes them"


def test_each_how_to_page_is_listed_once_in_its_group() -> None:
    """The index and the site's navigation have the same groups."""
    index = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([a-z-]+\.md)\)", index)
    assert sorted(linked) == sorted(path.name for path in DOCS.glob("how-to/*.md") if path.name != "index.md")
    assert linked == re.findall(
        r": how-to/([a-z-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert index.count("\n## ") == 5


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_folders_of_this_repository_that_a_page_names_exist(path: Path) -> None:
    tops = "packages|integration_tests|benchmarks|examples|docs|changes|\\.ci"
    named = re.findall(rf"[`(]((?:{tops})/[\w./*-]*)", path.read_text(encoding="utf-8"))
    assert [one for one in named if not any(ROOT.glob(one.rstrip("/")))] == []


# -- what the pages show


@functools.cache
def plugins_of_the_pages() -> PluginManager:
    """Ours, and the example that one page writes."""
    sys.path.insert(0, str(ROOT / "examples/plugins/localsgd/src"))
    try:
        example = importlib.import_module("fairlead_localsgd.localsgd").localsgd
    finally:
        del sys.path[0]
    points = [ours()._points[f"{axis}.{name}"] for axis, name in (k.split(".") for k in first_party())]
    return PluginManager([*points, FakeEntryPoint("strategy.localsgd", example)])


MANIFESTS = [block for block in blocks("yaml") if "\nkind:" in block.text]
"""What `kubectl apply` takes."""


def settings_of(block: Block, folder: Path) -> dict[str, Any]:
    """What a block says, over the files of its page that it extends, where no variable is set."""
    for other in blocks("yaml", pages=[block.page]):
        if other.title:
            (folder / other.title).write_text(other.text, encoding="utf-8")
    (folder / "block.yaml").write_text(block.text, encoding="utf-8")
    found: dict[str, Any] = interpolate(compose(["block.yaml"], folder, {})[0], {}).data
    return found


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if block not in MANIFESTS], ids=str)
def test_yaml_is_a_job(block: Block, tmp_path: Path) -> None:
    """A whole job, or sections of one."""
    data = settings_of(block, tmp_path)
    JobConfig.model_validate({"model": "a.model:Net", **data}, context={"plugins": plugins_of_the_pages()})


@pytest.mark.parametrize(
    "job",
    [*ROOT.glob("examples/*/*.yaml"), *(b for b in blocks("yaml") if b not in MANIFESTS)],
    ids=lambda job: job.name if isinstance(job, Path) else str(job),
)
def test_a_login_node_without_torch_checks_it(
    job: Path | Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `fairlead[check]`: an engine is not there by design. Of a page's own code nothing is there at all."""
    file = job if isinstance(job, Path) else tmp_path / "job.yaml"
    if isinstance(job, Block):
        data = settings_of(job, tmp_path)
        data.get("run", {}).pop("code", None)  # a folder of the page's reader
        file.write_text(yaml.dump({"model": "a.model:Net", **data}))
    plugins = plugins_of_the_pages()
    assert load_job(str(file), plugins=plugins, cwd=file.parent, environ={}).job is not None
    # What is imported by now stays; the places where a job's code is looked for become those of a login node.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "torch").exists()])
    loaded = load_job(str(file), plugins=plugins, cwd=file.parent, environ={})
    result = check_user_code(loaded, cast("Resolution", None), {}, file.parent)
    wrong = [finding.what for finding in result.findings if finding.severity == "error"]
    assert wrong == [] or isinstance(job, Block)
    assert [what for what in wrong if re.search(r"'(torch|lightning|transformers|deepspeed)\b", what)] == []


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_parses(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", blocks("sh", "bash"), ids=str)
def test_shell_parses(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", MANIFESTS, ids=str)
def test_manifests_are_what_submit_writes(block: Block, tmp_path: Path) -> None:
    """Of the page's own job, word for word."""
    asked = next(b for b in blocks("yaml", pages=[block.page]) if b.title == "job.yaml")
    (tmp_path / "job.yaml").write_text(asked.text)
    (tmp_path / "net.py").write_text("class Net:\n    def __init__(self, width): ...\n\n\nclass Sine: ...\n")
    settings: Any = {"to": None, "overrides": (), "sweep": (), "max_parallel": None}
    made = make_plan("job.yaml", **settings, environ={}, plugins=plugins_of_the_pages(), cwd=tmp_path)
    [text] = made.files.values()
    assert block.text in text.split("---\n")


ABOUT_CLUSTERS = [
    DOCS / "how-to" / f"{name}.md"
    for name in ("slurm", "lsf", "kubernetes", "mpi", "by-hand", "preemption", "troubleshooting", "start-up")
]


@functools.cache
def sources() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))


@pytest.mark.parametrize("source", ABOUT_CLUSTERS, ids=lambda path: path.name)
def test_codes_in_the_pages_exist(source: Path) -> None:
    """What looks like a code is one: of a finding, of a warning in a run, or an event of the history."""
    text = FENCE.sub("", source.read_text(encoding="utf-8"))
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text))
    told = set(re.findall(r"warning\[([a-z-]+)\]", sources())) | set(re.findall(r"event\(\s*\"([a-z-]+)\"", sources()))
    assert named - told - set(re.findall(r"^\| `([a-z-]+)` \|", page("reference/findings.md"), re.MULTILINE)) == set()


def test_errors_in_the_troubleshooting_tables_are_those_that_are_raised() -> None:
    """The words between numbers and names of an error's text stand in the sources."""
    text = (DOCS / "how-to/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!symptom|---)(.+) \|$", text, re.MULTILINE)
    said = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[1]) if " " in text]
    parts = [
        part.strip() for text in said for part in re.split(r"\.\.\.|\S*\d\S*|\bRUN\b", text) if " " in part.strip()
    ]
    assert len(parts) > 8
    assert [part for part in parts if part not in sources()] == []


def test_the_page_on_plugins_shows_the_example() -> None:
    """Whole files: what the page shows is what is installed and run."""
    shown = [b for b in blocks("python", "toml", pages=[DOCS / "write-a-plugin.md"]) if b.title]
    assert len(shown) == 4
    example = ROOT / "examples/plugins/localsgd"
    assert [b.title for b in shown if b.text.strip() != (example / str(b.title)).read_text("utf-8").strip()] == []


@pytest.mark.slow
def test_the_plugin_of_the_page_conforms(tmp_path: Path) -> None:
    """The code of the page, installed as a distribution, passes the suite that the page names."""
    shown = {str(b.title): b.text for b in blocks("python", "toml", pages=[DOCS / "write-a-plugin.md"]) if b.title}
    project = tomllib.loads(shown["pyproject.toml"])["project"]
    made = write_dist(
        tmp_path / "site",
        project["name"],
        version=project["version"],
        requires=project["dependencies"],
        entry_points=project["entry-points"]["fairlead"],
        files={title.removeprefix("src/"): text for title, text in shown.items() if title.startswith("src/")},
    )
    test = tmp_path / "test_page.py"
    test.write_text(shown["tests/test_localsgd.py"], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        cwd=tmp_path,
        env={**plain_environ(tmp_path), "PYTHONPATH": str(made.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


def parser_of(name: str) -> argparse.ArgumentParser:
    command = ours().command(name)
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False, exit_on_error=False)
    module, _, function = command.arguments.partition(":")
    getattr(importlib.import_module(module), function)(parser)
    return parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Those of a command and of its subcommands."""
    inner = [a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {
        *parser._option_string_actions,
        *(o for group in inner for one in group for o in one._option_string_actions),
    }


def calls() -> Iterator[tuple[str, list[str], bool]]:
    """Every `fairlead ...` of a page: where, its words, and whether it is a whole call."""
    for each in PAGES:
        text = each.read_text(encoding="utf-8")
        whole = "\n".join(match[2] for match in FENCE.findall(text) if match[0] in ("sh", "bash"))
        whole = re.sub(r" \\\n +| &$", " ", whole, flags=re.MULTILINE)
        shown = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        for line in [*whole.splitlines(), *shown]:
            if found := re.search(r"(?:^|[\s])fairlead (?=[a-z])(.*)", line):
                yield each.name, shlex.split(found[1], comments=True), True
        for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
            if found := re.search(r"(?:^|\s)fairlead (?=[a-z])(.*)", code, re.DOTALL):
                yield each.name, shlex.split(found[1]), False


def test_every_command_in_the_pages_exists() -> None:
    """A command line of a block parses; an inline one names a command and options that exist."""
    known = ours().names("command")
    wrong, seen = [], 0
    for where, (name, *words), whole in calls():
        words = [word for word in words if word not in OF_ANY_COMMAND]
        if name in NOT_YET or "pip" in words:
            continue
        seen += 1
        if name not in known:
            wrong.append(f"{where}: no command {name}")
            continue
        parser = parser_of(name)
        try:
            if whole:
                parsed = parser.parse_args(words)
                behind = getattr(parsed, "words", [])  # a script's own
                words = words[: len(words) - len(behind)]
            options = options_of(parser)
            unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in options]
        except (argparse.ArgumentError, SystemExit) as error:
            unknown = [str(error)]
        wrong += [f"{where}: fairlead {name}: {problem}" for problem in unknown]
    assert wrong == []
    assert seen > 40


def test_extras_and_sessions_in_the_pages_exist() -> None:
    text = "".join(each.read_text(encoding="utf-8") for each in [*PAGES, ROOT / "CONTRIBUTING.md"])
    core = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra for group in re.findall(r"fairlead\[([a-z][a-z,-]*)\]", text) for extra in group.split(",")}
    assert extras - set(core["optional-dependencies"]) == set()
    sessions = {name for names in re.findall(r"nox -s ([\w -]+)", text) for name in names.split()[:1]}
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert {s for s in sessions if f"\ndef {s}(" not in noxfile and f'(name="{s}"' not in noxfile} == set()


def test_links_between_files_resolve() -> None:
    """Those of the site are mkdocs's to check, with their anchors; the READMEs' are not."""
    broken = []
    for each in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", each.read_text(encoding="utf-8"))):
            made = target.endswith("measured.md")  # `nox -s bench` writes it
            if "://" not in target and not made and not (each.parent / target).exists():
                broken.append(f"{each.relative_to(ROOT)}: {target}")
    assert broken == []


# -- the README's commands, and the output that pages show


def test_the_readmes_commands_are_those_that_are_run() -> None:
    """The test command is CI's; both commands are one line, and the first trains the example."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("python3.11 -m venv")]
    demo, test = commands
    in_ci = [line.split(" # ")[0].strip() for line in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()]
    assert test in in_ci
    assert test in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    assert demo.removesuffix("-s demo") == test.removesuffix("-j 2")
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert '"fairlead", "fit", "examples/gpt/job.yaml"' in noxfile.partition("def demo(")[2].partition("@nox")[0]


def test_the_readmes_install_lines_are_those_that_are_run() -> None:
    """Session `isolated` runs each as it stands: a login node, one machine, and a cluster with an engine."""
    lines = readme_lines()
    assert list(lines) == ["lightning", "torch", "check", "slurm,deepspeed"]
    assert set(OLD_PIP) < set(lines)
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert '"--readme"' in noxfile.partition("def isolated(")[2].partition("@nox")[0]


def test_no_page_sends_to_an_index() -> None:
    """The packages are not on one: a page says which extra, and the page Install how it is installed."""
    pages = [each for each in PAGES if each.name != "install.md"]
    assert [str(each) for each in pages if "pip install 'fairlead" in each.read_text(encoding="utf-8")] == []


def plain_environ(home: Path) -> dict[str, str]:
    """No launcher and no scheduler: what the pages assume."""
    return {"PATH": os.environ["PATH"], "HOME": str(home)}


def transcript(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def project(folder: Path, source: Path, **changes: str) -> None:
    """The files that a page shows, in a folder; the tutorial's code is every page's."""
    for block in blocks("python", "yaml", "sh", pages=[DOCS / "tutorial.md", source]):
        if block.title:
            text = block.text
            for old, new in changes.items():
                text = text.replace(old, new)
            (folder / block.title).write_text(text, encoding="utf-8")


def try_transcripts(folder: Path, source: Path) -> None:
    checker, tried = doctest.OutputChecker(), 0
    for block in blocks("console", pages=[source]):
        for command, want in transcript(block.text):
            words = shlex.split(command)
            assert words[0] == "fairlead"
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=folder,
                env=plain_environ(folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert checker.check_output(want, done.stdout, flags), f"$ {command}\nshown:\n{want}\nreal:\n{done.stdout}"
            assert done.returncode == (2 if "error[" in want else 0)
            tried += 1
    assert tried


def test_the_readme_shows_what_check_says_of_a_typo(tmp_path: Path) -> None:
    """`layres` for `layers` (the README's first screen)."""
    project(tmp_path, ROOT / "README.md", layers="layres")
    (tmp_path / "net.py").write_text(
        next(b.text for b in blocks("python", pages=[DOCS / "tutorial.md"]) if b.title == "net.py"), encoding="utf-8"
    )
    try_transcripts(tmp_path, ROOT / "README.md")


def test_the_slurm_page_shows_what_is_printed(tmp_path: Path) -> None:
    project(tmp_path, DOCS / "how-to/slurm.md")
    try_transcripts(tmp_path, DOCS / "how-to/slurm.md")


def test_the_sweep_page_shows_what_is_printed(tmp_path: Path) -> None:
    project(tmp_path, DOCS / "how-to/sweep.md")
    try_transcripts(tmp_path, DOCS / "how-to/sweep.md")


@pytest.mark.slow
def test_the_tutorial_works_as_shown(tmp_path: Path) -> None:
    """From the first check to a run that goes on, in two processes."""
    project(tmp_path, DOCS / "tutorial.md")
    try_transcripts(tmp_path, DOCS / "tutorial.md")


def test_examples_in_titles_are_unique() -> None:
    """Two files of one name on a page would overwrite each other unseen."""
    for each in PAGES:
        titles: list[Any] = [b.title for b in blocks("python", "yaml", "toml", "sh", "bash", pages=[each]) if b.title]
        assert len(titles) == len(set(titles)), each
