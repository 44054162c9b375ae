"""The model card: what the file next to it is, in Markdown, for readers who do not have the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import __version__
from ..data.sets import SETS
from ..report.tables import format_bytes
from .figures import Exported, Row

if TYPE_CHECKING:
    from .source import Source

CARD_COLUMNS = (
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


def card(source: Source, exported: Exported, standardised: bool) -> str:
    """Return the model card of an exported file; ``standardised`` if its inputs are already."""
    shrunk = next(row for row in exported.rows if row.version == "shrunk")
    file = str(shrunk.file)
    versions: list[list[object]] = []
    for row in exported.rows:
        versions.append(_cells(row))
    parts = [
        f"# {file}",
        f"The personal model of client {_called(source, exported.client)}, trained by federated "
        f"learning with `{source.summary['method']}` on {source.federation.name}; "
        f"{_what_is_gone(exported)}. Written by fedgrove {__version__}.",
        "## Where it comes from",
        _table(("what", "value"), _origin(source, exported)),
        "## What it is worth",
        _table(CARD_COLUMNS, versions),
        "\n".join(_remarks(source, exported)),
        "## Inputs and outputs",
        "\n\n".join(_inputs_and_outputs(source, exported.client, standardised)),
        "## How to load it",
        f"```python\n{_snippet(source, exported, file)}\n```",
        "## Licence and limits",
        "\n".join(_limits(source)),
    ]
    return "\n\n".join(parts) + "\n"


def _called(source: Source, client: int) -> str:
    """The number of a client, and its name where it has one."""
    name = source.name(client)
    return name if name == str(client) else f"{client} ({_plain(name)})"


def _plain(name: str) -> str:
    r"""A name that people gave, as Markdown that shows it and nothing else.

    >>> print(_plain("<b>walk_fast</b>"))
    \<b>walk_fast\</b>
    """
    return re.sub(r"([\\`*<\[&])", r"\\\1", " ".join(name.split()))


def _what_is_gone(exported: Exported) -> str:
    sizes = {row.version: row.params for row in exported.rows}
    if sizes["shrunk"] < sizes["dense"]:
        return "channels that were pruned are gone"
    return "no whole channel of it was pruned"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines: list[str] = []
    for row in (head, ["---"] * len(head), *rows):
        # A bare | would end the cell.
        cells = []
        for cell in row:
            cells.append(str(cell).replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _origin(source: Source, exported: Exported) -> list[tuple[str, object]]:
    summary = source.summary
    data = source.data(exported.client)
    method = (
        f"{summary['method']}, {summary['rounds']} rounds, a cohort of {summary['cohort']}, "
        f"seed {summary['seed']}"
    )
    # The summary's keys are the epochs after which clients were scored; models are stored at the
    # last of them, or before fine-tuning if no client was scored.
    epochs = next(reversed(summary["finetune"]), "0")
    dealt = (
        f"{source.federation.name}: partition {summary['partition']}, "
        f"scenario {summary['scenario']}, split {summary['split']}"
    )
    examples = (
        f"{len(data.train)} to train, {len(data.validation)} to validate, {len(data.test)} to test"
    )
    return [
        # The name alone: a path would tell of the machine.
        ("run", source.folder.path.resolve().name),
        ("client", f"{_called(source, exported.client)}, of {summary['clients']}"),
        ("method", method),
        ("fine-tuning", f"{epochs} epochs on the client's own data"),
        ("data", dealt),
        ("examples", examples),
        ("network", type(source.net.module).__name__),
    ]


def _cells(row: Row) -> list[object]:
    return [
        row.version,
        f"`{row.file}`" if row.file else "not kept",
        f"{row.params:,}",
        f"{row.macs:,}",
        format_bytes(row.bytes),
        f"{row.bytes:,}",
        f"{row.latency:.2f}",
        f"{row.accuracy:.4f}",
        row.shares,
    ]


def _remarks(source: Source, exported: Exported) -> Iterator[str]:
    examples = len(source.data(exported.client).test)
    yield (
        f"- Accuracy is the fraction right of this client's own {examples} test examples; "
        "it says nothing of other clients."
    )
    yield (
        f"- Outputs agree with torch's to {exported.difference:.1e} on these examples; "
        "1e-05 is allowed."
    )
    yield (
        "- Time is that of one example, to the dense model's on the same machine; "
        "MACs are per example."
    )
    if exported.same_int8 is not None:
        yield (
            f"- int8 names the class that float names on {exported.same_int8:.2%} of all this "
            "client's examples; it was calibrated on its training examples."
        )
        yield (
            "- int8 %: the shares of weights / MACs that are. "
            f"One of {examples} test examples is {100 / examples:.1f} points."
        )
        if exported.to == "onnx":
            yield (
                "- int8 on x86 without VNNI: onnxruntime may overflow there unless "
                "`session.x64quantprecision` is 1."
            )
    for note in exported.notes:
        yield f"- {note}."


def _inputs_and_outputs(source: Source, client: int, standardised: bool) -> Iterator[str]:
    federation = source.federation
    units = _units(source, client, standardised)
    yield f"`x`: float32, `(batch, {_sizes(source)})`, channels first. {units}"
    own = source.preparation(client)
    if own.channels is not None:
        yield f"- channels: {', '.join(map(_plain, own.channels))}"
    if own.mean is not None and own.std is not None:
        yield f"- mean: {_numbers(own.mean)}\n- deviation: {_numbers(own.std)}"
    yield f"`logits`: float32, `(batch, {federation.classes})`; the largest names the class:"
    names = []
    for i, label in enumerate(federation.labels):
        names.append(f"{i} = {_plain(label)}")
    yield ", ".join(names) + "."


def _sizes(source: Source) -> str:
    """The shape of one example, without brackets."""
    return ", ".join(map(str, source.federation.shape))


def _numbers(values: Sequence[float]) -> str:
    # Nine digits name a float32 exactly.
    return ", ".join(f"{value:.9g}" for value in values)


def _units(source: Source, client: int, standardised: bool) -> str:
    """What the numbers of an input mean."""
    if source.preparation(client).changes_nothing:
        return "As they were recorded, or as they were given in Python; nothing is standardised."
    how = (
        "(x - mean) / deviation per channel; pixels by the set's constants, "
        "all else by this client's training data"
    )
    if standardised:
        return f"The caller must standardise what was recorded: {how}:"
    if not source.takes_raw(client):
        return (
            "Inputs of this client were brought to the shape of other data sets when these were "
            f"mixed; the caller must first standardise what was recorded, {how}, and then do that:"
        )
    return f"Raw, as they were recorded. The file itself standardises: {how}:"


def _snippet(source: Source, exported: Exported, file: str) -> str:
    template = {"onnx": ONNX, "executorch": EXECUTORCH}[exported.to]
    labels = list(source.federation.labels)
    return template.format(file=file, shape=_sizes(source), labels=labels)


def _limits(source: Source) -> list[str]:
    name = source.federation.name
    # A federation made in Python has a name of its own, which no known data set need have.
    known = SETS.get(name)
    origin = ""
    if known is not None and known.source:
        origin = f" ({known.source})"
    return [
        f"- The model is made of data: the licence of {name}{origin} decides about its use.",
        "- fedgrove, which wrote it, is under Apache-2.0; that is not a licence of the model.",
        "- It was trained on one client's own data, and so may tell of them: treat it with the "
        "same care.",
        "- It was not checked for any use but the test above.",
    ]
