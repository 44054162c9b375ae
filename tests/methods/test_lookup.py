"""How methods are found: lazily, by their protocol; a broken file breaks only itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedgrove
from fedgrove import methods

PACKAGE = Path(fedgrove.__file__).parent
BROKEN = {
    "syntax": ("def (", "cannot be imported, SyntaxError: invalid syntax"),
    "missing_import": ("import not_there", "cannot be imported, ModuleNotFoundError: No module"),
    "raises": ("raise RuntimeError('oh')", "cannot be imported, RuntimeError: oh."),
    "exits": ("raise SystemExit(3)", "cannot be imported, SystemExit: 3."),
    "empty": ("", "defines no method; a method is a frozen dataclass with the functions init,"),
    "no_fold": (
        "from dataclasses import dataclass\n"
        "from .fedavg import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class NoFold(FedAvg):\n"
        "    fold = None\n",
        "NoFold in ",
    ),
    "never_folds": (
        "from dataclasses import dataclass\n"
        "from ..parts.common import CommonParts\n"
        "@dataclass(frozen=True)\n"
        "class NeverFolds(CommonParts):\n"
        "    def init(self, setup): ...\n"
        "    def deliver(self, state, client): ...\n"
        "    def plan(self, state, cohort): ...\n"
        "    def work(self, verb): ...\n",
        "has no fold; a method has the functions init,",
    ),
    "no_codec": (
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class NoCodec:\n"
        "    local: None = None\n"
        "    init = deliver = plan = fold = work = lambda self: None\n",
        "has no field 'codec'; write in the class: codec: Codec = Dense()",
    ),
    "no_default": (
        "from dataclasses import dataclass\n"
        "from .fedavg import FedAvg\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class NoDefault(FedAvg):\n"
        "    beta: float\n",
        "has no default for beta; give every field one.",
    ),
    "wrong_default": (
        "from dataclasses import dataclass\n"
        "from .fedavg import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class WrongDefault(FedAvg):\n"
        "    def __post_init__(self): raise ValueError('beta is 2.')\n",
        "cannot be made with its defaults, ValueError: beta is 2.",
    ),
    "wrong_presets": (
        "from dataclasses import dataclass\n"
        "from .fedavg import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class WrongPresets(FedAvg): pass\n"
        "PRESETS = 5\n",
        "it must be a dictionary of methods by name.",
    ),
}
GOOD = """
from dataclasses import dataclass
from .fedavg import FedAvg

@dataclass(frozen=True)
class Better(FedAvg):
    '''A method without paper_bytes is a method, and so is one with an annotation that is wrong.'''

    paper_bytes = None
    beta: "dataclass.nothing" = 1
"""


def python(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, with the package of this folder."""
    environment = {**os.environ, "PYTHONPATH": str(source), "XDG_CACHE_HOME": str(source / "cache")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with files of methods that are broken, and one that is not."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, source / "fedgrove", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (text, _) in BROKEN.items():
        (source / "fedgrove" / "methods" / f"{name}.py").write_text(text)
    (source / "fedgrove" / "methods" / "better.py").write_text(GOOD)
    # A method that works, with a file that it does not import and that is broken.
    folder = source / "fedgrove" / "methods" / "split"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        GOOD.replace("Better", "Split").replace(".fedavg", "..fedavg")
    )
    (folder / "rest.py").write_text("def (")
    return source


def test_broken_files_are_listed_with_a_reason_and_all_others_as_ever(copy: Path) -> None:
    listed = python(copy, "-m", "fedgrove", "list", "methods")
    assert listed.returncode == 0, listed.stderr
    told = " ".join(listed.stdout.split())
    # A line may end within a name, at its hyphen.
    packed = told.replace(" ", "")
    for name, (_, reason) in BROKEN.items():
        called = name.replace("_", "-")
        assert f"method'{called}'isbroken:" in packed
        assert f"{name}.py" in packed
        assert reason.replace(" ", "") in packed
    for name in [*methods.names(), "better", "split"]:
        assert f" {name} " in f" {told} "


def test_other_methods_run_and_a_broken_one_says_why(copy: Path) -> None:
    code = (
        "import fedgrove as fg\nwords = dict(data='digits', clients=3, cohort=2, rounds=1, "
        "engine='serial', progress=False)\nassert fg.run('fedavg', **words).summary['method'] == "
        "'fedavg'\nbetter = fg.run('better', **words).summary\nassert better['method'] == "
        "'better'\nassert fg.methods.Better().local is None\nassert 'Better' in "
        "dir(fg.methods)\nfor name in ('syntax', 'no-fold'):\n    try:\n        fg.run(name, "
        "**words)\n    except fg.InputError as error:\n        print(error)\n"
    )
    ran = python(copy, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert "method 'syntax' is broken: " in ran.stdout
    assert "NoFold in " in ran.stdout
    assert (
        "has no fold; a method has the functions init, deliver, plan, fold and work" in ran.stdout
    )


def test_parts_are_still_found_by_name(copy: Path) -> None:
    """For a part of another method all files are imported, the broken ones too."""
    options = ["--data", "digits", "--set", "mean=Nothing", "--dry-run"]
    ran = python(copy, "-m", "fedgrove", "run", "fedavg", *options)
    assert ran.returncode == 2, ran.stderr
    assert "mean is 'Nothing'; it must be one of WeightedMean, Median," in ran.stderr


def test_only_what_is_needed_is_imported_and_the_folder_is_listed_once() -> None:
    code = (
        "import pkgutil, sys\nlisted = []\noriginal = pkgutil.iter_modules\ndef counted(path=None, "
        "prefix=''):\n    listed.append(str(path))\n    return original(path, "
        "prefix)\npkgutil.iter_modules = counted\nimport fedgrove as fg\nfg.run('ditto', "
        "data='digits', clients=3, cohort=2, rounds=1, engine='serial', "
        "progress=False)\nfg.methods.names()\nhomes = {name.split('.')[2] for name in sys.modules "
        "if name.startswith('fedgrove.methods.')}\nprint(sum('fedgrove/methods' in path for path "
        "in listed), *sorted(homes))\n"
    )
    ran = python(PACKAGE.parent, "-c", code)
    assert ran.returncode == 0, ran.stderr
    count, *homes = ran.stdout.split()
    assert count == "1"
    assert set(homes) <= {"_lookup", "ditto", "fedavg", "local"}


def test_classes_are_attributes() -> None:
    assert methods.LGFedAvg is methods.find("lg-fedavg")
    assert methods.find_class("CAAFP") is methods.CAAFP
    assert {"Ditto", "Grove", "find", "make"} <= set(dir(methods))
    with pytest.raises(AttributeError, match="has no attribute 'Dito'"):
        _ = methods.Dito
    with pytest.raises(AttributeError, match="has no attribute 'ditto_'"):
        _ = methods.ditto_
