"""SLURM's node lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.hostlist import MOST_HOSTS, expand, tasks_per_node


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", ["n1"]),
        ("node[01-04]", ["node01", "node02", "node03", "node04"]),
        ("node[01,03-05]", ["node01", "node03", "node04", "node05"]),
        ("a1,node[02-03]", ["a1", "node02", "node03"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("x[3]-ib,y[3-4]", ["x3-ib", "y3", "y4"]),
        ("node[001],gpu[1-3]", ["node001", "gpu1", "gpu2", "gpu3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[01-100]", [f"n{i:02d}" for i in range(1, 101)]),
        ("n[1-9:2]", ["n1", "n3", "n5", "n7", "n9"]),
        ("n[2,1,2]", ["n2", "n1", "n2"]),
        ("n1 n2", ["n1", "n2"]),
        (" n1,\tn[2-3]\n", ["n1", "n2", "n3"]),
        ("c[1-2]-[a]", None),
        ("n[1-2", None),
        ("n1-2]", None),
        ("n[[1-2]]", None),
        ("n[]", None),
        ("n[2-1]", None),
        ("n[1-2-3]", None),
        ("n[1-9:0]", None),
        ("n[-1]", None),
        ("n[1-999999999]", None),
        ("n[1-99999999999999999999999999]", None),
        ("n[1-9999]m[1-9999]", None),
        ("n[1-1000000],m[1]", None),
        ("", []),
    ],
)
def test_notation(hostlist: str, hosts: list[str] | None) -> None:
    """Suffixes, several brackets, comma lists, padding; None: an error, not a guess."""
    if hosts is None:
        with pytest.raises(ValueError, match=r"bracket|number|empty|hosts"):
            expand(hostlist)
    else:
        assert expand(hostlist) == hosts


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A number or range, and what it means, counted one by one."""
    low, count, width = draw(st.integers(0, 1200)), draw(st.integers(1, 12)), draw(st.integers(0, 5))
    numbers = [f"{low + i:0{width}d}" for i in range(count)]
    # Padding is part of a range only if its lower end shows it.
    if not numbers[0].startswith("0"):
        numbers = [str(low + i) for i in range(count)]
    else:
        numbers = [str(low + i).zfill(len(numbers[0])) for i in range(count)]
    return (numbers[0] if count == 1 else f"{numbers[0]}-{numbers[-1]}"), numbers


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Text and brackets in turn, and every combination: the last varies fastest, then the first, the second, ..."""
    word = st.text("abn-.1", max_size=4)
    prefix, brackets = draw(st.text("abn", min_size=1, max_size=3)), []
    text = prefix
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(st.lists(ranges(), min_size=1, max_size=3))
        tail = draw(word)
        text += "[" + ",".join(part for part, _ in parts) + "]" + tail
        brackets.append([number + tail for _, numbers in parts for number in numbers])
    if not brackets:
        return text, [text]
    *others, last = brackets
    hosts = [prefix + "".join(reversed(slow)) + fast for *slow, fast in itertools.product(*reversed(others), last)]
    return text, hosts


@given(st.lists(entries(), max_size=4), st.sampled_from([",", ", ", " "]))
def test_any_list_equals_the_naive_expansion(parts: list[tuple[str, list[str]]], separator: str) -> None:
    hostlist = separator.join(text for text, _ in parts)
    assert expand(hostlist) == [host for _, hosts in parts for host in hosts]


@given(st.text("n1-9,[]: x0", max_size=30))
def test_any_text_is_hosts_or_an_error(hostlist: str) -> None:
    try:
        hosts = expand(hostlist)
    except ValueError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)
    assert len(hosts) <= MOST_HOSTS


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_tasks_per_node_undoes_the_run_lengths(counts: list[int]) -> None:
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x)", "x2", "2(2)", "2,,3", "1(x99999999)"])
def test_malformed_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match="number of tasks"):
        tasks_per_node(text)


def test_a_hundred_thousand_hosts() -> None:
    """A list of a whole cluster, three ways; benchmarks/hostlist measures the time."""
    assert len(expand("rack[001-100]n[0001-1000]")) == 100_000
    assert len(expand(",".join(f"n[{i}]" for i in range(100_000)))) == 100_000
    assert expand(",".join(f"n{i}" for i in range(100_000)))[-1] == "n99999"
