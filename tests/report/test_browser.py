"""Pages in a real browser: sorting, hiding and pointing work, and no text lies on another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.report.record import record
from tests.report.test_comparison_report import RUNS, run

from fedgrove.report.comparison_report import make_comparison_report
from fedgrove.report.page import Page
from fedgrove.report.run_report import RunRecord, make_run_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path is not None), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium here"),
]

PHONE = 390
"""Pixels across. A window is never as narrow as that, a frame in a page is."""

LOOKED_AT = """
const boxes = (svg) => [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
const overlaps = [];
const outside = [];
for (const svg of document.querySelectorAll("figure svg")) {
  const all = boxes(svg);
  all.forEach(([a, p], i) => {
    if (p.left < -1 || p.right > innerWidth + 1) outside.push(a);
    for (const [b, q] of all.slice(i + 1)) {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      // Boxes of text are a little larger than its letters.
      if (wide > 1 && high > 4) overlaps.push(a + " | " + b);
    }
  });
}
// Scrollbars are no part of it.
const width = innerWidth;
return { overlaps, outside, sideways: root.scrollWidth - root.clientWidth, width };
"""


def asked(page: Page, folder: Path, script: str) -> Any:
    """What a script finds on the page once it is loaded."""
    # In the page, as a file: what a person would open, and one script more.
    answer = (
        "<pre id=answer></pre><script>addEventListener('load', () => {"
        f"const answer = (() => {{ {script} }})();"
        "document.getElementById('answer').textContent = JSON.stringify(answer) });</script>"
    )
    path = folder / "page.html"
    path.write_text(page.html().replace("</body>", f"{answer}</body>"), encoding="utf-8")
    return opened(folder, "1200,1600")


def opened(folder: Path, size: str, *flags: str) -> Any:
    """The answer in the folder's page.html once it is loaded."""
    path = folder / "page.html"
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={size}",
            *flags,
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(unescape(found[1]))


def framed(page: Page, folder: Path, script: str, width: int) -> Any:
    """What a script finds on the page in a frame of that width."""
    inner = (
        "<script>addEventListener('load', () => {"
        f"const answer = (() => {{ {script} }})();"
        "parent.postMessage(JSON.stringify(answer), '*') });</script>"
    )
    path = folder / "inner.html"
    path.write_text(page.html().replace("</body>", f"{inner}</body>"), encoding="utf-8")
    outer = (
        "<body><pre id=answer></pre><script>addEventListener('message', (event) => {"
        "document.getElementById('answer').textContent = event.data });</script>"
        f"<iframe src=inner.html style='width:{width}px;height:900px;border:0'></iframe></body>"
    )
    (folder / "page.html").write_text(outer, encoding="utf-8")
    return opened(folder, "1200,1600", "--virtual-time-budget=5000")


@pytest.mark.parametrize("width", [1200, PHONE])
@pytest.mark.parametrize("what", ["run", "compare", "one client", "no rounds"])
def test_nothing_overlaps_or_is_cut(what: str, width: int, tmp_path: Path) -> None:
    pages = {
        "run": lambda: make_run_report(record(24, 50)),
        "compare": lambda: make_comparison_report(RUNS),
        "one client": lambda: make_run_report(record(1, 1)),
        "no rounds": lambda: make_run_report(
            RunRecord("runs/new", {"method": "fedavg", "rounds": 5})
        ),
    }
    found = framed(pages[what](), tmp_path, LOOKED_AT, width)
    assert found == {"overlaps": [], "outside": [], "sideways": 0, "width": width}


def test_it_sorts_hides_points_and_switches(tmp_path: Path) -> None:
    script = """
    const table = document.querySelector("table.sortable");
    const column = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.startsWith("accuracy"));
    const values = () => [...table.tBodies[0].rows].slice(0, 3).map((r) => r.cells[column].textContent);
    const head = table.tHead.rows[0].cells[column];
    head.click();
    const up = values();
    head.click();
    const down = values();
    const dot = document.querySelector("circle[data-k='3']");
    const box = dot.getBoundingClientRect();
    const where = { bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
    dot.dispatchEvent(new PointerEvent("pointermove", where));
    const tip = document.getElementById("tip");
    const said = tip.hidden ? "" : tip.textContent;
    dot.dispatchEvent(new MouseEvent("click", where));
    const marked = document.querySelector("tr.on").dataset.k;
    const legend = document.querySelector(".legend button");
    legend.click();
    const hidden = legend.closest("figure").querySelector("[data-s='0']").classList.contains("off");
    const before = document.documentElement.dataset.theme;
    const paper = getComputedStyle(document.body).backgroundColor;
    document.getElementById("theme").click();
    const after = document.documentElement.dataset.theme;
    const other = getComputedStyle(document.body).backgroundColor;
    return { up, down, said, marked, hidden, themes: [before, after], changed: paper !== other };
    """
    found = asked(make_run_report(record(12, 8)), tmp_path, script)
    # Scores are k * 37 % 100: of twelve clients 0, 7 (k = 11) and 11 (k = 3) are the lowest.
    assert found["up"] == ["0.00", "7.00", "11.00"]
    assert found["down"] == ["96.00", "85.00", "74.00"]
    assert found["said"].startswith("client device-3, 11.0 %, density 0.40, group 3")
    assert found["marked"] == "3"
    assert found["hidden"]
    assert set(found["themes"]) == {"light", "dark"}
    assert found["changed"]


def test_numbers_with_units_are_sorted_by_what_they_are_worth(tmp_path: Path) -> None:
    page = Page("Units")
    sent = ["17.6 KiB", "2.0 MiB", "900 B", "1,030.5 MiB", "-"]
    times = ["10 min", "4.5 s", "800 ms", "2 h", "120 s"]
    page.table(["sent", "time"], list(zip(sent, times, strict=True)), sortable=True)
    script = """
    const table = document.querySelector("table");
    return [0, 1].map((i) => {
      table.tHead.rows[0].cells[i].click();
      return [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
    });
    """
    assert asked(page, tmp_path, script) == [
        ["900 B", "17.6 KiB", "2.0 MiB", "1,030.5 MiB", "-"],
        ["800 ms", "4.5 s", "120 s", "10 min", "2 h"],
    ]


def test_a_finger_reads_what_it_touches(tmp_path: Path) -> None:
    script = """
    const dot = document.querySelector("circle[data-k='3']");
    const box = dot.getBoundingClientRect();
    const where = { bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
    dot.dispatchEvent(new MouseEvent("click", where));
    const tip = document.getElementById("tip");
    return tip.hidden ? "" : tip.textContent;
    """
    found = asked(make_run_report(record(12, 8)), tmp_path, script)
    assert found.startswith("client device-3, 11.0 %")


def test_markup_in_names_is_not_run(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror='window.harmed=1'><script>window.harmed=1</script>"
    found = asked(make_run_report(record(3, 3, name=evil)), tmp_path, "return window.harmed || 0;")
    assert found == 0


@pytest.mark.parametrize(("clients", "seconds"), [(100, 2.0), (10_000, 10.0)])
def test_it_opens_soon(clients: int, seconds: float, tmp_path: Path) -> None:
    page = make_run_report(record(clients, 100))
    found = asked(page, tmp_path, "document.body.offsetHeight; return performance.now();")
    # Measured at 0.2 and 0.9 s on a busy machine of two cores.
    assert found / 1000 < seconds


def test_ten_thousand_rows_are_there_when_asked_for(tmp_path: Path) -> None:
    script = """
    const table = document.querySelector("table[data-shown]");
    const shown = () => [...table.tBodies[0].rows].filter((r) => !r.hidden).length;
    const first = shown();
    document.querySelector("button.more").click();
    return [first, shown()];
    """
    assert asked(make_run_report(record(10_000, 3)), tmp_path, script) == [100, 10_000]


def test_all_rows_are_printed(tmp_path: Path) -> None:
    """On the screen a long table scrolls, and its rows after the hundredth wait for a click."""
    assert count_sheets(40, tmp_path) + 4 <= count_sheets(340, tmp_path)


def count_sheets(runs: int, folder: Path) -> int:
    page = make_comparison_report([run(f"method{i}", 0, 0.5, 100) for i in range(runs)])
    (folder / "page.html").write_text(page.html(), encoding="utf-8")
    pdf = folder / "page.pdf"
    assert BROWSER is not None
    words = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu"]
    words += [f"--user-data-dir={folder / 'profile'}", f"--print-to-pdf={pdf}"]
    subprocess.run([*words, (folder / "page.html").as_uri()], timeout=120, check=True)
    return len(re.findall(rb"/Type /Page\b", pdf.read_bytes()))


def test_a_chart_is_saved_as_a_file(tmp_path: Path) -> None:
    script = """
    const saved = [];
    URL.createObjectURL = (blob) => { saved.push(blob.type, blob.size > 1000); return "about:blank"; };
    HTMLAnchorElement.prototype.click = function () { saved.push(this.download); };
    document.querySelector("figcaption button").click();
    return saved;
    """
    page = make_comparison_report(RUNS)
    name = "accuracy-mean-over-clients-before-fine-tuning.svg"
    assert asked(page, tmp_path, script) == ["image/svg+xml", True, name]
