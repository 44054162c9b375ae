"""The project's habits: extras that are used, workflows that do what make does, one place for addresses."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import fedgrove

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
TOOLS = {"dev", "docs"}
"""Extras of tools, which make runs and nothing imports."""
CALLED = {"mkdocs-material": "mkdocs", "onnxscript": "torch's own exporter imports it"}
"""Packages that are not imported under their own name."""
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def imported() -> set[str]:
    """The top modules that any file of ours imports, at the top or within a function."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
            elif isinstance(node, ast.Call):
                found.update(imported_by_name(node))
    # torch.utils.tensorboard is tensorboard's.
    return {name.removeprefix("torch.utils.").partition(".")[0] for name in found}


def imported_by_name(call: ast.Call) -> list[str]:
    """The module of ``importlib.import_module("...")``; nothing of any other call."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "import_module":
        return []
    return [word.value for word in call.args if isinstance(word, ast.Constant)]


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - TOOLS))
def test_no_extra_brings_what_nothing_imports(extra: str) -> None:
    wanted = {name_of(each) for each in EXTRAS[extra]} - set(CALLED)
    # The package litert-torch is imported as litert_torch.
    assert {name for name in wanted if name.replace("-", "_") not in imported()} == set()


def test_every_dependency_is_imported() -> None:
    modules = {"scikit-learn": "sklearn", "torch-pruning": "torch_pruning", "tomli-w": "tomli_w"}
    names = {name_of(each) for each in PROJECT["project"]["dependencies"]}
    assert {modules.get(name, name) for name in names} - imported() == set()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_use_no_secrets_and_only_targets_of_make(path: Path) -> None:
    text = path.read_text()
    assert "secrets." not in text
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= targets
    yaml = pytest.importorskip("yaml")
    assert set(yaml.safe_load(text)["jobs"]) >= ({"test"} if path.stem == "tests" else {"build"})


def test_there_is_one_place_for_addresses() -> None:
    assert set(PROJECT["tool"]["fedgrove"]["addresses"]) == {"repository", "site", "index"}
    marked = []
    for name in ("pyproject.toml", "mkdocs.yml", "Makefile", "CITATION.cff", "README.md"):
        if "PLACEHOLDER" in (ROOT / name).read_text():
            marked.append(name)
    for path in (ROOT / ".github").rglob("*"):
        if path.is_file() and "PLACEHOLDER" in path.read_text():
            marked.append(path.name)
    assert marked == ["pyproject.toml"]


def test_the_version_is_the_same_everywhere() -> None:
    version = fedgrove.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    # As the release workflow finds it.
    source = (ROOT / "src" / "fedgrove" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [version]


def test_a_class_name_has_one_meaning() -> None:
    """Only ``State`` is shared: each method has one of its own."""
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    del homes["State"]
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
