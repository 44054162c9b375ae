"""Devices, the clock and what comes of them on the command line, in small real runs."""

import json
import tomllib
from pathlib import Path

import pytest

from fedgrove.cli import main

SMALL = [
    "--data",
    "digits",
    "--clients",
    "3",
    "--cohort",
    "3",
    "--rounds",
    "3",
    "--epochs",
    "1",
    "--engine",
    "serial",
]
PROFILE = "client,up,down,speed,memory\n0,5,40,2.5,1000000\n1,20,100,10,2000000\n2,9,9,5,300000\n"
TRACE = "client,second,up,down\n0,0,5,40\n1,0,20,100\n2,0,9,9\n2,0.05,0,0\n2,60,9,9\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("devices.csv").write_text(PROFILE)
    Path("bandwidth.csv").write_text(TRACE)
    return tmp_path


def test_a_run_on_devices_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--profile", "devices.csv", "--trace", "bandwidth.csv", "--deadline", "30"]
    assert main(["run", "fedavg", *words, "--out", "mine", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in Path("mine/metrics.jsonl").read_text().splitlines()]
    # Client 2 gets its first task within .05 s, cannot send its report and is late, twice; in the
    # third round its outage ends at second 60, after which it has no time left.
    assert [line.get("lost") for line in lines] == [{"late": [2]}, {"late": [2]}, None]
    assert lines[1]["virtual_clock"] == 60.0
    assert summary["lost"] == {"late": 2}
    assert summary["virtual_seconds"] == lines[-1]["virtual_clock"] > 60.0
    assert "the trace ended before the run for 1 of 3 clients" in " ".join(summary["notes"])
    config = tomllib.loads(Path("mine/config.toml").read_text())
    assert (config["run"]["profile"], config["run"]["trace"]) == ("devices.csv", "bandwidth.csv")
    assert config["run"]["deadline"] == 30.0
    assert set(config["files"]) == {"devices.csv", "bandwidth.csv"}


def test_what_was_trained_on_devices_can_be_exported_without_their_files() -> None:
    pytest.importorskip("onnx")
    words = ["--profile", "devices.csv", "--out", "mine"]
    assert main(["run", "fedavg", *SMALL, *words, "--json"]) == 0
    Path("devices.csv").unlink()
    assert main(["export", "mine", "--client", "1", "--to", "onnx"]) == 0


def test_a_deadline_nobody_can_meet_ends_with_a_sentence_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "fedavg", *SMALL, "--deadline", "0.0001", "--out", "mine"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    sentence = err.splitlines()[-1]
    assert sentence.startswith(
        "fedgrove: No client answered within --deadline 0.0001: the fastest, c"
    )
    assert sentence.endswith("Give a longer deadline.")
    assert "Traceback" not in err
    assert not Path("mine").exists()


def test_a_sweep_on_devices_is_continued_only_with_the_same_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["sweep", "fedavg", "local", *SMALL, "--profile", "devices.csv", "--out", "all"]
    assert main(words) == 0
    assert main(words) == 0
    Path("devices.csv").write_text(PROFILE.replace("0,5,40", "0,6,40"))
    capsys.readouterr()
    assert main(words) == 2
    assert "all contains a different sweep or other files" in capsys.readouterr().err
    assert main(["resume", "all"]) == 2
    assert "devices.csv has changed since the run was started" in capsys.readouterr().err


def test_time_to_an_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("fedavg", "ditto"):
        words = ["--profile", "devices.csv", "--out", method]
        assert main(["run", method, *SMALL, *words, "--json"]) == 0
    capsys.readouterr()
    assert main(["compare", "fedavg", "ditto", "--time", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["to"] == min(run["best"] for run in found["runs"])
    assert all(run["seconds_to"] <= run["virtual_seconds"] for run in found["runs"])
    assert main(["compare", "fedavg", "ditto", "--time", "--to", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "accuracy 1.00 %" in out
    assert main(["compare", "fedavg", "ditto", "--time", "--plot", "page.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Page: page.html"
    assert "virtual seconds" in Path("page.html").read_text()


def test_costs_of_several_methods_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [
        "--net",
        "har-cnn",
        "--input",
        "3x32",
        "--classes",
        "4",
        "--clients",
        "3",
        "--cohort",
        "3",
        "--rounds",
        "2",
    ]
    words = [*shape, "--profile", "devices.csv", "--examples", "10"]
    assert main(["cost", "fedavg", "heterofl", "fedprox", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["fedavg", "heterofl", "fedprox"]
    fedavg, heterofl, _ = rows
    assert heterofl["per_device"]["bytes_up"]["min"] < fedavg["per_device"]["bytes_up"]["min"]
    assert main(["cost", "fedavg", *words, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone == fedavg
    assert main(["cost", "fedavg", "fedprox", *words, "--set", "mu=0.1,1"]) == 0
    out = capsys.readouterr().out
    assert [row.split()[0] for row in out.splitlines() if row.startswith("fed")] == 2 * [
        "fedavg",
        "fedprox-mu=0.1",
        "fedprox-mu=1",
    ]
    assert main(["cost", "heterofl", *words]) == 0
    assert "time per device and round" in capsys.readouterr().out
    # On data, which say how many examples each client has.
    data = ["--data", "digits", "--clients", "3", "--cohort", "3", "--rounds", "2"]
    assert main(["cost", "fedavg", "ca-afp", *data, "--profile", "devices.csv", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["virtual_seconds"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run fedavg --clients 5 --profile devices.csv", "devices.csv has no line for client 3, 4"),
        ("run fedavg --profile zero.csv", "zero.csv, line 2: up is '0'; it must be a number above"),
        ("run fedavg --trace late.csv", "late.csv, line 2: client 0 begins at second 3; its first"),
        (
            "run fedavg --trace nowhere.csv",
            "the devices in nowhere.csv cannot be read: No such fil",
        ),
        ("run fedavg --deadline 0", "deadline is 0.0; it must be above 0."),
        ("run fedavg --deadline soon", "--deadline is 'soon'; it must be a number."),
        ("cost fedavg --examples 5", "--examples is 5; it must be left out where there are data"),
        ("compare mine --to 0.9", "--to is 0.9; it must be given together with --time."),
        ("compare mine --plot p.html", "--plot is 'p.html'; it must be given together with --time"),
        ("compare mine --time --bytes", "--time is True; it must be given without --bytes."),
    ],
)
def test_refusals(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("zero.csv").write_text("client,up,down,speed,memory\n0,0,1,1,1\n")
    Path("late.csv").write_text("client,second,up,down\n0,3,1,1\n")
    assert main(words.split()) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()
