"""File operations for shared file systems. Each one is retried while the file system is briefly unavailable.

Clients of NFS, Lustre, GPFS and CephFS return ESTALE, EIO, ESHUTDOWN and similar errors when a server fails over, when
another node replaces a file, or when a client is evicted and reconnects. `retrying` repeats an operation for a bounded
time and logs that it did. ENOENT is an answer, not a fault. `durable` adds operations that survive a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
# Longest path of a Unix socket [bytes].
LONGEST_SOCKET = 107
# Content of a file: whole, as chunks, or as a function that returns the chunks and is called once per try.
Content = bytes | str | Sequence[bytes | memoryview] | Callable[[], Iterable[bytes | memoryview]]
# Longest time for which an operation is retried. A failover of an NFS or Lustre server can take longer, but on a hard
# mount its clients then block without an error.
RETRY_S = 60.0
# The same in a thread that runs an event loop, because a retry blocks the loop.
LOOP_RETRY_S = 0.5
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
# A file in the run directory that keeps space for records (`durable.fill_reserve`).
RESERVE = ".reserve"
FULL = (errno.ENOSPC, errno.EDQUOT)
# How long an NFS client may return cached attributes (acregmax, acdirmax) of a file that it does not reopen.
CACHE_S = 60.0
# Faults within this time of the previous one are not reported again.
QUIET_S = 60.0
# Errors that network file systems return temporarily, and that say nothing about the file.
TRANSIENT = frozenset(
    (
        *(errno.ESTALE, errno.EIO, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENXIO),
        *(errno.ENODEV, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOLCK),
        *(errno.ECOMM, errno.EPROTO),
    )
)
# How libraries written in Rust (safetensors) report an errno in the text of their exceptions.
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")

clock: Callable[[], float] = time.monotonic
sleep: Callable[[float], None] = time.sleep


class Outage(NamedTuple):
    """A file system fault that has ended: the operation succeeded, or the retries ran out."""

    path: Path
    error: str
    tries: int
    seconds: float
    recovered: bool


# Called at the end of an outage. Processes with a journal write an event.
on_fault: Callable[[Outage], None] | None = None
# Called before each pause. Processes send a heartbeat, because waiting for the file system is not a hang.
on_pause: Callable[[], None] | None = None
_thread = threading.local()
_outage = threading.Lock()
# Last time of each kind of report, and of the last operation that was given up [s of `clock`].
_outages: dict[str, float] = {}


def is_transient(error: BaseException) -> bool:
    """Return whether the same operation may succeed a moment later."""
    return _errno(error) in TRANSIENT


def _errno(error: BaseException) -> int | None:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _RUST_ERRNO.search(str(error))):
        number = int(match[1])
    return number


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit how long this thread retries each operation. For loops that try again later anyway."""
    before = getattr(_thread, "retry_s", None)
    _thread.retry_s = seconds
    try:
        yield
    finally:
        _thread.retry_s = before


def retrying(path: Path, action: Callable[[], T]) -> T:
    """Run `action`, which reads or changes `path`, and retry it from its beginning while it raises transient errors.

    Raises a lasting error of `action` at once, and an OSError with path and errno if a transient one outlives the
    limit.
    """
    if getattr(_thread, "retries", False):  # nested: only the outermost call retries, from its beginning
        return action()
    tries, began, limit_s, pause_s = 0, 0.0, 0.0, FIRST_PAUSE_S
    while True:
        try:
            _thread.retries = True
            try:
                result = action()
            finally:
                _thread.retries = False
        except Exception as error:
            if not is_transient(error):
                raise
            tries += 1
            if tries == 1:
                began, limit_s = clock(), _retry_s()
            if clock() + pause_s > began + limit_s:
                seconds = clock() - began
                _outages["given up"] = clock()
                _report(Outage(path, str(error), tries, seconds, recovered=False))
                text = f"{_text(error)} ({tries} failures in {seconds:.1f} s)"
                raise OSError(_errno(error), text, str(path)) from error
            if tries == 1 and _is_news("begun"):
                log.warning("%s: %s; retrying for up to %.3g s", path, _text(error), limit_s)
            last = error
        else:
            if tries:
                _report(Outage(path, str(last), tries, clock() - began, recovered=True))
            return result
        pause(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def writing(path: Path, action: Callable[[], T]) -> T:
    """Run `action`, which writes a record at `path`, like `retrying`. On a full disk it may use the run's reserve."""
    try:
        return retrying(path, action)
    except OSError as error:
        if error.errno not in FULL or getattr(_thread, "bulk", False) or not release_reserve(path):
            raise
    return retrying(path, action)


@contextlib.contextmanager
def keeping_reserve() -> Iterator[None]:
    """Writes of this thread within the block do not use the reserve."""
    before = getattr(_thread, "bulk", False)
    _thread.bulk = True
    try:
        yield
    finally:
        _thread.bulk = before


def release_reserve(path: Path) -> bool:
    """Empty the reserve of the run that `path` belongs to. Return whether that has freed space."""
    for directory in (path, *path.parents):
        reserve = directory / RESERVE
        with contextlib.suppress(OSError):  # there is no such file, or `directory` is one
            if reserve.stat().st_size == 0:
                return False
            os.truncate(reserve, 0)
            return True
    return False


def _retry_s() -> float:
    limit: float | None = getattr(_thread, "retry_s", None)
    if limit is not None:
        return limit
    if not _runs_event_loop():
        return RETRY_S
    # During a long outage an event loop tries each operation once: hundreds of half seconds would also block it.
    return 0.0 if clock() - _outages.get("given up", -QUIET_S) < 10 * LOOP_RETRY_S else LOOP_RETRY_S


def _runs_event_loop() -> bool:
    import asyncio  # imported only after a fault: agents do not need it otherwise

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def pause(seconds: float) -> None:
    """Wait before another try. The process sends a heartbeat, so that a wait does not count as unresponsive."""
    if on_pause is not None:
        on_pause()
    sleep(seconds)


def _is_news(kind: str) -> bool:
    now = clock()
    with _outage:
        before, _outages[kind] = _outages.get(kind), now
    return before is None or not 0 <= now - before < QUIET_S


def _report(fault: Outage) -> None:
    how = "recovered" if fault.recovered else "gave up"
    if _is_news(f"{how} (log)"):
        log.warning("%s: %s after %d failures in %.1f s: %s", fault.path, how, fault.tries, fault.seconds, fault.error)
    if on_fault is None or getattr(_thread, "reports", False) or not _is_news(how):
        return
    _thread.reports = True  # the handler writes a file, and a fault of that file must not be reported from within
    try:
        on_fault(fault)
    finally:
        _thread.reports = False


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_bytes(path: Path) -> bytes:
    return retrying(path, path.read_bytes)


def read_text(path: Path) -> str:
    return read_bytes(path).decode()


def reading(path: Path, read: Callable[[BinaryIO], T]) -> T:
    """Open a file unbuffered and return `read(file)`. Each try reopens the file."""

    def once() -> T:
        with path.open("rb", buffering=0) as file:
            return read(file)

    return retrying(path, once)


def status(path: Path) -> os.stat_result | None:
    """Return the `stat` result of a path, or None if nothing exists there."""
    try:
        return retrying(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: Path) -> bool:
    """Return whether a path exists. Unlike `Path.exists` it raises OSError if the file system does not answer."""
    return status(path) is not None


def is_file(path: Path) -> bool:
    result = status(path)
    return result is not None and stat.S_ISREG(result.st_mode)


def is_dir(path: Path) -> bool:
    result = status(path)
    return result is not None and stat.S_ISDIR(result.st_mode)


def listing(directory: Path, pattern: str = "*") -> list[Path]:
    """Return the sorted entries of a directory that match `pattern`; an empty list if the directory does not exist."""
    # `Path.glob` ignores OSError, so a directory that cannot be read would seem to be empty.
    try:
        paths = retrying(directory, lambda: list(directory.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(path for path in paths if path.match(pattern))


def settled_listing(directory: Path, pattern: str = "*") -> list[Path]:
    """Return a complete `listing`: list the directory repeatedly, until a listing adds no name to the earlier ones."""
    # An NFS client may return a stale listing. Files that callers look for are never removed meanwhile, so a name that
    # one listing has shown counts.
    before, paths = None, set(listing(directory, pattern))
    for pause_s in _pauses(CACHE_S):
        if before == paths:
            break
        if before is not None:
            sleep(pause_s)
        before, paths = paths, paths | set(listing(directory, pattern))
    return sorted(paths)


def revalidate(path: Path) -> None:
    """Make this node ask the server about a file or directory again, and drop cached content."""
    with contextlib.suppress(OSError):  # the caller's next operation raises the error
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def until_seen(look: Callable[[], T | None], *paths: Path, within_s: float = CACHE_S) -> T | None:
    """Wait until this node sees a file that another node has written, and return the first result that is not None.

    `look` returns None until the file is as expected. Before each further call, `paths` are revalidated. Returns None
    after `within_s`.
    """
    if (result := look()) is not None:
        return result
    log.info("%s: not visible yet; looking again for up to %.0f s", paths[0], within_s)
    for pause_s in _pauses(within_s):
        pause(pause_s)
        for path in paths:
            revalidate(path)
        if (result := look()) is not None:
            break
    return result


def _pauses(within_s: float) -> Iterator[float]:
    began, pause_s = clock(), FIRST_PAUSE_S
    while (left := began + within_s - clock()) > 0:
        yield min(pause_s, left)
        pause_s = min(2 * pause_s, 5.0)


def files_below(directory: Path, pattern: str = "*") -> list[Path]:
    matching = []
    for path in listing(directory):
        if is_own_directory(path):
            matching += files_below(path, pattern)
        elif path.match(pattern) and is_file(path):
            matching.append(path)
    return matching


def is_own_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(retrying(path, path.lstat).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def rename(source: Path, target: Path) -> None:
    failed = False

    def once() -> None:
        nonlocal failed
        try:
            source.rename(target)
        except FileNotFoundError:
            # After a failure the server may have renamed the file although its answer was lost.
            if not failed or not target.exists():
                raise
        except OSError:
            failed = True
            raise

    writing(source, once)


def unlink(path: Path) -> None:
    retrying(path, lambda: path.unlink(missing_ok=True))


def make_directory(path: Path, mode: int = 0o777) -> None:
    writing(path, lambda: path.mkdir(mode, parents=True, exist_ok=True))


def remove_tree(directory: Path, *, ignore_errors: bool = False) -> None:
    def once() -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)
        except OSError as error:
            # NFS keeps a removed file under another name while a process has it open. A process of an earlier attempt
            # may hold one until it has ended, so this error is transient.
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                raise OSError(errno.EAGAIN, error.strerror, error.filename) from error
            raise

    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        retrying(directory, once)


def swappable(directory: Path) -> bool:
    """Return whether other users may rename or remove entries of a directory. Raises OSError."""
    mode = directory.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def require_replaceable(path: Path) -> None:
    """Raise OSError if a path that a user chose is a device, pipe or socket, which `write_atomic` would replace."""
    about = status(path)
    if about is not None and not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))


def write_atomic(path: Path, data: Content) -> None:
    """Replace a file: write a temporary file, flush it, and rename it. After an OSError the old content stays."""
    writing(path, lambda: _write_atomic(path, data))


def _write_atomic(path: Path, data: Content) -> None:
    # The name is unique per try: other threads and nodes may write the same target, and after a failed flush the kernel
    # drops the lost pages, so that a second flush of the same file would succeed without them.
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        with temporary.open("wb") as handle:
            for chunk in _chunks(data):
                handle.write(chunk)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:  # including errors of the function that makes the chunks
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _chunks(data: Content) -> Iterable[bytes | memoryview]:
    if isinstance(data, str | bytes):
        return [data.encode() if isinstance(data, str) else data]
    return data() if callable(data) else data


class Appender:
    """Appends lines to a file that only this process writes. A failed append leaves no partial line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._failed_at: int | None = None  # file size before the append that failed [bytes]

    def append(self, lines: bytes) -> None:
        """Append complete lines. After an OSError none of these lines is in the file, now or later."""
        try:
            writing(self.path, lambda: self._append(lines))
        except OSError:
            if self._failed_at is not None:
                with contextlib.suppress(OSError):  # if this fails, the next append truncates the file
                    os.truncate(self.path, self._failed_at)
            raise

    def _append(self, lines: bytes) -> None:
        with self.path.open("a+b", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            if self._failed_at is not None and end > self._failed_at:
                file.truncate(self._failed_at)
                end = self._failed_at
            self._failed_at = end
            # An earlier writer may have been killed in the middle of its last line.
            left = memoryview(b"\n" + lines if not self._begun and _ends_in_partial_line(file, end) else lines)
            while left:
                left = left[file.write(left) :]
        self._begun, self._failed_at = True, None


def _ends_in_partial_line(file: Any, size: int) -> bool:
    if not size:
        return False
    file.seek(size - 1)
    return bool(file.read(1) != b"\n")


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any | None:
    """Return the JSON value in a file; None if the file is missing, not yet visible on this node, or not JSON."""
    try:
        return json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def digest(path: Path) -> str:
    """Return the blake2b-128 digest of a file, in hexadecimal."""

    def read(handle: BinaryIO) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        while chunk := handle.read(1 << 22):
            hasher.update(chunk)
        return hasher.hexdigest()

    return reading(path, read)


class FileWatcher:
    """Watches a JSON file that other processes replace. It decodes the file only after a change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.fault = ""  # error of the last read; empty if the file was read or does not exist

    def changed(self, *, wait: bool = False) -> Any | None:
        """Return the content if it changed since the last call; None otherwise, or if the file is missing or invalid.

        With `wait` a failed read is retried. A caller that polls soon again need not wait.
        """
        self.fault = ""
        try:
            return retrying(self._path, self._look) if wait else self._look()
        except (OSError, ValueError, RecursionError) as error:
            if is_transient(error):
                self.fault = f"{self._path}: {_text(error)}"
            return None

    def _look(self) -> Any | None:
        # An NFS client asks its server on open, while it may answer `stat` from its cache.
        with self._path.open("rb") as handle:
            status = os.fstat(handle.fileno())
            key = (status.st_ino, status.st_mtime_ns, status.st_size)
            if key == self._seen:
                return None
            value = json.loads(handle.read())
        self._seen = key
        return value
