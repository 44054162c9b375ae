"""int8 files: what stays in float, how weights are rounded, and what really runs in int8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.export.made import predicted, with_onnx
from torch import Tensor, nn

import fedgrove as fg
from fedgrove import nets
from fedgrove.export import onnx as onnx_files
from fedgrove.export import onnx_int8
from fedgrove.export.figures import Exported, Row
from fedgrove.export.rounding import patches, rounded

# ---- rounding ------------------------------------------------------------------------------------


def test_rounding_by_hand() -> None:
    """Inputs 0 and 1 are always equal, input 2 is on its own; steps of 1.

    .4 goes to 0, so its twin has to carry .8 and goes to 1; 2.6 goes to 3. In steps of .5: .4 is
    1 step, .1 too many, so the twin has .3 left, 1 step; 2.6 is 5.2 steps.
    """
    moments = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    weight = torch.tensor([[0.4, 0.4, 2.6], [0.4, 0.4, 2.6]])
    assert rounded(weight, torch.tensor([1.0, 0.5]), moments).tolist() == [[0, 1, 3], [1, 1, 5]]


@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 10))
@settings(max_examples=25, deadline=None)
def test_inputs_that_do_not_vary_together_are_rounded_to_the_nearest(
    seed: int, scale: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = 3 * torch.randn(4, 6, generator=g)
    spread = 0.1 + torch.rand(6, generator=g)
    q = rounded(weight, torch.full((4,), scale), torch.diag(spread))
    assert q.tolist() == (weight.double() / scale).round().clamp(-127, 127).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_what_a_layer_gives_changes_less_than_by_the_nearest(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    # 40 inputs that vary mostly along 5 directions, so that they can make up for each other.
    x = torch.randn(200, 5, generator=g) @ torch.randn(5, 40, generator=g)
    x = x + 0.1 * torch.randn(200, 40, generator=g)
    weight = torch.randn(8, 40, generator=g)
    scale = weight.abs().amax(1) / 127
    ours = rounded(weight, scale, x.t() @ x) * scale[:, None]
    nearest = (weight / scale[:, None]).round() * scale[:, None]
    our_error = (x @ (weight - ours).t()).square().sum()
    nearest_error = (x @ (weight - nearest).t()).square().sum()
    assert float(our_error) < 0.5 * float(nearest_error)


def test_inputs_that_are_always_0_do_no_harm() -> None:
    q = rounded(torch.tensor([[1.2, -300.0]]), torch.ones(1), torch.zeros(2, 2))
    assert q.tolist() == [[1, -127]]


@pytest.mark.parametrize(
    ("stride", "before", "after", "dilation"), [(1, 0, 0, 1), (2, 1, 0, 1), (1, 1, 2, 2)]
)
@pytest.mark.parametrize("axes", [1, 2])
def test_patches_are_what_a_convolution_reads(
    axes: int, stride: int, before: int, after: int, dilation: int
) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *(9, 7)[:axes], generator=g)
    w = torch.randn(4, 3, *(3, 2)[:axes], generator=g)
    pads = [before] * axes + [after] * axes
    rows = patches(x, w.shape[2:], [stride] * axes, pads, [dilation] * axes)
    convolve: Any = F.conv1d if axes == 1 else F.conv2d
    out: Tensor = convolve(F.pad(x, [before, after] * axes), w, stride=stride, dilation=dilation)
    assert torch.allclose(rows @ w.flatten(1).t(), out.movedim(1, -1).reshape(-1, 4), atol=1e-5)


# ---- the file ------------------------------------------------------------------------------------


def written(
    module: nn.Module, shape: tuple[int, ...], folder: Path
) -> tuple[Path, Path, tuple[float, float], Tensor]:
    x = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0))
    plain = folder / "net.onnx"
    path = folder / "net.int8.onnx"
    onnx_files.write(module.eval(), shape, plain, {})
    return plain, path, onnx_files.quantise(module, plain, x, path), x


def run_as(path: Path, folder: Path) -> list[str]:
    """The operations that onnxruntime really runs."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


@with_onnx
def test_the_shares_by_hand(tmp_path: Path) -> None:
    """bn-cnn2 on 8x8 with 3 classes.

    576 weights at 64 places, 73,728 at 16, a head of 1,536; ends below 5 % are float.
    """
    *_, shares, _ = written(nets.build("bn-cnn2", (1, 8, 8), 3, 0), (1, 8, 8), tmp_path)
    assert shares == pytest.approx((73_728 / 75_840, 1_179_648 / (36_864 + 1_179_648 + 1_536)))


@with_onnx
@pytest.mark.parametrize(("hidden", "kept"), [(64, 1), (4, 0)])
def test_only_small_ends_stay_in_float(hidden: int, kept: int, tmp_path: Path) -> None:
    """An mlp of 12 inputs: its head has 192 of 5,056 weights with 64 hidden, 12 of 76 with 4."""
    *_, shares, _ = written(nets.build("mlp", (12,), 3, 0, hidden=hidden), (12,), tmp_path)
    assert shares[0] == pytest.approx(4_864 / 5_056 if kept else 1.0)


class Recurrent(nn.Module):
    """A layer with weights that int8 leaves alone, and a linear one at every step."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 20, batch_first=True) if recurrent else None
        self.mix = nn.Linear(4, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x) if self.gru is None else self.gru(x)[0]
        return self.head(x).mean(1)


@with_onnx
def test_shares_are_told_where_they_are_known(tmp_path: Path) -> None:
    """Both linear layers are applied at each of 7 steps, and are too large to stay in float."""
    (tmp_path / "a").mkdir()
    *_, shares, _ = written(Recurrent(False), (7, 4), tmp_path / "a")
    assert shares == (1.0, 1.0)
    *_, shares, _ = written(Recurrent(True), (7, 4), tmp_path)
    assert shares is None


@with_onnx
def test_a_layer_that_reads_the_input_itself(tmp_path: Path) -> None:
    *_, shares, _ = written(nn.Linear(12, 3), (12,), tmp_path)
    assert shares == (1.0, 1.0)


@with_onnx
def test_logits_are_float_and_the_work_between_is_int8(tmp_path: Path) -> None:
    import onnx

    plain, path, _, _ = written(nets.build("har-cnn", (3, 32), 3, 0), (3, 32), tmp_path)
    model = onnx.load(str(path))
    (last,) = [node for node in model.graph.node if "logits" in node.output]
    assert last.op_type == "Gemm"
    done = run_as(path, tmp_path)
    assert [done.count(kind) for kind in ("QLinearConv", "QGemm", "Conv", "Gemm")] == [1, 1, 1, 1]
    assert "Relu" in [node.op_type for node in onnx.load(str(plain)).graph.node]
    # Weights that are made float again at every example cost time.
    assert "DequantizeLinear" not in done


class Pooled(nn.Module):
    """Pooling before ReLU, where half the numbers would be below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3)
        self.second = nn.Conv2d(8, 64, 3)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.first(x), 2))
        logits: Tensor = self.head(F.relu(F.max_pool2d(self.second(x), 2)).flatten(1))
        return logits


@with_onnx
def test_no_steps_go_to_what_relu_cuts(tmp_path: Path) -> None:
    """Behind the convolution in int8 the lowest step, -128, is 0."""
    import onnx

    _, path, _, _ = written(Pooled(), (1, 10, 10), tmp_path)
    model = onnx.load(str(path))
    numbers = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    computed: set[str] = set()
    zeros: set[int] = set()
    for node in model.graph.node:
        computed.update(node.output)
        # Activations only, not the network's own input, which is not behind a ReLU.
        if node.op_type == "QuantizeLinear" and node.input[0] in computed:
            zeros.add(int(numbers[node.input[2]]))
    assert zeros == {-128}


@with_onnx
def test_the_error_is_half_that_of_the_plain_way(
    everyone: dict[int, Exported], tmp_path: Path
) -> None:
    """Against onnxruntime's own quantiser, calibrated alike, on examples that neither saw."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def __init__(self, x: Tensor) -> None:
            self.left = [x]

        def get_next(self) -> Any:
            return {"x": self.left.pop().numpy()} if self.left else None

    for client, made in everyone.items():
        data = fg.load("digits", clients=3, partition="iid", standardise=False).clients[client]
        # Pixels as they were recorded: without standardisation they come divided by 16.
        train, test = 16 * data.train.x, 16 * data.test.x
        plain = made.folder / f"client-{client:05d}.onnx"
        ready = tmp_path / "ready"
        usual = tmp_path / "usual.onnx"
        with onnx_files.quiet():
            quantization.shape_inference.quant_pre_process(str(plain), str(ready))
            quantization.quantize_static(str(ready), str(usual), Reader(train), per_channel=True)
        truth = predicted(plain, test)
        ours = predicted(plain.with_suffix(".int8.onnx"), test) - truth
        theirs = predicted(usual, test) - truth
        assert float(ours.square().mean().sqrt()) < 0.5 * float(theirs.square().mean().sqrt())


@with_onnx
def test_rounding_by_what_is_read_is_closer_to_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for widest in (2048, 0):
        monkeypatch.setattr(onnx_int8, "WIDEST", widest)
        (tmp_path / str(widest)).mkdir()
        plain, path, _, x = written(
            nets.build("bn-cnn2", (1, 16, 16), 3, 0), (1, 16, 16), tmp_path / str(widest)
        )
        errors.append(float((predicted(path, x) - predicted(plain, x)).square().mean().sqrt()))
    assert errors[0] < 0.8 * errors[1]


@with_onnx
def test_the_shares_are_in_the_table_and_the_card(everyone: dict[int, Exported]) -> None:
    made = everyone[0]
    row = made.rows[-1]
    assert (row.version, made.rows[0].shares) == ("int8", "")
    assert row.int8 is not None
    assert 0.9 < row.int8[0] <= 1
    assert f"| {row.shares} |" in (made.folder / made.card).read_text()


def test_shares_in_words() -> None:
    row = Row("int8", 1, 1, 1, 1.0, 1.0, 1.0)
    assert row.shares == ""
    assert replace(row, int8=None).shares == "not known"
    assert replace(row, int8=(0.966, 0.5)).shares == "96.6 / 50.0"
