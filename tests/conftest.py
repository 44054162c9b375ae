"""Small federations and the loops that several test files share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import fedgrove
from fedgrove import trees
from fedgrove.core import Answer, AnyMethod, ClientInfo, Engine, Job, Report, Task
from fedgrove.data import ClientData, Federation
from fedgrove.data.federation import Defaults, Examples
from fedgrove.errors import EngineError
from fedgrove.nets import Net, build
from fedgrove.runs.files import compute_checksum, format_checksums, read_checksums
from fedgrove.runs.memory import Memory
from fedgrove.runs.rounds import Admission, rounds
from fedgrove.runs.run import Run

# A busy machine must not fail a property: time is not what they are about. `make test` tries the
# same examples each time, so that a change fails for what it changed; `make test-all` draws new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def own_current_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs without ``out`` are kept in the current folder, which is not to be the repository."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("current"))
    yield
    os.chdir(before)


SHAPES = {
    "mlp": (12,),
    "har-cnn": (3, 16),
    "bn-cnn2": (1, 8, 8),
    "resnet18": (3, 8, 8),
    "shufflenetv2": (3, 8, 8),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "har-cnn": {"dropout": False},
    "bn-cnn2": {"width": 4},
    "resnet18": {"width": 4, "norm": "group"},
    "shufflenetv2": {"width": 4, "norm": "group"},
}


def federation(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    classes: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Federation:
    """Random clients: each its own mean, labels that follow from the input, so that there is something to learn."""
    g = torch.Generator().manual_seed(7)
    rule = torch.randn(torch.Size(shape).numel(), classes, generator=g, dtype=torch.float64)

    def examples(n: int, shift: torch.Tensor) -> Examples:
        x = torch.randn(n, *shape, generator=g, dtype=torch.float64) + shift
        return Examples(x.to(dtype), (x.flatten(1) @ rule).argmax(1))

    clients = {}
    for k, n in enumerate(sizes):
        shift = 0.5 * torch.randn(shape, generator=g, dtype=torch.float64)
        clients[k] = ClientData(
            examples(n, shift), examples(4, shift), examples(9, shift), ClientInfo(n)
        )
    defaults = Defaults("mlp", 2, 3, 2, 8, "Adam", 1e-2)
    return Federation("tiny", clients, classes, tuple("abc")[:classes], shape, defaults)


def make_run(
    method: AnyMethod,
    folder: Path,
    *,
    net: str = "mlp",
    sizes: tuple[int, ...] = (20, 13, 24, 17),
    dtype: torch.dtype = torch.float64,
    options: dict[str, Any] | None = None,
    **words: Any,
) -> Run:
    """A small run whose clients keep what they remember under ``folder``."""
    shape = SHAPES[net]
    module = build(net, shape, 3, 0, **(OPTIONS.get(net, {}) if options is None else options)).to(
        dtype
    )
    words = {"rounds": 3, "cohort": min(3, len(sizes)), "finetune": (0, 1)} | words
    return Run(
        method, federation(shape, sizes, dtype=dtype), Net(module, shape), Memory(folder), **words
    )


def play(run: Run, engine: Engine) -> Any:
    """The final state."""
    loop = rounds(run)
    exchange = next(loop)
    while exchange.tasks:
        exchange = loop.send(answers(run, engine, exchange.tasks))
        if exchange.attempt == 3:
            raise EngineError(exchange.why_abandoned)
        if not exchange.why_abandoned:
            # No method's own report may be taken for a lie.
            assert not exchange.tally.refused, exchange.tally
    return exchange.state


class Noting:
    """Passes answers on, and notes what each client computed: on every engine the same number."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.macs: list[tuple[int, int, int]] = []

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        for (run, task), answer in self.engine.map(jobs):
            assert isinstance(answer, Report)
            self.macs.append((task.round, task.to, answer.macs))
            yield (run, task), answer

    def close(self) -> None:
        self.engine.close()


def answers(run: Run, engine: Engine, tasks: Iterable[Task]) -> Iterator[tuple[Task, Answer]]:
    """The tasks with their answers, as the loop of a run is sent them."""
    return ((task, answer) for (_, task), answer in engine.map((run, task) for task in tasks))


def reports(run: Run, engine: Engine, tasks: Iterable[Task]) -> Iterator[Report]:
    """The reports, where no client fails."""
    for _, answer in answers(run, engine, tasks):
        assert isinstance(answer, Report), answer
        yield answer


def admitted(run: Run, engine: Engine, tasks: Sequence[Task]) -> list[Report]:
    """The reports, all of which pass the gate; what clients remember is accepted, as in the loop."""
    admission = Admission(run, tasks)
    passed = list(admission.admit(answers(run, engine, tasks)))
    assert len(passed) == len(tasks), admission.tally
    admission.commit()
    return passed


def remembered(run: Run) -> dict[str, torch.Tensor]:
    """All that clients remember, as one tree."""
    return {
        f"{client}/{name}/{leaf}": value
        for client, version in sorted(run.memory.files.items())
        for name, tree in run.memory.read(client, version).items()
        for leaf, value in tree.items()
    }


def tensors(state: Any) -> dict[str, torch.Tensor]:
    """All tensors of a state, as one tree."""
    from fedgrove.runs.checkpoint import state_to_json

    found: trees.Tree = {}
    state_to_json(state, found)
    return found


def started(*words: str) -> subprocess.Popen[str]:
    """`fedgrove WORDS` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedgrove", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(fedgrove.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        # Where the tests run in the background Ctrl-C is ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def list_again(folder: Path) -> None:
    """Make checksums.txt agree with files that a test has changed on purpose."""
    digests = {
        name: compute_checksum((folder / name).read_bytes()) for name in read_checksums(folder)
    }
    (folder / "checksums.txt").write_bytes(format_checksums(digests))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for every column, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
