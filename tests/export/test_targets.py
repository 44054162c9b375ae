"""Models of numbers, labels and several tasks as files: they agree with the model of the run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.export.made import of, predicted, with_executorch, with_onnx
from torch import Tensor

import fedgrove as fg
from fedgrove.errors import InputError
from fedgrove.export import executorch as executorch_files
from fedgrove.export import litert as litert_files
from fedgrove.export.formats import FORMATS
from fedgrove.export.make import open_subject
from fedgrove.export.source import Outputs, opened
from fedgrove.problems import Unit, numbers
from fedgrove.runs.result import Result

with_litert = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in litert_files.NEEDS),
    reason="pip install 'fedgrove[litert]'",
)


def finished(data: str, folder: Path, **more: Any) -> Result:
    words: dict[str, Any] = {"clients": 3, "cohort": 3, "rounds": 1, "engine": "serial", **more}
    return fg.run("fedavg", data=data, out=folder, progress=False, **words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("runs")
    names = ("rooms", "tags", "diabetes", "motion-forecast")
    return {name: finished(name, folder / name) for name in names}


def raw_test(result: Result, client: int) -> Tensor:
    """The test inputs of a client as they were recorded."""
    return open_subject(opened(result), client, False, 1).inputs["test"]


@with_onnx
@pytest.mark.parametrize("name", ["rooms", "diabetes", "motion-forecast"])
def test_numbers_are_in_the_units_of_the_targets(name: str, runs: dict[str, Result]) -> None:
    """As ``predict`` gives them: degrees, not deviations from the mean."""
    result = runs[name]
    made = fg.export_model(result, client=1, int8=True)
    raw = raw_test(result, 1)
    wanted = np.asarray(result.model(1).predict(raw)).reshape(len(raw), -1)
    values = predicted(made.folder / made.file, raw).numpy()
    assert np.allclose(values, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    metric = result.summary["metric"]
    assert made.metric == metric
    assert of(made)["shrunk"].score == pytest.approx(result.summary[f"{metric}_clients"]["1"], 1e-4)
    assert made.same_int8 is None
    # int8 stays near: a few hundredths of the error that the model has.
    assert made.int8_gap is not None
    assert 0 < made.int8_gap < 0.1 * np.abs(wanted - wanted.mean()).max()
    text = (made.folder / made.card).read_text()
    assert f"| {metric} | int8 % |" in text
    assert "lower is better" in text
    assert "`values`: float32" in text
    assert "the same class" not in text
    assert f"0 = {opened(result).federation.labels[0]}" in text


@with_onnx
def test_a_forecast_of_standardised_inputs_is_standardised(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    result = runs["motion-forecast"]
    inside = fg.export_model(result, client=0, out=tmp_path / "inside")
    outside = fg.export_model(result, client=0, out=tmp_path / "outside", standardised=True)
    raw = raw_test(result, 0)
    seen = open_subject(opened(result), 0, True, 1).inputs["test"]
    recorded = predicted(inside.folder / inside.file, raw).reshape(len(raw), 3, 8)
    standardised = predicted(outside.folder / outside.file, seen).reshape(len(raw), 3, 8)
    own = opened(result).preparation(0)
    assert own.mean is not None
    assert own.std is not None
    mean = torch.tensor(own.mean).reshape(1, 3, 1)
    deviation = torch.tensor(own.std).reshape(1, 3, 1)
    assert torch.allclose(recorded, standardised * deviation + mean, atol=1e-4)
    assert "in the units of the recordings" in (inside.folder / inside.card).read_text()
    assert "standardised as the inputs are" in (outside.folder / outside.card).read_text()


@with_onnx
def test_labels_have_a_threshold(
    runs: dict[str, Result], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = runs["tags"]
    made = fg.export_model(result, client=2, int8=True)
    raw = raw_test(result, 2)
    logits = predicted(made.folder / made.file, raw)
    assert np.array_equal((logits > 0).long().numpy(), result.model(2).predict(raw))
    assert made.metric == "f1"
    assert made.score_torch == pytest.approx(result.summary["f1_clients"]["2"])
    assert made.same_int8 is not None
    assert made.same_int8 > 0.9
    text = (made.folder / made.card).read_text()
    assert "a label is predicted where its logit is above 0" in text
    assert "of the labels of all this client's examples" in text
    monkeypatch.chdir(made.folder)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(code, {})
    assert capsys.readouterr().out.startswith("[")


@with_onnx
def test_the_metadata_name_channels_and_outputs(runs: dict[str, Result], tmp_path: Path) -> None:
    import onnx

    def read(path: Path) -> dict[str, str]:
        return {prop.key: prop.value for prop in onnx.load(str(path)).metadata_props}

    made = fg.export_model(runs["tags"], client=0, out=tmp_path)
    found = read(made.folder / made.file)
    assert json.loads(found["labels"]) == ["red", "round", "soft", "sweet", "fresh"]
    assert (found["predicts"], found["output"]) == ("labels", "logits")
    assert "channels" not in found

    folder = tmp_path / "users"
    folder.mkdir()
    for name in ("anna", "bo"):
        rows = [f"{0.1 * i},{i % 7},{-i},{'walk' if i < 40 else 'sit'}" for i in range(80)]
        (folder / f"{name}.csv").write_text("\n".join(["time,ax,ay,activity", *rows]))
    words: dict[str, Any] = {"label": "activity", "time": "time", "window": 8, "rounds": 1}
    result = fg.run("fedavg", data=str(folder), out=tmp_path / "run", engine="serial", **words)
    anna = fg.export_model(result, client="anna", int8=True)
    # Files are named by the client.
    names = ["anna.int8.onnx", "anna.onnx", "anna.onnx.md"]
    assert sorted(path.name for path in anna.folder.iterdir()) == names
    for name in names[:2]:
        found = read(anna.folder / name)
        assert json.loads(found["channels"]) == ["ax", "ay"]
        assert json.loads(found["classes"]) == ["sit", "walk"]
        assert found["name"] == "anna"


@with_onnx
def test_tasks_of_a_mixed_federation_have_their_own_outputs(tmp_path: Path) -> None:
    rooms = fg.load("rooms", clients=2)
    tags = fg.load("tags", clients=2)
    mixed = fg.data.mix({"rooms": rooms, "tags": tags})
    result = fg.run("fedavg", data=mixed, rounds=1, engine="serial", out=tmp_path / "run")
    for client, (outputs, metric) in {0: (1, "mae"), 2: (5, "f1")}.items():
        made = fg.export_model(result, client=client)
        out = predicted(made.folder / made.file, raw_test(result, client))
        assert out.shape[1] == outputs
        assert made.metric == metric
        assert made.score_torch == pytest.approx(
            result.summary["metric_clients"][str(client)], 1e-4
        )
        assert not any("changed" in note for note in made.notes)


def test_what_float32_cannot_express_is_allowed() -> None:
    """Years near 2024 have steps of 1.2e-4: of a deviation of .5 these are 2.4e-4."""
    problem = numbers(Unit((2024.0,), (0.5,)))
    scale = torch.tensor([0.5], dtype=torch.float64)
    shift = torch.tensor([2024.0], dtype=torch.float64)
    meant = Outputs(problem, ("year",), 0, scale, shift)
    outputs = torch.tensor([[0.3], [-0.9]])
    right = (outputs.double() * 0.5 + 2024).float()
    difference, allowed = meant.difference(right, outputs)
    assert 1e-5 < difference <= allowed < 1e-3
    # A hundredth of a year is a wrong answer.
    difference, allowed = meant.difference(right + 0.01, outputs)
    assert difference == pytest.approx(0.02, rel=0.02)
    assert difference > allowed
    # Tiny units: an error of a whole deviation is small only in absolute terms.
    tiny = Outputs(problem, ("tiny",), 0, 1e-7 * scale / scale, 0 * shift)
    assert tiny.difference(torch.tensor([[2e-7]]), torch.tensor([[1.0]]))[0] == pytest.approx(1)


@pytest.mark.parametrize(
    "to",
    [pytest.param("executorch", marks=with_executorch), pytest.param("litert", marks=with_litert)],
)
@pytest.mark.filterwarnings("ignore")  # of packages that the exporters import
def test_other_formats_of_numbers_and_labels(
    to: str, runs: dict[str, Result], tmp_path: Path
) -> None:
    for name in ("rooms", "tags"):
        made = fg.export_model(runs[name], client=0, to=to, int8=True, out=tmp_path / name)
        raw = raw_test(runs[name], 0)
        wanted = np.asarray(runs[name].model(0).predict(raw)).reshape(len(raw), -1)
        given = FORMATS[to].load(made.folder / made.file)(raw).numpy()
        if name == "tags":
            given = (given > 0).astype(int)
        assert np.allclose(given, wanted, rtol=1e-4)
        assert of(made)["int8"].bytes < of(made)["shrunk"].bytes
        text = (made.folder / made.card).read_text()
        (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
        exec(code.replace(made.file, str(made.folder / made.file)), {})


def test_every_format_has_what_the_others_have() -> None:
    assert FORMATS["executorch"] is executorch_files
    endings = [each.SUFFIX for each in FORMATS.values()]
    assert len(set(endings)) == len(endings) == 3


def test_data_that_cannot_be_found_again_is_still_refused(tmp_path: Path) -> None:
    data = fg.load("rooms", clients=3)
    result = fg.run("fedavg", data=data, rounds=1, engine="serial", out=tmp_path / "run")
    with pytest.raises(InputError, match="the run's data was made in Python"):
        fg.export_model(result.folder, client=0)
