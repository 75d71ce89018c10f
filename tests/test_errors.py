"""One table of errors: csrc/control/error.h has it, and all else that tells errors apart agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

from polyhvd import _core, errors
from polyhvd.launch.job.blame import CONSEQUENCES

ROOT = Path(__file__).resolve().parents[1]


def enumerators() -> dict[str, int]:
    """The codes of error.h, by name."""
    text = (ROOT / "polyhvd/csrc/control/error.h").read_text()
    (body,) = re.findall(r"enum class ErrorCode[^{]*\{(.*?)\};", text, re.DOTALL)
    return {name: int(number) for name, number in re.findall(r"(k\w+) = (\d+),", body)}


def test_every_code_stands_in_the_table_once() -> None:
    codes = [code for code, *_ in _core.ERRORS]
    assert sorted(codes) == sorted(enumerators().values())
    assert len(set(codes)) == len(codes)


def test_every_code_has_a_class() -> None:
    assert set(errors.by_code()) == {code for code, *_ in _core.ERRORS}
    for code, name, *_ in _core.ERRORS:
        assert errors.by_code()[code] is getattr(errors, name)


def test_every_class_of_a_failed_collective_has_a_code() -> None:
    failures = {
        value
        for name in errors.__all__
        if isinstance(value := getattr(errors, name), type) and issubclass(value, errors.HorovodInternalError)
    }
    assert failures == set(errors.by_code().values()) - {errors.InvalidArgumentError}


def test_the_launcher_blames_no_rank_for_a_consequence() -> None:
    assert set(CONSEQUENCES) == {name for _, name, _, is_consequence in _core.ERRORS if is_consequence}
    causes = {name for _, name, _, is_consequence in _core.ERRORS if not is_consequence}
    assert not causes & set(CONSEQUENCES)


def test_what_ends_an_engine_is_a_consequence_elsewhere() -> None:
    for _, name, ends_engine, is_consequence in _core.ERRORS:
        assert is_consequence or not ends_engine, name


def test_the_document_lists_every_class() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    for name in errors.__all__:
        assert name == "by_code" or name in text, name
