"""How a run ended: with figures, or with a reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from .. import nets
from ..data.federation import Federation
from ..errors import InputError, list_some, shown
from ..nets.user_files import is_file_spec
from ..notebook import show_table
from ..report.tables import describe_run, finetune_lengths, key_after, name_cells
from .files import cannot_write, damaged
from .folder import RunFolder
from .model import PREPARATION_FILE as PREPARATION
from .model import Model, client_model, client_number, shared_model
from .report_html import write_run_report


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its figures, its folder, and its models."""

    summary: dict[str, Any]
    folder: RunFolder
    net: str | nn.Module | None = field(default=None, repr=False, compare=False)
    """The network, where it was made here or is trusted; None: as config.toml names it."""
    data: Federation | None = field(default=None, repr=False, compare=False)
    """The data, where they were made here; None: as config.toml names them."""
    is_temporary: bool = field(default=False, compare=False)
    """Whether the run folder is removed with this result."""

    def __repr__(self) -> str:
        place = "a temporary folder" if self.is_temporary else repr(str(self.folder.path))
        return f"Result({describe_run(self.summary)}, in {place})"

    def _repr_html_(self) -> str:
        notes = list(self.summary.get("notes", ()))
        return show_table(f"Result: {self.summary['method']}", [name_cells(self.summary)], notes)

    def table(self) -> None:
        """Print the numbers of a finished run."""
        from ..report.tables import print_summaries

        print_summaries([self.summary], elsewhere="the summary")

    def save(self, path: str | Path) -> RunFolder:
        """Copy the run folder with an HTML report; an existing folder is not changed."""
        target = Path(path)
        if target.exists():
            raise InputError(
                f"the run folder {target} exists; runs are never overwritten: give a different "
                "name."
            )
        try:
            shutil.copytree(self.folder.path, target)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise cannot_write(target, error) from None
        saved = RunFolder(target)
        write_run_report(saved)
        return saved

    # ---- figures ---------------------------------------------------------------------------------

    def clients(self, *, as_frame: bool = False) -> Any:
        """Return a dictionary per client of the run whose model is kept, or a DataFrame.

        ``client`` and ``name``; ``examples`` that it trains on and ``test`` examples; the metric on
        these by its name (``accuracy``), None where it was not scored, and after fine-tuning
        (``accuracy_after_3``); the ``group`` whose model it
        is delivered, None where it is delivered one of its own or none; ``model``, the file in the
        run folder. In a mixed federation its ``task``.
        """
        about = self.folder.preparation() or {"clients": {}}
        metric = self.summary.get("metric") or "metric"
        rows = []
        for client, file in sorted(self.folder.models().items()):
            entry = about["clients"].get(str(client), {})
            row = {
                "client": client,
                "name": entry.get("name", str(client)),
                "examples": entry.get("examples"),
                "test": entry.get("test"),
            }
            for epochs in finetune_lengths(self.summary):
                scores = self.summary.get(key_after(f"{metric}_clients", epochs), {})
                row[key_after(metric, epochs)] = scores.get(str(client))
            row |= {"group": entry.get("group"), "model": f"models/{file}"}
            if "task" in entry:
                row["task"] = entry["task"]
            rows.append(row)
        return frame(rows) if as_frame else rows

    def rounds(self, *, as_frame: bool = False) -> Any:
        """Return the run's lines of metrics.jsonl, one per exchange, or a DataFrame of them.

        In a DataFrame, figures within figures have a column each: ``bytes_up_parts.values``.
        """
        lines = self.folder.metrics()
        return frame(lines) if as_frame else lines

    # ---- models ----------------------------------------------------------------------------------

    def model(self, client: int | str | None = None, *, group: int | None = None) -> Model:
        """Return a client's own model after the run, by its name or its number, for raw inputs.

        Without a client: the model that the server hands out, where there is one for all; where
        each group of clients has one, say which ``group`` (:meth:`clients` tells).
        """
        about = self._about()
        if client is not None and group is not None:
            raise InputError(
                "a client and a group were given; a model belongs to either a client or a group."
            )
        if client is None:
            return self._shared(about, group)
        files = self.folder.models()
        names = {k: str(about["clients"][str(k)]["name"]) for k in sorted(files)}
        number = client_number(client, names, str(self.folder.path))
        module = self._module(about)
        return client_model(about, number, self.folder.tree(files[number]), module)

    def predict(
        self,
        path: str | Path,
        client: int | str | None = None,
        *,
        stride: int | None = None,
        time: str | None = None,
        fill: str | None = None,
    ) -> Any:
        """Predict each window of a recording with a client's model; return a DataFrame.

        Its rows have the line of the file and the time at which a window starts, what is predicted,
        and for classes its probability. The recording is read as the data of the run were: sorted
        by time, filled, and resampled to the rate of the run.

        Args:
            path: A table (.csv, also compressed; .parquet); the column of the label may be missing.
            client: The client whose model predicts, by name or number; by default :meth:`model`.
            stride: Rows from one window to the next; by default as in the run.
            time: The column to sort rows by; by default as in the run.
            fill: What empty cells become; by default as in the run.

        Raises:
            InputError: The run has no such model, or the recording does not fit it.
        """
        from .predictions import predict_recording

        if not isinstance(path, str | Path):
            raise InputError(
                f"predict was given {shown(path)}; give a file with a recording (.csv), or call "
                "model(client).predict(...) with rows or windows."
            )
        model = self.model(client)
        given = {"stride": stride, "time": time, "fill": fill}
        options: dict[str, Any] = {}
        for name in ("label", "client", *given):
            value = given.get(name)
            # Without a window, rows are predicted one by one.
            is_left_out = name == "stride" and model.preparation.window is None
            if value is None and not is_left_out:
                value = self.folder.options.get(name)
            options[name] = value
        owner = None
        if client is not None:
            about = self._about()
            names = {int(k): str(entry["name"]) for k, entry in about["clients"].items()}
            owner = names[client_number(client, names, str(self.folder.path))]
        return predict_recording(model, path, options, owner)

    def _about(self) -> dict[str, Any]:
        if self.summary.get("prediction") == "own":
            raise InputError(
                f"the clients of {self.folder.path} predict in their method's own way, "
                f"{self.summary['method']}, of which models/ contains only a part; use the scores "
                "of the run, or load the weights in Python."
            )
        about = self.folder.preparation()
        if about is None:
            raise InputError(
                f"{self.folder.path} was written before runs kept how raw inputs are prepared; run "
                "it again, or export its models: fedgrove.export_model."
            )
        for client in self.folder.models():
            if str(client) not in about["clients"]:
                place = self.folder.path / "models" / PREPARATION
                raise damaged(place, f"it does not describe client {client} of index.json")
        return about

    def _shared(self, about: Mapping[str, Any], group: int | None) -> Model:
        groups: dict[int, str] = {int(number): file for number, file in about["groups"].items()}
        method = self.summary["method"]
        if not groups:
            raise InputError(
                f"{method} has no model that clients share; name a client: result.model(0)."
            )
        members: dict[int, list[str]] = {number: [] for number in groups}
        for entry in about["clients"].values():
            if "group" in entry:
                members[entry["group"]].append(str(entry["name"]))
        # Some clients may have none of the server's: then there is none for all.
        is_for_all = len(groups) == 1 and len(members[0]) == len(about["clients"])
        if group is None and not is_for_all:
            listed = "; ".join(f"group {k}: {list_some(names)}" for k, names in members.items())
            raise InputError(
                f"{method} has no model for all clients, but one for groups of them "
                f"({listed}); name a group, as in result.model(group=0), or a client."
            )
        chosen = 0 if group is None else group
        if chosen not in groups:
            raise InputError(
                f"there is no group {chosen} of several clients; there are: "
                f"{', '.join(map(str, groups))}."
            )
        return shared_model(about, chosen, self.folder.tree(groups[chosen]), self._module(about))

    def _module(self, about: Mapping[str, Any]) -> nn.Module:
        """The network, built again; its weights do not matter yet."""
        net = self.net
        if net is None:
            net = str(self.folder.options.get("net", ""))
            if net.startswith("<"):
                raise InputError(
                    f"the run's net was made in Python ({net}); give it again: "
                    f"fedgrove.load_run({str(self.folder.path)!r}, net=...)."
                )
            if is_file_spec(net):
                raise InputError(
                    f"{self.folder.path / 'config.toml'} has net = {net!r}, so the code in that "
                    "file would be run. If you trust it, use fedgrove.load_run(path, trust=True)."
                )
        return nets.build(net, tuple(about["shape"]), int(about["outputs"]), seed=0)


def frame_of_runs(summaries: Iterable[Mapping[str, Any]]) -> Any:
    """Return a row per run as a DataFrame, without the scores of single clients.

    Their columns would read as other lengths of fine-tuning; :meth:`Result.clients` has them.
    """
    rows = []
    for summary in summaries:
        row = {}
        for key, value in summary.items():
            is_by_client = "_clients" in key and isinstance(value, Mapping)
            if not is_by_client:
                row[key] = value
        rows.append(row)
    return frame(rows)


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows about a run as a DataFrame of pandas."""
    # Imported here because pandas takes half a second, and few callers want a DataFrame.
    import pandas as pd

    return pd.json_normalize(list(rows))


@dataclass(frozen=True)
class Failure:
    """A run that could not be finished, and why; its folder holds what was saved."""

    why: str
    folder: RunFolder
