"""Commands from option classes: flags, help and completion follow from the options' fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import typer
from typer.core import TyperArgument, TyperCommand

from ..errors import spell_as_typed
from ..options.definition import Field, OptionsT, make_options, options_of
from . import complete


def add_command(
    app: typer.Typer,
    name: str,
    options: Callable[..., OptionsT],
    function: Callable[[OptionsT], None],
) -> None:
    """Add a function as a command of the command line, with the options of a class.

    What is wrong with the options is in their ``mistakes``: the function refuses it, alone or
    together with all else that it finds.
    """
    cls = cast(type, options)

    def call(**typed: Any) -> None:
        with spell_as_typed(cls):
            function(read_typed(options, name, typed))

    class Command(TyperCommand):
        """A command whose help describes its arguments, also if typer is older than click."""

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write options and arguments; click 8.5 resets the help that typer 0.20 has set."""
            for parameter in self.params:
                if isinstance(parameter, TyperArgument) and parameter.help is None:
                    parameter.help = options_of(cls)[str(parameter.name)].option.help
            super().format_options(ctx, formatter)

    parameters = [_parameter(field) for field in typed_options(cls)]
    # Typer builds a command from the signature and the annotations of its function.
    described: Any = call
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {each.name: each.annotation for each in parameters}
    described.__doc__ = inspect.getdoc(function)
    described.options = cls
    app.command(name, cls=Command)(call)


def read_typed(options: Callable[..., OptionsT], name: str, typed: Mapping[str, Any]) -> OptionsT:
    """Make options from what was typed on the command line; None, False or empty was not."""
    given = {}
    for key, value in typed.items():
        # Not `if value`: an empty text was given.
        if value is not None and value is not False and value != []:
            given[key] = value
    if "json" in given and "progress" in options_of(cast(type, options)):
        # Switched off like any switch that is on by default.
        given["progress"] = True
    return make_options(options, given, name, is_typed=True)


def typed_options(cls: type) -> list[Field]:
    """Return the options of a class that can be typed on the command line."""
    left_out = getattr(cls, "not_typed", ())
    allowed = [each for each in options_of(cls).values() if each.option.only != "python"]
    return [each for each in allowed if each.name not in left_out]


def _parameter(field: Field) -> inspect.Parameter:
    kind: Any = list[str] if field.option.is_repeated else str
    default: Any = None
    if isinstance(field.default, bool):
        kind = bool
        default = False
    elif field.is_required:
        default = inspect.Parameter.empty
    else:
        kind = kind | None
    details: Any = {
        "metavar": field.option.metavar or None,
        "show_default": False,
        "autocompletion": getattr(complete, field.option.complete or "", None),
    }
    if field.option.is_argument:
        described = typer.Argument(help=field.option.help, **details)
    else:
        described = typer.Option(field.flag, help=field.describe(), **details)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, described],
    )
