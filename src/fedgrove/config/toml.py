"""Configuration is construction: config.toml mirrors the dataclasses and rebuilds them by name.

::

    format = 2

    [run]                          the options of the command line
    method = "ditto"
    data = "digits"

    [method]                       a dataclass; its parts are tables in it
    type = "Ditto"

    [method.local.optimiser]
    type = "Adam"
    lr = 0.001

Types come from one explicit table (:func:`fedgrove.config.settings.part_types`); nothing is
evaluated as code. A method of the user's own, and its own parts, go by their file::

    [method]
    type = "mine/fedem.py:FedEM"   the path as it was given

    [code]                         the SHA-256 of each file that the method is made of
    "mine/fedem.py" = "8e35..."

Such a file is run only if it is trusted (:func:`check_trust`) and is still the same. Files of
devices, of data of one's own, and of the weights that a run starts from, are recorded alike, under
``[files]`` (:func:`check_files`).

Data that were made in Python cannot be written. What is known of them is, so that others are
refused when the run is resumed::

    [data]
    clients = 5
    shape = [6]
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import tomli_w
from torch import nn

from .. import methods
from ..core import AnyMethod
from ..data import Federation
from ..errors import InputError, Refusals, clean_text, shown, spell_hint, unknown
from ..metrics import Metric
from ..nets.initial_weights import remove_suffix
from ..nets.user_files import find_user_file, import_file, is_file_spec
from ..options.definition import is_plain, members, options_of
from ..problems import MixedProblem
from ..renamed import find_new_field, find_new_type, rename_field
from .experiment import Experiment
from .settings import MethodTypes, coerce, find_part, fitting, hints, is_built_in, own_fields_first

CONFIG_FORMAT = 2
"""Raised when names in config.toml change, or what is meant where one is left out; files of another
format are refused."""
NONE = "none"
"""Written only where a field that is not None by default holds None; others are left out."""


# ---- writing -------------------------------------------------------------------------------------


def to_toml(experiment: Experiment, files: Mapping[str, str] | None = None) -> str:
    """An experiment as the text of config.toml; floats are written so that no bit is lost.

    ``files`` holds the SHA-256 of each file of devices that its federation was made from, and of
    that of its initial weights.
    """
    run: dict[str, Any] = {"method": methods.name_of(experiment.method)}
    for option, value in vars(experiment).items():
        if option != "method" and value is not None:
            run[option] = _option_value(value)
    code: dict[str, str] = {}
    method = _table(experiment.method, code)
    document = {"format": CONFIG_FORMAT, "run": run, "method": method}
    if isinstance(experiment.data, Federation):
        document["data"] = _described(experiment.data.scored_by(experiment.metric))
    if code:
        document["code"] = code
    if files:
        document["files"] = dict(files)
    return tomli_w.dumps(document)


def _option_value(value: Any) -> Any:
    # What was made in Python cannot be written; the mark says that it must be given again.
    if isinstance(value, Federation):
        return f"<arrays: {value.name}>"
    if isinstance(value, nn.Module):
        return f"<module: {type(value).__name__}>"
    if isinstance(value, tuple):
        return list(value)
    return value


def _described(federation: Federation) -> dict[str, Any]:
    """What must agree where a federation that was made in Python is given again."""
    problem = federation.problem
    described: dict[str, Any] = {
        "clients": len(federation.clients),
        "shape": list(federation.shape),
        "outputs": federation.classes,
        "problem": problem.name,
    }
    if isinstance(problem, MixedProblem):
        metrics = [(task.name, task.problem.metric) for task in problem.tasks]
        described["metric"] = [f"{name}: {_metric(metric)}" for name, metric in metrics]
    else:
        described["metric"] = _metric(problem.metric)
    return described


def _metric(metric: Metric) -> str:
    """Describe a metric for config.toml."""
    direction = "more" if metric.more_is_better else "less"
    return f"{metric.name}, {direction} is better"


def _table(part: Any, code: dict[str, str]) -> dict[str, Any]:
    """A part as a table; the users' files that it comes from are added to ``code``."""
    cls = type(part)
    file = find_user_file(cls)
    if is_built_in(cls):
        name = cls.__name__
    elif file is not None:
        name = f"{file.path}:{cls.__qualname__}"
        code[file.path] = file.sha256
    else:
        name = f"{cls.__module__}:{cls.__qualname__}"
    table: dict[str, Any] = {"type": name}
    for field in own_fields_first(cls):
        value = getattr(part, field.name)
        is_default_none = value is None and field.default is None
        if field.init and not is_default_none:
            table[field.name] = _value(value, field.name, code)
    return table


def _value(value: Any, key: str, code: dict[str, str]) -> Any:
    """Return a setting's value as config.toml has it."""
    if dataclasses.is_dataclass(value):
        return _table(value, code)
    if isinstance(value, tuple | list):
        return [_value(item, key, code) for item in value]
    if value is None:
        return NONE
    if isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{key} contains a {type(value).__name__}, which config.toml cannot contain; parts consist "
        "of numbers, text, tuples and other parts."
    )


# ---- reading -------------------------------------------------------------------------------------


def read_run_table(text: str) -> dict[str, Any]:
    """The table [run] of a config.toml of any format."""
    run = _parsed(text).get("run", {})
    return run if isinstance(run, dict) else {}


def from_toml(
    text: str,
    data: Federation | None = None,
    net: nn.Module | None = None,
    method: AnyMethod | None = None,
) -> Experiment:
    """The experiment that :func:`to_toml` wrote.

    ``data``, ``net`` and ``method`` take the place of what was made in Python and so cannot be
    rebuilt by name. A file of code that it names is run: :func:`check_trust` comes first.
    """
    document = _parsed(text)
    for name in document:
        if name not in ("format", "run", "method", "data", "code", "files"):
            raise unknown("table of config.toml", name, ["run", "method", "data", "code", "files"])

    options = read_run_table(text)
    given: dict[str, Any] = {}
    if data is not None:
        _check_same_data(document.get("data", {}), data, options.get("metric"))
        given["data"] = data
    if net is not None:
        given["net"] = net
    refusals = Refusals()
    left = {option: value for option, value in options.items() if option not in given}
    given.update(read_options(left, refusals))
    if method is None:
        with refusals.collected():
            method = method_of(text)
    refusals.check()
    assert method is not None
    return Experiment(method=method, **given)


def read_options(values: Mapping[str, Any], refusals: Refusals) -> dict[str, Any]:
    """Read the options of [run] in a config.toml, without the method."""
    known = options_of(Experiment)
    found = {}
    for name, value in values.items():
        with refusals.collected():
            if name == "method":
                continue
            if name not in known:
                raise unknown("option of [run]", name, ["method", *known])
            _check_named(name, value)
            found[name] = known[name].convert(value)
    return found


def _check_named(name: str, value: Any) -> None:
    """Refuse data or a net that were made in Python, which a file cannot hold."""
    if name in ("data", "net") and not isinstance(value, str):
        raise InputError(f"{name} is {shown(value)} in config.toml; it must be a name.")
    if name in ("data", "net") and isinstance(value, str) and value.startswith("<"):
        raise InputError(
            f"the run's {name} was made in Python ({value}); resume it from Python with: "
            f"fedgrove.resume(path, {name}=...)"
        )


def method_of(text: str) -> Any:
    """The method of a config.toml. A file of code that it names is run."""
    return _method(_parsed(text), read_run_table(text))


def _check_same_data(known: Any, data: Federation, metric: str | None) -> None:
    """Refuse a federation other than the one that the run was started on, as far as one can tell.

    Folders from before this was written down know nothing of it. ``metric`` is the run's option.
    """
    if not isinstance(data, Federation):
        raise InputError(
            f"data is a {type(data).__name__}; make a federation of it with the options that the "
            "run was started with: data=fedgrove.load(..., label=..., window=...)."
        )
    if not isinstance(known, dict):
        raise InputError(
            "[data] of config.toml is not a table; restore the file as it was written."
        )
    now = _described(data.scored_by(metric))
    for option, value in known.items():
        if now.get(option) != value:
            raise InputError(
                f"the run was started on data with {option} = {value}, and data= has "
                f"{now.get(option)}; give the federation that it was started on."
            )


def check_named_data(text: str, data: Federation | None) -> None:
    """Refuse a federation for a run whose config.toml names its data."""
    named = str(read_run_table(text).get("data", ""))
    if data is not None and named and not named.startswith("<"):
        raise InputError(
            f"the run's data are {named}, which is read again by its name; leave data= out."
        )


def check_format(text: str, folder: Path) -> None:
    """Refuse the config.toml of a run folder whose format is not this version's.

    (One that was written by hand need not name a format.)
    """
    # Folders from before there was a format do not name one either.
    given = _parsed(text).get("format", 1)
    if given != CONFIG_FORMAT:
        raise InputError(
            f"{folder} has a config.toml of format {clean_text(str(given))}; this version of "
            f"fedgrove reads format {CONFIG_FORMAT}, in which some names and defaults changed. "
            "Resume the run with the version that wrote it, or start it again."
        )


def check_trust(
    text: str,
    folder: Path,
    trust: bool,
    given: Collection[str] = (),
    file: str = "config.toml",
) -> None:
    """Refuse to run the code that a run folder's config.toml names, unless it is trusted.

    To name code on the command line is to trust it; a folder may come from somebody else. What is
    ``given`` ("net", "method") takes the place of what is named.
    """
    if trust:
        return
    for option, spec in named_code(text).items():
        if option.partition(".")[0] in given:
            continue
        path = Path(spec.rpartition(":")[0] or spec)
        raise InputError(
            f'{folder / file} has {option} = "{spec}", so the code in {path.absolute()} '
            f"would be run. If you trust it, add {spell_hint('--trust', 'trust=True')}."
        )


def check_files(text: str, replaced: Collection[str] = ()) -> None:
    """Refuse a file named in config.toml that is not the one that the run was started with.

    Files of the options in ``replaced`` are not used, and not looked at.
    """
    files = _parsed(text).get("files", {})
    options = read_run_table(text)
    weights = remove_suffix(str(options.get("init", "")))
    unused = [remove_suffix(str(options[option])) for option in replaced if option in options]
    of_devices = [str(options[option]) for option in ("profile", "trace") if option in options]
    for path, known in files.items() if isinstance(files, dict) else ():
        is_of_data = path != weights and path not in of_devices
        if path in unused or (is_of_data and "data" in replaced):
            continue
        place = Path(path)
        if not place.is_file():
            what = "started from the weights in" if path == weights else "has the devices of"
            if is_of_data:
                what = "is on the data in"
            raise InputError(
                f"the run {what} {path}, and there is no file {place.absolute()}; go "
                "to the folder where the run was started, or restore the file."
            )
        _check_unchanged(place, known, "restore the file, or start the run again.")


def _check_unchanged(place: Path, known: Any, what_to_do: str) -> None:
    """Refuse a file whose SHA-256 is not the one that is known.

    The result is to be the one that the run would have had: another text would give another.
    """
    now = hashlib.sha256(place.read_bytes()).hexdigest()
    if known is not None and now != known:
        raise InputError(
            f"{place.absolute()} has changed since the run was started (its SHA-256 was "
            f"{str(known)[:12]} and is {now[:12]}), so the result would differ; {what_to_do}"
        )


def named_code(text: str) -> dict[str, str]:
    """What a config.toml names that is code in a file, as ``x.py:Net``, by option.

    >>> named_code('[run]\\nnet = "x.py:Net"\\ndata = "own.npz"')
    {'net': 'x.py:Net'}
    """
    options = dict(read_run_table(text))
    options.update(_types(_parsed(text).get("method"), "method"))
    return {
        option: value
        for option, value in options.items()
        if isinstance(value, str) and is_file_spec(value)
    }


def made_in_python(text: str) -> list[str]:
    """Return what config.toml cannot store and a resume needs: "data", "net" or "method"."""
    options = read_run_table(text)
    needed = [option for option in ("data", "net") if str(options.get(option, "")).startswith("<")]
    for _, name in _types(_parsed(text).get("method"), "method"):
        # A class of the user's that is in no file of its own, as __main__:Mine.
        if isinstance(name, str) and ":" in name and not is_file_spec(name):
            return [*needed, "method"]
    return needed


def how_to_resume(text: str, path: Path, function: str = "fedgrove.resume") -> str:
    """What resumes a run with this config.toml, for the end of a sentence; ``function`` in Python.

    >>> how_to_resume('[run]\\nnet = "x.py:Net"', Path(".."))
    "resume with: fedgrove.resume('..', trust=True)"
    >>> how_to_resume("", Path("runs/gone"))
    'runs/gone was moved or deleted; if it was moved, resume with: fedgrove.resume(NEW_PLACE)'
    """
    if not path.is_dir():
        how = spell_hint("fedgrove resume NEW_PLACE", f"{function}(NEW_PLACE)")
        return f"{path} was moved or deleted; if it was moved, resume with: {how}"
    needed = made_in_python(text)
    code = [option for option in named_code(text) if option.partition(".")[0] not in needed]
    if needed:
        options = [f"{option}=..." for option in needed]
        if code:
            options.append("trust=True")
        return f"resume from Python with: {function}({str(path)!r}, {', '.join(options)})"
    typed = shlex.quote(str(path))
    python = repr(str(path))
    if code:
        typed += " --trust"
        python += ", trust=True"
    return f"resume with: {spell_hint(f'fedgrove resume {typed}', f'{function}({python})')}"


def _types(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The type of a table and of the tables in it, by their paths."""
    if isinstance(value, dict):
        yield f"{path}.type", value.get("type")
        for key, item in value.items():
            yield from _types(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _types(item, f"{path}.{i}")


def same(one: str, other: str) -> bool:
    """Whether two config.toml describe the same run.

    One that was written before an option existed has its default; between formats defaults may have
    changed, so there no two are the same. Where data, network or method were made in Python, the
    texts must be equal: nothing else is known of them. No code is run.
    """
    if one == other:
        return True
    first = _parsed(one)
    second = _parsed(other)
    if any(first.get(key) != second.get(key) for key in ("format", "files")):
        return False
    try:
        if "code" in first or "code" in second:
            tables_agree = all(first.get(key) == second.get(key) for key in ("method", "code"))
            any_method = methods.FedAvg()
            return tables_agree and (
                from_toml(one, method=any_method) == from_toml(other, method=any_method)
            )
        return from_toml(one) == from_toml(other)
    except InputError:  # made in Python, or by a version with other options
        return False


def _parsed(text: str) -> dict[str, Any]:
    """Parse the text of a run folder's config.toml."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"config.toml is not TOML ({error}); restore the file as fedgrove wrote it."
        ) from None


def _method(document: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the method that config.toml names or describes."""
    table = document.get("method")
    code = document.get("code", {})
    if table is not None:
        return _part(table, MethodTypes(), "method", code)
    if "method" not in options:
        raise InputError(
            "config.toml names no method; write method = NAME under [run], or a table [method]."
        )
    option = str(options["method"])
    return methods.make(option)


def _part(table: Any, known: Mapping[str, type], path: str, code: Any, hint: Any = None) -> Any:
    """A part, or with no ``hint`` the method itself, from its table."""
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        raise InputError(
            f"{path} is {table!r}; it must be a table with a type: {', '.join(known)}."
        )
    name = find_new_type(table["type"])
    if is_file_spec(name):
        known = {name: _class_of_file(name, path, code, hint)}
    elif ":" in name:
        raise InputError(
            f"{path} is {name}, which is not part of fedgrove and is never imported by name; "
            "resume it from Python with: fedgrove.resume(path, method=...)"
        )
    if name not in known:
        raise unknown(f"type for {path}", name, known)
    fields = {key: value for key, value in table.items() if key != "type"}
    return _built(known[name], fields, path, code)


def _class_of_file(spec: str, path: str, code: Any, hint: Any) -> type:
    """The class of a method or part in a file of the user's own, if that is still the same."""
    file, _, name = spec.rpartition(":")
    place = Path(file)
    otherwise = "or resume from Python with: fedgrove.resume(path, method=...)"
    if not place.is_file():
        raise InputError(
            f"{path} is {spec}, and there is no file {place.absolute()}; go to the folder where "
            f"the run was started, {otherwise}"
        )
    known = code.get(file) if isinstance(code, dict) else None
    _check_unchanged(place, known, f"restore the file, start the run again, {otherwise}")
    if hint is None:
        return methods.find_own(file, name)
    module = import_file(place).__name__
    choices = fitting(hint, module)
    if name not in choices or choices[name].__module__ != module:
        raise unknown(f"type for {path} in {file}", name, choices)
    return choices[name]


def _built(cls: type, fields: Mapping[str, Any], path: str, code: Any) -> Any:
    """Build a part from the fields in its table of config.toml."""
    kinds = hints(cls)
    values = {}
    for key, value in fields.items():
        if find_new_field(cls, key) is not None:
            key, value = rename_field(cls, key, value)
        if key not in kinds:
            raise unknown(f"field of {path}, a {cls.__name__},", key, kinds)
        values[key] = _rebuilt(value, kinds[key], f"{path}.{key}", code)
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{path} cannot be created: {error}.") from None
    except InputError as error:
        raise InputError(f"{path}.{error}") from None


def _rebuilt(value: Any, hint: Any, path: str, code: Any) -> Any:
    """Return a setting's value, or part, from config.toml."""
    if isinstance(value, dict):
        known = fitting(hint)
        found = find_part(str(value.get("type")), hint)
        if found is not None:
            known = {found.__name__: found}
        return _part(value, known, path, code, hint)
    if isinstance(value, list):
        # A tuple of parts is rebuilt part by part; one of numbers or text at once.
        containers = [member for member in members(hint) if get_args(member)]
        if containers and not is_plain(containers[0]):
            item_hint = get_args(containers[0])[0]
            items = enumerate(value)
            return tuple(_rebuilt(item, item_hint, f"{path}.{i}", code) for i, item in items)
    return coerce(path, value, hint)
