"""`check` renders SFT data as the trainer does, so errors of chat templates appear before nodes are allocated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.checks.environments import data_rendering_problems
from primeslurm.plan.checks import sft_files
from primeslurm.plan.checks.environments import Interpreter
from primeslurm.recipe import Recipe, Site
from primeslurm.trainer.data import probe
from primeslurm.wire.probe_messages import DataAnswer, DataRequest
from tests.support.chat_templates import BUNDLED
from tests.support.recipes import recipe_data
from tests.support.turn_templates import CHATML, GEMMA, UNENDING, write_model

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}
GOOD: dict[str, Any] = {"messages": [ASKED, ANSWERED]}
GLM = (BUNDLED / "GLM-4.6.jinja").read_text()
GLM_STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
QWEN = (BUNDLED / "Qwen3.5-0.8B.jinja").read_text()
QWEN_3 = (BUNDLED / "Qwen3-0.6B.jinja").read_text()


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def request(directory: Path, *, every: bool = False, sees: bool = False, seq_len: int = 4096) -> DataRequest:
    return DataRequest(str(directory / "data.jsonl"), str(directory / "model"), every, sees, seq_len)


def looked(directory: Path, model: tuple[Any, ...], *lines: Any, **options: Any) -> DataAnswer:
    write_model(directory / "model", *model)
    write(directory / "data.jsonl", *lines)
    return probe.check(request(directory, **options))


def told(answer: DataAnswer) -> list[str]:
    return [f"{each.why} ({each.fix})" for each in answer.violations]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ((CHATML, "<|im_end|>", "<|im_end|>"), "an answer of the assistant ends with <|im_end|>; this token is"),
        ((GLM, "<|endoftext|>", GLM_STOPS), "ends with <|user|>, one that calls tools with <|observation|>; this"),
    ],
)
def test_the_token_that_ends_a_turn_is_said(model: tuple[Any, ...], text: str, tmp_path: Path) -> None:
    answer = looked(tmp_path, model, GOOD)
    assert (answer.violations, answer.warnings) == ([], [])
    (note,) = answer.notes
    assert text in note.why


def test_lines_longer_than_seq_len_are_counted(tmp_path: Path) -> None:
    model, long = (CHATML, "<|im_end|>", "<|im_end|>"), {"messages": [ASKED | {"content": "2 " * 900}, ANSWERED]}
    (warning,) = looked(tmp_path, model, GOOD, long, long, seq_len=800).warnings
    assert warning.field == "sft.data.path" and warning.why.startswith("2 of 3 lines have more than 800 tokens")
    answer = looked(tmp_path, model, long, long, seq_len=800)
    assert answer.violations[0].why.startswith("all lines have more than 800 tokens") and not answer.warnings
    (warning,) = looked(tmp_path, model, *[long] * (2 * probe.SAMPLE_LINES), seq_len=800).warnings
    assert "sampled lines have more than 800 tokens" in warning.why
    assert not looked(tmp_path, model, GOOD, long).warnings


def test_an_end_at_which_engines_do_not_stop_is_a_warning(tmp_path: Path) -> None:
    (warning,) = looked(tmp_path, (GEMMA, "<eos>"), GOOD).warnings
    assert warning.field == "model.path" and "turns end with <end_of_turn>, and engines that serve" in warning.why
    assert "eos_token_id in generation_config.json" in warning.fix


def test_a_template_without_an_end_is_refused_for_conversations_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    answer = looked(tmp_path / "a", (UNENDING, "<|end|>"), GOOD, GOOD, {"messages": [ASKED]})
    assert [each.field for each in answer.violations] == ["model.path", "sft.data.path"]
    assert "writes '\\n\\n' after an answer" in answer.violations[0].why
    assert "line 3: no message has role assistant" in answer.violations[1].why
    (tmp_path / "b").mkdir()
    assert not looked(tmp_path / "b", (UNENDING, "<|end|>"), {"prompt": "a", "completion": "b"}).violations


def test_all_kinds_are_named_at_once_with_their_first_lines(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    late = {"messages": [ASKED, system, ANSWERED]}
    broken = {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}
    image = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, ANSWERED]}
    half = {"messages": [{"role": "user", "content": "\ud83d"}, ANSWERED]}
    answer = looked(tmp_path, (QWEN, "<|im_end|>", "<|im_end|>"), GOOD, "", late, broken, late, image, "{", half)
    found = told(answer)
    assert [each.partition(":")[0] for each in found] == ["line 3", "line 4", "line 6", "line 7", "line 8"]
    assert "System message must be at the beginning" in found[0]
    assert "message 2: the arguments of a call are not JSON" in found[1]
    assert "it has images, but `model.vlm` is not set" in found[2]


def test_openai_forms_are_trained(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    talk = {"messages": [ASKED, called, result, {**ANSWERED, "tool_calls": None}], "tools": json.dumps([{"name": "f"}])}
    for i, template in enumerate([GLM, QWEN]):
        (tmp_path / str(i)).mkdir()
        assert told(looked(tmp_path / str(i), (template, "<|im_end|>"), talk, every=True)) == []


def test_train_all_is_refused_where_the_template_drops_thoughts(tmp_path: Path) -> None:
    talk = {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}
    (found,) = told(looked(tmp_path, (QWEN_3, "<|im_end|>"), GOOD, talk, talk, every=True))
    assert found.startswith("line 2: message 2: the chat template renders this answer differently once messages")
    assert found.endswith("(use `train: last`)")


def test_thoughts_that_are_not_shown_are_a_warning(tmp_path: Path) -> None:
    thinking = {"messages": [ASKED, {**ANSWERED, "reasoning": "Hm."}]}
    (warning,) = looked(tmp_path, (CHATML, "<|im_end|>", "<|im_end|>"), GOOD, thinking).warnings
    assert warning.why.startswith("line 2: the chat template does not show the thoughts")


def test_an_image_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"")
    template = GLM.replace("{{ visible_text(m.content) }}", "{{ m.content if m.content is string else 'IMAGE' }}")
    lines = [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": name}}]}, ANSWERED]}
        for name in ("there.png", "data:image/png;base64,AAAA", "gone.png")
    ]
    (found,) = told(looked(tmp_path, (template, "<|endoftext|>", GLM_STOPS), *lines, sees=True))
    assert found.startswith("line 3: an image is not there: gone.png")


def test_lines_all_over_a_long_file_are_rendered_and_all_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"messages": [ASKED, {"role": "system", "content": "x"}, ANSWERED]}
    lines = [*[GOOD] * 500, *[late] * 100, *[GOOD] * 399, "{"]
    found = told(looked(tmp_path, (QWEN, "<|im_end|>"), *lines))
    first, last = (int(each.partition(":")[0].removeprefix("line ")) for each in found)
    assert 501 <= first <= 600 and last == 1000
    monkeypatch.setattr(probe, "PARSED_BYTES", 1000)
    (found_first,) = told(probe.check(request(tmp_path)))
    assert "System message must be" in found_first, "after the beginning, a sample of lines is rendered"


def test_a_tokenizer_that_does_not_load_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", GOOD)
    (tmp_path / "model").mkdir()
    (violation,) = probe.check(request(tmp_path)).violations
    assert violation.field == "model.path" and "its tokenizer cannot be loaded" in violation.why


def recipe(directory: Path) -> Recipe:
    sft = {"data": {"path": str(directory / "data.jsonl")}}
    data = recipe_data(task="sft", environments=[], sft=sft, model={"path": str(directory / "model")})
    return Recipe.model_validate(data)


def test_the_python_of_jobs_renders_the_data(tmp_path: Path) -> None:
    late = {"messages": [ASKED, {"role": "system", "content": "x"}, ANSWERED]}
    looked(tmp_path, (QWEN, "<|im_end|>", "<|im_end|>"), GOOD, late)
    found = sft_files.render_data(recipe(tmp_path), Interpreter(sys.executable, {}))
    (violation,) = found.violations
    assert violation.why.startswith("line 2: the chat template fails") and found.notes and not found.missing_package


def test_missing_package_of_the_job_python_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", GOOD)
    poor = tmp_path / "python"
    poor.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "import transformers"\n')
    poor.chmod(0o755)
    assert sft_files.render_data(recipe(tmp_path), Interpreter(str(poor), {})).missing_package == "transformers"
    nodes = {"default": {"partition": "p", "gpus": 1, "cpus": 8}}
    site = Site.model_validate({"schema": 1, "name": "here", "nodes": nodes, "python": str(poor), "modules": ["conda"]})
    problems, (warning, note) = data_rendering_problems(recipe(tmp_path), site, local=False)
    assert not problems and "has no transformers without the site's modules" in note.text
    assert warning.level == "warning" and warning.field == "model.path"  # rendered with the Python of this test
    (problem,), _ = data_rendering_problems(recipe(tmp_path), site, local=True)
    assert problem.field == "python" and "has no transformers" in problem.why
