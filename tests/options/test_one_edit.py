"""Adding an option is one edit in fedgrove/options/groups.py, in every group but those of data.

Options of data are arguments of ``fedgrove.data.load`` too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "fedgrove"
CLASS = re.compile(r'class (\w+Options?)(?:\(\w+\))?:\n    """.*?"""\n(?=\n)', re.DOTALL)
PROGRAM = """
import inspect, json, sys
import fedgrove as fg

probes = {name: number for number, name in enumerate(json.loads(sys.argv[1]))}


def probes_of(function):
    taken = inspect.signature(function).parameters
    return {name: value for name, value in probes.items() if name in taken}


words = dict(data="digits", clients=3, cohort=2, rounds=1)
fg.run("fedavg", **words, engine="serial", progress=False, out="run", **probes_of(fg.run))
fg.sweep(["fedavg"], **words, engine="serial", progress=False, out="sweep", **probes_of(fg.sweep))
fg.cost("fedavg", **words, **probes_of(fg.cost))
fg.choose(methods=["local", "fedavg"], **words, dry_run=True, **probes_of(fg.choose))
print(json.dumps(sorted(probes_of(fg.run))))
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the package with a new option in every group, and the text of each group."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, source / "fedgrove", ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "fedgrove" / "options" / "groups.py"
    text = file.read_text()
    docstrings = {}
    for match in reversed(list(CLASS.finditer(text))):
        if "an argument of :func:`fedgrove.data.load` too" in match[0]:
            continue
        name = f"probe_{match[1].lower()}"
        docstrings[name] = match[0]
        field = f'    {name}: int | None = option(None, "A probe.", "N")\n'
        # At the end of the class: Python takes what is before KW_ONLY by position.
        end = re.compile(r"\n(?=\n\n)").search(text, match.end())
        position = len(text) if end is None else end.end()
        text = text[:position] + field + text[position:]
    file.write_text(text)
    return source, docstrings


def test_an_option_in_any_group_works_everywhere_and_in_config_toml(
    groups: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    source, docstrings = groups
    assert len(docstrings) > 12
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(sorted(docstrings))]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    of_runs = json.loads(ran.stdout.splitlines()[-1])
    assert len(of_runs) > 10
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["run"]
    for name in of_runs:
        is_left_out = "Not written to config.toml" in docstrings[name]
        assert (name in written) is not is_left_out, name
