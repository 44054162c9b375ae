"""What the shell is offered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedgrove.cli import complete, main


def words(rows: list[tuple[str, str]]) -> list[str]:
    return [word for word, _ in rows]


def test_names_that_begin_so() -> None:
    assert words(complete.methods("ca-")) == ["ca-afp", "ca-afp:paper"]
    assert words(complete.data("wis")) == ["wisdm", "wisdm51"]
    assert words(complete.nets("ml")) == ["mlp"]
    assert words(complete.engines("p")) == ["pool"]
    assert words(complete.kinds("n")) == ["nets"]
    assert words(complete.partitions("dir")) == ["dirichlet:", "dirichlet-clients:"]
    # Up to the number that is to be chosen, or whole.
    assert words(complete.partitions("shards")) == ["shards", "shards:"]
    assert complete.methods("no-such") == []


def test_settings_are_those_of_the_method_that_was_typed() -> None:
    ditto: Any = SimpleNamespace(params={"method": "ditto"}, args=[])
    assert words(complete.settings(ditto, "pull")) == ["pull=", "pull.mu="]
    assert "local.optimiser.momentum=" not in words(complete.settings(ditto, "local."))
    # digits is trained with Adam, mnist with SGD, which has a momentum.
    on_mnist: Any = SimpleNamespace(params={"method": "ditto", "data": "mnist"}, args=[])
    assert "local.optimiser.momentum=" in words(complete.settings(on_mnist, "local."))
    several: Any = SimpleNamespace(params={}, args=["fedavg", "ditto"])
    assert "pull.mu=" in words(complete.settings(several, ""))
    nobody: Any = SimpleNamespace(params={"method": "no-such"}, args=[])
    assert "pull.mu=" in words(complete.settings(nobody, ""))


def test_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("runs/a", "runs/b", "elsewhere/c", "runs/no-run", "sub/deep/x"):
        Path(path).mkdir(parents=True)
    for path in ("runs/a", "runs/b", "elsewhere/c", "sub/deep/x"):
        Path(path, "config.toml").touch()
    Path("runs/b/summary.json").touch()
    assert complete.runs("") == [("runs/a", ""), ("runs/b", "finished")]
    assert words(complete.runs("runs/a")) == ["runs/a"]
    assert words(complete.runs("else")) == ["elsewhere/"]
    assert words(complete.runs("elsewhere/")) == ["elsewhere/c"]
    assert words(complete.runs("sub/")) == ["sub/deep/"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedgrove re", ["resume", "rerun", "report"]),
        ("fedgrove run ditto --set pul", ["pull=", "pull.mu="]),
        ("fedgrove sweep fedprox ditto --set pull.", ["pull.mu="]),
        ("fedgrove run fedavg --data uci", ["uci-har", "uci-har-forecast"]),
        ("fedgrove run fedavg --partition dir", ["dirichlet:", "dirichlet-clients:"]),
        ("fedgrove list e", ["engines"]),
    ],
)
def test_bash_gets_them(
    line: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_FEDGROVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert capsys.readouterr().out.split() == expected
