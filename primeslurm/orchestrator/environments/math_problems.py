"""`math-problems`: problems from a JSONL or parquet file. math-verify checks the answer in the last LaTeX box.

    {"question": "What is 1/3 + 1/6?", "answer": "1/2"}

Each line or row is one problem. `question` and `answer` are the keys of the two texts. A key may be a path into nested
values, such as `prompt.0.content`. With `answer_marker`, the answer is the text after the last marker.

| data set of the Hugging Face hub | args besides `path` |
|---|---|
| `openai/gsm8k` | `{answer_marker: "####"}` |
| `open-r1/DAPO-Math-17k-Processed` | `{question: prompt, answer: solution}` |
| `BytedTsinghua-SIA/DAPO-Math-17k` | `{question: prompt.0.content, answer: reward_model.ground_truth}` |
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, field_validator
from verifiers.v1.runtimes import Runtime

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "MathTaskset"]

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
BOX = "\\boxed{"
# Characters. Longer answers are wrong, and would take long to check.
LONGEST_ANSWER = 1000
GRADER = (
    "import sys; from math_verify import parse, verify; "
    "gold, given = (parse('\\\\boxed{' + text + '}') for text in sys.argv[1:]); "
    "print(int(verify(gold, given)))"
)


class MathData(vf.TaskData):  # type: ignore[misc]
    """One problem."""

    answer: str


class MathConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The arguments of the environment."""

    path: Path
    """File with the problems: parquet if its name ends in `.parquet`, otherwise one JSON object per line."""
    question: str = "question"
    """Key of the problem's text, for example `question` or `prompt.0.content`."""
    answer: str = "answer"
    """Key of the answer: LaTeX or plain text, or a solution with its answer in a box at the end."""
    answer_marker: str | None = Field(None, min_length=1)
    """The answer is the text after the last occurrence of this marker, for example `####`. Default: the whole text."""
    instruction: str = INSTRUCTION
    """Text that is added to each problem. Empty: nothing."""

    @field_validator("path")
    @classmethod
    def _is_there(cls, path: Path) -> Path:
        if not path.is_file():
            raise ValueError(f"no file {path}")
        return path


class MathTask(vf.Task[MathData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Rewarded for the right answer only."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def correct(self, trace: vf.Trace, runtime: Runtime) -> float:
        """Return 1 if the last box of the last reply equals the answer, else 0."""
        reply = last_box(trace.last_reply or "")
        if reply is None or len(reply) > LONGEST_ANSWER:
            return 0.0
        if reply == self.data.answer:
            return 1.0
        # In the rollout's sandbox, because a reply can keep the computer algebra system busy for ever.
        result = await runtime.run([sys.executable, "-I", "-c", GRADER, self.data.answer, reply], {})
        return float(result.stdout.strip() == "1")

    @vf.metric  # type: ignore[untyped-decorator]
    async def answered(self, trace: vf.Trace) -> float:
        return float(last_box(trace.last_reply or "") is not None)


class MathTaskset(vf.Taskset[MathTask, MathConfig]):  # type: ignore[misc]
    """The problems of a file."""

    def load(self) -> Iterator[MathTask]:
        """Yield the problems in order. Raises ValueError if one is not an object with a question and an answer."""
        config = self.config
        for number, record in _rows(config.path) if config.path.suffix == ".parquet" else _lines(config.path):
            where = f"{config.path}, {'row' if config.path.suffix == '.parquet' else 'line'} {number}"
            question, answer = (_value(record, key, where) for key in (config.question, config.answer))
            if config.answer_marker is not None:
                _, marker, answer = answer.rpartition(config.answer_marker)
                if not marker:
                    raise ValueError(f"{where}: the answer has no marker {config.answer_marker!r}")
            solution = last_box(answer)
            prompt = f"{question}\n\n{config.instruction}" if config.instruction else question
            answer = (answer if solution is None else solution).strip()
            yield MathTask(MathData(prompt=prompt, answer=answer), config.task)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not JSON, one object per line ({error})") from error
                yield number, record


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _value(record: Any, key: str, where: str) -> str:
    """Return the text at a path of keys and list indices."""
    value = record
    for part in key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            others = f", only {', '.join(map(str, value))}" if isinstance(value, dict) else ""
            raise ValueError(f"{where}: there is no {key}{others}") from error
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"{where}: {key} = {value!r} is neither text nor a number")
    if not str(value).strip():
        raise ValueError(f"{where}: {key} is empty")
    return str(value)


def last_box(text: str) -> str | None:
    """Return the content of the last LaTeX box, up to its matching brace; None if there is none."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(BOX) : end].strip()
    return None
