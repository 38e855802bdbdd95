"""Access to files on a shared file system: every operation here is repeated while the file system is away for a moment.

Clients of NFS, Lustre, GPFS and CephFS answer ESTALE, EIO, ESHUTDOWN and the like when a server fails over, a file is
replaced by another node, or a client is evicted and reconnects. `retrying` repeats an operation for a bounded time and
says so. ENOENT is an answer, not a fault. `durable` adds what has to be on disk; `visible` adds what another node has
just written, and this node may not see yet.
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
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
Content = bytes | str | Sequence[bytes | memoryview] | Callable[[], Iterable[bytes | memoryview]]
"""Content of a file: whole, in chunks that are written one after another, or a function that makes the chunks. The
function is called again for each try."""
RETRY_S = 60.0
"""How long an operation is repeated. A failover of an NFS or Lustre server takes longer on a hard mount, but then its
clients block, and no error comes."""
LOOP_RETRY_S = 0.5
"""The same in a thread that runs an event loop, which must not stand still."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
RESERVE = ".reserve"
"""A file in the run directory that keeps space for records (`durable.fill_reserve`)."""
FULL = (errno.ENOSPC, errno.EDQUOT)
CACHE_S = 60.0
"""How long a client of NFS may show what it has seen before (acregmax, acdirmax), unless it opens the file anew."""
QUIET_S = 60.0
"""Faults that follow one another within this time are reported once."""
TRANSIENT = frozenset(
    {
        errno.ESTALE,
        errno.EIO,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENXIO,
        errno.ENODEV,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOLCK,
        errno.ECOMM,
        errno.EPROTO,
    }
)
"""Errors that clients of network file systems return for a while and that say nothing about the file."""
_IN_WORDS = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust (safetensors) name an errno in their own exceptions."""

clock: Callable[[], float] = time.monotonic
sleep: Callable[[float], None] = time.sleep


class Outage(NamedTuple):
    """A fault of the file system that is over, or that was given up on."""

    path: Path
    error: str
    tries: int
    seconds: float
    recovered: bool


on_fault: Callable[[Outage], None] | None = None
"""Called once per outage, when an operation succeeds again or is given up. Processes with a journal write an event."""
on_pause: Callable[[], None] | None = None
"""Called before each pause: a process that waits for the file system does not hang."""
_thread = threading.local()
_outage = threading.Lock()
_outages: dict[str, float] = {}
"""When each kind of report was last made, and when an operation was last given up, by `clock`."""


def is_transient(error: BaseException) -> bool:
    """Whether the file system may accept the same operation in a moment."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _IN_WORDS.search(str(error))):
        number = int(match[1])
    return number in TRANSIENT


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit how long this thread repeats each operation. For loops that have other work and come back by themselves."""
    before = getattr(_thread, "retry_s", None)
    _thread.retry_s = seconds
    try:
        yield
    finally:
        _thread.retry_s = before


def retrying(path: Path, action: Callable[[], T]) -> T:
    """Run `action`, which reads or changes `path`, and repeat it while the file system is away for a moment.

    Within another `retrying` nothing is repeated: the outer one starts from the beginning.

    Args:
        path: named in what is logged and raised.
        action: starts from the beginning each time.

    Raises:
        OSError: `action` raised it for another reason, or for this long. Then it names the path and the errno.
    """
    if getattr(_thread, "retries", False):
        return action()
    tries, began, limit_s, pause_s = 0, 0.0, 0.0, FIRST_PAUSE_S
    while True:
        try:
            result = _within_a_try(action)
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
                raise _named(error, path, tries, seconds) from error
            if tries == 1 and _is_news("begun"):
                log.warning("%s: %s; it is tried again for up to %.3g s", path, _text(error), limit_s)
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


def _within_a_try(action: Callable[[], T]) -> T:
    _thread.retries = True
    try:
        return action()
    finally:
        _thread.retries = False


def _retry_s() -> float:
    limit: float | None = getattr(_thread, "retry_s", None)
    if limit is not None:
        return limit
    if not _runs_event_loop():
        return RETRY_S
    # During a long outage each operation of an event loop is tried once: hundreds of half seconds would stop it, too.
    return 0.0 if clock() - _outages.get("given up", -QUIET_S) < 10 * LOOP_RETRY_S else LOOP_RETRY_S


def _runs_event_loop() -> bool:
    import asyncio  # agents have no use for it, and this is only asked after a fault

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


def forget_faults() -> None:
    """Report the next fault even if it comes soon after another one."""
    _outages.clear()


def _is_news(kind: str) -> bool:
    now = clock()
    with _outage:
        before, _outages[kind] = _outages.get(kind), now
    return before is None or not 0 <= now - before < QUIET_S


def _report(fault: Outage) -> None:
    how = "recovered" if fault.recovered else "was given up"
    if _is_news(f"{how} (log)"):
        log.warning("%s: %s after %d failures in %.1f s: %s", fault.path, how, fault.tries, fault.seconds, fault.error)
    if on_fault is None or getattr(_thread, "reports", False) or not _is_news(how):
        return
    _thread.reports = True  # the report is a file, too
    try:
        on_fault(fault)
    finally:
        _thread.reports = False


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _named(error: Exception, path: Path, tries: int, seconds: float) -> OSError:
    number = error.errno if isinstance(error, OSError) else int(_IN_WORDS.search(str(error))[1])  # type: ignore[index]
    return OSError(number, f"{_text(error)} ({tries} failures in {seconds:.1f} s)", str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises OSError."""
    return retrying(path, path.read_bytes)


def read_text(path: Path) -> str:
    """Return the content of a file as text. Raises OSError or UnicodeDecodeError."""
    return read_bytes(path).decode()


def reading(path: Path, read: Callable[[BinaryIO], T]) -> T:
    """Open a file without a buffer and return what `read` makes of it. Each try opens the file anew. Raises OSError."""

    def once() -> T:
        with path.open("rb", buffering=0) as file:
            return read(file)

    return retrying(path, once)


def status(path: Path) -> os.stat_result | None:
    """Return what `stat` says of a path, or None if there is nothing. Raises OSError."""
    try:
        return retrying(path, path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: Path) -> bool:
    """Whether there is something at a path. Raises OSError if the file system does not say."""
    return status(path) is not None


def is_file(path: Path) -> bool:
    """Whether there is a regular file. Raises OSError if the file system does not say."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(path: Path) -> bool:
    """Whether there is a directory. Raises OSError if the file system does not say."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def listing(directory: Path, pattern: str = "*") -> list[Path]:
    """List what a directory holds whose name matches `pattern`, sorted; nothing if there is no directory.

    Unlike `Path.glob` it raises OSError where the directory cannot be read: an empty list means an empty directory.
    """
    try:
        found = retrying(directory, lambda: list(directory.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(path for path in found if path.match(pattern))


def settled_listing(directory: Path, pattern: str = "*") -> list[Path]:
    """`listing` of what has to be complete: it is repeated until two listings in a row agree.

    What only one of them shows is there, too: names of what counts do not go while somebody looks for them.
    """
    before, found = None, set(listing(directory, pattern))
    for pause_s in _pauses(CACHE_S):
        if before == found:
            break
        if before is not None:
            sleep(pause_s)
        before, found = found, found | set(listing(directory, pattern))
    return sorted(found)


def revalidate(path: Path) -> None:
    """Have this node ask the server about a file or directory, and read content anew that it has in its memory."""
    with contextlib.suppress(OSError):  # whoever looks at it next gets the error
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def until_seen(look: Callable[[], T | None], *paths: Path, within_s: float = CACHE_S) -> T | None:
    """Wait for what another node has written and this one may not see yet.

    Args:
        look: returns None as long as it is not as expected.
        paths: directories and files that are asked for anew before each look but the first.
        within_s: no look is later than this.

    Returns:
        What `look` returned first that is not None; None if nothing else came.
    """
    if (found := look()) is not None:
        return found
    log.info("%s: not as expected; looks again for up to %.0f s", paths[0], within_s)
    for pause_s in _pauses(within_s):
        pause(pause_s)
        for path in paths:
            revalidate(path)
        if (found := look()) is not None:
            break
    return found


def _pauses(within_s: float) -> Iterator[float]:
    began, pause_s = clock(), FIRST_PAUSE_S
    while (left := began + within_s - clock()) > 0:
        yield min(pause_s, left)
        pause_s = min(2 * pause_s, 5.0)


def files_below(directory: Path, pattern: str = "*") -> list[Path]:
    """List all files below a directory whose names match. Unlike `Path.rglob` and `os.walk` it raises OSError."""
    found = []
    for path in listing(directory):
        if is_own_directory(path):
            found += files_below(path, pattern)
        elif path.match(pattern) and is_file(path):
            found.append(path)
    return found


def is_own_directory(path: Path) -> bool:
    """Whether there is a directory, and not a link to one. Raises OSError if the file system does not say."""
    try:
        return stat.S_ISDIR(retrying(path, path.lstat).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory. Raises OSError."""
    failed = False

    def once() -> None:
        nonlocal failed
        try:
            source.rename(target)
        except FileNotFoundError:
            # The server did it the first time, and its answer was lost.
            if not failed or not target.exists():
                raise
        except OSError:
            failed = True
            raise

    writing(source, once)


def unlink(path: Path) -> None:
    """Remove a file if it is there. Raises OSError."""
    retrying(path, lambda: path.unlink(missing_ok=True))


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents if they are not there. Raises OSError."""
    writing(path, lambda: path.mkdir(mode, parents=True, exist_ok=True))


def remove_tree(directory: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory with all that is in it, if it is there. Raises OSError unless `ignore_errors`."""

    def once() -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)
        except OSError as error:
            # NFS keeps a removed file that a process has open under another name, until the process closes it. A
            # process of an earlier attempt that is ending may hold one for a moment.
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                raise OSError(errno.EAGAIN, error.strerror, error.filename) from error
            raise

    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        retrying(directory, once)


def write_atomic(path: Path, data: Content) -> None:
    """Write beside the target, flush to disk, rename over it.

    A failed flush loses what was written, and the next flush would succeed without it: each try writes another file.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    writing(path, lambda: _write_atomic(path, data))


def _write_atomic(path: Path, data: Content) -> None:
    # Of this call alone: another thread, or a process of the same number on another node, may write the same file.
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        with temporary.open("wb") as handle:
            for chunk in _chunks(data):
                handle.write(chunk)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:  # also of who makes the chunks
        with contextlib.suppress(OSError):  # the first error says why
            temporary.unlink(missing_ok=True)
        raise


def _chunks(data: Content) -> Iterable[bytes | memoryview]:
    if isinstance(data, str | bytes):
        return [data.encode() if isinstance(data, str) else data]
    return data() if callable(data) else data


class Appender:
    """Appends to a file that only this process appends to. A failed append leaves no half line for the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._failed_at: int | None = None
        """Size of the file before the append that failed."""

    def append(self, lines: bytes) -> None:
        """Append whole lines. Raises OSError, and then nothing is appended, now or by the next call."""
        try:
            writing(self.path, lambda: self._append(lines))
        except OSError:
            if self._failed_at is not None:
                with contextlib.suppress(OSError):  # otherwise the next append does it
                    os.truncate(self.path, self._failed_at)
            raise

    def _append(self, lines: bytes) -> None:
        with self.path.open("a+b", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            if self._failed_at is not None and end > self._failed_at:
                file.truncate(self._failed_at)
                end = self._failed_at
            self._failed_at = end
            left = memoryview(b"\n" + lines if not self._begun and _ends_in_half_a_line(file, end) else lines)
            while left:
                left = left[file.write(left) :]
        self._begun, self._failed_at = True, None


def _ends_in_half_a_line(file: Any, size: int) -> bool:
    """Whether an earlier writer was killed in the middle of its last line."""
    if not size:
        return False
    file.seek(size - 1)
    return bool(file.read(1) != b"\n")


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON in a file, or None if it is not there (or, on a shared file system, not there yet) or no JSON."""
    try:
        return json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def digest(path: Path) -> str:
    """blake2b-128 of a file, in hex."""

    def read(handle: BinaryIO) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        while chunk := handle.read(1 << 22):
            hasher.update(chunk)
        return hasher.hexdigest()

    return reading(path, read)


class FileWatcher:
    """A JSON file that others replace: decoded only when it is another one than last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.fault = ""
        """Why the file could not be read the last time; empty if it could, or is not there."""

    def changed(self, *, wait: bool = False) -> Any | None:
        """The content if it changed since the last call, else None (also while the file is missing or half there).

        Args:
            wait: repeat a look that fails, as `retrying` does. Whoever looks again soon need not wait.
        """
        self.fault = ""
        try:
            return retrying(self._path, self._look) if wait else self._look()
        except (OSError, ValueError, RecursionError) as error:
            if is_transient(error):
                self.fault = f"{self._path}: {_text(error)}"
            return None

    def _look(self) -> Any | None:
        # Opened, not only looked at: that is what makes a network file system ask its server.
        with self._path.open("rb") as handle:
            status = os.fstat(handle.fileno())
            key = (status.st_ino, status.st_mtime_ns, status.st_size)
            if key == self._seen:
                return None
            value = json.loads(handle.read())
        self._seen = key
        return value
