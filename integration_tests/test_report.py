"""`fairlead report`, opened in a real browser: what a reader finds, in light and dark, on a screen and a phone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead_runs.goodput import goodput
from integration_tests.made_run import SLOW, make_run

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs a browser (Debian: chromium)"
)
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "see-a-run.md"
SCREEN, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "runs"
    make_run(folder / "one", steps=3000, ranks=16)
    make_run(folder / "two", steps=1500, ranks=4, lr=0.2)
    return folder


def called(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", "report", *words]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False)


def report(folder: Path, *words: str) -> str:
    done = called(folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def opened(browser: Any, file: Path, size: dict[str, int], scheme: str) -> Any:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith("http") and page.wrong.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
    return page


@pytest.mark.parametrize(("size", "scheme"), [(SCREEN, "light"), (PHONE, "dark")], ids=["screen-light", "phone-dark"])
def test_the_page_of_a_run_shows_its_figures(browser: Any, runs: Path, size: dict[str, int], scheme: str) -> None:
    said = report(runs, "one")
    page = opened(browser, runs / "one" / "report.html", size, scheme)
    assert page.wrong == []
    went = goodput(runs / "one")
    assert went.share is not None
    shown = page.inner_text("[data-name=goodput] b")
    assert shown == f"{went.share:.1%}"
    assert shown in said
    parts = page.eval_on_selector_all(
        "tr[data-part]", "rows => rows.map(row => [row.dataset.part, +row.dataset.seconds])"
    )
    assert dict(parts) == pytest.approx({part: s for part, s in went.seconds.items() if s >= 0.001}, abs=0.01)
    assert sum(seconds for _, seconds in parts) == pytest.approx(went.total_s, abs=0.1)
    text = page.inner_text("body")
    assert f"rank {SLOW} (n{SLOW // 8})" in text  # the slow one
    assert "<script>alert(1)</script> & no luck" in text  # as text, not run
    assert "SLURM_NTASKS_PER_NODE" in text
    marks = "all => all.map(one => one.querySelectorAll('svg path, svg line').length)"
    drawn = page.eval_on_selector_all(".chart", marks)
    assert len(drawn) >= 6
    assert all(drawn)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= size["width"], "nothing sticks out of a phone"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    if folder := os.environ.get("FAIRLEAD_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/one-{size['width']}-{scheme}.png", full_page=True)
    page.close()


def test_two_runs_are_compared(browser: Any, runs: Path) -> None:
    report(runs, "one", "two", "-o", "both.html")
    page = opened(browser, runs.parent / "both.html", SCREEN, "light")
    assert page.wrong == []
    differences = page.inner_text("#differences")
    assert re.search(r"model\.args\.lr\s+0\.1\s+0\.2", differences)
    assert "16 ranks of one give 4.00 times the samples a second of 4 of two" in page.inner_text("body")
    if folder := os.environ.get("FAIRLEAD_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/both.png", full_page=True)
    page.close()


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/digits", steps=300, ranks=2)
    make_run(tmp_path / "runs/digits-2", steps=300, ranks=2, lr=0.2)
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        words = [sys.executable, "-m", *command.split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "runs/digits/report.html").exists()
    assert (tmp_path / "compared.html").exists()
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(shown.stdout.split()[0]) == goodput(tmp_path / "runs/digits").share


@pytest.mark.full
def test_a_million_steps_and_4096_ranks_are_a_page_of_a_few_megabytes(browser: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/large", steps=1_000_000, ranks=4096)
    report(tmp_path / "runs", "large")
    file = tmp_path / "runs/large/report.html"
    assert file.stat().st_size < 5_000_000
    page = opened(browser, file, SCREEN, "light")
    assert page.wrong == []
    assert "the 10 slowest of 4096 ranks" in page.inner_text("body")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such"], "there is no run 'no-such'"),
        (["one", "one"], "one is named twice"),
        (["one", "-o", "nowhere/page.html"], "there is no folder"),
        (["one", "-o", "runs"], "is a folder"),
    ],
)
def test_a_wrong_call_is_refused_with_what_to_do(runs: Path, words: list[str], said: str) -> None:
    done = called(runs, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
