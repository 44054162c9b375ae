"""The house: packages import in one direction, and docs/architecture.md has the whole map."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedgrove"


# ---- the map in docs/architecture.md -------------------------------------------------------------


def read_map() -> list[str]:
    """The rooms from the ground floor up; a module of the top folder is a room of its own."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"## Where things are\n.*?```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return [line.split()[0].removesuffix("/").removesuffix(".py") for line in block[1].splitlines()]


def test_the_map_is_complete() -> None:
    expected = set()
    for path in PACKAGE.iterdir():
        is_module = path.suffix == ".py" and path.name not in ("__init__.py", "__main__.py")
        if is_module or (path / "__init__.py").exists():
            expected.add(path.stem)
    assert sorted(read_map()) == sorted(expected)


# ---- imports -------------------------------------------------------------------------------------


def imports(path: Path) -> Iterator[str]:
    """The fedgrove modules that a file imports, lazy imports too, those for type checkers not."""
    tree = ast.parse(path.read_text())
    for_type_checkers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in node.body:
                for_type_checkers.update(id(n) for n in ast.walk(inner))
    package = ["fedgrove", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if id(node) in for_type_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # A module by name: only our own, written out, can be placed.
            literal = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            yield str(literal)


def room_of(module: str) -> str | None:
    """The room of a dotted name; None for other packages, and for fedgrove's own lazy names."""
    parts = module.split(".")
    if parts[0] != "fedgrove" or len(parts) < 2:
        return None
    is_room = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
    return parts[1] if is_room else None


FLOORS = read_map()


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_down(path: Path) -> None:
    """A file imports from its own room and from rooms before it on the map: so there is no cycle."""
    parts = path.relative_to(PACKAGE).parts
    if parts == ("__init__.py",):
        pytest.skip("imports its names on first use, by string")
    if parts == ("__main__.py",):
        pytest.skip("is the command line, for python -m")
    room = parts[0].removesuffix(".py")
    allowed = FLOORS[: FLOORS.index(room) + 1]
    rooms = {room_of(module) for module in imports(path)} - {None}
    assert rooms <= set(allowed), (
        f"{room} imports {sorted(rooms - set(allowed))}, which come later on the map"
    )


def test_the_top_folder_is_the_entrance_only() -> None:
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert files == {
        "__init__.py",
        "__main__.py",
        "api.py",
        "core.py",
        "errors.py",
        "estimator.py",
        "metrics.py",
        "notebook.py",
        "problems.py",
        "renamed.py",
        "seeds.py",
        "trees.py",
        "gpu_copies.py",
    }


def test_the_lab_is_imported_by_its_own_tests_and_one_place_only() -> None:
    # The product is installed and tested without the lab.
    importing = []
    for folder in (PACKAGE, ROOT / "tests"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                if any(name.split(".")[0] == "fedgrove_lab" for name in names):
                    importing.append(path.relative_to(ROOT).as_posix())
    assert importing == ["src/fedgrove/cli/app.py"]
