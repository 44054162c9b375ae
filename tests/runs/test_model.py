"""A model of a finished run is used on raw inputs, and is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import list_again
from torch import Tensor, nn

import fedgrove as fg
from fedgrove import data
from fedgrove.core import ClientInfo
from fedgrove.data import ClientData, Examples, Federation
from fedgrove.data.preparation import Preparation
from fedgrove.errors import DamageError, InputError
from fedgrove.runs.model import Model, client_number, pooled
from fedgrove.runs.result import Result

WATCHES = ("watch-03", "watch-07", "watch-11")
QUICK: dict[str, Any] = {"engine": "serial", "progress": False, "rounds": 2, "cohort": 2}


def windows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw windows (3, 16) of three watches, each with offsets and units of its own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3, 16))
    y = np.where(x[:, 0].mean(1) > 0, "run", "walk")
    watch = np.repeat(np.arange(3), 30)
    # Without standardisation these would be three different worlds.
    x = x * (1 + 10 * watch)[:, None, None] + (100 * watch - 50)[:, None, None]
    return x, y, np.array(WATCHES)[watch]


def federation() -> Federation:
    x, y, owner = windows()
    return data.from_arrays(x, y, owner)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("trained") / "run"
    return fg.run("fedavg", data=federation(), net="mlp", lr=0.01, out=out, **QUICK)


def raw_test(seen: Federation, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The raw test examples of a client: those of all windows that became its test part."""
    x, _, _ = windows()
    prepared = seen.preparation_of(k).apply(x)
    test = seen.client(k).test
    rows = []
    for example in test.x.numpy():
        (row,) = np.flatnonzero((prepared == example).all((1, 2)))
        rows.append(row)
    return x[rows], np.array(seen.labels)[test.y.numpy()]


# ---- raw inputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(3))
def test_a_clients_accuracy_on_raw_inputs_is_the_runs(trained: Result, k: int) -> None:
    x, y = raw_test(federation(), k)
    model = trained.model(WATCHES[k])
    assert set(model.predict(x)) <= {"run", "walk"}
    reported = trained.summary["accuracy_clients"][str(k)]
    assert model.score(x, y) == pytest.approx(reported, abs=1e-6)
    # The standardisation is what makes it so: without it the outputs are others.
    with torch.no_grad():
        bare = model.module(torch.tensor(x, dtype=torch.float32))
    assert not np.allclose(bare.numpy(), model.outputs(x), atol=0.1)


def test_one_window_gives_one_answer(trained: Result) -> None:
    x, _, _ = windows()
    model = trained.model("watch-07")
    several = model.predict(x[30:33])
    assert [model.predict(window) for window in x[30:33]] == several.tolist()
    assert isinstance(model.predict(x[30]), str)
    probabilities = model.predict_proba(x[30])
    assert probabilities.shape == (2,)
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-6)
    assert model.labels[int(probabilities.argmax())] == several[0]
    assert model.predict(x[:0]).shape == (0,)
    # Tensors and lists are as good.
    assert model.predict(torch.from_numpy(x[30])) == model.predict(x[30].tolist()) == several[0]


def test_by_name_by_number_and_from_the_folder(trained: Result) -> None:
    x, _, _ = windows()
    again = fg.load_run(trained.folder.path)
    assert again.summary == trained.summary
    for same in (trained.model(1), trained.model("1"), trained.model(np.int64(1))):
        assert np.array_equal(same.outputs(x), trained.model("watch-07").outputs(x))
    assert np.array_equal(again.model("watch-07").outputs(x), trained.model(1).outputs(x))


def test_the_model_of_all_and_a_new_device(trained: Result) -> None:
    x, _, _ = windows()
    shared = trained.model()
    assert "3 clients share" in shared.who
    # The last of three watches, as if it were new: its own windows say how it is standardised.
    mine = shared.standardised_by(x[60:])
    assert mine.preparation.mean == pytest.approx(x[60:].mean((0, 2)).tolist())
    assert np.array_equal(mine.preparation.apply(x[60:]).mean((0, 2)).round(4), np.zeros(3))
    assert not np.allclose(mine.outputs(x[60:]), shared.outputs(x[60:]), atol=0.01)
    # In other units it would see the same.
    again = shared.standardised_by(2 * x[60:] + 7)
    assert np.allclose(again.outputs(2 * x[60:] + 7), mine.outputs(x[60:]), atol=1e-4)
    with pytest.raises(InputError, match="two or more"):
        shared.standardised_by(x[0])


def test_pooled_by_hand() -> None:
    # One value 1, and three of mean 5 and variance 4: mean (1 + 15) / 4 = 4, mean of squares
    # (1 * (0.25 + 1) + 3 * (4 + 25)) / 4 = 22.0625, deviation sqrt(22.0625 - 16) = 2.4622...
    one = Preparation((1.0,), (0.5,), labels=("a",))
    other = Preparation((5.0,), (2.0,), labels=("a",))
    both = pooled([one, other], [1, 3])
    assert both.mean == (4.0,)
    assert both.std == pytest.approx((6.0625**0.5,))
    assert both.labels == ("a",)
    assert pooled([one, one], [1, 3]) is one
    # One that changes nothing has mean 0 and deviation 1.
    assert pooled([Preparation(), Preparation((2.0,), (1.0,))], [1, 1]).mean == (1.0,)


# ---- what is predicted ---------------------------------------------------------------------------


def test_numbers_come_in_their_units() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 4)) * 3 + 20
    y = 1000 + 50 * (x[:, 0] - 20)
    owner = np.repeat(["a", "b"], 40)
    words = {**QUICK, "rounds": 15}
    result = fg.run("fedavg", data=data.from_arrays(x, y, owner), net="mlp", lr=0.02, **words)
    model = result.model("b")
    predicted = model.predict(x)
    assert predicted.shape == (80,)
    assert abs(predicted.mean() - 1000) < 100
    assert model.score(x[40:], y[40:]) > 0.5
    assert isinstance(model.predict(x[0]), float)
    with pytest.raises(InputError, match="no probabilities; call predict"):
        model.predict_proba(x)


def test_samples_that_follow_come_as_they_were_recorded() -> None:
    result = fg.run("fedavg", data="motion-forecast", clients=2, **{**QUICK, "rounds": 1})
    seen = data.load("motion-forecast", clients=2).client(0).test
    raw = data.load("motion-forecast", clients=2, standardise=False).client(0).test
    own = result.model(0)
    predicted = own.predict(raw.x)
    deviation = np.array(own.preparation.std).repeat(own.preparation.ahead or 0)
    # In units of each channel's deviation the error is the one that the run reports.
    error = np.sqrt((((predicted - raw.y.numpy()) / deviation) ** 2).mean())
    assert error == pytest.approx(result.summary["rmse_clients"]["0"], abs=1e-4)
    assert len(seen) == len(raw)


def test_several_labels_are_zeros_and_ones() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 4))
    y = (x[:, :3] > 0).astype(int)
    result = fg.run("fedavg", data=data.from_arrays(x, y, clients=2), net="mlp", **QUICK)
    answers = result.model(0).predict(x)
    assert answers.shape == (40, 3)
    assert set(answers.ravel().tolist()) <= {0, 1}
    assert ((result.model(0).predict_proba(x) > 0.5) == answers).all()


def test_a_client_never_predicts_a_class_it_does_not_know_of() -> None:
    g = torch.Generator().manual_seed(0)

    def client(k: int) -> ClientData:
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(k))
        part = Examples(x, torch.randint(0, 2, (12,), generator=g) + k)
        return ClientData(part, part, part, ClientInfo(12), labels=(k, k + 1))

    result = fg.run("fedavg", data=data.from_clients(client, 2, classes=3), net="mlp", **QUICK)
    x = np.random.default_rng(0).normal(size=(200, 5))
    # Names of classes that are whole numbers come as such.
    assert set(result.model(0).predict(x).tolist()) <= {0, 1}
    assert set(result.model(1).predict(x).tolist()) <= {1, 2}
    assert result.model(0).predict_proba(x)[:, 2].max() == 0.0


def test_mixed_tasks_have_their_own_inputs_and_answers() -> None:
    result = fg.run("fedavg", data="motion+motion-forecast", clients=4, **{**QUICK, "rounds": 1})
    raw = data.load("motion", clients=2, standardise=False).client(1).test
    model = result.model(1)
    truth = np.array(model.labels)[raw.y.numpy()]
    reported = result.clients()[1]
    assert reported["task"] == "motion"
    assert model.score(raw.x, truth) == pytest.approx(reported["metric"], abs=1e-6)
    with pytest.raises(InputError, match=r"several tasks \(motion, motion-forecast\)"):
        result.model()


def test_inputs_that_were_padded_for_a_mixture_are_padded_again() -> None:
    x, y, owner = windows()
    short = data.from_arrays(x[:60, :, :12], y[:60], owner[:60])
    both = data.mix({"long": federation(), "short": short})
    result = fg.run("fedavg", data=both, net="mlp", lr=0.01, **QUICK)
    model = result.model(3)
    assert model.shape == (3, 12)
    assert model.labels == ("run", "walk")
    prepared = both.client(3).train.x[:5]
    (found,) = [
        x[row, :, :12]
        for row in range(60)
        if np.array_equal(model.preparation.apply(x[[row], :, :12]), prepared[:1, :, :12].numpy())
    ]
    with torch.no_grad():
        wanted = model.module(prepared)[0, model.first : model.first + 2]
    assert np.allclose(model.outputs(found), wanted.numpy(), atol=1e-6)


# ---- sentences -----------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, str]] = {
    "turned": (np.zeros((16, 3)), r"you gave \(16, 3\); this model takes windows \(3, 16\)"),
    "what to do": (np.zeros((4, 16, 3)), r"other way round: numpy\.swapaxes\(x, -1, -2\)"),
    "too short": (np.zeros((3, 15)), r"you gave \(3, 15\).* a batch of them \(n, 3, 16\)"),
    "too deep": (np.zeros((1, 1, 3, 16)), r"you gave \(1, 1, 3, 16\)"),
    "text": (np.full((3, 16), "x"), r"values of type <U1; a model takes numbers"),
    "NaN": (np.full((3, 16), np.nan), r"NaN or infinity"),
    "ragged": ([[1.0], [1.0, 2.0]], r"different lengths"),
}


@pytest.mark.parametrize("case", WRONG)
def test_inputs_that_do_not_fit(case: str, trained: Result) -> None:
    x, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        trained.model(0).predict(x)


def test_images_hint_at_their_channels() -> None:
    model = Model("it", nn.Flatten(), (3, 8, 9), ("a", "b"), "classes")
    with pytest.raises(InputError, match=r"channels are last: numpy\.moveaxis"):
        model.predict(np.zeros((2, 8, 9, 3)))
    grey = Model("it", nn.Flatten(), (1, 8, 9), ("a", "b"), "classes")
    with pytest.raises(InputError, match=r"lack the channel: numpy\.expand_dims"):
        grey.predict(np.zeros((8, 9)))


def test_windows_of_recordings_may_come_as_recorded() -> None:
    own = Preparation(window=4, shape=(2, 4), labels=("a", "b"))
    model = Model(
        "it", nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), (2, 4), ("a", "b"), "classes", own
    )
    x = np.random.default_rng(0).normal(size=(5, 2, 4))
    assert np.array_equal(model.outputs(x), model.outputs(np.swapaxes(x, 1, 2)))
    assert np.array_equal(model.outputs(x[0]), model.outputs(x[0].T))


class Frame:
    """What a DataFrame of pandas or polars can do, as far as it is asked."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = list(columns)
        self._columns = columns

    def __getitem__(self, name: str) -> Frame:
        return Frame({name: self._columns[name]})

    def to_numpy(self) -> np.ndarray:
        stacked = np.stack(list(self._columns.values()), axis=1)
        return stacked[:, 0] if len(self.columns) == 1 else stacked


def test_columns_of_a_frame_are_taken_by_name() -> None:
    """As many channels as samples, so that the shape says nothing of which is which."""
    own = Preparation(window=2, shape=(2, 2), labels=("a", "b"), channels=("ax", "ay"))
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    model = Model("it", net, (2, 2), ("a", "b"), "classes", own)
    ax, ay = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    wanted = model.outputs(np.stack([ax, ay]))
    assert np.array_equal(model.outputs(Frame({"ax": ax, "ay": ay})), wanted)
    other_order = Frame({"activity": np.array(["run", "run"]), "ay": ay, "ax": ax})
    assert np.array_equal(model.outputs(other_order), wanted)
    with pytest.raises(
        InputError, match=r"no column ax; this model takes ax, ay, and yours has ay"
    ):
        model.outputs(Frame({"ay": ay}))


def test_an_unknown_client_is_answered_with_near_names(trained: Result) -> None:
    with pytest.raises(InputError, match=r"no client 'watch-7' .* did you mean 'watch-07'"):
        trained.model("watch-7")
    with pytest.raises(InputError, match="There are: watch-03, watch-07, watch-11"):
        trained.model(3)
    with pytest.raises(InputError, match="no client True"):
        client_number(True, {0: "a", 1: "b"}, "the run")
    # A name that looks like a number goes before a number.
    assert client_number("1", {0: "1", 1: "0"}, "the run") == 0
    assert client_number(1, {0: "1", 1: "0"}, "the run") == 1
    many = {k: f"user-{k}" for k in range(50)}
    with pytest.raises(InputError, match="user-19 and 30 others"):
        client_number("nobody", many, "the run")


def test_groups_are_named_where_there_is_no_model_for_all() -> None:
    result = fg.run("local", data=federation(), net="mlp", **QUICK)
    with pytest.raises(InputError, match=r"local has no model that clients share; name a client"):
        result.model()
    assert result.clients()[0]["group"] is None
    grouped = fg.run("ca-afp", data="digits", clients=4, set={"clusters": 2}, **QUICK)
    members = [row["name"] for row in grouped.clients() if row["group"] == 0]
    assert len(members) > 1
    with pytest.raises(InputError, match=rf"group 0: {', '.join(members)}"):
        grouped.model()
    assert "clients share" in grouped.model(group=0).who
    with pytest.raises(InputError, match="no group 9"):
        grouped.model(group=9)
    with pytest.raises(InputError, match="either a client or a group"):
        grouped.model(0, group=0)


# ---- the folder ----------------------------------------------------------------------------------


@pytest.fixture
def copied(trained: Result, tmp_path: Path) -> Path:
    shutil.copytree(trained.folder.path, tmp_path / "run")
    return tmp_path / "run"


def test_an_unfinished_run_says_how_to_go_on(copied: Path) -> None:
    (copied / "summary.json").unlink()
    with pytest.raises(
        InputError, match=r"not finished: 2 of 2 rounds are saved; resume from Pyth"
    ):
        fg.load_run(copied)
    with pytest.raises(InputError, match="not a run folder"):
        fg.load_run(copied / "models")


def test_a_folder_from_before_has_figures_but_no_preparation(copied: Path) -> None:
    (copied / "models" / "preparation.json").unlink()
    lines = (copied / "checksums.txt").read_text().splitlines()
    kept = [line for line in lines if "preparation.json" not in line]
    (copied / "checksums.txt").write_text("\n".join(kept) + "\n")
    old = fg.load_run(copied)
    assert [row["accuracy"] for row in old.clients()] == list(
        old.summary["accuracy_clients"].values()
    )
    with pytest.raises(InputError, match="before runs kept how raw inputs are prepared"):
        old.model(0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 9}'])
def test_a_damaged_preparation_is_noticed(copied: Path, content: bytes) -> None:
    path = copied / "models" / "preparation.json"
    path.write_bytes(content)
    with pytest.raises(DamageError, match=r"preparation\.json"):
        fg.load_run(copied).model(0)
    list_again(copied)
    with pytest.raises(DamageError, match=r"preparation\.json"):
        fg.load_run(copied).model(0)


def test_weights_that_are_damaged_are_noticed(copied: Path) -> None:
    (copied / "models" / "client-00001.safetensors").write_bytes(b"nothing")
    with pytest.raises(DamageError, match=r"client-00001\.safetensors"):
        fg.load_run(copied).model(1)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


def test_a_module_of_ones_own_is_given_again(tmp_path: Path) -> None:
    x, _, _ = windows()
    net = Own()
    before = net.head.weight.clone()
    result = fg.run("fedavg", data=federation(), net=net, out=tmp_path / "run", **QUICK)
    wanted = result.model(0).outputs(x)
    assert torch.equal(net.head.weight, before), "the user's own module stays as it is"
    with pytest.raises(InputError, match=r"made in Python \(<module: Own>\); give it again"):
        fg.load_run(tmp_path / "run").model(0)
    assert np.array_equal(fg.load_run(tmp_path / "run", net=Own()).model(0).outputs(x), wanted)
    with pytest.raises(
        InputError, match=r"'1\.weight' of the model of client watch-03 is 'missing'"
    ):
        fg.load_run(tmp_path / "run", net=nn.Sequential(nn.Flatten(), nn.Linear(48, 2))).model(0)


def test_code_in_a_file_is_run_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(48, classes))\n"
    )
    result = fg.run("fedavg", data=federation(), net="mine.py:Net", out="run", **QUICK)
    x, _, _ = windows()
    wanted = result.model(0).outputs(x)
    with pytest.raises(InputError, match=r"mine\.py:Net.*trust=True"):
        fg.load_run("run").model(0)
    assert np.array_equal(fg.load_run("run", trust=True).model(0).outputs(x), wanted)
    with pytest.raises(InputError, match="leave net= out"):
        fg.load_run("run", net=Own())


def test_a_method_that_predicts_in_its_own_way_is_refused() -> None:
    result = fg.run("fedem", data="digits", clients=3, **{**QUICK, "rounds": 1})
    with pytest.raises(InputError, match=r"predict in their method's own way, fedem"):
        result.model(0)


# ---- figures -------------------------------------------------------------------------------------


def test_clients_and_rounds_are_lists_of_dictionaries(trained: Result) -> None:
    rows = trained.clients()
    assert [row["name"] for row in rows] == list(WATCHES)
    assert [row["client"] for row in rows] == [0, 1, 2]
    # Nothing is held out for validation.
    assert sum(row["examples"] + row["test"] for row in rows) == 90
    assert [row["accuracy"] for row in rows] == list(trained.summary["accuracy_clients"].values())
    for row in rows:
        assert (trained.folder.path / row["model"]).is_file()
        assert row["group"] == 0
    assert [line["round"] for line in trained.rounds()] == [1, 2]
    assert json.dumps(rows)


def test_data_frames(trained: Result) -> None:
    table = trained.clients(as_frame=True)
    assert list(table["name"]) == list(WATCHES)
    assert table["accuracy"].mean() == pytest.approx(trained.summary["accuracy_mean"])
    assert "bytes_up_parts.values" in trained.rounds(as_frame=True).columns
