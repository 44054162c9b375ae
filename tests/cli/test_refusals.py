"""Every mistake ends with code 2 and one sentence, and leaves nothing behind."""

from pathlib import Path

import numpy as np
import pytest

from fedgrove.cli import main
from fedgrove.config.settings import allowed
from fedgrove.parts.objective import Objective

LOSSES = allowed(Objective).removeprefix("one of ").split(", ")
"""The names of the losses that every method can train with."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("fedgrove: ")
    assert list(Path().iterdir()) == []
    return line.removeprefix("fedgrove: ")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("run fedavgg", "there is no method 'fedavgg'; did you mean 'fedavg'? There are: "),
        ("run --set lr=-1", "local.optimiser.lr is -1.0; it must be above 0."),
        ("run --lr -1", "local.optimiser.lr is -1.0; it must be above 0."),
        ("run --epochs 0", "local.epochs is 0; it must be 1 or more."),
        (
            "run ditto --set nosuch=1",
            "there is no setting of ditto 'nosuch'. There are: codec, ",
        ),
        (
            "run adfedwcp --dry-run --set pull.origin=nowhere",
            "there is no setting of adfedwcp 'pull.origin'",
        ),
        ("run adfedwcp --set pull.to=clustered", "there is no setting of adfedwcp 'pull.to'"),
        ("run fedprox --set pull.to=nowhere", "there is no setting of fedprox 'pull.to'"),
        ("run moon --set contrast.away=nowhere", "there is no setting of moon 'contrast.away'"),
        ("run fedem --set components=100000", "components is 100000; it must be in 1..100."),
        ("run fedavg --net mlp:hidden=0", "hidden of net 'mlp' is 0; it must be 1 or more."),
        ("run fedkd --set mentee=mlp:hidden=0", "hidden of net 'mlp' is 0; it must be 1 or more."),
        (
            "run fedkd --set distil=0 --set use_mentor=true",
            "use_mentor is True; it must be false where there are no mentors (distil is 0).",
        ),
        (
            "run fedmask --set density=1e-9",
            "density is 1e-09; it must be above 0.000122: at less, none of the 4,096 weights of "
            "fc1.weight is kept.",
        ),
        (
            "run adfedwcp --dry-run --set objective=GammaDistance",
            "the objective is GammaDistance(), which does not use the targets: it can only be "
            "added to a loss, in Python, as ProblemLoss() + GammaDistance(). With --set, "
            f"objective must be one of {', '.join(LOSSES)}.",
        ),
        (
            "run fedmask --set objective=GammaL1",
            "the objective is GammaL1(), which does not use the targets",
        ),
        ("run qfedcg --set objective=Clustered", "the objective is Clustered(), which does not "),
        ("run fedavg --set objective=Proximal", "the objective is Proximal(), which does not "),
        ("run fedavg --set objective=AnnealedPull", "the objective is AnnealedPull(), which "),
        (
            "cost fedavg --set objective=Proximal --net mlp --input 4 --classes 2",
            "the objective is Proximal(), which does not ",
        ),
        ("sweep fedavg --set objective=Proximal", "the objective is Proximal(), which does not "),
        (
            "run adfedwcp --set objective=MutualDistillation",
            "the objective has MutualDistillation, which belongs to fedkd: clients of other methods "
            f"do not have what it needs. With --set, objective must be one of {', '.join(LOSSES)}.",
        ),
        (
            "run fedmask --set objective=LogitCalibration",
            "the objective has LogitCalibration, which belongs to fedlc: ",
        ),
        (
            "run fedavg --set objective=None",
            f"objective is 'None'; it must be one of {', '.join(LOSSES)}.",
        ),
        ("run --set nosuch=1", "there is no setting of local 'nosuch'. There are: "),
        (
            "run --set lr=0.1,0.2",
            "--set takes one value without a method; for several, train a sweep of local, fedavg, ",
        ),
        ("run ditto --set lr", "--set was given 'lr'; it takes key=value"),
        ("run --set lr", "--set was given 'lr"),
        ("run --data nope", "there is no data set 'nope'"),
        ("run --data digits+nope", "there is no data set 'nope'"),
        ("run --data digits+digits", "--data is 'digits+digits', which names a set twice; "),
        (
            "run fedavg --data digits+motion",
            "inputs of digits (1, 8, 8), motion (3, 64) cannot be brought to one shape: ",
        ),
        ("run fedavg --data crowd+digits", "the clients of crowd are created when needed; "),
        (
            "run fedavg --data rooms+tags --clients 1",
            "--clients is 1; it must be at least 2, one for each data set.",
        ),
        (
            "run fedavg --data rooms+tags --clients 6 --scenario switch:2:4",
            "pairs of a switch is 4; it must be at most 3 pairs of clients of different tasks.",
        ),
        (
            "run fedavg --data rooms --scenario switch:2:1 --rounds 2",
            "client ",
        ),
        (
            "run fedavg --data rooms+tags --partition dirichlet:.5",
            "partition dirichlet:.5 needs classes, and the targets of rooms are numbers; ",
        ),
        ("run fedavg --data digits:grey", "digits:grey has no colours to leave out; "),
        (
            "run fedavg --partition iid:0",
            "--partition is 'iid:0'; it must be iid:N with N above 0.",
        ),
        ("run --data nope.npz", "there is no file or folder 'nope.npz'"),
        ("run --data digits --net har-cnn", "net 'har-cnn' takes (channels, length)"),
        ("run --net nope", "there is no net 'nope'"),
        ("run --partition iidd", "there is no partition 'iidd'; did you mean 'iid'?"),
        ("run --rounds 0", "--rounds is 0; it must be 1 to 1000000."),
        ("run --rounds 1000000000000 --dry-run", "--rounds is 1000000000000; it must be "),
        ("run ditto --rounds 0", "--rounds is 0; it must be 1 to 1000000."),
        ("run --rounds ten", "--rounds is 'ten'; it must be a whole number."),
        ("run --lr x", "--lr is 'x'; it must be a number."),
        (
            "run --finetune 0,x",
            "--finetune is '0,x'; it must be whole numbers of epochs, 0 or more, such as 0,3,25.",
        ),
        ("run --finetune -1", "--finetune is (-1,); it must be whole numbers of epochs, 0 or more"),
        ("run --cohort 25", "--cohort is 25; it must be between 1 and the number of clients, 24."),
        ("run --seed -1", "--seed is -1; it must be 0 or more, and below 2^63."),
        (
            "run ditto --validation 0.6",
            "--validation is 0.6; it must be between 0 (none) and 0.5.",
        ),
        ("sweep ditto --validation -1", "--validation is -1.0; it must be between 0 (none)"),
        ("cost ditto --validation ten", "--validation is 'ten'; it must be a number."),
        ("run --clients 0", "--clients is 0; it must be 1 or more."),
        ("run --engine fast", "there is no engine 'fast'"),
        (
            "run --device cuda",
            "--device is cuda, and torch finds no CUDA device here; use --device cpu.",
        ),
        ("run --device tpu", "there is no device 'tpu'. There are: auto, cpu, cuda, cuda:0."),
        ("run --round 3", "there is no option '--round'; did you mean '--rounds'?"),
        ("run --rounds", "Option '--rounds' requires an argument."),
        ("run fedavg local", "Got unexpected extra argument"),
        (
            "rnu",
            "there is no command 'rnu'; did you mean 'run'? There are: app, bench, choose, ",
        ),
        ("resume nothing", "nothing is not a run folder: it does not exist."),
        ("resume", "there is no unfinished run under runs; give a run folder: "),
        ("compare nothing", "nothing is not a run folder: it does not exist."),
        ("compare", "RUN... is missing; see: fedgrove compare --help"),
        ("cost", "METHOD... is missing; see: fedgrove cost --help"),
        (
            "cost fedavg --input 3x",
            "--input is '3x'; it must be a shape CxL or CxHxW, such as 3x200 or 1x28x28.",
        ),
        (
            "cost fedavg --net mlp --input 99999999x99999999 --classes 3",
            "the shape of an input is (99999999, 99999999); it must be at most 16777216 numbers.",
        ),
        (
            "cost fedavg --net mlp --input 3x32 --classes 99999999999",
            "--classes is 99999999999; it must be above 0 and at most 16777216.",
        ),
        (
            "cost fedavg --net mlp --input 3 --classes 2 --examples 99999999999999999999",
            "--examples is 99999999999999999999; it must be 1 to 1000000000.",
        ),
        ("cost fedavg --input 3x200", "--input came without --net and --classes; give them too"),
        (
            "cost fedavg --input 64 --net mlp --classes 2 --data digits",
            "--data is 'digits'; it must be left out",
        ),
        (
            "cost fedavg --input 64 --net mlp --classes 2 --clients 0",
            "--clients is 0; it must be 1 or more.",
        ),
        ("paper ca-apf --table 2", "there is no paper 'ca-apf'; did you mean 'ca-afp'?"),
        ("paper --table 2", "NAME is missing; see: fedgrove paper --help"),
        (
            "paper ca-afp",
            "neither --table nor --figure was given; ca-afp has --table 1, 2, 3, 4, 5, 6, 7 and "
            "--figure 2, 3, 4.",
        ),
        (
            "paper ca-afp --table 8",
            "--table is 8; it must be one of 1, 2, 3, 4, 5, 6, 7, those of ca-afp that are run here.",
        ),
        (
            "paper ca-afp --figure 9",
            "--figure is 9; it must be one of 2, 3, 4, those of ca-afp that are run here.",
        ),
        ("paper ca-afp --table two", "--table is 'two'; it must be a whole number."),
        ("paper ca-afp --table 2 --figure 1 --quick", "--figure is 1; it must be one of 2, 3, 4"),
        ("paper ca-afp --table 2 --data nope", "there is no data set 'nope'"),
        ("paper ca-afp --table 2 --quick --split halves", "there is no split 'halves'"),
        (
            "paper ca-afp --table 2 --quick --seeds none",
            "--seeds is 'none'; it must be a number of seeds",
        ),
        ("paper ca-afp --table 2 --quick --engine fast", "there is no engine 'fast'"),
        ("list things", "there is no list 'things'"),
        ("show fedavgg", "there is no method 'fedavgg'; did you mean 'fedavg'?"),
    ],
)
def test_a_mistake_is_one_sentence(
    args: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *args.split()).startswith(sentence)


def test_a_folder_that_exists_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/note").write_text("keep")
    for words in (["run", "ditto"], ["run"]):
        assert main([*words, "--out", "mine"]) == 2
        assert (
            "fedgrove: the run folder mine exists; runs are never overwritten."
            in capsys.readouterr().err
        )
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["note"]


def test_a_net_that_does_not_fit_the_users_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        x=rng.normal(size=(60, 1, 28, 28)),
        y=np.arange(60) % 3,
        client=np.arange(60) // 20,
    )
    assert main(["run", "--data", "own.npz", "--net", "har-cnn"]) == 2
    assert "net 'har-cnn' takes (channels, length)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["own.npz"]


@pytest.mark.parametrize("method", ["pfedgate", "fedmask"])
def test_a_net_without_weights_to_prune_is_refused(
    method: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    Path("scales.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Scales(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.ones(classes))\n\n"
        "    def forward(self, x):\n"
        "        return x.flatten(1)[:, : len(self.scale)] * self.scale\n"
    )
    assert main(["run", method, "--net", "scales.py:Scales"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = f"fedgrove: {method} cannot be used with net Scales: it has no weights that can be "
    assert line.startswith(told)
    assert not list(recwarn)
    assert not Path("runs").exists()


def test_files_that_are_nowhere_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGROVE_DATA", raising=False)
    assert main(["run", "--data", "uci-har"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedgrove: uci-har was not found: searched for ")
    assert "FEDGROVE_DATA or --data-dir" in line


# ---- paths and texts that no program should be given ---------------------------------------------

LONG = "x" * 5000


@pytest.mark.parametrize(
    "args",
    [
        ("resume", LONG),
        ("rerun", LONG),
        ("compare", LONG),
        ("watch", LONG),
        ("report", LONG),
        ("run", "fedavg", "--data", "digits", "--out", LONG),
        ("run", "fedavg", "--data", "+".join(["digits"] * 900)),
        ("run", "fedavg", "--data", "digits", "--init", LONG),
        ("run", "fedavg", "--data", "digits", "--trace", LONG),
        ("keys", LONG),
    ],
    ids=lambda args: " ".join(args)[:40],
)
def test_a_name_that_is_too_long_is_a_sentence(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(refused(capsys, *args)) < 6500


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device on this system")
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--config", "/dev/zero is longer than 16777216 bytes; give a file of options."),
        ("--init", "--init is /dev/zero, which is a device or a pipe; give a file."),
        ("--trace", "a file of devices is /dev/zero, which is a device or a pipe; give a file."),
    ],
)
def test_a_device_without_an_end_is_not_read(
    option: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "run", "fedavg", "--data", "digits", option, "/dev/zero") == sentence


@pytest.mark.parametrize("option", ["--out", "--init", "--config", "--trace"])
def test_a_zero_byte_is_a_sentence(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "run", "fedavg", "--data", "digits", option, "a\0b")


@pytest.mark.parametrize(
    "args",
    [
        ("run", "\x1b[31mred"),
        ("run", "fedavg", "--net", "\x1b[2J"),
        ("resume", "\u202egnp.exe"),
        ("cost", "a\rb"),
    ],
)
def test_a_terminal_gets_no_control_characters(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, *args)
    assert sentence.isprintable()


def test_names_of_columns_and_files_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path("users")
    folder.mkdir()
    (folder / "\x1b[31mann.csv").write_text("\x1b[2Ja,b\n1,2\n")
    (folder / "bob.csv").write_text("a,y\n1,0\n2,1\n")
    assert main(["run", "fedavg", "--data", "users", "--label", "y"]) == 2
    out, err = capsys.readouterr()
    assert "?[31mann" in err
    assert all(line.isprintable() for line in (out + err).splitlines())
