"""``fedgrove.export_model``: a client's own model as a file, checked against torch, with a card beside it.

::

    model = the client's own, without the channels of which every parameter is 0
    file  = the model behind the client's standardisation, as ONNX or ExecuTorch
    check   max |file(x) - torch(x)| <= 1e-5 max(1, max |torch(x)|)  on the client's test data, else nothing is written
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from .. import __version__
from ..data import Federation
from ..errors import EngineError, InputError, check
from ..nets import Net
from ..runs.folder import RunFolder
from ..runs.result import Result
from ..runs.store import write_bytes
from ..trees import Tree
from .card import card
from .figures import Exported, Row, accuracy, latencies, spread_out
from .formats import Predict, Wish
from .source import Raw, Scale, Source, opened, shrunk

T = TypeVar("T")
TOLERANCE = 1e-5
POINT = 0.01
"""What int8 may lose in accuracy before a note says so."""
CALIBRATION = 512
"""Training examples that int8 is calibrated on, at most; spread evenly."""


def export_model(
    run: str | Path | Result | RunFolder,
    *,
    client: int,
    to: str = "onnx",
    int8: bool = False,
    out: str | Path | None = None,
    standardised: bool = False,
    align: int = 1,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
) -> Exported:
    """Write a client's own model, really shrunk, as ONNX or ExecuTorch, with a card beside it; checked against torch.

    ``out`` is ``export`` in the run folder by default. The file takes inputs as they were before they were
    standardised and does that itself, unless ``standardised``. With ``align`` a shrunk layer keeps as many zero
    channels as make its width a multiple of that: larger, and often faster. ``data`` and ``net`` are for runs on what
    was made in Python, which config.toml cannot rebuild.
    """
    wish = Wish(to, int8, standardised, align)
    return _export(opened(run, data, net, data_dir), client, wish, out)


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
) -> Iterator[Exported]:
    """:func:`export` for every client of a run, one after another; each is written when it is yielded."""
    wish = Wish(to, int8, standardised, align)
    source = opened(run, data, net, data_dir)
    return (_export(source, client, wish, out) for client in sorted(source.files))


def _export(source: Source, client: int, wish: Wish, out: str | Path | None) -> Exported:
    subject = _subject(source, client, wish)
    folder = source.folder.path / "export" if out is None else Path(out)
    for name in wish.names(client).values():
        if (folder / name).exists():
            raise InputError(
                f"{folder / name} exists; models are never overwritten: give another --out."
            )
    with tempfile.TemporaryDirectory() as scratch:
        made = replace(_made(subject, wish, Path(scratch)), folder=folder)
        whole = {row.file: (Path(scratch) / row.file).read_bytes() for row in made.rows if row.file}
        _commit(folder, {**whole, made.card: card(source, made, wish.standardised).encode()})
    return made


def _commit(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files, or none; the card comes last."""
    fresh = [p for p in (folder, *folder.parents) if not p.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            written += [folder / f"{name}.part", folder / name]
            write_bytes(folder / name, content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        for path in fresh:
            if path.is_dir():
                path.rmdir()
        raise InputError(
            f"{folder} cannot be written to: {error.strerror or error}; give another --out."
        ) from None


# ---- one client -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Subject:
    """One client's model in full width and without the channels that are gone, and its inputs as the file takes them.

    ``scale`` is the standardisation that becomes part of the file, if any does.
    """

    source: Source
    client: int
    tree: Tree
    small: Net
    few: Tree
    scale: Scale | None
    inputs: Mapping[str, Tensor]

    def module(self, net: Net, tree: Tree) -> nn.Module:
        """What is written: the net with its values, behind the standardisation."""
        filled = net.filled(tree)
        return (
            filled if self.scale is None else Raw(filled, self.scale, self.source.federation.shape)
        ).eval()


def _subject(source: Source, client: int, wish: Wish) -> _Subject:
    tree = source.tree(client)
    check(
        len(source.data(client).test) > 0,
        f"the test data of client {client}",
        0,
        "1 example or more to check with",
    )
    ready = not wish.int8 or len(source.data(client).train) > 0
    check(
        ready,
        f"the training data of client {client}",
        0,
        "1 example or more to fit int8 to; leave --int8 out",
    )
    small, few = shrunk(source.net, tree, wish.align)
    raw = source.raw is not None and not wish.standardised
    data = source.raw.clients[client] if source.raw is not None and raw else source.data(client)
    inputs = {name: getattr(data, name).x.float() for name in ("train", "validation", "test")}
    return _Subject(source, client, tree, small, few, source.scale(client) if raw else None, inputs)


def _made(subject: _Subject, wish: Wish, scratch: Path) -> Exported:
    """Write the files into ``scratch``, check them against torch and measure them."""
    source, client, names = subject.source, subject.client, wish.names(subject.client)
    paths, shares = _files(subject, wish, scratch)
    predicts = {version: wish.format.load(path) for version, path in paths.items()}
    difference, right = _compared(predicts["shrunk"], subject)
    rows = tuple(
        replace(row, int8=shares) if row.version == "int8" else row
        for row in _rows(subject, paths, predicts, names)
    )
    same = None
    if wish.int8:
        every = torch.cat(list(subject.inputs.values()))
        same = accuracy(predicts["int8"](every), predicts["shrunk"](every).argmax(1))
    notes = tuple(_notes(source, client, rows, right))
    return Exported(client, wish.to, scratch, rows, names["card"], difference, right, same, notes)


def _files(
    subject: _Subject, wish: Wish, scratch: Path
) -> tuple[dict[str, Path], tuple[float, float] | None]:
    """The versions of the model as files, and what of int8 is; where no channel is gone, dense and shrunk are one."""
    source, shape, names = (
        subject.source,
        subject.source.federation.shape,
        wish.names(subject.client),
    )
    module, path, said = (
        subject.module(subject.small, subject.few),
        scratch / names["shrunk"],
        _said(subject),
    )
    paths = {"dense": path, "shrunk": path}
    _tried(wish, source.net, lambda: wish.format.write(module, shape, path, said))
    if subject.small is not source.net:
        paths["dense"] = scratch / f"dense{wish.format.SUFFIX}"
        full = subject.module(source.net, subject.tree)
        _tried(wish, source.net, lambda: wish.format.write(full, shape, paths["dense"], said))
    shares = None
    if wish.int8:
        paths["int8"], x = scratch / names["int8"], spread_out(subject.inputs["train"], CALIBRATION)
        shares = _tried(
            wish, source.net, lambda: wish.format.quantise(module, path, x, paths["int8"])
        )
    return paths, shares


def _tried(wish: Wish, net: Net, step: Callable[[], T]) -> T:
    try:
        return step()
    except Exception as error:  # what an exporter makes of a module that is not ours
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise InputError(
            f"{type(net.module).__name__} could not be written for {wish.to}, {type(error).__name__}: {reason}; write "
            "its forward pass with plain tensor operations."
        ) from error


def _said(subject: _Subject) -> dict[str, str]:
    """What the file says of itself."""
    source, scale = subject.source, subject.scale
    said = {
        "fedgrove": __version__,
        "method": str(source.summary["method"]),
        "data": source.federation.name,
        "client": str(subject.client),
        "classes": json.dumps(list(source.federation.labels)),
        "standardises": "yes" if scale else "no",
    }
    return said | ({k: json.dumps(list(v)) for k, v in asdict(scale).items()} if scale else {})


def _compared(predict: Predict, subject: _Subject) -> tuple[float, float]:
    """How far the file is from torch on the test data, and torch's accuracy there; too far is refused.

    torch runs the model as the run did: in full width, on the inputs that the run saw.
    """
    data = subject.source.data(subject.client).test
    with torch.no_grad():
        truth = subject.source.net.run(subject.tree, data.x.float(), train=False)
    apart = (predict(subject.inputs["test"]) - truth).abs().max() / truth.abs().max().clamp_min(1.0)
    if not float(apart) <= TOLERANCE:
        raise EngineError(
            f"the file's outputs are {float(apart):.1e} from torch's on the test data of client {subject.client}, and "
            f"{TOLERANCE:g} is allowed; nothing was written. Report the network and the versions of torch and runtime."
        )
    return float(apart), accuracy(truth, data.y)


def _rows(
    subject: _Subject,
    paths: Mapping[str, Path],
    predicts: Mapping[str, Predict],
    names: Mapping[str, str],
) -> tuple[Row, ...]:
    """The figures of every version; a model that is dense anyway is measured once."""
    x, y = subject.inputs["test"], subject.source.data(subject.client).test.y
    alone = {v: p for v, p in predicts.items() if v != "dense" or paths[v] != paths["shrunk"]}
    times = latencies(alone, x[:1])
    times.setdefault("dense", times["shrunk"])

    def row(version: str) -> Row:
        layout = (subject.source.net if version == "dense" else subject.small).layout
        ratio = times[version] / times["dense"]
        figures = (layout.size, layout.macs, paths[version].stat().st_size, times[version], ratio)
        return Row(version, *figures, accuracy(predicts[version](x), y), names.get(version))

    return tuple(row(version) for version in paths)


def _notes(source: Source, client: int, rows: Sequence[Row], right: float) -> Iterator[str]:
    by, n = {row.version: row for row in rows}, len(source.data(client).test)
    lost = by["shrunk"].accuracy - by["int8"].accuracy if "int8" in by else 0.0
    if lost > POINT + 1e-9:
        yield f"int8 loses {100 * lost:.1f} points, {round(n * lost)} of this client's {n} test examples; 1 is allowed"
    told = source.summary["accuracy_clients"].get(str(client))
    if told is not None and abs(told - right) > 1.5 / n:
        yield f"the run says {told:.4f} for this client and its data, rebuilt, give {right:.4f}: they have changed"
    yield from source.summary.get("notes", ())
