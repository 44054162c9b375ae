"""Exports that are refused and leave nothing behind; the command line; ExecuTorch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import list_again
from tests.export.made import (
    NETS,
    finished,
    of,
    prune,
    with_executorch,
    with_onnx,
)
from torch import Tensor, nn

import fedgrove as fg
from fedgrove import nets
from fedgrove.cli import main
from fedgrove.errors import EngineError, FedgroveError, InputError
from fedgrove.export import executorch as executorch_files
from fedgrove.export import onnx as onnx_files
from fedgrove.export.figures import Exported
from fedgrove.nets import Net
from fedgrove.runs.memory import read_tree, write_tree

# ---- what is refused leaves nothing behind -------------------------------------------------------


def spoil(path: Path) -> None:
    (path / "models" / "client-00000.safetensors").write_bytes(b"nothing")


BAD: dict[str, tuple[dict[str, Any], Callable[[Path], object], str]] = {
    "client": ({"client": 6}, lambda path: None, r"no client 6 .* 0 to 2"),
    "negative": ({"client": -1}, lambda path: None, r"no client -1"),
    "format": ({"to": "onxn"}, lambda path: None, r"no format 'onxn'; did you mean 'onnx'"),
    "unfinished": (
        {},
        lambda path: (path / "summary.json").unlink(),
        r"not finished.*fedgrove\.resume\(",
    ),
    "no run": ({}, lambda path: (path / "config.toml").unlink(), r"not a run folder"),
    "no models": ({}, lambda path: shutil.rmtree(path / "models"), r"no models/index.json"),
    "spoilt": ({}, spoil, r"client-00000.safetensors does not match .*checksums\.txt"),
}


@with_onnx
@pytest.mark.parametrize("case", BAD)
def test_refusals_are_sentences(case: str, digits: Path, tmp_path: Path) -> None:
    arguments, change, message = BAD[case]
    path = tmp_path / "run"
    shutil.copytree(digits, path, ignore=shutil.ignore_patterns("export"))
    change(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        fg.export_model(path, **{"client": 0, "out": tmp_path / "deep" / "out"} | arguments)
    assert sorted(tmp_path.rglob("*")) == before


@with_onnx
def test_a_model_of_another_net_is_refused(digits: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(digits, path, ignore=shutil.ignore_patterns("export"))
    tree = read_tree(path / "models" / "client-00000.safetensors")
    write_tree(path / "models" / "client-00000.safetensors", {**tree, "head.bias": torch.zeros(7)})
    list_again(path)
    with pytest.raises(InputError, match=r"'head.bias' .* is \(7,\); it must be \(10,\)"):
        fg.export_model(path, client=0)
    assert not (path / "export").exists()


@with_onnx
def test_a_file_that_is_there_is_not_touched(digits: Path, everyone: dict[int, Exported]) -> None:
    before = {p.name: p.read_bytes() for p in (digits / "export").iterdir()}
    with pytest.raises(InputError, match="never overwritten"):
        fg.export_model(digits, client=0)
    assert {p.name: p.read_bytes() for p in (digits / "export").iterdir()} == before


@with_onnx
def test_a_folder_that_cannot_be_made(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    with pytest.raises(InputError, match="cannot be written to"):
        fg.export_model(digits, client=0, out=tmp_path / "file" / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


class TwoFaced(nn.Module):
    """Gives other numbers when it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits + 0.01 if torch.compiler.is_exporting() else logits


class Undecided(TwoFaced):
    """Branches on its data, which no exporter can follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else self.head(-x)


@with_onnx
@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        (TwoFaced, EngineError, "from torch's.*nothing was written"),
        (Undecided, InputError, "could not be written"),
    ],
)
def test_a_file_that_disagrees_with_torch_is_not_written(
    module: type[nn.Module], kind: type[FedgroveError], message: str, tmp_path: Path
) -> None:
    run = finished(tmp_path, module(), (12,))
    with pytest.raises(kind, match=message):
        fg.export_model(run, client=0, net=module())
    assert not (run.path / "export").exists()


@pytest.mark.parametrize(("files", "extra"), [(onnx_files, "export"), (executorch_files, "edge")])
def test_a_missing_package_names_the_extra(
    files: Any, extra: str, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "NEEDS", ("no_such_package",))
    to = {"export": "onnx", "edge": "executorch"}[extra]
    with pytest.raises(InputError, match=rf"no_such_package.*pip install 'fedgrove\[{extra}\]'"):
        fg.export_model(digits, client=0, to=to)


# ---- the command line ----------------------------------------------------------------------------


@with_onnx
def test_the_command_prints_a_table_or_json(
    digits: Path, everyone: dict[int, Exported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(digits), "--client", "1", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("dense", "shrunk", "accuracy", "client-00001.onnx.md"):
        assert word in shown
    entry = json.loads(json.dumps(everyone[1].json()))
    assert [row["version"] for row in entry["rows"]] == ["dense", "shrunk", "int8"]
    assert entry["difference"] <= 1e-5
    assert main(["export", str(digits), "--client", "9", "--json"]) == 2
    assert "no client 9" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--client", "1", "--all"]])
def test_one_client_or_all(
    words: list[str], digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(digits), *words]) == 2
    assert "--client K" in capsys.readouterr().err


# ---- ExecuTorch ----------------------------------------------------------------------------------


@with_executorch
@pytest.mark.filterwarnings("ignore")  # of packages that ExecuTorch imports
@pytest.mark.parametrize(
    "name", ["bn-cnn2", *(pytest.param(n, marks=pytest.mark.slow) for n in NETS if n != "bn-cnn2")]
)
def test_executorch_agrees_too(name: str, tmp_path: Path) -> None:
    run = finished(tmp_path, name, NETS[name])
    prune(run, Net(nets.build(name, NETS[name], 3, 0), NETS[name]))
    made = fg.export_model(run, client=0, to="executorch", int8=True)
    rows = of(made)
    assert made.difference <= 1e-5
    assert rows["int8"].bytes < rows["shrunk"].bytes < rows["dense"].bytes
    text = (made.folder / made.card).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(code.replace("client-00000.pte", str(made.folder / "client-00000.pte")), {})
