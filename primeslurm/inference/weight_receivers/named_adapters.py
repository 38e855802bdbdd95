"""LoRA adapters that requests name by their path below a directory, which any host may write.

An adapter's name is its path relative to the directory in PRIMESLURM_ADAPTERS, for example `a1b2c3:train:0/v000012`. It
stands for one version for ever: an engine keeps the files that it read first, so writers must use new names for new
weights. vLLM drops adapters to load others, and reads them again, even in the middle of a request. It ends if the files
are missing. So the engine works with its own copy, which it keeps while requests use it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from primeslurm.base import files
from primeslurm.base.private_directory import WORD, PrivateDirectory, random_word, remove_abandoned
from primeslurm.inference.patches import expect
from primeslurm.wire.names import ADAPTERS

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Names that an engine remembers, with a copy of their files. Names that requests use do not count.
REMEMBERED = 64
# A name is remembered for at least this long after its last use [s].
IDLE_S = 60.0
# Longest wait until this node sees an adapter that another node has written [s].
SEEN_S = 2.0
# Start of the name of an engine's directory of copies
_COPIES = "primeslurm-adapters-"
_SEGMENT = re.compile(r"[\w:-][\w:.-]*", re.ASCII)


# Marks errors of workers about adapters that the engine can never use. Only the text of an error leaves their process.
_UNUSABLE = "the engine cannot use this adapter"


class AdapterError(Exception):
    """An adapter that can never be used."""


class MissingAdapterError(AdapterError):
    """There is no complete adapter of this name, or it is not yet visible on this node."""


class AdapterLoadError(AdapterError):
    """An adapter that was not loaded, but may be later."""


def copy_adapter(root: Path, name: str, target: Path, within_s: float = SEEN_S) -> None:
    """Copy the files of an adapter below `root` into a new directory.

    Raises AdapterError unless the name is a plain relative path and the files are below `root`, MissingAdapterError
    unless they are complete, and OSError.
    """
    if len(name) > 500 or not all(map(_SEGMENT.fullmatch, name.split("/"))):
        raise AdapterError(
            f"model = {name[:500]!r}: is no name of an adapter, which is a relative path of letters, digits, '_', '-', "
            "':' and '.', without '..'"
        )
    directory, problem = root / name, AdapterError()

    def look() -> dict[str, bytes] | None:
        nonlocal problem
        try:
            return _read(root, name, directory)
        except AdapterError as error:
            problem = error
            return None

    contents = files.until_seen(look, directory.parent, directory, within_s=within_s)
    if contents is None:
        raise problem
    target.mkdir()
    for file, content in contents.items():
        (target / file).write_bytes(content)


def _read(root: Path, name: str, directory: Path) -> dict[str, bytes]:
    contents = {}
    for file in (CONFIG, TENSORS):
        path = directory / file
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
            raise AdapterError(f"model = {name}: {file} is a symbolic link out of the directory of adapters")
        try:
            contents[file] = files.read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):
            text = f"model = {name}: there is no such adapter, because {file} is missing in {directory}"
            raise MissingAdapterError(text) from None
    try:
        json.loads(contents[CONFIG])
        size = int.from_bytes(contents[TENSORS][:8], "little")
        header = json.loads(contents[TENSORS][8 : 8 + size])
        end = max(tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise MissingAdapterError(f"model = {name}: {CONFIG} or {TENSORS} in {directory} is incomplete") from None
    if len(contents[TENSORS]) != 8 + size + end:
        raise MissingAdapterError(f"model = {name}: {TENSORS} in {directory} is incomplete")
    return contents


class NamedAdapters(dict[str, Any]):
    """Maps adapter names to vLLM's LoRARequest, for the adapters whose files this engine has copied.

    Args:
        root: Directory of all adapters.
        load: Loads a copy into the engine, given name, number and directory. Returns vLLM's request for it.
    """

    def __init__(
        self,
        root: Path,
        load: Callable[[str, int, str], Awaitable[Any]],
        remembered: int = REMEMBERED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._root, self._load, self._remembered, self._clock = root, load, remembered, clock
        temporary = Path(tempfile.gettempdir())
        remove_abandoned(temporary, f"{_COPIES}{'?' * WORD}")  # of engines that were killed
        self._copies = PrivateDirectory(temporary / f"{_COPIES}{random_word()}")
        self._copies.make()
        atexit.register(self._copies.remove)
        self._numbers = itertools.count(1)
        self._loading: dict[str, asyncio.Task[Any]] = {}
        self._users: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}
        """Time of the last use. The name that was not used for the longest time comes first."""

    def __getitem__(self, name: str) -> Any:
        self._touch(name)
        return super().__getitem__(name)

    async def resolve(self, name: str) -> Any:
        """Return vLLM's request for an adapter. Raises AdapterError if it cannot be used."""
        if name in self:
            return self[name]
        if name not in self._loading:
            self._loading[name] = task = asyncio.create_task(self._add(name))
            task.add_done_callback(lambda _: self._loading.pop(name))
        return await asyncio.shield(self._loading[name])  # other requests wait for it, too

    @contextlib.contextmanager
    def using(self, name: str) -> Any:
        """Keep the copied files of an adapter while a request in this context uses it."""
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if name in self:
                self._touch(name)

    async def _add(self, name: str) -> Any:
        number = next(self._numbers)  # vLLM caches what it has loaded by this number, so each copy needs its own
        copy = self._copies.path / str(number)
        try:
            await asyncio.to_thread(copy_adapter, self._root, name, copy)
            request = await self._load(name, number, str(copy))
        except BaseException as error:
            shutil.rmtree(copy, ignore_errors=True)
            if isinstance(error, OSError):
                raise AdapterLoadError(f"model = {name}: {type(error).__name__} {error}") from error
            raise
        self[name] = request
        self._touch(name)
        self._forget()
        return request

    def _touch(self, name: str) -> None:
        self._used_at.pop(name, None)
        self._used_at[name] = self._clock()

    def _forget(self) -> None:
        now = self._clock()
        unused = [name for name, at in self._used_at.items() if not self._users[name] and now - at > IDLE_S]
        for name in unused[: max(0, len(self) - self._remembered)]:
            del self._used_at[name], self._users[name]
            shutil.rmtree(self.pop(name).lora_path, ignore_errors=True)


def load_error(name: str, error: Exception) -> AdapterError:
    """Convert vLLM's `error` to the AdapterError that says why adapter `name` was not loaded."""
    kind = AdapterError if _UNUSABLE in str(error) else AdapterLoadError
    return kind(f"model = {name}: {error}")


@contextlib.contextmanager
def unusable() -> Iterator[None]:
    """Mark a ValueError from the body (wrong rank, features or layers): the engine can never use the adapter."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{_UNUSABLE}: {error}") from error


def use(root: Path) -> None:
    """Patch vLLM, so that requests can name any adapter below the directory `root`."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMValidationError
    from vllm.lora import model_manager
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    from primeslurm.inference.weight_receivers.adapter_receiver import check_layers

    init = expect(OpenAIServingModels, "__init__", ("engine_client",))
    expect(OpenAIServingModels, "resolve_lora", ("lora_name",))
    expect(AsyncLLM, "generate", ("lora_request",))
    read = expect(WorkerLoRAManager, "_load_adapter", ("lora_request",))
    is_supported = expect(model_manager, "is_supported_lora_module", ("module_name", "module"))
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # otherwise vLLM resolves no names

    @functools.wraps(init)
    def __init__(self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        init(self, engine_client, *args, **kwargs)
        if engine_client.vllm_config.lora_config is None:
            raise ValueError(f"{ADAPTERS} is set, but the engine has no adapters: add --enable-lora")

        async def load(name: str, number: int, path: str) -> LoRARequest:
            request = LoRARequest(name, number, path)
            try:
                await engine_client.add_lora(request)
            except EngineDeadError:
                raise
            except Exception as error:
                raise load_error(name, error) from error
            return request

        self.lora_requests = adapters = NamedAdapters(root, load)
        generate = engine_client.generate

        @functools.wraps(generate)
        async def counted(*args: Any, lora_request: LoRARequest | None = None, **kwargs: Any) -> AsyncIterator[Any]:
            with adapters.using(lora_request.lora_name) if lora_request else contextlib.nullcontext():
                async with contextlib.aclosing(generate(*args, lora_request=lora_request, **kwargs)) as outputs:
                    async for output in outputs:
                        yield output

        engine_client.generate = counted

    # vLLM's own method hides why an adapter cannot be loaded, and neither its names nor its locks are ever dropped.
    async def resolve_lora(self: Any, lora_name: str) -> LoRARequest:
        try:
            request: LoRARequest = await self.lora_requests.resolve(lora_name)
            return request
        except MissingAdapterError as error:
            raise VLLMNotFoundError(str(error)) from None
        except AdapterLoadError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from None
        except AdapterError as error:
            raise VLLMValidationError(str(error), parameter="model") from None

    @functools.wraps(read)
    def _load_adapter(self: Any, lora_request: LoRARequest) -> Any:
        with unusable():
            adapter = read(self, lora_request)
            check_layers(self._adapter_manager, adapter)
        return adapter

    # Trainers adapt neither the embedding nor the output layer. If vLLM prepared the latter, a request for
    # log-probabilities of a prompt would end the engine.
    @functools.wraps(is_supported)
    def is_supported_lora_module(module_name: str, module: Any, *args: Any) -> bool:
        return is_supported(module_name, module, *args) and not isinstance(module, VocabParallelEmbedding)

    model_manager.is_supported_lora_module = is_supported_lora_module
    OpenAIServingModels.__init__ = __init__
    OpenAIServingModels.resolve_lora = resolve_lora
    WorkerLoRAManager._load_adapter = _load_adapter
