"""What the pages say is so: code runs, commands parse, named tests and functions exist.

Links, and where pages stand in the site: tests/test_site.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

import fedgrove as fg
from fedgrove import data, engines, methods, nets
from fedgrove.cli.app import app
from fedgrove.cli.parameters import read_typed
from fedgrove.config.grid import Variant, variants
from fedgrove.config.settings import assign
from fedgrove.data.sets import SETS
from fedgrove.parts.local import LocalTraining
from fedgrove.runs.run import make_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)
FENCE = re.compile(
    r"^(?P<before>(?:<!-- (?:not run|needs): .+? -->\n)?)```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)
NOT_COMMANDS = {"--help", "--version", "--install-completion", "--show-completion"}


class Block(NamedTuple):
    kind: str
    body: str
    line: int
    skipped: bool


def is_skipped(before: str) -> bool:
    """Not run at all, or in need of a library that is not installed here."""
    needed = re.match(r"<!-- needs: (\w+) -->", before)
    if needed is not None:
        return importlib.util.find_spec(needed[1]) is None
    return bool(before)


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *kinds: str) -> list[Block]:
    text = page.read_text()
    return [
        Block(m["kind"], m["body"], text.count("\n", 0, m.start("body")), is_skipped(m["before"]))
        for m in FENCE.finditer(text)
        if m["kind"] in kinds
    ]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


EVERY = pytest.mark.parametrize("page", PAGES, ids=called)


def test_there_are_pages() -> None:
    assert {"README.md", "docs/index.md", "docs/tutorial-new-method.md"} <= {
        called(page) for page in PAGES
    }


@EVERY
def test_fences_are_closed_and_found(page: Path) -> None:
    """Else a block could hide from the tests below."""
    fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(list(FENCE.finditer(page.read_text())))


# ---- python --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The namespace of a page, in an empty working directory from which its own files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(
        sys.modules, "page", module
    )  # where dataclasses look up the types of their fields
    before = set(sys.modules)
    yield vars(module)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=called)
def test_python_runs(page: Path, place: dict[str, Any]) -> None:
    """A block that opens with ``# name.py`` is saved under that name; all others run, one after another."""
    for block in blocks(page, "python"):
        first, _, _ = block.body.partition("\n")
        if block.skipped:
            continue
        if re.fullmatch(r"# \w+\.py", first):
            Path(first[2:]).write_text(block.body)
        else:
            exec(compile("\n" * block.line + block.body, str(page), "exec"), place)


# ---- command lines -------------------------------------------------------------------------------


def lines(page: Path) -> list[str]:
    """The lines of sh blocks, and those of console blocks that begin with $."""
    found = []
    for block in blocks(page, "sh", "bash", "shell", "console"):
        for line in block.body.replace("\\\n", " ").splitlines():
            if block.kind == "console" and not line.startswith("$ "):
                continue
            found.append(line.removeprefix("$ ").strip())
    return [line for line in found if line and not line.startswith("#")]


def commands(page: Path, program: str) -> list[list[str]]:
    """The arguments of each call of a program; ``A=b`` before it sets a variable."""
    found = []
    for line in lines(page):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0] == program:
            found.append(words[1:])
    return found


FEDGROVE = [
    pytest.param(words, id=f"{called(page)}: {' '.join(words)}")
    for page in PAGES
    for words in commands(page, "fedgrove")
]


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of the words, without doing it; a word it does not know raises."""
    group: Any = typer.main.get_command(app)
    with group.make_context("fedgrove", list(words), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        with command.make_context(name, rest, parent=context) as inner:
            options = getattr(command.callback, "options", None)
            if options is not None:
                read_typed(options, name, inner.params).check()
            told = command.get_help(inner)
            flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
            assert [flag for flag in flags if not re.search(rf"{flag}\b", told)] == []
            return {"command": name, **inner.params}


@pytest.mark.parametrize("words", FEDGROVE)
def test_commands_parse_and_name_what_there_is(words: list[str]) -> None:
    if set(words) & NOT_COMMANDS:
        return
    found = parsed(words)
    known = {
        "method": methods.names(),
        "data": data.names(),
        "net": list(nets.names()),
        "engine": engines.names(),
    }
    several = found.get("methods") or []
    # `cost` and `sweep` take several; one of them is as for `run`.
    word = found.get("method") or (several[0] if len(several) == 1 else "")
    if ".py:" in word and not (ROOT / word.partition(":")[0]).is_file():
        return  # a file that the reader writes
    if ".py:" in word:
        word = str(ROOT / word)
    if found.get("config"):
        return  # the method is in a file that the reader writes
    if word:
        method = methods.make(word)  # a preset must exist too
    for key, names in known.items():
        given = found.get(key)
        if key == "method" and given and ".py:" not in given:
            given = given.partition(":")[0]
        if key == "net" and given and ".py:" not in given:
            given = given.partition(":")[0]  # a net's options follow its name
        several_given = [given] if given else []
        if key == "data" and given:
            several_given = [
                each.removesuffix(":grey").removesuffix(":turned") for each in given.split("+")
            ]
        for each in several_given:
            is_file = re.search(r"\.npz$|\.csv$|/$|\.py:\w+$", each)
            assert each in names or is_file, f"{key} {given}"
    recipe = (
        make_recipe(SETS[found["data"]].defaults) if found.get("data") in SETS else LocalTraining()
    )
    if len(several) > 1:
        # Not those in files that the reader writes.
        chosen = [Variant(name, methods.make(name)) for name in several if ".py:" not in name]
        assert variants(chosen, found.get("set") or (), recipe)
        return
    if found["command"] == "sweep":
        assert variants([Variant(word, method)], found.get("set") or (), recipe)
        return
    for text in found.get("set") or ():
        # One after another, as on the command line: a part may come first and then its fields.
        method = assign(method, text, recipe)


def test_there_are_commands_to_parse_and_a_wrong_one_does_not() -> None:
    assert len(FEDGROVE) > 8
    for words in (["run", "--no-such-flag"], ["runn"], ["run", "--rounds", "x"], ["cost"]):
        with pytest.raises(Exception, match=r"no-such|runn|whole|METHOD|method"):
            parsed(words)


@EVERY
def test_commands_in_the_text_exist(page: Path) -> None:
    known = {*typer.main.get_command(app).commands, *NOT_COMMANDS}  # type: ignore[attr-defined]
    named = re.findall(r"`fedgrove (\S+?)(?: [^`]*)?`", prose(page))
    assert [name for name in named if name not in known] == []


@EVERY
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = [words[0] for words in commands(page, "make")] + re.findall(
        r"`make ([\w-]+)", prose(page)
    )
    assert [name for name in named if name not in targets] == []


# ---- names ---------------------------------------------------------------------------------------


@EVERY
def test_files_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|lab|tests|docs|examples)/[\w./-]+)(?:::\w+)?`", prose(page))
    assert [name for name in named if "my" not in name and not (ROOT / name).exists()] == []


@EVERY
def test_named_tests_exist(page: Path) -> None:
    named = re.findall(r"`((?:lab/)?tests/[\w./]+)::(\w+)`", page.read_text())
    assert [
        n for n in named if not re.search(rf"^ *def {n[1]}\(", (ROOT / n[0]).read_text(), re.M)
    ] == []


@EVERY
def test_named_functions_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("names what there was when an entry was written")
    named = re.findall(
        r"`(fedgrove(?!\.v\d)(?:\.\w+)+)(?:\([^`]*)?`", prose(page)
    )  # fedgrove.v1 is the wire's tag
    assert [name for name in named if not resolves(name)] == []


def resolves(name: str) -> bool:
    words = name.split(".")
    for cut in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:cut]))
        except ImportError:
            continue
        for word in words[cut:]:
            # a dataclass's field without a default is no attribute of its class
            found = getattr(found, word, None) or getattr(found, "__dataclass_fields__", {}).get(
                word
            )
        return found is not None
    return False


def test_a_name_that_is_nowhere_is_noticed() -> None:
    assert resolves("fedgrove.parts.objective.Proximal")
    assert not resolves("fedgrove.parts.objective.Proximity")
    assert not resolves("fedgrove.nowhere.Proximal")


# ---- what pages list is what there is ------------------------------------------------------------


def column(page: str) -> set[str]:
    """The names in the first column of a page's tables."""
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / page).read_text(), re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_method_is_listed_and_no_other() -> None:
    assert column("docs/methods.md") == set(methods.names())
    # The README may leave the list to that page.
    assert column("README.md") in (set(), set(methods.names()))


def test_every_method_has_a_page_and_every_page_of_a_paper_its_method() -> None:
    papers = {p.stem for p in ROOT.glob("docs/papers/*.md")}
    assert papers <= set(methods.names())
    for name in methods.names():
        assert name in papers or (ROOT / f"docs/{name}.md").is_file()


def test_every_key_of_a_summary_is_explained(tmp_path: Path) -> None:
    options = {"data": "digits", "clients": 3, "cohort": 1, "rounds": 1, "finetune": (3,)}
    run = fg.run("local", **options, engine="serial").summary
    # Of the scores after fine-tuning one stands for all.
    tuned = {key for key in run if key.endswith("_after_3")} - {"accuracy_mean_after_3"}
    summary = set(run) - tuned
    files = {"config.toml", "metrics.jsonl", "checkpoint/", "models/", "summary.json"}
    files |= {"checksums.txt", "lock", "report.html"}
    # Only of methods that have them, of federations of several tasks, of nets that start from given
    # weights or have frozen ones, of private runs, where clients differ, and where training diverged.
    of_some = {
        "figures",
        "prediction",
        "purity",
        "tasks",
        "init_sha256",
        "params_frozen",
        "privacy",
        "density_clients",
        "diverged",
        "seconds_shared_by",
    }
    assert column("docs/runs.md") == summary | files | of_some


def test_no_machine_or_registry_is_named() -> None:
    for page in PAGES:
        assert not re.search(r"/home/|/tmp/|/usr/|/root", page.read_text()), called(page)
