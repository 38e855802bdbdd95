"""`looking`: a taskset with one question about one image."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import numpy as np
import verifiers.v1 as vf
from PIL import Image

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "LookingTaskset"]


def random_image() -> str:
    """Return a data URI of 96 x 64 random pixels."""
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class LookingConfig(vf.TasksetConfig):  # type: ignore[misc]
    pass


class LookingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Any answer gets a reward of 1."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def tried(self, trace: vf.Trace) -> float:
        return 1.0


class LookingTaskset(vf.Taskset[LookingTask, LookingConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[LookingTask]:
        content = [{"type": "image_url", "image_url": {"url": random_image()}}, {"type": "text", "text": "what"}]
        yield LookingTask(vf.TaskData(prompt=[{"role": "user", "content": content}]), self.config.task)
