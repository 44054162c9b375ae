"""What follows from the methods: the stub for editors, and the lists of methods in the docs.

A method's file says what the lists need at the end of its docstring::

    - Shared: what travels between server and clients.
    - A client uses: which model.
    - Bytes in the paper: a formula.
    - Secure aggregation: yes or no; why.

Its fields say what they mean in the docstrings below them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from generate import ROOT, Files, replace_block

from fedgrove import data, methods
from fedgrove.config.settings import own_fields_first
from fedgrove.data import Federation
from fedgrove.errors import InputError
from fedgrove.parts.common import CommonParts
from fedgrove.runs.memory import Memory
from fedgrove.runs.privacy import Privacy
from fedgrove.runs.run import build

STUB = ROOT / "src" / "fedgrove" / "methods" / "__init__.pyi"
DOCS = ROOT / "docs"
FACTS = ("Shared", "A client uses", "Bytes in the paper", "Secure aggregation")
COMMON = {field.name for field in dataclasses.fields(CommonParts)}


# ---- the stub ------------------------------------------------------------------------------------


def stub() -> Files:
    """``methods/__init__.pyi``: every name with its type, for editors and type checkers."""
    lines = ["# Written by tools/generate.py: do not edit.", ""]
    for name in methods.__all__:
        lines.append(f"from ._lookup import {name} as {name}")
    for name in methods.names():
        module = name.replace("-", "_")
        cls = methods.find(name).__name__
        lines.append(f"from .{module} import {cls} as {cls}")
    return {STUB: "\n".join(lines) + "\n"}


# ---- what a method's file says -------------------------------------------------------------------


class About(NamedTuple):
    """What the docstring of a method's file says of it."""

    shared: str
    used: str
    paper_bytes: str
    secure_sums: str


def about(name: str) -> About:
    """The facts in a method's docstring."""
    module = sys.modules[methods.find(name).__module__]
    docstring = inspect.getdoc(module) or ""
    facts = []
    missing = []
    for fact in FACTS:
        match = re.search(rf"^- {fact}: ((?:.|\n  )+?)\.?$(?!\n  )", docstring, re.MULTILINE)
        if match is None:
            missing.append(f"'- {fact}: ...'")
        else:
            facts.append(" ".join(match[1].split()).replace("``", "`"))
    if missing:
        file = Path(inspect.getfile(module)).name
        raise SystemExit(
            f"the docstring at the top of {file} has no line {', '.join(missing)}; "
            "src/fedgrove/methods/fedavg.py shows how it ends"
        )
    return About(*facts)


def page_of(name: str) -> Path:
    """The page of a method, from the folder of docs."""
    for path in (Path("papers") / f"{name}.md", Path(f"{name}.md")):
        if (DOCS / path).exists():
            return path
    raise SystemExit(f"{name} has no page: write docs/papers/{name}.md, as docs/papers/fedavg.md")


def field_docstrings(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for field, below in pairwise(body):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = " ".join(str(below.value.value).split())
                found[field.target.id] = text.replace("``", "`").rstrip(".")
    return found


def as_typed(value: Any) -> str:
    """A default as a user would write it: a part with the fields that can be set."""
    if dataclasses.is_dataclass(value):
        words = []
        for field in dataclasses.fields(value):
            if field.init and field.metadata.get("settable", True):
                words.append(f"{field.name}={as_typed(getattr(value, field.name))}")
        return f"{type(value).__name__}({', '.join(words)})" if words else type(value).__name__
    if isinstance(value, tuple):
        return ",".join(as_typed(item) for item in value) or "()"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def noise_can_be_added(name: str, federation: Federation) -> bool:
    """Whether a run with ``--privacy`` is accepted, on a net without running statistics."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(
                methods.make(name),
                federation,
                Memory(Path(folder)),
                net="bn-cnn2:norm=group",
                rounds=20,
                cohort=3,
                privacy=Privacy(1.0, 0.0),
            )
        except InputError as error:
            if "cannot run with privacy" not in str(error):
                raise
            return False
    return True


# ---- tables --------------------------------------------------------------------------------------


def table(header: str, rows: list[str]) -> str:
    """Rows of a Markdown table below a header of the same form."""
    line = "|".join("---" for _ in header.split("|")[1:-1])
    return "\n".join([header, f"|{line}|", *rows])


def methods_table(docs: str = "") -> str:
    """Every method with its page, what it shares and what a client uses."""
    rows = []
    for name in methods.names():
        facts = about(name)
        rows.append(f"| [`{name}`]({docs}{page_of(name)}) | {facts.shared} | {facts.used} |")
    return table("| method | what is shared | what a client uses |", rows)


def bytes_table() -> str:
    """Every method with its class and the formula of its paper."""
    rows = []
    for name in methods.names():
        cls = methods.find(name).__name__
        rows.append(f"| `{name}` | `fedgrove.methods.{cls}` | {about(name).paper_bytes} |")
    return table("| method | class | `bytes_paper` |", rows)


def settings_table() -> str:
    """Every field that a method has besides those that all have."""
    rows = []
    for name in methods.names():
        method = methods.make(name)
        meanings = field_docstrings(type(method))
        for field in own_fields_first(type(method)):
            is_settable = field.init and field.metadata.get("settable", True)
            if field.name in COMMON or not is_settable:
                continue
            if field.name not in meanings:
                raise SystemExit(
                    f"{name} has a field '{field.name}' without a docstring below it, which says "
                    "in the docs what it means"
                )
            meaning = meanings[field.name].replace("|", "\\|")
            default = as_typed(getattr(method, field.name))
            rows.append(f"| `{name}` | `{field.name}` | {meaning} | `{default}` |")
    return table("| method | field | meaning | default |", rows)


def privacy_table() -> str:
    """Which methods can run with noise at the client, and which could under secure aggregation."""
    federation = data.load("digits", clients=4)
    rows = []
    for name in methods.names():
        sums, _, why = about(name).secure_sums.partition("; ")
        noise = "yes" if noise_can_be_added(name, federation) else "no"
        rows.append(f"| `{name}` | {noise} | {sums} | {why} |")
    return table("| method | noise at the client | secure aggregation | why |", rows)


def papers_menu() -> str:
    """The pages of methods as entries of mkdocs.yml."""
    entries = {}
    for path in sorted((DOCS / "papers").glob("*.md")):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        entries[title.lower()] = f'      - "{title}": papers/{path.name}'
    return "\n".join(entries[title] for title in sorted(entries))


# ---- pages ---------------------------------------------------------------------------------------


def pages() -> Files:
    """The docs pages, and the menu of the site, with their lists of methods."""
    blocks: dict[Path, Mapping[str, str]] = {
        DOCS / "methods.md": {
            "methods": methods_table(),
            "bytes": bytes_table(),
            "settings": settings_table(),
        },
        DOCS / "privacy.md": {"privacy": privacy_table()},
        ROOT / "mkdocs.yml": {"papers": papers_menu()},
    }
    readme = ROOT / "README.md"
    # The list is there only if the page has room for it.
    if "<!-- begin methods:" in readme.read_text():
        blocks[readme] = {"methods": methods_table("docs/")}
    files = {}
    for path, by_name in blocks.items():
        text = path.read_text()
        for name, block in by_name.items():
            text = replace_block(text, name, block)
        files[path] = text
    return files
