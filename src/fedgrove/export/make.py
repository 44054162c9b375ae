"""``fedgrove.export_model``: a client's own model as a file, checked against torch, with a card.

::

    model = the client's own, without the channels of which every parameter is 0
    file  = the model behind the client's standardisation, as ONNX or ExecuTorch
    check   max |file(x) - torch(x)| <= 1e-5 max(1, max |torch(x)|)  on the client's test data;
            else nothing is written
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import __version__
from ..data import Federation
from ..data.preparation import IDENTITY, Preparation
from ..errors import EngineError, InputError, check, first_line
from ..nets import Net
from ..report.tables import finetune_lengths, format_bytes, scores_after
from ..runs.files import write_bytes
from ..runs.folder import RunFolder
from ..runs.result import Result
from ..trees import Tree
from .card import card
from .figures import Exported, Row, accuracy, latencies, spread_out
from .formats import ExportRequest, Predict
from .source import Raw, Source, opened, shrunk, unprepared

LOGIT_TOLERANCE = 1e-5
"""The largest allowed difference between the file's logits and torch's."""
POINT = 0.01
"""The loss in accuracy by int8 above which there is a note."""
MANY_ZEROS = 0.1
"""The share of single zeros above which a note says why the file holds them."""
CHANNEL_METHODS = ("safl", "hermes", "fedapta", "heterofl")
"""Methods whose models are really smaller, to name as a way out."""
CALIBRATION = 512
"""How many training examples int8 is calibrated on, at most; spread evenly."""


def export_model(
    run: str | Path | Result | RunFolder,
    *,
    client: int | str,
    to: str = "onnx",
    int8: bool = False,
    out: str | Path | None = None,
    standardised: bool = False,
    align: int = 1,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: bool = False,
) -> Exported:
    """Export a client's personal model, really shrunk, as ONNX or ExecuTorch, with a model card.

    The file's outputs are compared with torch's before it is kept.

    Args:
        run: A finished run: its folder or its result.
        client: The client's name or number.
        to: The format, "onnx" or "executorch".
        int8: Whether to write a quantised file as well.
        out: The folder for the files; None: ``export`` in the run folder.
        standardised: Whether the file takes standardised inputs. By default it takes inputs as they
            were recorded, and standardises them itself.
        align: A shrunk layer keeps zero channels until its width is a multiple of this number:
            larger, and often faster.
        data: The federation again, for a run on data made in Python.
        net: The network again, for a run with a module made in Python.
        data_dir: The folder with the data sets' files.
        trust: Whether code that config.toml names may be run.

    Returns:
        Where the files are, and what was measured.

    Raises:
        InputError: The run is not finished, or the client, format or network does not fit.
        EngineError: The file's outputs differ from torch's.
    """
    options = ExportRequest(to, int8, standardised, align)
    source = opened(run, data, net, data_dir, trust)
    return export_client(source, source.number(client), options, out)


def export_all(
    run: str | Path | Result | RunFolder,
    *,
    to: str = "onnx",
    int8: bool = False,
    out: str | Path | None = None,
    standardised: bool = False,
    align: int = 1,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: bool = False,
) -> Iterator[Exported]:
    """Export the model of every client of a run; each is written when it is yielded.

    Arguments are those of :func:`export_model`.
    """
    # Not a generator function: wrong arguments are refused at the call, not at the first client.
    options = ExportRequest(to, int8, standardised, align)
    source = opened(run, data, net, data_dir, trust)
    return (export_client(source, client, options, out) for client in sorted(source.files))


def export_client(
    source: Source, client: int, options: ExportRequest, out: str | Path | None
) -> Exported:
    """Export the model of one client of a run that was opened; refuse to overwrite files."""
    subject = _subject(source, client, options)
    folder = source.folder.path / "export" if out is None else Path(out)
    for name in options.names(client).values():
        if (folder / name).exists():
            raise InputError(
                f"{folder / name} exists; models are never overwritten: give a different --out."
            )
    # Nothing goes into ``folder`` before the file is known to agree with torch.
    with tempfile.TemporaryDirectory() as scratch:
        exported = replace(_write_and_measure(subject, options, Path(scratch)), folder=folder)
        names = [row.file for row in exported.rows if row.file]
        contents = {name: (Path(scratch) / name).read_bytes() for name in names}
    contents[exported.card] = card(source, exported, options.standardised).encode()
    _commit(folder, contents)
    return exported


def _commit(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files, or none; the card comes last."""
    # The deepest comes first, so that each is empty when its turn comes to be removed.
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            written.append(folder / name)
            write_bytes(folder / name, content)
    except (OSError, EngineError) as error:
        for path in written:
            path.unlink(missing_ok=True)
        for path in new_folders:
            if path.is_dir():
                path.rmdir()
        reason = f"{error.strerror or error}." if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{folder} cannot be written to: {reason} Give a different --out."
        ) from None


# ---- one client ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Subject:
    """One client's model in full width and shrunk, and its inputs as the file takes them."""

    source: Source
    client: int
    tree: Tree
    small_net: Net
    small_tree: Tree
    own: Preparation
    """The standardisation that becomes part of the file; one that changes nothing does not."""
    inputs: Mapping[str, Tensor]

    def module(self, net: Net, tree: Tree) -> nn.Module:
        """The module to export: the net with its values, behind the standardisation."""
        module = net.filled(tree)
        if not self.own.changes_nothing:
            module = Raw(module, self.own, self.source.federation.shape)
        return module.eval()


def _subject(source: Source, client: int, options: ExportRequest) -> _Subject:
    tree = source.tree(client)
    data = source.data(client)
    can_check = len(data.test) > 0
    allowed = "1 example or more to check with"
    check(can_check, f"the test data of client {client}", 0, allowed)
    can_calibrate = len(data.train) > 0 or not options.int8
    allowed = "1 example or more to fit int8 to; leave --int8 out"
    check(can_calibrate, f"the training data of client {client}", 0, allowed)
    small_net, small_tree = shrunk(source.net, tree, options.align)
    own = IDENTITY
    if source.takes_raw(client) and not options.standardised:
        own = source.preparation(client)
    inputs = {
        "train": unprepared(own, data.train.x),
        "validation": unprepared(own, data.validation.x),
        "test": unprepared(own, data.test.x),
    }
    return _Subject(source, client, tree, small_net, small_tree, own, inputs)


def _write_and_measure(subject: _Subject, options: ExportRequest, scratch: Path) -> Exported:
    """Write the files into ``scratch``, check them against torch and measure them."""
    names = options.names(subject.client)
    paths, int8_shares = _write_versions(subject, options, scratch)
    predicts = {version: options.format.load(path) for version, path in paths.items()}
    difference, torch_accuracy = _compared(predicts["shrunk"], subject)
    rows = _rows(subject, paths, predicts, names, int8_shares)
    same_int8 = None
    if options.int8:
        examples = torch.cat(list(subject.inputs.values()))
        float_classes = predicts["shrunk"](examples).argmax(1)
        same_int8 = accuracy(predicts["int8"](examples), float_classes)
    notes = (
        *_why_not_smaller(subject, rows, paths["shrunk"]),
        *_notes(subject.source, subject.client, rows, torch_accuracy),
    )
    return Exported(
        subject.client,
        options.to,
        scratch,
        rows,
        names["card"],
        difference,
        torch_accuracy,
        same_int8,
        notes,
        subject.source.name(subject.client),
    )


def _write_versions(
    subject: _Subject, options: ExportRequest, scratch: Path
) -> tuple[dict[str, Path], tuple[float, float] | None]:
    """The path of each version, and the shares of weights and MACs that are in int8.

    If no channel was removed, dense and shrunk are one file.
    """
    net = subject.source.net
    shape = subject.source.federation.shape
    names = options.names(subject.client)
    metadata = _metadata(subject)

    module = subject.module(subject.small_net, subject.small_tree)
    path = scratch / names["shrunk"]
    paths = {"dense": path, "shrunk": path}
    with _exporter_errors(options, net):
        options.format.write(module, shape, path, metadata)

    # shrunk() gives the very same net back where it found nothing to remove.
    if subject.small_net is not net:
        full_module = subject.module(net, subject.tree)
        paths["dense"] = scratch / f"dense{options.format.SUFFIX}"
        with _exporter_errors(options, net):
            options.format.write(full_module, shape, paths["dense"], metadata)

    int8_shares = None
    if options.int8:
        examples = spread_out(subject.inputs["train"], CALIBRATION)
        paths["int8"] = scratch / names["int8"]
        with _exporter_errors(options, net):
            int8_shares = options.format.quantise(module, path, examples, paths["int8"])
    return paths, int8_shares


@contextmanager
def _exporter_errors(options: ExportRequest, net: Net) -> Iterator[None]:
    """Turn whatever an exporter raises for a module it cannot handle into one readable error."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        raise InputError(
            f"{type(net.module).__name__} could not be written for {options.to}, "
            f"{type(error).__name__}: {reason}; write its forward pass with plain tensor "
            "operations."
        ) from error


def _metadata(subject: _Subject) -> dict[str, str]:
    source = subject.source
    metadata = {
        "fedgrove": __version__,
        "method": str(source.summary["method"]),
        "data": source.federation.name,
        "client": str(subject.client),
        "name": source.name(subject.client),
        "classes": json.dumps(list(source.federation.labels)),
        "standardises": "no",
    }
    if subject.own.mean is not None and subject.own.std is not None:
        metadata["standardises"] = "yes"
        metadata["mean"] = json.dumps(list(subject.own.mean))
        metadata["deviation"] = json.dumps(list(subject.own.std))
    return metadata


def _compared(predict: Predict, subject: _Subject) -> tuple[float, float]:
    """How far the file is from torch on the test data, and torch's accuracy there.

    Too far is refused. torch runs the model as the run did: in full width, on inputs that were
    standardised as in training. So shrinking and standardising are checked as well.
    """
    net = subject.source.net
    data = subject.source.data(subject.client).test
    raw = subject.inputs["test"]
    prepared = torch.from_numpy(subject.own.apply(raw.numpy()))
    with torch.no_grad():
        truth = net.run(subject.tree, data.x.float(), train=False)
        # Raw inputs were made of what the model saw, and rounded: they are prepared again here.
        wanted = net.run(subject.tree, prepared, train=False)
    largest = (predict(raw) - wanted).abs().max()
    difference = float(largest / wanted.abs().max().clamp_min(1.0))
    # Not ``difference > LOGIT_TOLERANCE``, which would let NaN pass.
    if not difference <= LOGIT_TOLERANCE:
        raise EngineError(
            f"the file's outputs are {difference:.1e} from torch's on the test data of client "
            f"{subject.client}, and {LOGIT_TOLERANCE:g} is allowed; nothing was written. Report "
            "the network and the versions of torch and runtime."
        )
    return difference, accuracy(truth, data.y)


def _rows(
    subject: _Subject,
    paths: Mapping[str, Path],
    predicts: Mapping[str, Predict],
    names: Mapping[str, str],
    int8_shares: tuple[float, float] | None,
) -> tuple[Row, ...]:
    """The figures of every version."""
    x = subject.inputs["test"]
    y = subject.source.data(subject.client).test.y
    # If no channel was removed, dense and shrunk are one file. It is timed once: two measurements
    # of the same thing would differ by chance.
    timed = dict(predicts)
    if paths["dense"] == paths["shrunk"]:
        del timed["dense"]
    times = latencies(timed, x[:1])
    times.setdefault("dense", times["shrunk"])

    rows: list[Row] = []
    for version, path in paths.items():
        net = subject.source.net if version == "dense" else subject.small_net
        row = Row(
            version,
            net.layout.size,
            net.layout.macs,
            path.stat().st_size,
            times[version],
            times[version] / times["dense"],
            accuracy(predicts[version](x), y),
            names.get(version),
        )
        if version == "int8":
            row = replace(row, int8=int8_shares)
        rows.append(row)
    return tuple(rows)


def _why_not_smaller(subject: _Subject, rows: Sequence[Row], file: Path) -> Iterator[str]:
    """A note where much is pruned and the file holds it all the same; and what would shrink it."""
    zeros = 0
    weights = 0
    for name in subject.small_net.layout.prunable:
        zeros += int((subject.small_tree[name] == 0).sum())
        weights += subject.small_tree[name].numel()
    if weights == 0 or zeros < MANY_ZEROS * weights:
        return
    dense = file.stat().st_size
    zipped = len(zlib.compress(file.read_bytes()))
    int8 = "int8 (--int8), about a quarter"
    for row in rows:
        if row.version == "int8":
            int8 = f"int8, {format_bytes(row.bytes)}"
    yield (
        f"{zeros / weights:.0%} of its weights are zeros, but one by one and not in whole "
        "channels: the file stores them all the same and cannot shrink. What would: "
        f"{int8}; a sparse file, {format_bytes(zipped)} of {format_bytes(dense)} when zipped, "
        "which a device unpacks to its full size; a method that prunes whole channels "
        f"({', '.join(CHANNEL_METHODS)}), smaller on the device too"
    )


def _notes(
    source: Source, client: int, rows: Sequence[Row], torch_accuracy: float
) -> Iterator[str]:
    accuracies = {row.version: row.accuracy for row in rows}
    examples = len(source.data(client).test)
    lost = accuracies["shrunk"] - accuracies["int8"] if "int8" in accuracies else 0.0
    # The margin is for a loss of exactly one point, whose difference of floats may lie above it.
    if lost > POINT + 1e-9:
        yield (
            f"int8 loses {100 * lost:.1f} points, {round(examples * lost)} of this client's "
            f"{examples} test examples; 1 is allowed"
        )
    # The models that are kept are those after the last length of fine-tuning.
    tuned = scores_after(source.summary, finetune_lengths(source.summary)[-1])
    # Of a mixed federation each client's score is of its own task.
    scores = tuned.get("accuracy_clients") or tuned.get("metric_clients", {})
    reported = scores.get(str(client))
    # One example may fall otherwise on another machine; two have another cause.
    if reported is not None and abs(reported - torch_accuracy) > 1.5 / examples:
        yield (
            f"the run reported {reported:.4f} for this client, but its data, rebuilt, give "
            f"{torch_accuracy:.4f}: they have changed"
        )
    yield from source.summary.get("notes", ())
