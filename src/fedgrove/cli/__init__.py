"""The command line: thin over the library, the same verbs, the same words.

Whatever is refused ends with a sentence on stderr, one for each thing that is wrong: code 2 for
wrong input, 1 for work that could not be finished, 130 for an interruption, 143 and 129 for SIGTERM
and SIGHUP.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from ..errors import (
    EngineError,
    FedgroveError,
    FolderWarning,
    InputError,
    InputErrors,
    unknown,
)

__all__ = ["main"]

# typer brings its own copy of click or uses the real one, by version; this is the root of either's
# errors.
ClickError: Any = typer.BadParameter.__mro__[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments (by default those of the process) say; returns the exit code."""
    from ..report.terminal import write_ascii_where_needed
    from .app import app

    write_ascii_where_needed()
    command = typer.main.get_command(app)
    words = None if argv is None else list(argv)
    with warnings.catch_warnings(), _signals_interrupt() as received:
        _show_warnings_as_sentences()
        return _code(command, words, received)


def _code(command: Any, words: list[str] | None, received: Sequence[int]) -> int:
    try:
        code = command.main(words, prog_name="fedgrove", standalone_mode=False)
    except EngineError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            return _fail(error, 1)
        # As a shell counts processes that a signal has ended.
        return _fail(error, 128 + (received[0] if received else signal.SIGINT))
    except FedgroveError as error:
        return _fail(error, 2)
    except ClickError as error:
        return _fail(_sentence(error), 2)
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror}; free some space, or check the disk.", 1)
    # typer returns the code of an Exit, and otherwise what the command returned.
    return code if isinstance(code, int) else 0


_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What anything that writes can meet, a library's temporary files too."""


def _show_warnings_as_sentences() -> None:
    others = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **words: Any) -> None:
        if issubclass(category, FolderWarning):
            print(f"fedgrove: {message}", file=sys.stderr)
        else:
            others(message, category, *rest, **words)

    warnings.showwarning = show


@contextmanager
def _signals_interrupt() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP interrupt, as Ctrl-C does; yields the list of those that came."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        # The first one is enough: another must not break into the tidying up. A terminal that is
        # closed sends several.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Only Windows has no SIGHUP; nohup has it ignored, and so it stays.
        if is_main_thread and number and signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(reason: object, code: int) -> int:
    # One line for each thing that is wrong; nobody's own line breaks make more of them.
    lines = reason.lines() if isinstance(reason, InputErrors) else [reason]
    text = "\n".join(" ".join(str(line).split()) for line in lines)
    print(f"fedgrove: {text}", file=sys.stderr)
    return code


def _sentence(error: Any) -> object:
    """What a parser's error means, in our words."""
    parameter = getattr(error, "param", None)
    # By name: the classes are typer's or click's, see above.
    match type(error).__name__:
        case "NoSuchOption":
            return unknown("option", error.option_name, _options(error))
        case "MissingParameter" if parameter is not None:
            command = error.ctx.command_path if error.ctx else "fedgrove"
            return f"{parameter.metavar or parameter.opts[0]} is missing; see: {command} --help"
        case "BadParameter" if parameter is not None:
            return f"{parameter.opts[0]} {error.message}"
    return InputError(error.format_message())


def _options(error: Any) -> list[str]:
    if not error.ctx:
        return []
    options = []
    for parameter in error.ctx.command.params:
        for name in parameter.opts:
            if name.startswith("--"):
                options.append(name)
    return options
