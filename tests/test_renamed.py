"""Old names work, and say what they are called now."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys

import pytest

import fedgrove
from fedgrove import core, renamed
from fedgrove.config.settings import assign
from fedgrove.parts.group import Agglomerative

MODULES = renamed.read_tables()["modules"]
NAMES = renamed.read_tables()["names"]
FIELDS = renamed.read_tables()["fields"]


@pytest.mark.parametrize("old", sorted(MODULES))
def test_modules_are_found_under_their_old_names(old: str) -> None:
    sys.modules.pop(old, None)
    homes = MODULES[old]
    if isinstance(homes, str):
        homes = (homes,)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {' and '.join(homes)}"):
        module = importlib.import_module(old)
    for new in homes:
        there = importlib.import_module(new)
        public = [name for name in vars(there) if not name.startswith("_")]
        assert public
        for name in public:
            assert getattr(module, name) is not None
            if vars(there)[name] is getattr(module, name):
                continue
            # What two modules import by the same name comes from the first.
            assert len(homes) > 1
        # The module keeps its own name: what it defines can still be pickled.
        assert there.__spec__ is not None
        assert there.__spec__.name == new
    with pytest.raises(AttributeError, match=f"{old}' has no attribute 'nothing'"):
        _ = module.nothing
    sys.modules.pop(old, None)


@pytest.mark.parametrize(
    ("module", "old"), [(module, old) for module, names in NAMES.items() for old in names]
)
def test_old_names_in_a_module(module: str, old: str) -> None:
    there = importlib.import_module(module)
    home, _, new = NAMES[module][old].rpartition(".")
    home = home or module
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {home}.{new}") as seen:
        assert getattr(there, old) is getattr(importlib.import_module(home), new)
    # Python shows it only at a line of the user's own program.
    assert [each.filename for each in seen] == [__file__]


def test_old_names_of_parts_in_settings() -> None:
    method = fedgrove.methods.make("ca-afp")
    assert assign(method, "grouping=AverageLinkage").grouping == Agglomerative()


def test_old_names_of_the_package() -> None:
    with pytest.warns(DeprecationWarning, match="fedgrove.core.Info is now"):
        assert fedgrove.Info is core.ClientInfo
    with pytest.raises(AttributeError, match="no attribute 'Infos'"):
        _ = fedgrove.Infos


@pytest.mark.parametrize(
    ("home", "old"), [(home, old) for home, fields in FIELDS.items() for old in fields]
)
def test_old_fields_of_methods_and_parts(home: str, old: str) -> None:
    module, _, name = home.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    entry = FIELDS[home][old]
    assert renamed.find_new_field(cls, old) == entry["name"]
    assert entry["name"] in {field.name for field in dataclasses.fields(cls)}
    assert old not in {field.name for field in dataclasses.fields(cls)}
    for value, new in entry["values"].items():
        with pytest.warns(DeprecationWarning, match=f"{name}.{old} = {value} is now"):
            assert renamed.rename_field(cls, old, value) == (entry["name"], new)
    assert renamed.find_new_field(core.Give, old) is None


def test_an_old_argument() -> None:
    with pytest.warns(DeprecationWarning, match="holds= of Give is now expected="):
        give = core.Give(lambda carry, client: core.Outcome(), holds=core.expected_no_packets)
    assert give.expected is core.expected_no_packets


def test_the_tables_are_not_read_before_an_old_name_is_used() -> None:
    # Modules that are missing everywhere are looked for too, as org.python by the module copy.
    code = """
import importlib.util
import fedgrove
from fedgrove import renamed
from fedgrove.errors import InputError
fedgrove.WireError
assert importlib.util.find_spec("no_such_module") is None
assert renamed.read_tables.cache_info().misses == 0
fedgrove.Info
assert renamed.read_tables.cache_info().misses == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
