"""list, show, doctor, help."""

import tomllib
from pathlib import Path

import pytest

from fedgrove import __version__, data, methods, nets
from fedgrove.cli import catalogue, main
from fedgrove.config.settings import Draft, hints
from fedgrove.options.definition import members
from fedgrove.parts.local import LocalTraining

ROOT = Path(__file__).parents[2]


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", methods.names()),
        ("data", data.names()),
        ("nets", nets.names()),
        ("engines", ["auto", "batched", "pool", "serial"]),
        ("parts", ["objective", "local", "optimiser", "codec"]),
    ],
)
def test_list_names_everything(
    kind: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, "list", kind).splitlines()
    assert set(names) <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 1 for line in lines)


PRESETS = [f"{name}:{preset}" for name in methods.names() for preset in methods.presets(name)]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_listed_in_words_that_set_takes(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed one after the other, the words make the preset of the method."""
    # A long row is folded: whatever stands up to the next name belongs to it.
    after = said(capsys, "list", "methods").split(f"\n{preset} ")[1]
    base = preset.partition(":")[0]
    row = []
    for word in after.partition(" with ")[2].split():
        if "=" not in word:
            break
        row.append(word)
    draft = Draft(methods.make(base))
    for word in row:
        draft = draft.assign(word)
    assert draft.checked() == methods.make(preset)


def test_list_parts_says_what_each_field_takes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = dict(line.split(maxsplit=1) for line in said(capsys, "list", "parts").splitlines())
    optimisers = [cls.__name__ for cls in members(hints(LocalTraining)["optimiser"])]
    assert rows["optimiser"].strip() == ", ".join(optimisers)
    assert "Encoded" not in rows["codec"]


def test_show_prints_equations_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "show", "ditto")
    assert "mu/2 |v - w|^2" in out
    rows = dict(
        line.split(maxsplit=1) for line in out.splitlines() if line.startswith(("pull.", "local."))
    )
    assert rows["pull.mu"].strip() == "0.1  (a number)"
    assert rows["local.epochs"].strip() == "5  (a whole number)"
    assert "local.batch" in rows
    assert "32  (a whole number)" in said(capsys, "show", "fedavg", "--data", "uci-har")


def test_doctor_says_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mnist.npz").touch()
    out = said(capsys, "doctor", "--data-dir", str(tmp_path))
    rows = dict(line.rstrip().split("  ", maxsplit=1) for line in out.splitlines())
    assert rows["data mnist"].strip() == "available"
    assert rows["data uci-har"].strip().startswith("not found; get it from https://")
    # Its variants come from the same address.
    assert out.count("data emnist") == 1
    assert rows["test run"].strip().startswith("works: ")
    assert "extra export" in rows
    monkeypatch.setenv("FEDGROVE_DATA", str(tmp_path / "nowhere"))
    assert "which is not a folder" in said(capsys, "doctor")


def test_help_describes_arguments_once_and_cuts_no_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = said(capsys, "--help").partition("Commands:")[2]
    assert "..." not in listed
    assert "..." not in said(capsys, "bench", "--help").partition("Commands:")[2]
    for command, sentence in (("list", "What to list."), ("new", "The folder to create.")):
        out = said(capsys, command, "--help")
        assert out.lower().count("arguments:") == 1
        assert sentence in out


def test_help_names_the_commands_and_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["--help"]):
        out = said(capsys, *args)
        assert all(
            f"  {name} " in out
            for name in ("run", "resume", "compare", "cost", "list", "show", "doctor")
        )
    out = said(capsys, "run", "--help")
    words = "data net partition scenario split clients cohort rounds epochs batch lr finetune profile seed engine"
    assert all(
        f"--{word} " in out
        for word in [*words.split(), "device", "out", "set", "dry-run", "json", "data-dir"]
    )
    assert said(capsys, "--version").strip() == __version__


def test_doctor_names_only_extras_that_there_are_and_are_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    source = "".join(
        path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "catalogue.py"
    )
    for name, (_, modules) in catalogue.EXTRAS.items():
        # Packages have hyphens where modules have underscores.
        brought = " ".join(extras[name]).replace("-", "_")
        for module in modules:
            assert module in brought
            assert (
                f"import {module}" in source
                or f"from {module}" in source
                or f"from torch.utils.{module}" in source
                or f'import_module("{module}.' in source
                or module == "onnxscript"
            )


def test_nothing_is_suggested_that_is_not_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict"]) == 2
    assert "did you mean" not in capsys.readouterr().err
