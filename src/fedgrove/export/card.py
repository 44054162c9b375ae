"""The model card: what the file beside it is, in Markdown, for whoever meets it without the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import __version__
from ..data.sets import SETS
from ..report.tables import mib
from .figures import Exported, Row

if TYPE_CHECKING:
    from .source import Source

HEAD = (
    "version",
    "file",
    "parameters",
    "MACs",
    "size",
    "bytes",
    "time to dense",
    "accuracy",
    "int8 %",
)

ONNX = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
x = np.zeros((1, {shape}), dtype=np.float32)  # a batch of any size
logits = session.run(["logits"], {{"x": x}})[0]
print({labels}[logits[0].argmax()])"""

EXECUTORCH = """\
import torch
from executorch.runtime import Runtime

method = Runtime.get().load_program("{file}").load_method("forward")
x = torch.zeros(1, {shape})  # one example at a time
logits = method.execute([x])[0]
print({labels}[logits[0].argmax()])"""


def card(source: Source, made: Exported, standardised: bool) -> str:
    """The text of the card; ``standardised`` says that the file takes inputs that are standardised already."""
    file = next(str(row.file) for row in made.rows if row.version == "shrunk")
    parts = [
        f"# {file}",
        f"The personal model of client {made.client}, trained by federated learning with `{source.summary['method']}`"
        f" on {source.federation.name}; channels that were pruned are gone. Written by fedgrove {__version__}.",
        "## Where it comes from",
        _table(("what", "value"), list(_origin(source, made))),
        "## What it is worth",
        _table(HEAD, [_cells(row) for row in made.rows]),
        "\n".join(_remarks(source, made)),
        "## Inputs and outputs",
        "\n\n".join(_inputs(source, made.client, standardised)),
        "## How to load it",
        f"```python\n{_snippet(source, made, file)}\n```",
        "## Licence and limits",
        "\n".join(_limits(source)),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _origin(source: Source, made: Exported) -> Iterator[tuple[str, object]]:
    s, federation, data = source.summary, source.federation, source.data(made.client)
    yield "run", source.folder.path.resolve().name
    yield "client", f"{made.client}, of {s['clients']}"
    yield (
        "method",
        f"{s['method']}, {s['rounds']} rounds, a cohort of {s['cohort']}, seed {s['seed']}",
    )
    yield "fine-tuning", f"{[*s['finetune']][-1]} epochs on the client's own data"
    yield (
        "data",
        f"{federation.name}: partition {s['partition']}, scenario {s['scenario']}, split {s['split']}",
    )
    yield (
        "examples",
        f"{len(data.train)} to train, {len(data.validation)} to validate, {len(data.test)} to test",
    )
    yield "network", type(source.net.module).__name__


def _cells(row: Row) -> list[object]:
    file = f"`{row.file}`" if row.file else "not kept"
    counts = (f"{row.params:,}", f"{row.macs:,}", mib(row.bytes), f"{row.bytes:,}")
    return [row.version, file, *counts, f"{row.latency:.2f}", f"{row.accuracy:.4f}", row.shares]


def _remarks(source: Source, made: Exported) -> Iterator[str]:
    n = len(source.data(made.client).test)
    yield f"- Accuracy is the fraction right of this client's own {n} test examples; it says nothing of other clients."
    yield f"- Outputs agree with torch's to {made.difference:.1e} on these examples; 1e-05 is allowed."
    yield "- Time is that of one example, to the dense model's on the same machine; MACs are per example."
    if made.same_int8 is not None:
        yield (
            f"- int8 names the class that float names on {made.same_int8:.2%} of all this client's examples;"
            " it was calibrated on its training examples."
        )
        yield f"- int8 %: the shares of weights / MACs that are. One of {n} test examples is {100 / n:.1f} points."
    if made.same_int8 is not None and made.to == "onnx":
        yield "- int8 on x86 without VNNI: onnxruntime may overflow there unless `session.x64quantprecision` is 1."
    yield from (f"- {note}." for note in made.notes)


def _inputs(source: Source, client: int, standardised: bool) -> Iterator[str]:
    federation, scale = source.federation, source.scale(client)
    shape = ", ".join(map(str, federation.shape))
    yield f"`x`: float32, `(batch, {shape})`, channels first. {_units(source, standardised)}"
    if scale is not None:
        numbers = {"mean": scale.mean, "deviation": scale.deviation}
        yield "\n".join(
            f"- {k}: {', '.join(f'{v:.9g}' for v in values)}" for k, values in numbers.items()
        )
    yield f"`logits`: float32, `(batch, {federation.classes})`; the largest names the class:"
    yield ", ".join(f"{i} = {label}" for i, label in enumerate(federation.labels)) + "."


def _units(source: Source, standardised: bool) -> str:
    """What the numbers of an input mean."""
    if not source.experiment.standardise:
        return "Nothing is standardised: pixels are divided by their largest value, all else is as recorded."
    if source.raw is None:
        return "As in the federation that was made in Python; how it standardised them is not known here."
    before = "pixels divided by their largest value, all else as recorded"
    how = "(x - mean) / deviation per channel; pixels by the set's constants, all else by this client's training data"
    if standardised:
        return f"The caller must standardise ({before}): {how}:"
    return f"Not standardised: {before}. The file itself standardises: {how}:"


def _snippet(source: Source, made: Exported, file: str) -> str:
    text = {"onnx": ONNX, "executorch": EXECUTORCH}[made.to]
    shape = ", ".join(map(str, source.federation.shape))
    return text.format(file=file, shape=shape, labels=list(source.federation.labels))


def _limits(source: Source) -> Iterator[str]:
    known = SETS.get(source.federation.name)
    where = f" ({known.source})" if known and known.source else ""
    yield f"- The model is made of data: the licence of {source.federation.name}{where} decides about its use."
    yield "- fedgrove, which wrote it, is under Apache-2.0; that is not a licence of the model."
    yield "- It was trained on one client's own data, and so may tell of them: treat it with the same care."
    yield "- Nobody checked it for any use but the test above."
