"""``fedgrove.export_model``: a client's own model as a file, checked against torch, with a card.

::

    model = the client's own, without the channels of which every parameter is 0
    file  = the model behind the client's standardisation, with its outputs in the units of the
            targets, as ONNX, ExecuTorch or LiteRT
    check   max |file(x) - torch(x)| <= 1e-5 max(1, max |torch(x)|)  on the client's test data;
            else nothing is written
"""

from __future__ import annotations

import json
import math
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
from ..errors import (
    BudgetError,
    EngineError,
    FedgroveError,
    InputError,
    check,
    first_line,
    spell_option,
)
from ..metrics import ACCURACY, Metric
from ..nets import Net
from ..report.tables import finetune_lengths, format_bytes, format_kilobytes, scores_after
from ..runs.files import write_bytes
from ..runs.folder import RunFolder
from ..runs.result import Result
from ..trees import Tree
from .card import card
from .figures import Exported, Row, latencies, spread_out
from .formats import ExportRequest, Predict
from .source import Answers, Outputs, Raw, Source, opened, shrunk, unprepared

POINT = 0.01
"""The loss by int8 of a score that is a share, such as accuracy, above which there is a note."""
WORSE = 0.05
"""The same of any other score, as a share of it."""
MANY_ZEROS = 0.1
"""The share of single zeros above which a note says why the file holds them."""
CHANNEL_METHODS = ("safl", "hermes", "fedapta", "heterofl", "fedlayerprune")
"""Methods whose models are really smaller, to name as a way out."""
CALIBRATION = 512
"""How many training examples int8 is calibrated on, at most; spread evenly."""


def export_model(
    run: str | Path | Result | RunFolder,
    *,
    client: int | str,
    to: str = "onnx",
    int8: bool = False,
    size: str | None = None,
    out: str | Path | None = None,
    standardised: bool = False,
    align: int = 1,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: bool = False,
) -> Exported:
    """Export a client's personal model, really shrunk, as a file with a model card.

    The file's outputs are compared with torch's before it is kept.

    Args:
        run: A finished run: its folder or its result.
        client: The client's name or number.
        to: The format: "onnx", "executorch" or "litert".
        int8: Whether to write a quantised file as well.
        size: The most that a file may take, such as "80kB": the float file if it fits, else int8.
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
    options = ExportRequest(to, int8, standardised, align, size)
    source = opened(run, data, net, data_dir, trust)
    return export_client(source, source.number(client), options, out)


def export_all(
    run: str | Path | Result | RunFolder,
    *,
    to: str = "onnx",
    int8: bool = False,
    size: str | None = None,
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
    options = ExportRequest(to, int8, standardised, align, size)
    source = opened(run, data, net, data_dir, trust)
    return (export_client(source, client, options, out) for client in sorted(source.files))


def export_client(
    source: Source, client: int, options: ExportRequest, out: str | Path | None
) -> Exported:
    """Export the model of one client of a run that was opened; refuse to overwrite files."""
    subject = open_subject(source, client, options.standardised, options.align)
    return make_draft(subject, options, out).keep()


@dataclass(frozen=True)
class ExportDraft:
    """Files of one client in one format that were checked and measured, and are not kept yet."""

    subject: Subject
    options: ExportRequest
    exported: Exported
    contents: Mapping[str, bytes]
    """By name; the model card comes last."""

    def only(self, *versions: str) -> ExportDraft:
        """Return the draft with the files of these versions, and a card that describes them."""
        rows = []
        for row in self.exported.rows:
            rows.append(row if row.version in versions else replace(row, file=None))
        exported = replace(self.exported, rows=tuple(rows))
        exported = replace(exported, card=f"{exported.file}.md")
        contents = {row.file: self.contents[row.file] for row in rows if row.file}
        text = card(self.subject.source, exported, self.options.standardised)
        contents[exported.card] = text.encode()
        return replace(self, exported=exported, contents=contents)

    def within(self, most: float) -> ExportDraft:
        """Return the draft with the files of at most ``most`` bytes; refuse if there is none."""
        files = [row for row in self.exported.rows if row.file]
        fitting = [row.version for row in files if row.bytes <= most]
        smallest = min(files, key=lambda row: row.bytes)
        if not fitting:
            name = "float" if smallest.version == "shrunk" else smallest.version
            raise BudgetError(
                f"size is {self.options.size}; the smallest file of client {self.exported.name} "
                f"for {self.options.to} is {name}, with {format_kilobytes(smallest.bytes)} kB: "
                f"give {round_up(smallest.bytes)}, or train a smaller net, or with a method that "
                f"removes channels ({', '.join(CHANNEL_METHODS)}).",
                smallest.bytes,
            )
        notes = list(self.exported.notes)
        for row in files:
            if row.version not in fitting:
                size = format_kilobytes(row.bytes)
                notes.append(f"{row.file} would take {size} kB, so it was not kept")
        noted = replace(self, exported=replace(self.exported, notes=tuple(notes)))
        return noted.only(*fitting)

    def check_free(self) -> None:
        """Refuse to overwrite files."""
        for name in self.contents:
            path = self.exported.folder / name
            if path.exists():
                raise InputError(
                    f"{path} exists; models are never overwritten: give a different "
                    f"{spell_option('out')}."
                )

    def keep(self) -> Exported:
        """Write the files."""
        self.check_free()
        _commit(self.exported.folder, self.contents)
        return self.exported


def make_draft(subject: Subject, options: ExportRequest, out: str | Path | None) -> ExportDraft:
    """Write a client's files into a folder that is removed again, check and measure them."""
    source = subject.source
    client = subject.client
    count = len(source.data(client).test)
    check(count > 0, f"the test data of client {client}", count, "1 example or more to check with")
    folder = source.folder.path / "export" if out is None else Path(out)
    with tempfile.TemporaryDirectory() as scratch:
        exported = replace(_write_and_measure(subject, options, Path(scratch)), folder=folder)
        names = [row.file for row in exported.rows if row.file]
        contents = {name: (Path(scratch) / name).read_bytes() for name in names}
    draft = ExportDraft(subject, options, exported, contents)
    if options.most_bytes is None:
        return draft.only("shrunk", "int8")
    return draft.within(options.most_bytes)


def round_up(size: int) -> str:
    """Write the size of a file as an option that allows it.

    >>> round_up(80_001)
    '80.1kB'
    """
    return f"{math.ceil(size / 100) / 10:.1f}kB"


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
            f"{folder} cannot be written to: {reason} Give a different {spell_option('out')}."
        ) from None


# ---- one client ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """One client's model in full width and shrunk, and its inputs as the file takes them."""

    source: Source
    client: int
    tree: Tree
    small_net: Net
    small_tree: Tree
    own: Preparation
    """The standardisation that becomes part of the file; one that changes nothing does not."""
    outputs: Outputs
    inputs: Mapping[str, Tensor]

    def module(self, net: Net, tree: Tree) -> nn.Module:
        """The module to export: the net with its values, between raw inputs and meant outputs."""
        module = net.filled(tree)
        if not self.own.changes_nothing:
            module = Raw(module, self.own, self.source.federation.shape)
        has_others = len(self.outputs.labels) < self.source.federation.classes
        if has_others or self.outputs.are_scaled:
            module = Answers(module, self.outputs)
        return module.eval()


def open_subject(source: Source, client: int, standardised: bool, align: int) -> Subject:
    """Return what is exported of a client, in any format.

    Raises:
        InputError: The client's model does not fit the network.
    """
    tree = source.tree(client)
    data = source.data(client)
    small_net, small_tree = shrunk(source.net, tree, align)
    own = IDENTITY
    if source.takes_raw(client) and not standardised:
        own = source.preparation(client)
    inputs = {
        "train": unprepared(own, data.train.x),
        "validation": unprepared(own, data.validation.x),
        "test": unprepared(own, data.test.x),
    }
    outputs = source.outputs(client, standardised=own.changes_nothing)
    return Subject(source, client, tree, small_net, small_tree, own, outputs, inputs)


def _write_and_measure(subject: Subject, options: ExportRequest, scratch: Path) -> Exported:
    """Write the files into ``scratch``, check them against torch and measure them."""
    source = subject.source
    names = options.names(source.file_stem(subject.client))
    with exporter_errors(options, source.net):
        paths, int8_shares = write_versions(subject, options, scratch)
        predicts = {version: options.format.load(path) for version, path in paths.items()}
        difference, allowed, torch_score = _compared(predicts["shrunk"], subject)
        rows = _rows(subject, paths, predicts, names, int8_shares)
    same_int8 = None
    int8_gap = None
    if "int8" in predicts:
        examples = torch.cat(list(subject.inputs.values()))
        in_float = predicts["shrunk"](examples)
        in_int8 = predicts["int8"](examples)
        same_int8 = subject.outputs.same(in_int8, in_float)
        int8_gap = float((in_int8 - in_float).abs().mean())
    notes = (
        *_why_not_smaller(subject, rows, paths["shrunk"]),
        *_notes(subject, rows, torch_score),
    )
    metric = subject.outputs.problem.metric
    return Exported(
        client=subject.client,
        to=options.to,
        folder=scratch,
        rows=rows,
        card="",
        difference=difference,
        allowed=allowed,
        metric=metric.name,
        more_is_better=metric.more_is_better,
        share=metric.share,
        score_torch=torch_score,
        same_int8=same_int8,
        int8_gap=int8_gap,
        notes=notes,
        name=source.name(subject.client),
    )


def write_versions(
    subject: Subject, options: ExportRequest, scratch: Path
) -> tuple[dict[str, Path], tuple[float, float] | None]:
    """Write the files of a client's model into a folder, without checking them.

    If no channel was removed, dense and shrunk are one file.

    Returns:
        The path of each version, and the shares of weights and MACs that are in int8.
    """
    net = subject.source.net
    shape = subject.source.federation.shape
    names = options.names(subject.source.file_stem(subject.client))
    metadata = _metadata(subject)

    module = subject.module(subject.small_net, subject.small_tree)
    path = scratch / names["shrunk"]
    paths = {"dense": path, "shrunk": path}
    options.format.write(module, shape, path, metadata)

    # shrunk() gives the very same net back where it found nothing to remove.
    if subject.small_net is not net:
        full_module = subject.module(net, subject.tree)
        paths["dense"] = scratch / f"dense{options.format.SUFFIX}"
        options.format.write(full_module, shape, paths["dense"], metadata)

    most = options.most_bytes
    is_too_large = most is not None and path.stat().st_size > most
    int8_shares = None
    if options.int8 or is_too_large:
        count = len(subject.inputs["train"])
        allowed = f"1 example or more to fit int8 to; leave out {spell_option('int8')}"
        if is_too_large:
            allowed = f"1 example or more to fit int8 to; give a larger {spell_option('size')}"
        check(count > 0, f"the training data of client {subject.client}", count, allowed)
        examples = spread_out(subject.inputs["train"], CALIBRATION)
        paths["int8"] = scratch / names["int8"]
        int8_shares = options.format.quantise(module, path, examples, paths["int8"])
    return paths, int8_shares


@contextmanager
def exporter_errors(options: ExportRequest, net: Net) -> Iterator[None]:
    """Turn whatever a format raises for a module it cannot handle into one readable error."""
    try:
        yield
    except FedgroveError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise InputError(
            f"{type(net.module).__name__} could not be written for {options.to}, "
            f"{type(error).__name__}: {reason}; write its forward pass with plain tensor "
            "operations."
        ) from error


def _metadata(subject: Subject) -> dict[str, str]:
    source = subject.source
    outputs = subject.outputs
    kind = outputs.problem.kind or "outputs"
    metadata = {
        "fedgrove": __version__,
        "method": str(source.summary["method"]),
        "data": source.federation.name,
        "client": str(subject.client),
        "name": source.name(subject.client),
        # The names of the outputs, as "classes", "labels" or "numbers".
        kind: json.dumps(list(outputs.labels)),
        "predicts": kind,
        "output": outputs.tensor,
        "standardises": "no",
    }
    channels = source.preparation(subject.client).channels
    if channels is not None:
        metadata["channels"] = json.dumps(list(channels))
    if subject.own.mean is not None and subject.own.std is not None:
        metadata["standardises"] = "yes"
        metadata["mean"] = json.dumps(list(subject.own.mean))
        metadata["deviation"] = json.dumps(list(subject.own.std))
    return metadata


def _compared(predict: Predict, subject: Subject) -> tuple[float, float, float]:
    """How far the file is from torch on the test data, what is allowed, and torch's score there.

    Too far is refused. torch runs the model as the run did: in full width, on inputs that were
    standardised as in training. So shrinking and standardising are checked as well.
    """
    net = subject.source.net
    outputs = subject.outputs
    data = subject.source.data(subject.client).test
    raw = subject.inputs["test"]
    prepared = torch.from_numpy(subject.own.apply(raw.numpy()))
    with torch.no_grad():
        truth = net.run(subject.tree, data.x.float(), train=False)
        # Raw inputs were made of what the model saw, and rounded: they are prepared again here.
        wanted = net.run(subject.tree, prepared, train=False)
    difference, allowed = outputs.difference(predict(raw), wanted)
    # Not ``difference > allowed``, which would let NaN pass.
    if not difference <= allowed:
        raise EngineError(
            f"the file's outputs are {difference:.1e} from torch's on the test data of client "
            f"{subject.client}, and {allowed:.1g} is allowed; nothing was written. Report the "
            "network and the versions of torch and runtime."
        )
    return difference, allowed, outputs.score(outputs.select(truth), data.y)


def _rows(
    subject: Subject,
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
            subject.outputs.score(subject.outputs.to_network(predicts[version](x)), y),
            names.get(version),
        )
        if version == "int8":
            row = replace(row, int8=int8_shares)
        rows.append(row)
    return tuple(rows)


def _why_not_smaller(subject: Subject, rows: Sequence[Row], file: Path) -> Iterator[str]:
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
    int8 = f"int8 ({spell_option('int8')}), about a quarter"
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


def _notes(subject: Subject, rows: Sequence[Row], torch_score: float) -> Iterator[str]:
    source = subject.source
    metric = subject.outputs.problem.metric
    examples = len(source.data(subject.client).test)
    scores = {row.version: row.score for row in rows}
    if "int8" in scores:
        lost = scores["shrunk"] - scores["int8"]
        if not metric.more_is_better:
            lost = -lost
        yield from _note_on_int8(metric, lost, scores["shrunk"], examples)
    # The models that are kept are those after the last length of fine-tuning.
    tuned = scores_after(source.summary, finetune_lengths(source.summary)[-1])
    # Of a mixed federation each client's score is of its own task.
    of_clients = tuned.get(f"{metric.name}_clients") or tuned.get("metric_clients", {})
    reported = of_clients.get(str(subject.client))
    if reported is not None:
        # One example may fall otherwise on another machine; two have another cause.
        most = 1.5 / examples if metric.share else 1e-3 * abs(reported)
        if abs(reported - torch_score) > most:
            yield (
                f"the run reported {reported:.4f} for this client, but its data, rebuilt, give "
                f"{torch_score:.4f}: they have changed"
            )
    yield from source.summary.get("notes", ())


def _note_on_int8(metric: Metric, lost: float, score: float, examples: int) -> Iterator[str]:
    """A note where int8 loses much; ``lost`` is positive if it is worse than ``score``."""
    if not metric.share:
        if lost > WORSE * abs(score):
            yield (
                f"with int8, the {metric.name} on this client's {examples} test examples is "
                f"{lost / abs(score):.0%} worse; {WORSE:.0%} is allowed"
            )
        return
    # The margin is for a loss of exactly one point, whose difference of floats may lie above it.
    if lost > POINT + 1e-9:
        of_examples = f"on this client's {examples} test examples"
        if metric.name == ACCURACY.name:
            of_examples = f"{round(examples * lost)} of this client's {examples} test examples"
        yield f"int8 loses {100 * lost:.1f} points, {of_examples}; 1 is allowed"
