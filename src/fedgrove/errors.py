"""Errors, in sentences: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

from .renamed import find_old_names


class FedgroveError(Exception):
    """Any error that fedgrove raises on purpose; its text is a sentence for the user."""

    command: type | None = None
    """The options of the command that raised it; None: it was raised in Python."""


class InputError(FedgroveError, ValueError):
    """A name, value or file that cannot be used. The command line prints it, exit code 2."""


class ArgumentError(InputError, TypeError):
    """A call with an argument too many, or one too few; Python has TypeError for it."""


class BudgetError(InputError):
    """A budget of bytes that is too small; ``needed`` is the least that would do."""

    def __init__(self, sentence: str, needed: float = 0.0) -> None:
        super().__init__(sentence)
        self.needed = needed


class InputErrors(InputError):
    """Several things that are wrong at once; ``sentences`` holds one for each."""

    def __init__(self, sentences: Iterable[str], more: int = 0) -> None:
        """``more`` is the number of further errors, which are only counted."""
        self.sentences = tuple(sentences)
        self.more = more
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """How many things are wrong, then a line for each."""
        lines = [f"{len(self.sentences) + self.more} things are wrong:"]
        lines.extend(f"- {sentence}" for sentence in self.sentences)
        if self.more:
            lines.append(f"- and {self.more} more.")
        return lines

    def __reduce__(self) -> tuple[type[InputErrors], tuple[tuple[str, ...], int]]:
        # An exception is pickled with its text, and is made of its sentences.
        return InputErrors, (self.sentences, self.more)


class UnfitError(InputError):
    """A network that a method cannot use as it is; says why, and what would do."""


class MethodError(InputError):
    """An error in a method of the user's own; says which function, and where."""


class FolderTakenError(InputError):
    """A folder that is to be made and exists."""


class MissingError(InputError):
    """A data set whose files are nowhere; files that are there and wrong are another matter."""


class DamageError(InputError):
    """A file of a run folder that is missing, or is not what was written."""


class FolderWarning(UserWarning):
    """What was found wrong in a run folder and could be put right."""


class WireError(FedgroveError, ValueError):
    """Bytes that are not what they claim to be."""


class UnknownMask(WireError):
    """Bytes that refer to a mask their reader does not know; ``packets``: which of a message do."""

    def __init__(self, sentence: str, packets: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.packets = packets


class UnexpectedTensors(WireError):
    """Bytes contain tensors other than those that their reader expects."""


class UnexpectedReport(WireError):
    """An answer contains something else than its task requests; found before it was decoded.

    ``reason`` is a key of :data:`fedgrove.runs.gate.REFUSALS`.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class EngineError(FedgroveError, RuntimeError):
    """Work that an engine could not finish: a worker died, every update was refused."""


MOST_LISTED = 20
"""The most errors that are listed at once; the others are counted."""


class Refusals:
    """Collects errors, so that all of them are reported at once.

    Hand-written, because errors also come from data files, networks and devices, not only from
    values that pydantic validates, and each has its own sentence.

    >>> refusals = Refusals()
    >>> for lr in (-1, 0.1, -2):
    ...     with refusals.collected():
    ...         check(lr > 0, "lr", lr, "above 0")
    >>> refusals.sentences
    ['lr is -1; it must be above 0.', 'lr is -2; it must be above 0.']
    """

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self._places: dict[str, list[str]] = {}
        """Each sentence, or the kind of it: the first sentence, then the places of all others."""
        self._more = 0
        self._first: InputError | None = None
        for sentence in sentences:
            self.add(sentence)

    @property
    def sentences(self) -> list[str]:
        """What was collected, in the order in which it was found."""
        listed = []
        for sentence, *places in self._places.values():
            if places:
                sentence += f" The same in {list_some(places)}."
            listed.append(sentence)
        return listed

    def add(self, error: InputError | str, kind: str = "", place: str = "") -> None:
        """Add one error, or several; a sentence that is there already is not repeated.

        Args:
            error: The error, or its sentence.
            kind: Only the first error of a kind is listed in full; of the others, the place.
            place: Where it was found, with ``kind``.
        """
        if isinstance(error, str):
            error = InputError(error)
        new = error.sentences if isinstance(error, InputErrors) else (str(error),)
        for sentence in new:
            key = kind or sentence
            if key not in self._places:
                self._places[key] = [sentence]
            elif kind:
                self._places[key].append(place)
        if isinstance(error, InputErrors):
            self._more += error.more
        self._first = self._first or error

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect a refusal instead of raising it."""
        try:
            yield
        except InputError as error:
            self.add(error)

    def check(self) -> None:
        """Refuse, if anything was collected."""
        found = self.sentences
        if self._first is not None and found == [str(self._first)]:
            # The error itself: its class may carry more than the sentence.
            raise self._first
        if len(found) + self._more == 1:
            raise InputError(found[0])
        if found:
            listed = found[:MOST_LISTED]
            raise InputErrors(listed, self._more + len(found) - len(listed))


def together(sentences: Sequence[str]) -> InputError:
    """One error of one or more sentences."""
    return InputErrors(sentences) if len(sentences) > 1 else InputError(*sentences)


SYNONYMS = {
    "batch-size": "batch",
    "bs": "batch",
    "check": "doctor",
    "clients-per-round": "cohort",
    "continue": "resume",
    "dataset": "data",
    "describe": "show",
    "diff": "compare",
    "evaluation": "evaluate",
    "fit": "run",
    "har": "uci-har",
    "info": "show",
    "lam": "mu",
    "lambda": "mu",
    "learning-rate": "lr",
    "local-epochs": "epochs",
    "ls": "list",
    "model": "net",
    "n-clients": "clients",
    "num-clients": "clients",
    "num-rounds": "rounds",
    "optim": "optimiser",
    "optimizer": "optimiser",
    "output": "out",
    "output-dir": "out",
    "params": "set",
    "random-seed": "seed",
    "resnet": "resnet18",
    "sparsity": "density",
    "standardize": "standardise",
    "start": "run",
    "train": "run",
    "wd": "weight_decay",
}
"""Words of other libraries and papers, and ours for them; a hyphen stands for _ too."""
LEAST_LIKENESS = 0.82
"""From 0 to 1, as difflib counts it. Lower, and 'fedproto' is taken for 'fedprox'; higher, and
'mnis' is not taken for 'mnist'."""
LEAST_BEGINNING = 3
"""Letters of a name that stand for all of it."""
SHORT = 4
"""Letters of a word in which one wrong letter counts for much: it needs only 0.6, but must begin
with the right one."""


def unknown(
    kind: str, given: str, allowed: Iterable[str], related: Mapping[str, str] = MappingProxyType({})
) -> InputError:
    """The error for an unknown name: it suggests the nearest name and lists all.

    Args:
        kind: What the name stands for, as "method".
        given: The unknown name.
        allowed: All known names.
        related: Names of other things, and the known name that is nearest in kind.

    >>> print(unknown("method", "fedavgg", ["fedavg", "local"]))
    there is no method 'fedavgg'; did you mean 'fedavg'? There are: fedavg, local.
    >>> print(unknown("setting of ditto", "lambda", ["local.batch", "pull.mu"]))
    there is no setting of ditto 'lambda'; did you mean 'pull.mu'? There are: local.batch, pull.mu.
    """
    names = sorted(allowed)
    if len(given) > LONGEST_SHOWN or not is_plain_text(given):
        given = clean_text(given, LONGEST_SHOWN)
    plain = given.lower().replace("-", "").replace("_", "")
    # A well-known name may also be near to one of ours by its letters alone.
    near = "" if plain in related else nearest(given, names)
    other = nearest(plain, list(related))
    hint = "."
    if near:
        hint = f"; did you mean '{near}'?"
    elif other:
        hint = f"; the nearest in kind is '{related[other]}'."
    listed = ", ".join(names) or "none"
    return InputError(f"there is no {kind} '{given}'{hint} There are: {listed}.")


def nearest(given: str, names: list[str]) -> str:
    """The name that was probably meant; empty if none is near."""
    # Options begin with dashes, and a setting may be given by the end of its path.
    by_word: dict[str, str] = {}
    for name in names:
        by_word.setdefault(name, name)
        by_word.setdefault(name.lstrip("-"), name)
        by_word.setdefault(name.rpartition(".")[2], name)
    # What follows a colon is a number of the user's.
    before_colon = given.partition(":")[0]
    by_beginning = {name.partition(":")[0]: name for name in reversed(names)}
    word = given.lstrip("-").rpartition(".")[2].lower()
    ours = SYNONYMS.get(word.replace("_", "-"), "")
    if ours in by_word:
        return by_word[ours]
    # As it was given first: a path that is nearly right is nearer than its end.
    near = difflib.get_close_matches(given, names, n=1, cutoff=LEAST_LIKENESS)
    if near:
        return near[0]
    near = difflib.get_close_matches(word, by_word, n=1, cutoff=LEAST_LIKENESS)
    if not near and ":" in given:
        near = difflib.get_close_matches(before_colon, by_beginning, n=1, cutoff=LEAST_LIKENESS)
        return by_beginning[near[0]] if near else ""
    near = near or [name for name in by_word if _is_part_or_mix(name, word)]
    # The beginning of several names says nothing; of several that a word begins with, the longest
    # is meant.
    if len(near) > 1 and near[0].startswith(word):
        return ""
    if not near and len(word) <= SHORT:
        alike = [name for name in by_word if name[:1] == word[:1]]
        near = difflib.get_close_matches(word, alike, n=1, cutoff=0.6)
    return by_word[max(near, key=len)] if near else ""


def _is_part_or_mix(name: str, word: str) -> bool:
    """Whether a word begins a name, begins with it, or has its letters in another order."""
    is_long_enough = min(len(name), len(word)) >= LEAST_BEGINNING
    begins = name.startswith(word) or word.startswith(name)
    return (is_long_enough and begins) or sorted(name) == sorted(word)


def check(ok: bool, name: str, given: object, allowed: str) -> None:
    """Raise an :class:`InputError` unless ``ok``, with the range that is allowed.

    Args:
        ok: Whether the value can be used.
        name: The name of the option or field.
        given: The value.
        allowed: What it must be, as "above 0".

    Raises:
        InputError: ``ok`` is false.

    >>> check(0.5 <= 1, "density", 0.5, "in (0, 1]")
    >>> check(-1 > 0, "lr", -1, "above 0")
    Traceback (most recent call last):
    fedgrove.errors.InputError: lr is -1; it must be above 0.
    """
    if not ok:
        raise InputError(f"{name} is {shown(given)}; it must be {allowed}.")


_IS_TYPED: ContextVar[bool] = ContextVar("_IS_TYPED", default=False)
"""Whether options were typed; otherwise messages are for Python."""


@contextmanager
def spell_as_typed(command: type) -> Iterator[None]:
    """Spell options in messages as the command line takes them, until the end of the block.

    Args:
        command: The options of the command that was typed. An error that leaves the block keeps
            them: whoever prints it spells the option that its sentence begins with.
    """
    token = _IS_TYPED.set(True)
    try:
        yield
    except FedgroveError as error:
        error.command = command
        raise
    finally:
        # Tests and notebooks run commands, and Python again after them.
        _IS_TYPED.reset(token)


def spell_option(name: str, value: str = "") -> str:
    """Return an option as the reader of a message writes it.

    >>> spell_option("data_dir"), spell_option("out", "DIR"), spell_option("engine", "serial")
    ('data_dir', 'out=DIR', "engine='serial'")
    >>> spell_option("set", "mu=0.1"), spell_option("set", "head=shared")
    ("set={'mu': 0.1}", "set={'head': 'shared'}")
    """
    if _IS_TYPED.get():
        return f"--{name.replace('_', '-')} {value}".strip()
    if not value:
        return name
    if name == "set":
        key, _, setting = value.partition("=")
        python = {"true": "True", "false": "False"}.get(setting, setting)
        # A number and a truth value need no quotes.
        is_plain = python != setting or setting.replace(".", "", 1).isdecimal()
        return f"set={{{key!r}: {python if is_plain else repr(setting)}}}"
    # What is in capitals stands for a value; a number needs no quotes.
    is_word = value[0].islower()
    return f"{name}={value!r}" if is_word else f"{name}={value}"


def spell_hint(typed: str, python: str) -> str:
    """Return the hint for the reader of a message: a command, or what does the same in Python.

    >>> spell_hint("fedgrove compare runs/a", "fedgrove.compare('runs/a')")
    "fedgrove.compare('runs/a')"
    """
    return typed if _IS_TYPED.get() else python


LONGEST_SHOWN = 200
"""Letters of what was given that are shown."""


def shown(given: object) -> str:
    """What was given, for a sentence: an array by its type and shape, anything long cut.

    >>> shown("nope"), len(shown(list(range(1000))))
    ("'nope'", 204)
    """
    shape = getattr(given, "shape", None)
    if shape is not None:
        kind = getattr(given, "dtype", "")
        return f"a {type(given).__name__} {kind} of the shape {tuple(shape)}".replace("  ", " ")
    text = repr(given)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN].rstrip(', ')} ..."


def list_some(names: Sequence[str], most: int = 5) -> str:
    """List the first names, and count the others.

    >>> list_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    listed = ", ".join(names[:most])
    if len(names) > most:
        listed += f" and {len(names) - most} more"
    return listed


NOT_PLAIN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that steer a terminal, and surrogates, which cannot be written to a file."""


def is_plain_text(text: str) -> bool:
    """Whether a text can be printed and stored as it is; it may have tabs and line breaks.

    >>> is_plain_text("café"), is_plain_text("\\x1b[2J"), is_plain_text("\\udcff")
    (True, False, False)
    """
    return NOT_PLAIN.search(text) is None


LONGEST_SENTENCE = 1000
"""Letters of a sentence from another machine that are kept."""


def make_printable(text: str) -> str:
    """Return a text with a question mark for each character that a terminal must not get.

    Files, columns and clients may have any name, and control characters can move the cursor, hide
    what was printed, or reverse the direction of writing.

    >>> make_printable("\x1b[31mred\u202e")
    '?[31mred?'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def clean_text(text: str, most: int = LONGEST_SENTENCE) -> str:
    """Return text from another machine so that it is safe to print, log and store: one short line.

    Characters that cannot be printed, such as control characters, lone surrogates and those that
    reverse the direction of writing, become question marks.

    >>> clean_text("two\\nlines \\x1b[31m\\ud800"), clean_text("x" * 9, most=4)
    ('two lines ?[31m?', 'xxxx ...')
    """
    # Cut before anything else: the text may have megabytes. Blanks that are joined shorten it.
    start = " ".join(text[: 2 * most].split())
    cleaned = make_printable(start[:most])
    if len(start) > most or len(text) > 2 * most:
        cleaned += " ..."
    return cleaned


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, to be quoted in a sentence.

    It may quote what a file contains, so characters that cannot be printed become question marks.

    >>> first_line(ValueError("no such shape: (2, 3)\\nwhile tracing"))
    'no such shape: (2, 3)'
    >>> first_line(ValueError("no such dtype: \\x1b[31m"))
    'no such dtype: ?[31m'
    >>> first_line(ValueError())
    'no reason given'
    """
    text = str(error).strip() or "no reason given"
    return make_printable(text.splitlines()[0])


def check_has_end(name: str, path: Path) -> None:
    """Refuse a device or a pipe in place of a file: reading it may never end.

    Args:
        name: What the path was given as.
        path: The path; one that does not exist is accepted.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{name} is {path}, which is a device or a pipe; give a file.")


def not_a_run(path: Path) -> InputError:
    """The error for a path that is not a run folder."""
    if (path / "choice.json").is_file():
        page = path / "report.html"
        where = f"{page} is its report" if page.is_file() else "it is not finished"
        return InputError(
            f"{path} is not a run folder: it contains a choice between methods (fedgrove choose), "
            f"and {where}; the runs are in its folders first, second and full."
        )
    what = "has no config.toml" if path.is_dir() else "does not exist"
    return InputError(
        f"{path} is not a run folder: it {what}. "
        f"`{spell_hint('fedgrove run --out DIR', 'fedgrove.run(out=DIR)')}` creates one."
    )


__getattr__ = find_old_names(__name__)
