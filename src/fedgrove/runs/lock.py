"""The lock of a run folder: one process at a time trains in it.

The operating system holds the lock, on the file ``lock``, and releases it when the process ends, by
whatever means. A file that a killed process left behind therefore locks nothing.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InputError
from .files import cannot_write

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_FILE = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems answer that have no locks: there nothing can be done, and runs go on."""
_FAR = 1 << 30
"""The byte that is locked on Windows, which keeps others from reading it: not one of the text."""
_held: set[int] = set()
"""The descriptors of the locks this process holds."""


@contextmanager
def locked(folder: Path, sweep: Path | None = None) -> Iterator[None]:
    """Lock the folder of a run or a sweep while the block runs.

    A run of a ``sweep`` is refused while the whole sweep is trained; whoever locks the sweep asks
    :func:`check_free` of its runs. So whichever comes second notices, and a sweep of a thousand
    runs needs one descriptor.
    """
    descriptor = _acquire(folder)
    try:
        if sweep is not None:
            check_free(sweep)
        yield
    finally:
        # In a forked process it is not in the set any more: there the lock is the parent's.
        if descriptor in _held:
            _held.discard(descriptor)
            # While it is still locked: whoever opened the file before must find it replaced.
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()
            os.close(descriptor)


def check_free(folder: Path) -> None:
    """Refuse a run folder that is locked, by another process or by this one."""
    if is_locked(folder):
        raise _in_use(folder)


def is_locked(folder: Path) -> bool:
    """Return whether a process, another one or this one, trains in a run folder."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | _NO_FOLLOW)
    except OSError:
        # There is no such file, or it is not one of ours.
        return False
    try:
        return not _try(descriptor)
    finally:
        os.close(descriptor)


def _acquire(folder: Path) -> int:
    path = folder / LOCK_FILE
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from None
        if not _try(descriptor):
            os.close(descriptor)
            raise _in_use(folder)
        if _is_still(path, descriptor):
            break
        # Its holder deleted the file between the two calls; there may be a new one.
        os.close(descriptor)
    _held.add(descriptor)
    # Only for the sentence that others get: on a full disk it goes without.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {platform.node()}\n".encode())
    return descriptor


# A link called lock must not lead to another file, which would be emptied.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _try(descriptor: int) -> bool:
    """Lock an open file; False if it is locked already."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            # Not lockf: its locks do not keep two threads of one process apart.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS
    return True


def _in_use(folder: Path) -> InputError:
    # Who has just locked the file is about to write its name; until then it holds the last one's.
    time.sleep(0.05)
    who = "another process"
    with suppress(OSError, ValueError):
        pid, _, machine = (folder / LOCK_FILE).read_text().strip().partition(" ")
        who = f"process {int(pid)}"
        if machine and machine != platform.node():
            who += f" on {machine}"
    return InputError(
        f"{folder} is in use: {who} trains in it. Wait until it has ended, or end it, and try "
        "again."
    )


def _forget_inherited() -> None:
    """In a forked process: without this, workers would hold the lock after the server is gone."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_inherited)
