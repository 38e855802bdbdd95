"""The `math-problems` environment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig, make_runtime

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.math_problems import INSTRUCTION, LONGEST_ANSWER, last_box


def problems(directory: Path, *records: object, **args: str) -> list[vf.Task]:
    path = directory / "math.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return list(environments.load("math-problems", {"path": str(path), **args}).taskset)


def test_problems_are_read_from_a_file(tmp_path: Path) -> None:
    solution = r"Half of it, so $\boxed{\frac{3}{4}}$."
    first, second = problems(tmp_path, {"q": "1/2?", "a": 0.5}, {"q": "?", "a": solution}, question="q", answer="a")
    assert (first.data.prompt, first.data.answer) == (f"1/2?\n\n{INSTRUCTION}", "0.5")
    assert second.data.answer == r"\frac{3}{4}"


def test_missing_file_and_missing_key_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*absent\.jsonl"):
        environments.load("math-problems", {"path": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ValueError, match=r"math\.jsonl, line 2: there is no answer, only question"):
        problems(tmp_path, {"question": "?", "answer": "1"}, {"question": "?"})


GSM8K = {"question": "Natalia sold 48 clips ...", "answer": "48/2 = <<48/2=24>>24 ... 48+24 = 72 ...\n#### 72"}
DAPO = {
    "prompt": [{"role": "user", "content": "Solve: x + 1 = 3."}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("record", "args", "prompt", "answer"),
    [
        (GSM8K, {"answer_marker": "####"}, GSM8K["question"], "72"),
        (DAPO, {"question": "prompt.0.content", "answer": "reward_model.ground_truth"}, "Solve: x + 1 = 3.", "2"),
    ],
    ids=["GSM8K", "DAPO"],
)
def test_public_data_sets_are_read_without_conversion(
    tmp_path: Path, suffix: str, record: dict[str, Any], args: dict[str, str], prompt: str, answer: str
) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record, record]), path)
    else:
        path.write_text(f"{json.dumps(record)}\n" * 2)
    tasks = list(environments.load("math-problems", {"path": str(path), "instruction": "", **args}).taskset)
    assert [(task.data.prompt, task.data.answer) for task in tasks] == [(prompt, answer)] * 2


@pytest.mark.parametrize(
    ("record", "args", "why"),
    [
        ({"question": "?", "answer": "72"}, {"answer_marker": "####"}, "line 1: the answer has no marker '####'"),
        (DAPO, {"question": "prompt.1.content", "answer": "prompt"}, "line 1: there is no prompt.1.content"),
        ({"question": "?", "answer": " "}, {}, "line 1: answer is empty"),
        (DAPO, {"question": "prompt", "answer": "prompt"}, "line 1: prompt = .* is neither text nor a number"),
        ({"question": "?", "answer": None}, {}, "line 1: answer = None is neither text nor a number"),
    ],
)
def test_record_without_question_or_answer_is_named(
    tmp_path: Path, record: dict[str, Any], args: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        problems(tmp_path, record, **args)


def test_invalid_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"data\.parquet is not a readable parquet file"):
        list(environments.load("math-problems", {"path": str(path)}).taskset)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{1}, no, \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        (r"\boxed{}", ""),
        ("1", None),
    ],
)
def test_last_box_is_the_answer(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


async def test_answers_are_compared_as_mathematics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "cache")
    (task,) = problems(tmp_path, {"question": "1/3 + 1/6?", "answer": "1/2"})
    runtime = make_runtime(SubprocessConfig(), name="grader")
    await runtime.start()
    try:
        replies = {
            r"\boxed{1/2}": 1.0,
            r"\boxed{\frac{3}{6}}": 1.0,
            r"\boxed{1/3}": 0.0,
            r"\boxed{" + "9" * (LONGEST_ANSWER + 1) + "}": 0.0,
            "1/2": 0.0,
            "": 0.0,
        }
        rewards = {reply: await task.correct(SimpleNamespace(last_reply=reply), runtime) for reply in replies}
    finally:
        await runtime.stop()
    assert rewards == replies
