"""All formats next to each other: the size, score and time of each, or why it is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..data import Federation
from ..errors import BudgetError, FedgroveError, unknown
from ..report.tables import Scores, format_kilobytes
from ..runs.folder import RunFolder
from ..runs.result import Result
from .figures import Row
from .formats import FORMATS, ExportRequest, missing_packages, parse_file_size
from .make import CHANNEL_METHODS, ExportDraft, Subject, make_draft, open_subject, round_up
from .source import Source, opened


@dataclass(frozen=True)
class FormatRow:
    """A client's model in one format, in float or in int8; or why there is no such file."""

    client: int
    name: str
    """What the client is called."""
    to: str
    version: str
    """float or int8; both if the format failed as a whole."""
    metric: str
    share: bool
    bytes: int | None = None
    score: float | None = None
    latency_us: float | None = None
    """Processor time of one example, that of the shortest turn; it depends on the machine."""
    latency: float | None = None
    """The ratio of that time to that of the first format in float."""
    difference: float | None = None
    """Of a float file: how far its outputs are from torch's, as ``Exported.difference``."""
    file: str | None = None
    """The file that was kept."""
    fits: bool = True
    """Whether the file takes no more than the size that was given."""
    install: str = ""
    """How to install what the format needs, if that is missing."""
    failure: str = ""
    """Why there is no file."""

    @property
    def scores(self) -> Scores:
        """The metric, which formats the score."""
        return Scores(self.metric, share=self.share)

    @property
    def has_failed(self) -> bool:
        """Whether the format is installed, and yet there is no file."""
        return bool(self.failure) and not self.install

    def json(self) -> dict[str, Any]:
        """The row as ``--json`` prints it."""
        return asdict(self)


def compare_formats(
    run: str | Path | Result | RunFolder,
    *,
    client: int | str | None = None,
    formats: Sequence[str] = tuple(FORMATS),
    size: str | None = None,
    write: bool = False,
    out: str | Path | None = None,
    standardised: bool = False,
    align: int = 1,
    data: Federation | None = None,
    net: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: bool = False,
) -> list[FormatRow]:
    """Compare a client's model in several export formats, in float and in int8.

    A format that cannot be written is a row that says why. Arguments that are not explained here
    are those of :func:`fedgrove.export_model`.

    Args:
        run: A finished run: its folder or its result.
        client: The client's name or number; None: the first client.
        formats: The formats to compare.
        size: The most that a file may take, such as "80kB". Only one file is kept then: a float
            file if one fits, else int8; of several that fit the smallest.
        write: Whether to keep the files. By default they are written, measured and removed.
        out: The folder for the files; None: ``export`` in the run folder.
        standardised: Whether the files take standardised inputs.
        align: A shrunk layer keeps zero channels until its width is a multiple of this number.
        data: The federation again, for a run on data made in Python.
        net: The network again, for a run with a module made in Python.
        data_dir: The folder with the data sets' files.
        trust: Whether code that config.toml names may be run.

    Raises:
        InputError: The run is not finished, or the client or a format is unknown.
        BudgetError: No file is as small as ``size``.
    """
    source = opened(run, data, net, data_dir, trust)
    number = min(source.files) if client is None else source.number(client)
    found = FormatComparison.of(source, number, formats, size, out, standardised, align)
    return found.keep() if write else found.rows()


@dataclass(frozen=True)
class FormatComparison:
    """What was written of a client in several formats, before any file is kept."""

    subject: Subject
    drafts: Mapping[str, ExportDraft]
    failures: Mapping[tuple[str, str], str]
    """Why there is no file, by format and version."""
    most: float | None = None
    """The most bytes of a file."""
    best: tuple[str, str] | None = None
    """With a size: the format and the version of the only file that is kept."""

    @classmethod
    def of(
        cls,
        source: Source,
        client: int,
        formats: Sequence[str],
        size: str | None,
        out: str | Path | None,
        standardised: bool,
        align: int,
    ) -> FormatComparison:
        """Write a client's model in each format, and measure it."""
        for to in formats:
            if to not in FORMATS:
                raise unknown("format", to, FORMATS)
        most = parse_file_size(size)
        subject = open_subject(source, client, standardised, align)
        drafts: dict[str, ExportDraft] = {}
        failures: dict[tuple[str, str], str] = {}
        for to in formats:
            # A format that fails in int8 may do in float.
            for int8 in (True, False):
                try:
                    request = ExportRequest(to, int8, standardised, align)
                    drafts[to] = make_draft(subject, request, out)
                    break
                except FedgroveError as error:
                    failures[to, "int8" if int8 else "float"] = str(error)
        found = cls(subject, drafts, failures, most)
        if most is None:
            return found
        return replace(found, best=found._find_best(most, str(size)))

    def _find_best(self, most: float, size: str) -> tuple[str, str]:
        """Return the file to keep: float before int8, then the smallest."""
        files = []
        for to, draft in self.drafts.items():
            for row in _versions(draft):
                files.append((row.version == "int8", row.bytes, to, row))
        fitting = [each for each in files if each[1] <= most]
        if fitting:
            is_int8, _, to, _ = min(fitting, key=lambda each: each[:3])
            return to, "int8" if is_int8 else "shrunk"
        if not files:
            # No format could be written: the rows say why.
            return "", ""
        is_int8, least, to, _ = min(files, key=lambda each: each[1])
        name = self.subject.source.name(self.subject.client)
        raise BudgetError(
            f"size is {size}; the smallest file of client {name} is {to} in "
            f"{'int8' if is_int8 else 'float'}, with {format_kilobytes(least)} kB: give "
            f"{round_up(least)}, or train a smaller net, or with a method that removes channels "
            f"({', '.join(CHANNEL_METHODS)}).",
            least,
        )

    def keep(self) -> list[FormatRow]:
        """Write the files, all or none of them; the rows."""
        drafts = [self._kept(to, draft) for to, draft in self.drafts.items()]
        drafts = [draft for draft in drafts if draft.contents]
        for draft in drafts:
            draft.check_free()
        for draft in drafts:
            draft.keep()
        kept = {name for draft in drafts for name in draft.contents}
        return self.rows(kept)

    def _kept(self, to: str, draft: ExportDraft) -> ExportDraft:
        if self.best is None:
            return draft
        return draft.only(self.best[1]) if to == self.best[0] else replace(draft, contents={})

    def rows(self, kept: frozenset[str] | set[str] = frozenset()) -> list[FormatRow]:
        """Return a row for each format and version; ``kept`` are the names of kept files."""
        source = self.subject.source
        metric = self.subject.outputs.problem.metric
        plain = FormatRow(
            self.subject.client,
            source.name(self.subject.client),
            "",
            "",
            metric.name,
            metric.share,
        )
        rows: list[FormatRow] = []
        formats = dict.fromkeys([*self.drafts, *(to for to, _ in self.failures)])
        for to in sorted(formats, key=list(FORMATS).index):
            if to in self.drafts:
                rows += self._measured(replace(plain, to=to), self.drafts[to], kept)
            elif (to, "float") in self.failures:
                install = ""
                if missing_packages(to):
                    install = f"pip install 'fedgrove[{FORMATS[to].EXTRA}]'"
                failure = self.failures[to, "float"]
                both = "float, int8"
                rows.append(replace(plain, to=to, version=both, install=install, failure=failure))
        return _relative(rows)

    def _measured(
        self, plain: FormatRow, draft: ExportDraft, kept: frozenset[str] | set[str]
    ) -> list[FormatRow]:
        rows = []
        for row in _versions(draft):
            is_float = row.version == "shrunk"
            rows.append(
                replace(
                    plain,
                    version="float" if is_float else row.version,
                    bytes=row.bytes,
                    score=row.score,
                    latency_us=row.latency_us,
                    difference=draft.exported.difference if is_float else None,
                    file=row.file if row.file in kept else None,
                    fits=self.most is None or row.bytes <= self.most,
                )
            )
        failure = self.failures.get((plain.to, "int8"))
        if failure is not None:
            rows.append(replace(plain, version="int8", failure=failure))
        return rows


def _versions(draft: ExportDraft) -> list[Row]:
    """The versions of which there are files; dense is there only to be compared with."""
    return [row for row in draft.exported.rows if row.version != "dense"]


def _relative(rows: Sequence[FormatRow]) -> list[FormatRow]:
    """Return the rows with times relative to the first that has one."""
    first = next((row.latency_us for row in rows if row.latency_us is not None), None)
    compared = []
    for row in rows:
        if row.latency_us is not None and first:
            row = replace(row, latency=row.latency_us / first)
        compared.append(row)
    return compared
