"""Slurm's lists of hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.launch.providers.nodelist import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("node[01-04,7],gpu3", ["node01", "node02", "node03", "node04", "node7", "gpu3"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("r[1-2]-ib.example.com", ["r1-ib.example.com", "r2-ib.example.com"]),
    ],
)
def test_lists_are_expanded_in_order(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[1-", "n[1-2", "n1]", "n[[1]]", "n[]", "n[1,]", "n[a-b]", "n[1-2-3]", "n[-1]", "n[2-1]", "a,,b",
        "a,", ",a", "a b", "n[0-99999999]", "n[1-300][1-300]", "n[\u0661]", "n[1-" + "9" * 400 + "]",
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"n|a"):
        expand(text)


prefixes = st.from_regex(r"[a-z][a-z.-]{0,5}", fullmatch=True)
ranges = st.tuples(st.integers(0, 9999), st.integers(0, 30), st.integers(1, 6))


@settings(deadline=None)
@given(st.lists(st.tuples(prefixes, st.lists(ranges, max_size=4)), max_size=4))
def test_what_slurm_would_write_comes_back(parts: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    items, hosts = [], []
    for prefix, spans in parts:
        texts = []
        for first, length, width in spans:
            numbers = [
                f"{number:0{len(f'{first:0{width}d}')}d}" for number in range(first, first + length + 1)
            ]
            texts.append(numbers[0] if length == 0 else f"{numbers[0]}-{numbers[-1]}")
            hosts += [prefix + number for number in numbers]
        items.append(f"{prefix}[{','.join(texts)}]" if spans else prefix)
        hosts += [] if spans else [prefix]
    assert expand(",".join(items)) == hosts


@settings(deadline=None)
@given(st.text(alphabet="n1-2,[] x", max_size=20))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)
