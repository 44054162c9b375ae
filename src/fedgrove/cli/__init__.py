"""The command line: thin over the library, the same verbs, the same words.

Whatever is refused ends with one sentence on stderr: code 2 for wrong input, 1 for work that could
not be finished, 130 for an interruption.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import EngineError, FedgroveError, InputError, unknown

__all__ = ["main"]

# typer brings its own copy of click or uses the real one, by version; this is the root of either's
# errors.
ClickError: Any = typer.BadParameter.__mro__[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments (by default those of the process) say; returns the exit code."""
    from .app import app

    command = typer.main.get_command(app)
    words = None if argv is None else list(argv)
    try:
        code = command.main(words, prog_name="fedgrove", standalone_mode=False)
    except EngineError as error:
        interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        return _fail(error, 130 if interrupted else 1)
    except FedgroveError as error:
        return _fail(error, 2)
    except ClickError as error:
        return _fail(_sentence(error), 2)
    # typer returns the code of an Exit, and otherwise what the command returned.
    return code if isinstance(code, int) else 0


def _fail(reason: object, code: int) -> int:
    print(f"fedgrove: {' '.join(str(reason).split())}", file=sys.stderr)
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
