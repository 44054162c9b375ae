"""The command line: the functions of :mod:`fedgrove.api` as commands, with the same options.

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
from itertools import chain
from typing import Any

import typer

from ..errors import (
    EngineError,
    FedgroveError,
    FolderWarning,
    InputError,
    InputErrors,
    make_printable,
    shown,
    unknown,
)
from ..options.definition import options_of

__all__ = ["main"]

# typer brings its own copy of click or uses the real one, by version; this is the root of either's
# errors.
ClickError: Any = typer.BadParameter.__mro__[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (by default those of the process) name.

    Returns:
        The exit code.
    """
    from ..report.terminal import write_ascii_where_needed
    from .app import app

    write_ascii_where_needed()
    command = typer.main.get_command(app)
    arguments = None if argv is None else list(argv)
    with warnings.catch_warnings(), _signals_interrupt() as received:
        _show_warnings_as_sentences()
        return _exit_code(command, arguments, received)


def _exit_code(command: Any, arguments: list[str] | None, received: Sequence[int]) -> int:
    try:
        code = command.main(arguments, prog_name="fedgrove", standalone_mode=False)
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
        where = f"{shown(error.filename)}: " if error.filename else ""
        if error.errno in _PATH_TROUBLE:
            return _fail(f"{where}{error.strerror}; give another path.", 2)
        if error.errno not in _DISK_TROUBLE:
            raise
        return _fail(f"{where}{error.strerror}; free some space, or check the disk.", 1)
    # typer returns the code of an Exit, and otherwise what the command returned.
    return code if isinstance(code, int) else 0


_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What anything that writes can meet, a library's temporary files too."""
_PATH_TROUBLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""What looking at a path of the user's can meet, before anything is read."""


def _show_warnings_as_sentences() -> None:
    others = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, FolderWarning):
            print(f"fedgrove: {make_printable(str(message))}", file=sys.stderr)
        else:
            others(message, category, *rest, **named)

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
    sentences = reason.lines() if isinstance(reason, InputErrors) else [str(reason)]
    # What the parser refuses was not raised by a command, and names options as they are typed.
    command = getattr(reason, "command", None)
    # One line for each thing that is wrong; line breaks in a sentence make no more of them.
    lines = []
    for sentence in sentences:
        text = " ".join(_spell_flag(sentence, command).split())
        lines.append(make_printable(text))
    print("fedgrove:", "\n".join(lines), file=sys.stderr)
    return code


def _spell_flag(sentence: str, command: type | None) -> str:
    """A sentence about an option of the command, with its name as it is typed."""
    mark = "- " if sentence.startswith("- ") else ""
    name, verb, rest = sentence.removeprefix("- ").partition(" is ")
    if not verb or command is None:
        return sentence
    field = options_of(command).get(name)
    if field is None or field.option.is_argument:
        return sentence
    return f"{mark}{field.flag} is {rest}"


def _sentence(error: Any) -> object:
    """The sentence for a parser's error."""
    parameter = getattr(error, "param", None)
    # By name: the classes are typer's or click's, see above.
    kind = type(error).__name__
    if kind == "UsageError" and str(error.message).startswith("Missing command"):
        # A group of commands without one of them, as "fedgrove bench".
        commands = ", ".join(error.ctx.command.list_commands(error.ctx))
        return f"{error.ctx.command_path} needs one of the commands {commands}."
    match kind:
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
    names = chain.from_iterable(each.opts for each in error.ctx.command.params)
    return [name for name in names if name.startswith("--")]
