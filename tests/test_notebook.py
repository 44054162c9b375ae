"""A notebook, executed: what it shows is short, and nothing of it is for a command line."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CELLS = (
    "import fedgrove as fg\nfrom fedgrove import data",
    "federation = data.load('digits', clients=4)\nfederation",
    "size = dict(data=federation, rounds=2, cohort=2, engine='serial', finetune=(0, 1))\n"
    "first = fg.run('fedavg', **size)\nfirst",
    "other = fg.run('fedprox', **size, seed=1)\nboth = fg.compare(first, other)\nboth",
    "swept = fg.sweep(['fedavg', 'local'], seeds=2, data='digits', clients=4, cohort=2, rounds=2, "
    "engine='serial', out='swept')\nswept",
    "first.table()\nboth.table()\nswept.table()",
    "swept.frame()[['run', 'state', 'accuracy_mean']]",
    "both.charts()[0]",
    "try:\n    fg.load_run('swept/fedavg-s0/nothing')\nexcept fg.InputError as error:\n    print(error)",
)
MOST_LETTERS = 1500
"""Of a plain repr, and of a line of text."""


@pytest.mark.slow
def test_a_notebook_shows_short_results(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [cell["outputs"] for cell in notebook["cells"]]

    federation = result_of(shown[1])
    assert federation["text/plain"].startswith("Federation('digits', 4 clients")
    assert read(federation["text/html"])[:4] == [
        federation["text/plain"].replace("\n", ""),
        "client",
        "training examples",
        "test examples",
    ]
    run = result_of(shown[2])
    assert run["text/plain"].startswith("Result(fedavg on digits, seed 0, 2 rounds, accuracy ")
    assert "in a temporary folder)" in run["text/plain"]
    words = read(run["text/html"])
    assert "accuracy % before fine-tuning" in words
    assert "accuracy % after 1 epoch of fine-tuning" in words
    # The bar has its last state: both rounds.
    (bar,) = [each["data"]["text/html"] for each in shown[2] if each.output_type == "display_data"]
    assert bar.startswith('<progress max="2" value="2"></progress> 2 of 2 rounds  accuracy ')
    assert "left" not in bar
    comparison = result_of(shown[3])
    assert comparison["text/plain"] == "Comparison(2 runs)"
    words = read(comparison["text/html"])
    assert {"fedavg-s0", "fedprox-s1"} <= set(words)
    sweep = result_of(shown[4])
    assert sweep["text/plain"] == "Sweep(4 runs, in 'swept')"
    assert {"fedavg", "local", "method", "sent"} <= set(read(sweep["text/html"]))
    assert "fedavg-s0" in result_of(shown[6])["text/html"]
    assert result_of(shown[7])["text/html"].startswith("<svg ")
    for outputs in shown:
        for output in outputs:
            plain = output.get("text") or output["data"].get("text/plain", "")
            assert "--" not in plain.replace("---", ""), plain
            assert "/tmp/" not in plain
            if output.output_type == "execute_result":
                assert len(plain) < MOST_LETTERS
    assert "`fedgrove.run(out=DIR)` creates one." in shown[8][0]["text"]


def result_of(outputs: list[Any]) -> Any:
    """What the last line of a cell is shown as."""
    (result,) = [each for each in outputs if each["output_type"] == "execute_result"]
    return result["data"]


def read(html: str) -> list[str]:
    """The texts of a page, in order; every tag is closed."""
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    return reader.texts


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())
