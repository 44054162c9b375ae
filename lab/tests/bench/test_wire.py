"""The bench of the wire: what it counts, what it claims, and that it notices a codec that lies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgrove import trees
from fedgrove.cli import main
from fedgrove.core import Packet
from fedgrove.errors import EngineError, InputError
from fedgrove.report.page import check_place
from fedgrove.wire.codec import COSTS, Dense, explain
from fedgrove_lab.bench import report, wire
from fedgrove_lab.bench.wire import (
    TrainedWeights,
    is_available,
    train_federated,
    train_resnet,
)


@pytest.fixture(scope="module")
def chance() -> TrainedWeights:
    """Weights without any structure, so that entropy is a limit; and a buffer."""
    g = torch.Generator().manual_seed(0)
    tree = {"a.weight": torch.randn(150, 200, generator=g), "a.bias": torch.randn(200, generator=g)}
    return TrainedWeights(
        "chance", "drawn", tree | {"seen": torch.rand(40, generator=g)}, frozenset({"seen"})
    )


@pytest.fixture(scope="module")
def rows(chance: TrainedWeights) -> list[wire.WireRow]:
    return list(wire.measure(chance, (1.0, 0.3), (0, 16), repeats=1))


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 8, 32])
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_packets_have_the_density_and_the_centroids_they_claim(
    chance: TrainedWeights, density: float, k: int
) -> None:
    packet = wire.make_packet(chance, wire.prune_weights(chance, density), k)
    weight = packet.values["a.weight"]
    if density == 1:
        assert packet.mask is None
    else:
        assert packet.mask is not None
        mask = packet.mask["a.weight"]
        assert int(mask.sum()) == 9000
        assert torch.equal(weight != 0, mask)
    distinct = len(weight.unique())
    if k:
        # The 0 of what is pruned is one of the k.
        assert distinct == k
    else:
        assert distinct > 8000
        assert torch.equal(packet.values["a.bias"], chance.tree["a.bias"])
    assert torch.equal(packet.values["seen"], chance.tree["seen"])


def test_bounds_by_hand() -> None:
    # 8 of 16 kept: 16 bits of one bit each = 2 bytes; two values, 4 times each, among the 8: 8 bits
    # = 1 byte. "b": four bytes per number; the top two of 1.0 (3f80) and 2.0 (4000) differ, one bit
    # for each of 2 numbers and 2 planes = half a byte; the low two are all 0.
    mask = torch.arange(16) % 2 > 0
    values = {"w": torch.tensor([0.0, 1, 0, 2] * 4), "b": torch.tensor([1.0, 2.0])}
    packet = Packet(values, {"w": mask})
    lines = explain(wire.CODEC.encode(packet).data)
    assert [line.values for line in lines] == ["book", "full"]
    assert wire.find_bounds(packet, lines) == {"mask": 2.0, "indices": 1.0, "values": 0.5}


@pytest.mark.parametrize("k", [0, 16])
def test_the_plain_way_is_lossless_and_what_it_says(chance: TrainedWeights, k: int) -> None:
    packet = wire.make_packet(chance, wire.prune_weights(chance, 0.3), k)
    clustered = frozenset({"a.weight", "a.bias"}) if k else frozenset[str]()
    data = wire.encode_plain(packet, clustered)
    given = wire.find_books(packet, clustered)
    assert data == wire.encode_plain(packet, clustered, given)
    back = wire.decode_plain(data)
    assert trees.identical(back.values, packet.values)
    assert trees.identical(back.mask or {}, packet.mask or {})
    # 30,000 bits of .88 bit each take near 3,750 bytes, and 9,000 numbers 4 bytes or a byte of
    # 4 bits.
    assert 3_300 < len(data["a.weight"].bitmap or b"") < 3_800
    if k:
        assert 4_000 < len(data["a.weight"].kept) < 5_500
    else:
        assert 31_000 < len(data["a.weight"].kept) < 36_100
    # What comes back may be written to.
    back.values["seen"].add_(1)


# --- rows and claims ------------------------------------------------------------------------------


def test_rows_add_up(rows: list[wire.WireRow]) -> None:
    assert [(r.density, r.k, r.kind) for r in rows] == [
        (1.0, 0, "fp32"),
        (1.0, 16, "k=16"),
        (0.3, 0, "fp32"),
        (0.3, 16, "k=16"),
    ]
    for r in rows:
        assert set(r.parts) == set(COSTS)
        assert sum(r.parts.values()) == r.bytes
        assert r.params == 30_240
        assert r.share == r.bytes / (4 * 30_240)
        assert r.tensor == "a.weight"
        assert sum(r.bound.values()) <= r.bytes
        speeds = [*vars(r.model_speed).values(), *vars(r.tensor_speed).values()]
        assert min(speeds) > 0
    assert rows[0].ratio is None
    for r in rows[1:]:
        assert r.ratio is not None
        assert r.ratio_header is not None
        # Nothing to find beyond the counts: not below their entropy, and not far above.
        assert 1 <= r.ratio < 1.02
        assert r.ratio < r.ratio_header


def test_claims_are_the_worst_of_the_rows(rows: list[wire.WireRow]) -> None:
    results = wire.checks(rows)
    # It is a claim on larger models.
    assert "streams" not in results
    assert results["share_fp32_density_0.3"]["value"] == round(rows[2].share, 4)
    assert results["encode_model"]["value"] == round(min(r.model_speed.encode for r in rows), 4)
    large = [replace(r, params=90_000, share=0.1) for r in rows]
    large[3] = replace(large[3], ratio=1.021, ratio_header=1.03)
    results = wire.checks(large)
    where = "chance, density 0.3, k=16"
    assert results["streams"] == {"value": 1.021, "bound": 1.02, "ok": False, "at": where}
    assert results["streams_with_header"]["value"] == 1.03
    assert results["share_k16_density_0.3"] == {
        "value": 0.1,
        "bound": 0.062,
        "ok": False,
        "at": where,
    }
    assert results["share_fp32_density_0.3"]["ok"]


def test_a_codec_that_changes_a_number_is_noticed(
    chance: TrainedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lying(Dense):
        def decode(self, *args: Any, **kwargs: Any) -> Packet:
            packet = super().decode(*args, **kwargs)
            packet.values["a.bias"][7] += 1
            return packet

    monkeypatch.setattr(wire, "CODEC", Lying())
    with pytest.raises(EngineError, match="came back changed"):
        next(iter(wire.measure(chance)))


# --- the command ----------------------------------------------------------------------------------


def test_quick_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", "--quick", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["weights"]["motion"].startswith("fedavg on motion, 1 round")
    assert len(printed["rows"]) == 16
    for row in printed["rows"]:
        assert sum(row["parts"].values()) == row["bytes"]
        assert row["share"] < row["plain_share"] + 0.001
    for claim in printed["checks"].values():
        assert claim["ok"] in (claim["value"] <= claim["bound"], claim["value"] >= claim["bound"])
    assert printed["checks"]["share_fp32_density_0.3"]["ok"]


def test_table_and_page(
    rows: list[wire.WireRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = wire.report([TrainedWeights("chance", "drawn", {})], rows)
    report.print_wire(content)
    out = capsys.readouterr().out
    assert "chance: drawn" in out
    assert f"{rows[3].share:.4f}" in out
    assert "holds: share_fp32_density_0.3" in out
    report.write_wire_page(content, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "chance: share of dense float32" in page
    assert '<script src="http' not in page


def test_a_page_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        check_place(tmp_path / "none" / "page.html")
    assert main(["bench", "wire", "--plot", "none/page.html"]) == 2
    assert "there is no folder 'none'" in capsys.readouterr().err
    assert main(["bench", "wier"]) == 2
    assert "did you mean 'wire'" in capsys.readouterr().err


def test_weights_say_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path))
    assert is_available("digits", tmp_path)
    assert not is_available("cifar10", tmp_path)
    weights = train_resnet(0, tmp_path)
    assert "cifar10 was not found" in weights.about
    buffers = sum(weights.tree[k].numel() for k in weights.buffers)
    assert trees.size(weights.tree) - buffers == 11_173_962
    assert len(weights.prunable) == 21
    with pytest.raises(InputError, match="rounds is 0"):
        train_federated(0)
