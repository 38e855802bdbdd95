"""The order of examples, and examples that are sampled again."""

from __future__ import annotations

from primeslurm.orchestrator.dispatch import Examples

RATIOS = {"a": 1.0, "b/c": 3.0}


def test_unfinished_examples_come_first_then_the_environment_behind_its_share() -> None:
    made = Examples(RATIOS, cursors={"a": 2}, unfinished=[("a", 1), ("gone", 0)], taken={"a-00000002"})
    assert [made.take_next(["a", "b/c"]) for _ in range(5)] == [
        ("a", 1),
        *(("b/c", example) for example in range(3)),
        ("b/c", 3),
    ]
    assert [made.take_next(labels) for labels in (["a"], [])] == [("a", 3), None], "example 2 is taken"


def test_given_up_example_is_sampled_again_with_its_task() -> None:
    made = Examples(RATIOS, cursors={"a": 3}, taken={"a-00000001"})
    assert not made.is_unopened(("a", 1)) and made.is_unopened(("a", 3))
    assert made.sample_again(("a", 1), 7) and not made.sample_again(("a", 1), 7)
    assert made.is_unopened(("a", 1)) and made.was_returned(("a", 1))
    assert made.take_next(["a"]) == ("a", 1) and made.take_task(("a", 1), set()) == 7
    assert made.take_task(("a", 1), set()) is None, "there is no curriculum"
    assert made.returned([]) == [] and made.returned([("a", 1)]) == [("a", 1)]
    made.put_in_batch({"a-00000001"})
    assert made.returned([]) == [("a", 1)]
    made.forget_batch({"a-00000001"})
    assert made.returned([]) == []


def test_position_is_found_from_a_file_name() -> None:
    made = Examples(RATIOS, cursors={"b/c": 2})
    assert made.position_of_file("b_c-00000001") == ("b/c", 1) == made.position_of_file("b/c-00000001")
    assert [made.position_of_file(name) for name in ("b_c-00000002", "c-00000001", "b_c-x", "")] == [None] * 4


def test_positions_before_an_adopted_one_stay_unfinished() -> None:
    made = Examples(RATIOS, cursors={"a": 1})
    made.mark_opened(("a", 3))
    assert (made.cursors["a"], made.unfinished) == (4, [("a", 1), ("a", 2)])
    made.mark_opened(("a", 1))
    assert made.unfinished == [("a", 2)]
