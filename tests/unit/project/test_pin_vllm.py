"""The script that moves the pin of vLLM finds every pin."""

from __future__ import annotations

from primeslurm.recipe.rules import engine_options
from scripts.pin_vllm import FILES, ROOT, repinned


def test_every_pin_of_vllm_moves_and_no_other() -> None:
    texts = {path.relative_to(ROOT).as_posix(): text for path, text in repinned("9.8.7").items()}
    changed = [
        new
        for name in FILES
        for old, new in zip((ROOT / name).read_text().splitlines(), texts[name].splitlines(), strict=True)
        if old != new
    ]
    assert len(changed) == 6 and all("vllm" in line and "9.8.7" in line for line in changed)
    assert not any(f"vllm=={engine_options.version()}" in text for text in texts.values())
    assert all("vllm-router==9.8.7" not in text for text in texts.values())


def test_pin_is_the_version_of_the_stored_options() -> None:
    assert all(path.read_text() == text for path, text in repinned(engine_options.version()).items())
