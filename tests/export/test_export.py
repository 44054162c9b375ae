"""A client's model as a file: it agrees with torch, it is smaller, its card is true."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.export.made import (
    NETS,
    close,
    finished,
    of,
    predicted,
    prune,
    thinned,
    with_onnx,
)
from torch import Tensor, nn

import fedgrove as fg
from fedgrove import nets, trees
from fedgrove.channels.find_groups import find_groups, make_channel_mask
from fedgrove.core import Packet, Setup
from fedgrove.data.preparation import Preparation
from fedgrove.errors import InputError
from fedgrove.export import onnx as onnx_files
from fedgrove.export.figures import Exported, Row
from fedgrove.export.make import _note_on_int8, _notes, open_subject
from fedgrove.export.source import Raw, opened, shrunk, unprepared
from fedgrove.methods import FedAvg
from fedgrove.nets import Net
from fedgrove.parts.one_model import OneModel as State
from fedgrove.problems import numbers

# ---- what is written agrees with torch -----------------------------------------------------------


@with_onnx
@pytest.mark.parametrize(
    "name",
    # The graph of so many small layers takes as long to write as those of all others.
    [
        name if name != "shufflenetv2" else pytest.param(name, marks=pytest.mark.slow)
        for name in NETS
    ],
)
def test_every_net_is_written_shrunk_and_agrees(name: str, tmp_path: Path) -> None:
    shape = NETS[name]
    # At their usual widths these would take most of the time of the test.
    fields = {"resnet18": {"width": 8}, "shufflenetv2": {"width": 16}}.get(name, {})
    net = Net(nets.build(name, shape, 3, 0, **fields), shape)
    tree = thinned(net)
    path = tmp_path / "net.onnx"
    small, few = shrunk(net, tree)
    assert small.layout.size < 0.65 * net.layout.size
    channels = range(shape[0])
    means = tuple(0.5 * c - 1.0 for c in channels)
    deviations = tuple(1.0 + 0.1 * c for c in channels)
    scale = Preparation(means, deviations)
    onnx_files.write(Raw(small.filled(few), scale, shape).eval(), shape, path, {})
    raw = 3 * torch.randn(7, *shape, generator=torch.Generator().manual_seed(1))
    wide = (-1, *(1,) * (len(shape) - 1))
    seen = (raw - torch.tensor(means).view(wide)) / torch.tensor(deviations).view(wide)
    truth = net(tree, seen, train=False).logits.detach()
    for n in (1, 7):
        assert close(predicted(path, raw[:n]), truth[:n])
    # 4 bytes a parameter, and at most 40 KiB of graph and names
    assert 4 * small.layout.size < path.stat().st_size < 4 * small.layout.size + 40_960


@with_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_every_net_leaves_a_run(name: str, tmp_path: Path) -> None:
    shape = NETS[name]
    run = finished(tmp_path, name, shape)
    net = Net(nets.build(name, shape, 3, 0), shape)
    tree = prune(run, net)
    made = fg.export_model(run, client=0, int8=True)
    rows = of(made)
    seen = fg.load(str(tmp_path / "own.npz"), standardise=True).clients[0].test.x
    raw = fg.load(str(tmp_path / "own.npz"), standardise=False).clients[0].test.x
    truth = net(tree, seen, train=False).logits.detach()
    assert close(predicted(run.path / "export" / "client-00000.onnx", raw), truth)
    assert rows["int8"].bytes < rows["shrunk"].bytes < 0.65 * rows["dense"].bytes


@with_onnx
def test_a_trained_model_and_its_int8(digits: Path, everyone: dict[int, Exported]) -> None:
    made = everyone[2]
    rows = of(made)
    summary = json.loads((digits / "summary.json").read_text())
    assert made.score_torch == pytest.approx(summary["accuracy_clients"]["2"], abs=1e-6)
    assert rows["shrunk"].score == made.score_torch > 0.9
    assert made.same_int8 is not None
    assert made.same_int8 > 0.97
    assert rows["int8"].bytes < 0.5 * rows["shrunk"].bytes
    assert all(row.latency_us > 0 for row in made.rows)
    raw = fg.load("digits", clients=3, partition="iid", standardise=False).clients[2].test
    # Pixels as they were recorded, from 0 to 16; without standardisation they come divided by 16.
    out = predicted(made.folder / "client-00002.int8.onnx", 16 * raw.x)
    assert float((out.argmax(1) == raw.y).double().mean()) == rows["int8"].score


@with_onnx
def test_int8_loses_at_most_a_point(everyone: dict[int, Exported]) -> None:
    for made in everyone.values():
        assert of(made)["shrunk"].score - of(made)["int8"].score <= 0.01
        assert made.notes == ()


@with_onnx
def test_every_client_has_its_files(digits: Path, everyone: dict[int, Exported]) -> None:
    names: list[str] = []
    for client in range(3):
        stem = f"client-{client:05d}"
        names += [f"{stem}.int8.onnx", f"{stem}.onnx", f"{stem}.onnx.md"]
    assert sorted(p.name for p in (digits / "export").iterdir()) == names


@cache
def half() -> Mapping[str, Tensor]:
    net = Net(nets.build("bn-cnn2", (1, 8, 8), 3, 0), (1, 8, 8))
    return make_channel_mask(
        net, {g.name: torch.arange(g.size) < g.size // 2 for g in find_groups(net)}
    )


@dataclass(frozen=True)
class Halved(FedAvg):
    """FedAvg on half the channels."""

    def init(self, setup: Setup) -> State:
        return State(0, trees.apply_mask(setup.params, half()))

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        return {"model": Packet(state.model, dict(half()))}


@with_onnx
def test_a_method_that_removes_channels(tmp_path: Path) -> None:
    """From training on the small net to the file; the method, made here, is not needed again."""
    run = finished(tmp_path, "bn-cnn2", (1, 8, 8), Halved())
    rows = of(fg.export_model(run, client=1))
    # conv 3x3 without bias: 1·32·9 + 32·64·9; norms 2·32 + 2·64; head 64·2·2·3 + 3
    assert rows["shrunk"].params == 288 + 18_432 + 64 + 128 + 768 + 3
    assert rows["dense"].params == 576 + 73_728 + 128 + 256 + 1_536 + 3
    assert rows["shrunk"].bytes < 0.3 * rows["dense"].bytes


def test_single_zeros_stay_and_whole_channels_go() -> None:
    net = Net(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), (2,))
    tree = {k: torch.ones_like(v) for k, v in net.params().items()}
    tree["0.weight"][0, 0] = 0
    same, kept = shrunk(net, tree)
    assert same is net
    assert trees.equal(kept, tree)
    tree["0.weight"][1] = 0
    tree["0.bias"][1] = 0
    # The next layer still reads it.
    assert shrunk(net, tree)[0] is net
    tree["2.weight"][:, 1] = 0
    small, few = shrunk(net, tree)
    assert small.layout.shapes == {
        "0.weight": (2, 2),
        "0.bias": (2,),
        "2.weight": (2, 2),
        "2.bias": (2,),
    }
    assert few["0.weight"].tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("align", "widths"), [(1, (20, 45)), (8, (24, 48)), (16, (32, 48)), (100, (64, 100))]
)
def test_zero_channels_fill_up_to_a_multiple(align: int, widths: tuple[int, int]) -> None:
    """Of 64 and 128 channels the last 20 and 45 are left.

    No layer gets wider than it was, and outputs stay.
    """
    net = Net(nets.build("bn-cnn2", (1, 8, 8), 3, 0), (1, 8, 8))
    kept: dict[str, Tensor] = {}
    for group, left in zip(find_groups(net), (20, 45), strict=True):
        kept[group.name] = torch.arange(group.size) >= group.size - left
    tree = trees.apply_mask(net.params(), make_channel_mask(net, kept))
    small, few = shrunk(net, tree, align)
    filters = [value for value in few.values() if value.dim() == 4]
    assert tuple(len(value) for value in filters) == widths
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert close(small(few, x, train=False).logits, net(tree, x, train=False).logits)


@with_onnx
def test_an_aligned_file_is_checked_too_and_the_full_width_is_its_limit(tmp_path: Path) -> None:
    run = finished(tmp_path, "bn-cnn2", (1, 8, 8))
    prune(run, Net(nets.build("bn-cnn2", (1, 8, 8), 3, 0), (1, 8, 8)))
    # 32 and 64 of 64 and 128 channels are left; 48 makes them 48 and 96, 128 all of them.
    widths = {1: (32, 64), 48: (48, 96), 128: (64, 128)}
    accuracies: set[float] = set()
    for align, (a, b) in widths.items():
        made = fg.export_model(run, client=0, align=align, out=tmp_path / str(align))
        row = of(made)["shrunk"]
        assert row.params == 9 * a + 9 * a * b + 2 * a + 2 * b + 12 * b + 3
        accuracies.add(row.score)
    assert len(accuracies) == 1
    with pytest.raises(InputError, match=r"align is 0; it must be 1"):
        fg.export_model(run, client=0, align=0)


# ---- standardisation -----------------------------------------------------------------------------


@given(
    mean=st.floats(-100, 100),
    deviation=st.floats(0.01, 100),
    shape=st.sampled_from([(4,), (2, 9), (3, 4, 4)]),
)
@settings(max_examples=30, deadline=None)
def test_raw_inputs_are_found_again(mean: float, deviation: float, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    raw = mean + deviation * torch.randn(6, *shape, generator=g)
    means = tuple((torch.linspace(-1, 1, shape[0]).double() + mean).tolist())
    deviations = tuple((torch.linspace(1, 2, shape[0]).double() * deviation).tolist())
    own = Preparation(means, deviations, shape=shape)
    again = unprepared(own, torch.from_numpy(own.apply(raw.numpy())))
    assert torch.allclose(again, raw, rtol=1e-5, atol=1e-5 * (1 + abs(mean) + deviation))


@with_onnx
def test_the_file_standardises_unless_told(tmp_path: Path) -> None:
    run = finished(tmp_path, "har-cnn", (3, 16))
    inside = fg.export_model(run, client=1, out=tmp_path / "inside")
    outside = fg.export_model(run, client=1, out=tmp_path / "outside", standardised=True)
    raw = fg.load(str(tmp_path / "own.npz"), standardise=False).clients[1]
    seen = fg.load(str(tmp_path / "own.npz"), standardise=True).clients[1]
    file_inside = inside.folder / "client-00001.onnx"
    file_outside = outside.folder / "client-00001.onnx"
    logits = predicted(file_outside, seen.test.x)
    assert torch.allclose(predicted(file_inside, raw.test.x), logits, atol=1e-5)
    assert not torch.allclose(predicted(file_inside, seen.test.x), logits, atol=1e-2)

    import onnx

    metadata = {prop.key: prop.value for prop in onnx.load(str(file_inside)).metadata_props}
    train = raw.train.x.double()
    mean = train.mean((0, 2)).tolist()
    deviation = train.std((0, 2), correction=0).tolist()
    assert json.loads(metadata["mean"]) == pytest.approx(mean, rel=1e-5)
    assert json.loads(metadata["deviation"]) == pytest.approx(deviation, rel=1e-5)
    assert metadata["client"] == "1"
    assert metadata["standardises"] == "yes"
    assert json.loads(metadata["classes"]) == ["0", "1", "2"]
    card_inside = (inside.folder / inside.card).read_text()
    card_outside = (outside.folder / outside.card).read_text()
    assert "The file itself standardises" in card_inside
    assert "The caller must standardise" in card_outside
    for value in json.loads(metadata["mean"]):
        assert f"{value:.9g}" in card_inside
        assert f"{value:.9g}" in card_outside


@with_onnx
def test_data_made_in_python_are_handed_over_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = fg.from_arrays(rng.standard_normal((40, 5)), rng.integers(0, 2, 40), clients=2)
    run = fg.run(
        "local", data=data, rounds=1, cohort=1, engine="serial", out=tmp_path / "run"
    ).folder
    message = r"made in Python.*fedgrove.export_model\(run, data=\.\.\.\)"
    with pytest.raises(InputError, match=message):
        fg.export_model(run, client=0)
    with pytest.raises(InputError, match=r"data is a tuple; .* data=fedgrove\.load\("):
        fg.export_model(run, client=0, data=(np.zeros((40, 5)), np.zeros(40)))
    made = fg.export_model(run, client=0, data=data)
    assert "The file itself standardises" in (made.folder / made.card).read_text()


@with_onnx
def test_raw_windows_by_name_give_what_the_model_gives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = 100 + 30 * rng.standard_normal((40, 3, 8))
    y = rng.integers(0, 2, 40)
    data = fg.from_arrays(x, y, np.repeat(["<i>watch</i>", "watch-07"], 20))
    run = fg.run("fedavg", data=data, rounds=1, net="mlp", engine="serial", out=tmp_path / "run")
    # Markdown shows HTML as what it is.
    strange = fg.export_model(run, client=0, out=tmp_path / "strange")
    assert r"client 0 (\<i>watch\</i>)" in (strange.folder / strange.card).read_text()
    # The result knows the data that it was made of.
    made = fg.export_model(run, client="watch-07")
    raw = torch.tensor(x, dtype=torch.float32)
    out = predicted(made.folder / "watch-07.onnx", raw)
    assert np.allclose(out.numpy(), run.model("watch-07").outputs(raw), atol=1e-5)
    text = (made.folder / made.card).read_text()
    assert "client 1 (watch-07)" in text
    assert "Raw, as they were recorded. The file itself standardises" in text
    with pytest.raises(InputError, match="did you mean 'watch-07'"):
        fg.export_model(run, client="watch-7", data=data)


@with_onnx
def test_a_masked_model_says_why_it_stays_dense(tmp_path: Path) -> None:
    words: dict[str, Any] = {"clients": 3, "cohort": 2, "rounds": 3, "set": {"clusters": 1}}
    run = fg.run("ca-afp", data="digits", engine="serial", out=tmp_path / "run", **words)
    made = fg.export_model(run, client=0, int8=True)
    (note,) = [note for note in made.notes if "zeros" in note]
    share = round(100 * (1 - run.summary["density"]))
    assert note.startswith(f"{share}% of its weights are zeros, but one by one")
    for way in ("int8, ", "a sparse file, ", "prunes whole channels (safl, "):
        assert way in note
    assert made.rows[0].params == made.rows[1].params
    text = (made.folder / made.card).read_text()
    assert note in text
    assert "no whole channel was pruned" in text


# ---- the card ------------------------------------------------------------------------------------


@with_onnx
def test_the_card_says_what_it_must_and_its_code_runs(
    digits: Path,
    everyone: dict[int, Exported],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = everyone[1]
    text = (made.folder / made.card).read_text()
    for row in made.rows:
        for word in (f"{row.params:,}", f"{row.macs:,}", f"{row.bytes:,}", f"{row.score:.4f}"):
            assert word in text
    for words in (
        "fedavg",
        "digits",
        "| client | 1, of 3 |",
        "partition iid",
        "`(batch, 1, 8, 8)`",
        "3 = 3",
        "Apache-2.0",
        "5 rounds",
        "seed 0",
        "calibrated",
        "mean: 4.884",
        "`client-00001.int8.onnx`",
    ):
        assert words in text
    assert str(digits.parent) not in text
    monkeypatch.chdir(made.folder)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(code, {})
    assert capsys.readouterr().out.strip() in set("0123456789")


@with_onnx
def test_no_path_of_this_machine_is_in_a_file(digits: Path, everyone: dict[int, Exported]) -> None:
    for path in (digits / "export").glob("*.onnx"):
        assert not re.search(
            rb"\.py\b|/home/|/tmp/|/root|site-packages|com.microsoft", path.read_bytes()
        )


def rows_of(shrunk: float, int8: float) -> tuple[Row, ...]:
    return (
        Row("dense", 1, 1, 1, 1.0, 1.0, score=shrunk),
        Row("shrunk", 1, 1, 1, 1.0, 1.0, score=shrunk),
        Row("int8", 1, 1, 1, 1.0, 1.0, score=int8),
    )


def test_a_loss_above_one_point_and_changed_data_are_noted(digits: Path) -> None:
    source = opened(digits)
    subject = open_subject(source, 0, False, 1)
    right = source.summary["accuracy_clients"]["0"]
    assert list(_notes(subject, rows_of(0.95, 0.94), right)) == []
    assert re.search(r"int8 loses 1\.1 points", *_notes(subject, rows_of(0.95, 0.939), right))
    assert re.search(r"they have changed", *_notes(subject, rows_of(0.5, 0.5), right - 0.5))


def test_a_larger_error_by_int8_is_noted() -> None:
    mae = numbers().metric
    assert list(_note_on_int8(mae, 0.05, 1.0, 16)) == []
    (note,) = _note_on_int8(mae, 0.09, 1.5, 16)
    assert note == (
        "with int8, the mae on this client's 16 test examples is 6% worse; 5% is allowed"
    )
