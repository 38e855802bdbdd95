"""Which example comes next, and which come again."""

from __future__ import annotations

from primeslurm.orchestrator.dispatch import Examples

RATIOS = {"a": 1.0, "b/c": 3.0}


def test_what_is_unfinished_comes_first_and_then_who_is_furthest_behind_its_share() -> None:
    made = Examples(RATIOS, cursors={"a": 2}, unfinished=[("a", 1), ("gone", 0)], taken={"a-00000002"})
    assert [made.take_next(["a", "b/c"]) for _ in range(5)] == [
        ("a", 1),
        *(("b/c", example) for example in range(3)),
        ("b/c", 3),
    ]
    assert [made.take_next(labels) for labels in (["a"], [])] == [("a", 3), None], "2 is taken"


def test_what_was_given_up_comes_again_once_and_with_its_task() -> None:
    made = Examples(RATIOS, cursors={"a": 3}, taken={"a-00000001"})
    assert not made.is_unopened(("a", 1)) and made.is_unopened(("a", 3))
    assert made.come_again(("a", 1), 7) and not made.come_again(("a", 1), 7)
    assert made.is_unopened(("a", 1)) and made.was_returned(("a", 1))
    assert made.take_next(["a"]) == ("a", 1) and made.take_task(("a", 1), set()) == 7
    assert made.take_task(("a", 1), set()) is None, "nobody draws"
    assert made.returned([]) == [] and made.returned([("a", 1)]) == [("a", 1)]
    made.put_in_batch({"a-00000001"})
    assert made.returned([]) == [("a", 1)]
    made.forget_batch({"a-00000001"})
    assert made.returned([]) == []


def test_a_group_that_is_known_by_its_file_alone_is_found() -> None:
    made = Examples(RATIOS, cursors={"b/c": 2})
    assert made.position_of_file("b_c-00000001") == ("b/c", 1) == made.position_of_file("b/c-00000001")
    assert [made.position_of_file(name) for name in ("b_c-00000002", "c-00000001", "b_c-x", "")] == [None] * 4


def test_a_position_that_is_claimed_leaves_those_before_it_to_come() -> None:
    made = Examples(RATIOS, cursors={"a": 1})
    made.mark_opened(("a", 3))
    assert (made.cursors["a"], made.unfinished) == (4, [("a", 1), ("a", 2)])
    made.mark_opened(("a", 1))
    assert made.unfinished == [("a", 2)]
