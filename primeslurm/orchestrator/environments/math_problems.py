"""`math-problems`: problems of a file of your own, answered in a LaTeX box and checked by math-verify.

    {"question": "What is 1/3 + 1/6?", "answer": "1/2"}

A line of the file is one problem. Data sets of Hugging Face write such files: `dataset.to_json("math.jsonl")`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from pydantic import field_validator
from verifiers.v1.runtimes import Runtime

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "MathTaskset"]

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
BOX = "\\boxed{"
LONGEST_ANSWER = 1000
"""Characters. What is longer is no answer to a problem with a short one, and not worth a computer algebra system."""
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
    """Of the problems: a JSON object a line."""
    question: str = "question"
    """Key of the problem's text."""
    answer: str = "answer"
    """Key of its answer: LaTeX or plain, or a solution with its answer in a box at the end."""
    instruction: str = INSTRUCTION
    """Added to each problem."""

    @field_validator("path")
    @classmethod
    def _is_there(cls, path: Path) -> Path:
        if not path.is_file():
            raise ValueError(f"no file {path}")
        return path


class MathTask(vf.Task[MathData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Rewarded for the answer alone."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def correct(self, trace: vf.Trace, runtime: Runtime) -> float:
        """Return 1 if the last box of the last reply equals the answer, else 0.

        Where the two are not the same text, math-verify decides, in the rollout's sandbox: what a policy writes can
        keep a computer algebra system busy for ever.
        """
        given = boxed(trace.last_reply or "")
        if given is None or len(given) > LONGEST_ANSWER:
            return 0.0
        if given == self.data.answer:
            return 1.0
        found = await runtime.run([sys.executable, "-I", "-c", GRADER, self.data.answer, given], {})
        return float(found.stdout.strip() == "1")

    @vf.metric  # type: ignore[untyped-decorator]
    async def answered(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply has an answer in a box, else 0."""
        return float(boxed(trace.last_reply or "") is not None)


class MathTaskset(vf.Taskset[MathTask, MathConfig]):  # type: ignore[misc]
    """The problems of a file."""

    def load(self) -> Iterator[MathTask]:
        """Yield the problems, in order.

        Raises:
            ValueError: a line is no JSON object with question and answer.
        """
        with self.config.path.open() as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    question, answer = str(record[self.config.question]), str(record[self.config.answer])
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{self.config.path}, line {number}: {error!r}") from error
                solution = boxed(answer)
                data = MathData(
                    prompt=f"{question}\n\n{self.config.instruction}",
                    answer=(answer if solution is None else solution).strip(),
                )
                yield MathTask(data, self.config.task)


def boxed(text: str) -> str | None:
    """What stands in the last box of a text, with its braces in balance; None if there is none."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(BOX) : end].strip()
    return None
