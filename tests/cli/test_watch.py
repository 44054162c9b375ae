"""Watching real runs: one that trains, one that is killed, one that is finished, a sweep, a page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedgrove.cli import main
from fedgrove.cli import watch as module
from fedgrove.runs import follow
from fedgrove.runs.lock import locked

LINE = {"round": 1, "counts": True, "bytes_up": 1 << 20, "bytes_down": 0, "bytes_up_parts": {}}
LINE |= {"bytes_down_parts": {}, "accuracy_mean": 0.5, "seconds": 1.5}
SMALL = ["--clients", "4", "--cohort", "2", "--net", "mlp:hidden=8", "--engine", "serial"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "EVERY", 0.05)
    monkeypatch.setattr(module, "SAY_EVERY", 0.05)
    monkeypatch.setattr(module, "LINGER", 0.3)
    monkeypatch.setattr(follow, "SILENCE", 0.2)
    return tmp_path


@pytest.fixture
def training(here: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains for a long time in runs/long, after its first round."""
    words = ["run", "fedavg", *SMALL, "--rounds", "100000", "--out", "runs/long"]
    command = [sys.executable, "-m", "fedgrove", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = Path("runs/long/metrics.jsonl")
    begun = time.monotonic()
    while not metrics.exists() or not metrics.stat().st_size:
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def now(path: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["watch", path, "--json"]) == 0
    looks: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return looks


@pytest.mark.slow
def test_a_run_that_trains_is_watched_and_then_killed(
    training: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    (before,) = now("runs/long", capsys)
    assert before["state"] == "training"
    assert before["method"] == "fedavg"
    assert before["rounds"] == 100000
    # The time left is what a round takes, for all that are left: some minutes at least.
    assert float(str(before["left"])) > 60
    look_at_the_page("runs/long")
    assert training.poll() is None
    (after,) = now("runs/long", capsys)
    assert int(str(after["round"])) > int(str(before["round"]))
    assert int(str(after["bytes"])) > int(str(before["bytes"]))

    command = [sys.executable, "-m", "fedgrove", "watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        first = watcher.stdout.readline()
        assert re.match(
            r"runs/long: training, round \d+/100000, accuracy [\d.]+ %, .*, about .* left", first
        )
        training.send_signal(signal.SIGKILL)
        rest = watcher.stdout.read()
        assert watcher.wait(timeout=30) == 1
    assert "runs/long was stopped after " in rest
    assert rest.endswith("Continue with: fedgrove resume runs/long\n")


def look_at_the_page(path: str) -> None:
    """Start the server, ask it as a browser does, and as others might, and end it with Ctrl-C."""
    command = [sys.executable, "-m", "fedgrove", "watch", path, "--browser"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where tests run in the background of a shell Ctrl-C is ignored, and what they start
        # would ignore it too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address[0], timeout=10) as answer:
            page = answer.read().decode()
            assert "script" not in answer.headers["Content-Security-Policy"]
        assert '<meta http-equiv="refresh" content="2">' in page
        assert ": training</p>" in page
        assert 'class="line"' in page
        # Other paths, and sites that pretend to be ours, get nothing.
        for wrong in (
            urllib.request.Request(f"{address[0]}../config.toml"),
            urllib.request.Request(address[0], headers={"Host": "evil.example"}),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(wrong, timeout=10)
            refused.value.close()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
        assert server.stderr.read() == "fedgrove: no longer watching; the run continues.\n"


def made_up(rounds: int) -> Path:
    """A run folder with so many of five rounds, as another process would have written them."""
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[run]\nmethod = "fedavg"\nrounds = 5\n')
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(1, rounds + 1):
            file.write(json.dumps({**LINE, "round": number}) + "\n")
    return folder


def test_a_page_of_a_run_that_trains() -> None:
    with locked(made_up(2)):
        look_at_the_page("runs/a")


def test_finished_runs_and_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--rounds", "2"]
    assert main(["run", "fedavg", *words, "--out", "runs/one"]) == 0
    capsys.readouterr()
    assert main(["watch", "runs/one"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/one: finished, round 2/2, accuracy ")
    assert "Its table: fedgrove compare runs/one" in out
    # The page of a run that is over is served for a while, and then ends by itself.
    assert main(["watch", "runs/one", "--browser"]) == 0

    assert main(["sweep", "fedavg", "local", *words, "--out", "runs/many"]) == 0
    looks = now("runs/many", capsys)
    assert [look["path"] for look in looks] == ["runs/many/fedavg-s0", "runs/many/local-s0"]
    assert {look["state"] for look in looks} == {"finished"}
    # Without a name it is the one that was written to last.
    assert main(["watch"]) == 0
    assert "runs/many/local-s0 is finished." in capsys.readouterr().out


def test_a_run_of_a_sweep_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/many/a")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[run]\nmethod = "fedavg"\nrounds = 5\n')
    why = {"state": "failed", "why": "the net is <b>broken</b>."}
    members = {"a": why, "c": {"state": "unfinished"}}
    written = Path("runs/many") / "sweep.json"
    written.write_text(json.dumps({"grid": {}, "members": members}))
    with locked(Path("runs/many")):
        looks = now("runs/many", capsys)
        # c has no folder yet.
        assert [(look["path"], look["state"]) for look in looks] == [("runs/many/a", "failed")]
        # A sweep with a member outside its folder is damaged, and none of its members is shown.
        written.write_text(json.dumps({"grid": {}, "members": {**members, "../b": why}}))
        assert now("runs/many", capsys) == []


def test_in_a_terminal_a_table_is_live_and_the_last_sentence_stays() -> None:
    folder = made_up(2)
    inside, outside = os.openpty()
    termios.tcsetwinsize(outside, (24, 100))
    command = [sys.executable, "-m", "fedgrove", "watch", "runs/a"]
    with locked(folder):
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        watcher = subprocess.Popen(command, stdout=outside, env=environment)
        os.close(outside)
        shown = b""
        # Two rounds took three seconds, and three are left.
        while b"4.5 s" not in shown:
            shown += os.read(inside, 4096)
        assert b"training" in shown
        assert b"accuracy 50.0 %" in shown
        # Half-written, and then what a resumed run writes.
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**LINE, "round": 4, "accuracy_mean": 0.625})[:20])
        (folder / "metrics.jsonl").write_text("")
        (folder / "metrics.jsonl").write_text(json.dumps({**LINE, "round": 1}) + "\n")
        while b"1/5" not in shown:
            shown += os.read(inside, 4096)
    rest = b""
    with suppress(OSError):
        # On Linux reading from a terminal whose other end is closed is an error.
        while chunk := os.read(inside, 4096):
            rest += chunk
    os.close(inside)
    assert watcher.wait(timeout=30) == 1
    assert b"runs/a was stopped after 1 of 5 rounds" in rest


def test_watching_does_not_wait_for_torch() -> None:
    made_up(1)
    code = (
        "import sys; from fedgrove.cli import main; main(['watch', '--json']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    for words, sentence in {
        ("nowhere",): "nowhere is not a run folder: it does not exist. ",
        ("empty",): "empty is not a run folder: it has no config.toml. ",
        (): "there is no run under runs; give a run folder: fedgrove watch RUN",
        ("empty", "--port", "80"): "--port is 80; it must be given together with --browser",
        ("empty", "--browser", "--port", "70000"): "--port is 70000; it must be between 1 and ",
        ("empty", "--track", "tensorbord"): "did you mean 'tensorboard'?",
    }.items():
        assert main(["watch", *words]) == 2
        assert sentence in capsys.readouterr().err
