"""Errors and findings: what a user reads, and what a script gets."""

from __future__ import annotations

import pickle

import pytest

from fairlead import errors
from fairlead.errors import ConfigError, FairleadError, RunFailedError, did_you_mean
from fairlead.findings import CODES, Finding, errors_in, raise_errors

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


def test_a_block_names_place_reason_and_remedy() -> None:
    error = ConfigError(
        "unknown field 'layres'", where="job.yaml:3, model.args", why="GPT takes: layers\nwidth", fix="layers"
    )
    assert error.block().splitlines() == [
        "unknown field 'layres'",
        "  where: job.yaml:3, model.args",
        "  why:   GPT takes: layers",
        "         width",
        "  do:    layers",
    ]
    assert str(error) == error.block()


def test_only_a_failed_run_ends_with_1() -> None:
    assert {kind.__name__ for kind in KINDS if kind.exit_code == 1} == {"RunFailedError"}
    assert all(kind.exit_code in (1, 2) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel_between_processes(kind: type[FairleadError]) -> None:
    error = kind("what", where="here", why="because", fix="do this")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert back.block() == error.block()


def test_a_subclass_with_its_own_constructor_travels_too() -> None:
    back = pickle.loads(pickle.dumps(RankDiedError(3)))
    assert back.rank == 3
    assert back.what == "rank 3 died"


class RankDiedError(RunFailedError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} died")
        self.rank = rank


def test_did_you_mean_ignores_case_and_gives_up() -> None:
    assert did_you_mean("DDP", ["ddp", "fsdp"]) == "ddp"
    assert did_you_mean("xyzzy", ["ddp", "fsdp"]) is None


def test_findings_are_raised_together() -> None:
    warning = Finding("warning", "oversubscribed", "many ranks")
    first = Finding("error", "unknown-field", "unknown field 'a'", where="a")
    second = Finding("error", "wrong-type", "b is text", where="b", fix="remove the quotes")
    raise_errors([warning])
    assert errors_in([warning, first]) == [first]
    with pytest.raises(ConfigError, match="unknown field 'a'") as one:
        raise_errors([warning, first])
    assert one.value.where == "a"
    with pytest.raises(ConfigError) as both:
        raise_errors([first, second])
    assert "error[unknown-field]" in str(both.value.why)
    assert "error[wrong-type]" in str(both.value.why)
    assert "many ranks" not in str(both.value.why)


def test_a_finding_as_json_has_the_contracts_keys() -> None:
    assert set(Finding("info", "class-unchecked", "x").as_dict()) == {"severity", "code", "where", "what", "why", "fix"}


def test_codes_are_sentences() -> None:
    assert all(text.endswith(".") and code == code.lower() for code, text in CODES.items())
