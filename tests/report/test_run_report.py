"""The page of a run: what it says of a good run, and that any other one opens too."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
from tests.report.record import line, record, summary

from fedgrove.report.run_report import RunRecord, headline, make_run_report

VOID = {"meta", "br"}
SECTIONS = [
    "Round by round",
    "Every client",
    "Groups and similarity of models",
    "Layer by layer",
    "Where the bytes went",
    "Losses and refusals",
    "Time on the devices",
    "Run it again",
]


class Checked(HTMLParser):
    """Refuses a page whose tags do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += f"{data} "


def read(known: RunRecord) -> str:
    """The words on the page, which must be whole and need nothing but itself."""
    page = make_run_report(known).html()
    checked = Checked()
    checked.feed(page)
    assert checked.open == []
    assert not re.search(r"<(link|img|script src)|https?://|url\(", page)
    # A number and its sign of percent are held together by a space that does not break.
    return checked.text.replace("\xa0", " ")


def test_all_sections_of_a_good_run() -> None:
    known = record(baselines={"fedavg": summary(12, 8, method="fedavg", accuracy_mean=0.5)})
    text = read(known)
    positions = [text.index(section) for section in SECTIONS]
    assert positions == sorted(positions)
    assert "75.0 %" in text
    assert "fedgrove rerun runs/made" in text
    assert "made, not measured" in text
    assert "Weights kept" in text
    # 8 rounds, of which the third lost two answers.
    assert "crashed" in text
    assert "no <b>memory</b>" in text


def test_clients_without_groups_are_of_one_kind() -> None:
    clients = [{**client, "group": None} for client in record().clients]
    text = read(record(clients=clients, similar=["a", "b"], similarity=[[1.0, 0.0], [0.0, 1.0]]))
    assert "in no group" not in text
    assert "Similarity of models" in text
    assert "Groups and" not in text
    some = [{**client, "group": None} for client in record().clients[:3]]
    assert "in no group (3)" in read(record(clients=[*record().clients[3:], *some]))


def test_one_client_is_not_a_plural() -> None:
    text = read(record(1, 3))
    assert "ca-afp gives its only client 75.0 % accuracy before fine-tuning, with" in text
    assert "1 clients" not in text


def test_a_run_that_failed_in_its_first_round_has_no_curve() -> None:
    lines = [{**line(0, 3), "counts": False, "abandoned": "nobody answered."}]
    text = read(
        RunRecord("runs/a", {"method": "fedavg", "rounds": 3}, lines=lines, failure="lost.")
    )
    assert "No round was finished, so there is no curve." in text
    assert "--evaluate" not in text


def test_the_headline_by_hand() -> None:
    own = summary(12, 8)
    fedavg = summary(12, 8, method="fedavg", accuracy_mean=0.5, bytes_up=2**24, bytes_down=2**25)
    local = summary(12, 8, method="local", accuracy_mean=0.25)
    # 8 times 3 MiB of 48 MiB.
    assert headline(own, {"fedavg": fedavg, "local": local}) == (
        "ca-afp gives its 12 clients 75.0 % accuracy on average before fine-tuning, where fedavg "
        "gives 50.0 % and training alone gives 25.0 %, with 50 % of fedavg's bytes and 50 % of the "
        "weights."
    )
    assert headline(own, {}) == (
        "ca-afp gives its 12 clients 75.0 % accuracy on average before fine-tuning, with 50 % of "
        "the weights; 24.0 MiB were sent in total."
    )
    # Against itself there is nothing to say.
    assert "where" not in headline(fedavg, {"fedavg": fedavg})
    after = {"finetune": {"0": {}, "3": {}}, "accuracy_mean_after_3": 0.875}
    tuned = {**own, **after}
    both = {"local": {**local, **after, "accuracy_mean_after_3": 0.5}}
    assert headline(tuned, both).startswith(
        "ca-afp gives its 12 clients 75.0 % accuracy on average before fine-tuning, where training "
        "alone gives 25.0 %; after 3 epochs of fine-tuning 87.5 %, where training alone gives 50.0 %,"
    )
    error = {**own, "metric": "mae", "share": False, "more_is_better": False}
    for key in ("mean", "std", "worst", "worst10"):
        error[f"mae_{key}"] = 1.25
    assert headline(error, {}).startswith("ca-afp gives its 12 clients mae 1.25 on average")
    assert "no client was scored" in headline({**own, "accuracy_mean": None}, {})


def test_without_a_round_it_says_so() -> None:
    text = read(RunRecord("runs/new one", {"method": "fedavg", "data": "digits", "rounds": 5}))
    assert "unfinished: 0 of 5 rounds" in text
    assert "No round was finished, so there is nothing to show yet." in text
    # As it is typed into a shell.
    assert "fedgrove resume 'runs/new one'" in text


def test_a_failed_run_says_why() -> None:
    known = record(summary=None, clients=[], failure="the loss is not a number <nan>.")
    text = read(known)
    assert "failed after 8 of 8 rounds" in text
    assert "Why it failed: the loss is not a number <nan>." in text
    assert "Round by round" in text


def test_one_client() -> None:
    text = read(record(1, rounds=1))
    assert "The only client" in text


def test_names_with_markup_stay_text() -> None:
    known = record(name="</script><script>alert(1)</script>", path="runs/<b>")
    page = make_run_report(known).html()
    assert "<script>alert" not in page
    assert "</script><script>alert(1)</script>-3" in read(known)


def test_several_tasks_with_metrics_of_their_own() -> None:
    task = {"metric": "accuracy", "more_is_better": True, "share": True, "clients": 3}
    task |= {"mean": 0.5, "std": 0.1, "worst": 0.3, "worst10": 0.3}
    other = {**task, "metric": "mae", "more_is_better": False, "share": False, "mean": 1.5}
    tasks = {"digits": task, "power": other}
    lines = [{**line(n, 2), "tasks": tasks, "accuracy_mean": None} for n in (1, 2)]
    whole = {**summary(12, 2), "metric": None, "tasks": tasks, "finetune": {"0": {"tasks": tasks}}}
    text = read(record(lines=lines, summary=whole))
    assert "ca-afp gives clients 50.0 % on digits, mae 1.5 on power." in text
    assert "Mae by round" in text


def test_nobody_scored() -> None:
    lines = [{key: value for key, value in line(1, 1).items() if "accuracy" not in key}]
    clients = [{**client, "score": None} for client in record(3).clients]
    whole = {k: v for k, v in summary(3, 1).items() if not k.startswith("accuracy")}
    text = read(record(lines=lines, clients=clients, summary={**whole, "finetune": {}}))
    assert "Clients were not scored on the way" in text
    assert "No client was scored." in text


@pytest.mark.parametrize(
    ("clients", "rounds", "megabytes"), [(24, 50, 0.5), (100, 100, 1.2), (10_000, 100, 4.0)]
)
def test_sizes(clients: int, rounds: int, megabytes: float) -> None:
    known = record(clients, rounds)
    begun = time.perf_counter()
    page = make_run_report(known).html()
    seconds = time.perf_counter() - begun
    assert len(page.encode()) < megabytes * 1e6
    # Measured at 0.05, 0.15 and 0.6 s on a busy machine.
    assert seconds < 5
    if clients > 100:
        assert "show all 10,000 rows" in page
