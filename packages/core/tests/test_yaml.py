"""YAML as users expect it: 1.2 scalars, lines for error messages, and a writer that every reader understands."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.errors import ConfigError
from fairlead.yaml import dump, load, load_file, parse_scalar_or_flow


@pytest.fixture(params=["libyaml", "pure"], autouse=True)
def _parser(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds with PyYAML's C parser and, where it was built without it, with the Python one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pure":
            patch.delattr(yaml, "CSafeLoader", raising=False)
        elif not yaml.__with_libyaml__:
            pytest.skip("PyYAML without libyaml")
        yield


def value(text: str) -> object:
    document = load(f"x: {text}\n", source="t.yaml").data
    assert isinstance(document, dict)
    return document["x"]


def error(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        load(text, source="job.yaml")
    return info.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5e+3", -2500.0),
        ("010", 10),
        ("+7", 7),
        ("0o17", 15),
        ("0x1f", 31),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("# only a comment", None),
        ("24:00:00", "24:00:00"),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("0b11", "0b11"),
        ("1e", "1e"),
        ("'1e-3'", "1e-3"),
        ('"null"', "null"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("!!int 0x10", 16),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    read = value(text)
    assert read == expected
    assert type(read) is type(expected)


def test_nan() -> None:
    assert math.isnan(float(str(value(".nan"))))


def test_lines_of_keys_items_and_missing_paths() -> None:
    text = "# a job\nrun: {name: x}\nmodel:\n  args:\n    layers: 4\n    blocks:\n      - 1\n      - w: 2\n"
    document = load(text, source="job.yaml")
    lines = {
        ("run",): 2,
        ("run", "name"): 2,
        ("model", "args", "layers"): 5,
        ("model", "args", "blocks", 1): 8,
        ("model", "args", "blocks", 1, "w"): 8,
        ("model", "args", "layres"): 4,
        ("model", "args", "blocks", 9): 6,
        ("nothing",): 2,
        (): 2,
    }
    assert {path: document.line(path) for path in lines} == lines


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing here\n", "\ufeff", "---\n"])
def test_an_empty_document_is_none(text: str) -> None:
    assert load(text, source="f").data is None


def test_aliases_are_copies_and_keep_lines() -> None:
    document = load("a: &x\n  k: [1]\nb: *x\n", source="f")
    assert document.data == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert isinstance(document.data, dict)
    document.data["a"]["k"].append(2)
    assert document.data["b"] == {"k": [1]}
    assert (document.line(("b",)), document.line(("b", "k"))) == (3, 2)


def test_an_alias_may_be_a_key() -> None:
    assert load("a: &a x\n*a : 1\n", source="f").data == {"a": "x", "x": 1}
    assert error("a: &a x\n*a : 1\nx: 2\n").where == "job.yaml:3"


def test_merge_keys() -> None:
    text = "d: &d {lr: 1, w: 2}\ne: &e {w: 3, z: 4}\nm:\n  <<: [*d, *e]\n  lr: 9\nq: {'<<': 1}\n"
    document = load(text, source="f")
    assert isinstance(document.data, dict)
    assert document.data["m"] == {"lr": 9, "w": 2, "z": 4}
    assert document.data["q"] == {"<<": 1}
    assert document.line(("m", "z")) == 2
    assert "mapping" in error("x:\n  <<: 3\n").what
    assert error("a: &a {}\nx:\n  <<: *a\n  <<: *a\n").where == "job.yaml:4"


def test_a_duplicate_key_names_both_lines() -> None:
    """Of two values for one setting none is dropped in silence."""
    problem = error("trainer:\n  devices: 1\n  max_steps: 2\n  devices: 4\n")
    assert problem.where == "job.yaml:4"
    assert "'devices'" in problem.what
    assert "line 2" in str(problem.why)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a:\n\tb: 1\n", 2, "tab"),
        ("a:\n  b: 1\n\tc: 2\n", 3, "tab"),
        ("a: b: c\n", 1, "mapping values are not allowed"),
        ("a: 1\nx: [1, 2\nb: 3\n", 3, "line 2"),
        ("a: 1\nx: {b: 1\n", 2, "bracket"),
        ("a: 1\nb: 'x\n", 2, "quote"),
        ("a: 1\nb: @x\n", 2, "quote text"),
        ("a: 1\n b: 2\n", 2, "align keys"),
        ("- a\nb: 1\n", 2, "line 1"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: 1\n1.5: x\n", 2, '"1.5":'),
        ('1: a\n"1": x\n', 2, "twice"),
        ("a: 1\ntrue: x\n", 2, '"true":'),
        ("a: 1\n: x\n", 2, "key"),
        ("a: 1\n[b]: x\n", 2, "cannot be a key"),
        ("a: 1\nb: *c\n", 2, "undefined alias"),
        ("x: 0\na: &a\n  - *a\n", 2, "inside"),
        ("a: !!python/object:os.system x\n", 1, "not supported"),
        ("a: !foo {}\n", 1, "!foo"),
        ("a: !!int x\n", 1, "not a !!int"),
        ("a: 1e999\n", 1, ".inf"),
        ("a: 1\nb: " + "9" * 5000, 2, "5000 digits"),
        ("a: 1\nb: \x01\n", 2, "U+0001"),
        ("a: \ud800\n", 1, "valid text"),
        ("[" * 3000, 1, "deep"),
    ],
)
def test_a_wrong_document_names_line_and_cause(text: str, line: int, words: str) -> None:
    """A config error names the place and what to do."""
    problem = error(text)
    assert problem.where == f"job.yaml:{line}"
    assert words in problem.block()


def test_an_alias_bomb_is_refused() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "aliases" in error("\n".join(levels)).what
    chain = ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 2000))]
    assert "aliases" in error("\n".join(chain)).what


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("", None),
        ("''", ""),
        ("24:00:00", "24:00:00"),
        ("pkg.mod:GPT", "pkg.mod:GPT"),
        ("[1, {a: 0x10}]", [1, {"a": 16}]),
        ("{name: ddp, bucket_cap_mb: 25}", {"name": "ddp", "bucket_cap_mb": 25}),
        ("two words", "two words"),
    ],
)
def test_set_values(text: str, expected: object) -> None:
    assert parse_scalar_or_flow(text) == expected


@pytest.mark.parametrize("text", ["[1, 2", "a: b", "- 1", "#x", "*a", "@x", "!x", "--- 1", "a\n---\nb", "{a: 1, a: 2}"])
def test_a_set_value_that_is_not_yaml_says_to_quote_it(text: str) -> None:
    with pytest.raises(ConfigError) as info:
        parse_scalar_or_flow(text, source="--set run.name")
    assert info.value.where == "--set run.name"
    assert "quotes" in str(info.value.fix)


def file_error(path: Path | str) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        load_file(path)
    return info.value


def test_files(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_bytes(b"\xef\xbb\xbfrun: {name: \xc3\xa9}\r\ntrainer: {}\r\n")
    document = load_file(job)
    assert document.data == {"run": {"name": "é"}, "trainer": {}}
    assert (document.source, document.line(("trainer",))) == (str(job), 2)

    assert "job.yaml" in str(file_error(tmp_path / "job.yml").fix)
    assert "job.yaml" in str(file_error(tmp_path / "job").fix)
    assert file_error(tmp_path / "zzzzzzz").fix is None
    assert "does not exist" in str(file_error(tmp_path / "no" / "job.yaml").why)
    assert "not a directory" in str(file_error(job / "x").why).lower()
    folder = file_error(tmp_path)
    assert "folder" in folder.what
    assert "job.yaml" in str(folder.fix)
    assert file_error("a\0b").what
    assert "no such file" in file_error("").what or "folder" in file_error("").what

    job.write_bytes(b"PK\x03\x04\0\0")
    assert "binary" in file_error(job).what
    job.write_bytes(b"a: 1\nb: \xff\n")
    assert file_error(job).where == f"{job}:2"
    job.write_bytes("a: 1\n".encode("utf-16"))
    assert "UTF-16" in file_error(job).what
    with job.open("wb") as file:
        file.truncate(10 * 1024 * 1024 + 1)
    assert "larger than 10 MiB" in file_error(job).what


def test_a_file_without_permission(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("a: 1\n")
    job.chmod(0)
    user = os.geteuid()
    if user == 0:  # root reads everything: be somebody else for a moment
        os.seteuid(65534)
    try:
        assert "permission" in file_error(job).what
    finally:
        os.seteuid(user)


AMBIGUOUS = [
    *("off", "1e-3", "24:00:00", "010", "0o17", "1_000", "2024-01-01", "y", "<<", "=", "", "~", "null", "a: b", "#x"),
    *("- x", "[", "@x", "0x1f", ".5", "1.", "+1", ".inf", "é", "\U0001f600", "\ufeff", "\x85", "\u2028", "\t", "\n"),
    *(
        "module load cuda\nsrun x\n",
        "a\n\nb",
        " lead\nx",
        "trail \nx",
        "x\n\n",
        "\x00",
        "x" * 3000,
        "1e999",
        "---",
        "...",
    ),
]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(AMBIGUOUS)
    | st.text(alphabet="0123456789.e+-_:xoyYnN~<=# \n", max_size=8)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(AMBIGUOUS), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    return repr(left) == repr(right)  # tells 1 from 1.0 and True, 0.0 from -0.0, and compares the order of keys


@settings(deadline=None, max_examples=400)
@given(trees)
def test_what_is_written_reads_back_in_1_2_and_in_1_1(data: object) -> None:
    text = dump(data)
    assert same(load(text, source="f").data, data)
    assert same(yaml.safe_load(text), data)


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_every_ambiguous_text_stays_text(text: str) -> None:
    written = dump({text: [text]})
    assert load(written, source="f").data == {text: [text]} == yaml.safe_load(written)


def test_the_written_form_reads_well() -> None:
    shared = [1]
    data = {"z": 1e-3, "a": 1e-5, "setup": "module load x\nsrun y\n", "l": [shared, shared], "t": (1, 2)}
    assert dump(data) == (
        "z: 0.001\na: 1.0e-05\nsetup: |\n  module load x\n  srun y\nl:\n  - - 1\n  - - 1\nt:\n  - 1\n  - 2\n"
    )
    assert dump({"long": "w " * 90 + "w"}).count("\n") == 1
    assert math.isnan(yaml.safe_load(dump(math.nan)))


def test_what_cannot_be_written_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested"):
        dump(loop)
    with pytest.raises(TypeError, match=r"a\.0: a object"):
        dump({"a": [object()]})
    with pytest.raises(TypeError, match=r"key 1\.5 is neither text nor an integer"):
        dump({"a": {1.5: 2}})
    with pytest.raises(ConfigError, match="Unicode"):
        dump({"a": "\ud800"})


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="ab:-[]{},&*!|>'\"%@`# \n\t~<.0e1?", max_size=30))
def test_any_text_is_data_or_a_config_error(text: str) -> None:
    """Never a traceback, and what was read can be written."""
    try:
        data = load(text, source="f").data
    except ConfigError:
        return
    assert repr(load(dump(data), source="g").data) == repr(data)
