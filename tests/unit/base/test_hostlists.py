"""Slurm host lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base.hostlists import compress, expand

KNOWN = [
    ("", []),
    ("a", ["a"]),
    ("a,b", ["a", "b"]),
    ("node[001-003,007],x1", ["node001", "node002", "node003", "node007", "x1"]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[009-011]", ["n009", "n010", "n011"]),
    ("n[3,1]", ["n3", "n1"]),
    ("r[1-2]c[01-02]", ["r1c01", "r1c02", "r2c01", "r2c02"]),
    ("gpu-a[1-2]-ib0", ["gpu-a1-ib0", "gpu-a2-ib0"]),
]


@pytest.mark.parametrize(("hostlist", "names"), KNOWN)
def test_expand(hostlist: str, names: list[str]) -> None:
    assert expand(hostlist) == names


def test_blanks_beside_commas_are_no_part_of_a_name() -> None:
    """Otherwise a mistyped list would name nodes that do not exist."""
    assert expand(" n1, n[2-3] ,x") == ["n1", "n2", "n3", "x"]
    assert expand("  ") == []


@pytest.mark.parametrize("bad", ["n[1-", "n]1", "n[a]", "n[3-1]", "n[]", "a,,b", ",a", "n[[1]]", "n[1-2-3]"])
def test_expand_refuses(bad: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm host list"):
        expand(bad)


@pytest.mark.parametrize(
    ("names", "hostlist"),
    [
        ([], ""),
        (["a", "b"], "a,b"),
        (["n001", "n002", "n003", "n007", "x1"], "n[001-003,007],x1"),
        (["n9", "n10"], "n9,n10"),
        (["n2", "n1"], "n[2,1]"),
        (["n1", "m1", "n2"], "n1,m1,n2"),
        (["n1", "n1"], "n[1,1]"),
    ],
)
def test_compress(names: list[str], hostlist: str) -> None:
    assert compress(names) == hostlist


names = st.from_regex(r"[a-z]{1,4}(-[a-z]+)?[0-9]{0,4}(x[0-9]{1,2})?", fullmatch=True)


@given(st.lists(names, max_size=30))
def test_expand_undoes_compress(given_names: list[str]) -> None:
    assert expand(compress(given_names)) == given_names


@given(st.integers(0, 9900), st.integers(1, 60), st.integers(4, 6))
def test_a_run_of_nodes_is_one_bracket(first: int, count: int, width: int) -> None:
    run = [f"node{number:0{width}d}" for number in range(first, first + count)]
    assert compress(run) == (run[0] if count == 1 else f"node[{run[0][4:]}-{run[-1][4:]}]")
