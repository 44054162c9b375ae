"""What the files of a run folder contain: every file that is read is checked here first.

Checksums find files that were damaged. They do not find a file that another program wrote, or that
somebody edited together with its checksum. So that no reader meets a value of another type, each
file has a model below, and :func:`check_content` refuses the first value that does not fit, in one
sentence. Keys that a model does not name are allowed: other versions may write them.

The models are for checking only: readers get the content as it was parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ..errors import clean_text, is_plain_text, shown
from ..report.tables import AFTER
from .files import damaged, is_file_name, is_plain_name

# ---- values --------------------------------------------------------------------------------------

MOST = 1 << 62
"""The largest whole number: larger ones do not fit into 64 bits."""
MOST_NUMBERS = 1 << 28
"""The most numbers that one input, or the outputs of a network, may have."""

Whole = Annotated[int, Field(strict=True, ge=-MOST, le=MOST)]
Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Size = Annotated[int, Field(strict=True, ge=1, le=MOST_NUMBERS)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Flag = Annotated[bool, Field(strict=True)]


def _check_text(text: str) -> str:
    if not is_plain_text(text):
        raise ValueError("must be text that can be printed")
    return text


Text = Annotated[str, Field(strict=True), AfterValidator(_check_text)]
Client = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9]{1,18}$")]
"""A number as a key of JSON: of a client, a group, or epochs of fine-tuning."""
Digest = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]

Hex = Annotated[str, StringConstraints(strict=True, pattern=r"^([0-9a-f]{2})+$")]


def _check_file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError("must be the name of a file in the same folder")
    return name


def _check_version(version: str) -> str:
    if not is_plain_name(version):
        raise ValueError("must be a version such as '12.train.0123456789abcdef'")
    return version


FileName = Annotated[Text, AfterValidator(_check_file_name)]
Version = Annotated[Text, AfterValidator(_check_version)]
Reasons = dict[Text, list[Count]]
Parts = dict[Text, Count]


class _Content(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


# ---- summary.json and metrics.jsonl --------------------------------------------------------------


def _check_scores(values: Mapping[str, Any]) -> None:
    """Check the numbers whose names begin with that of a metric, which may be a user's."""
    for name, value in values.items():
        kind = AFTER.sub("", name)
        if kind.endswith("validation_mean"):
            _check_entry(_number_or_none, name, value)
        elif kind.endswith(("_mean", "_std", "_worst", "_worst10", "_pooled")):
            _check_entry(_number, name, value)
        elif kind.endswith("_clients"):
            _check_entry(_numbers_by_client, name, value)
        elif kind == "tasks":
            _check_entry(_scores_by_task, name, value)


def _check_entry(adapter: TypeAdapter[Any], name: str, value: Any) -> None:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(_explain(error, (name,))) from None


_number: TypeAdapter[Any] = TypeAdapter(Number)
_number_or_none: TypeAdapter[Any] = TypeAdapter(Number | None)
_numbers_by_client: TypeAdapter[Any] = TypeAdapter(dict[Client, Number])


class TaskScores(_Content):
    """The scores of one task of a mixed federation."""

    metric: Text
    more_is_better: Flag
    share: Flag
    clients: Count
    mean: Number
    std: Number
    worst: Number
    worst10: Number
    pooled: Number | None = None
    validation_mean: Number | None = None
    loss_mean: Number | None = None
    bytes_up: Count | None = None
    bytes_down: Count | None = None


_scores_by_task: TypeAdapter[Any] = TypeAdapter(dict[Text, TaskScores])


class Scored(_Content):
    """The scores of clients, under names that begin with the metric's, or by task."""

    tasks: dict[Text, TaskScores] = {}
    validation_mean: Number | None = None
    loss_mean: Number | None = None

    def has_mean(self, metric: str) -> bool:
        """Whether there is a mean of the metric, or of a metric for each task."""
        return bool(self.tasks) or f"{metric}_mean" in (self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _check(self) -> Scored:
        _check_scores(self.__pydantic_extra__ or {})
        return self


class Headline(Scored):
    """The scores of a run or a round, and what their metric is."""

    metric: Text | None = None
    more_is_better: Flag = True
    share: Flag = True
    validation_clients: dict[Client, dict[Client, Number]] = {}


class MetricsLine(Headline):
    """A line of metrics.jsonl."""

    round: Count
    counts: Flag
    bytes_up: Count
    bytes_down: Count
    bytes_up_parts: Parts
    bytes_down_parts: Parts
    seconds: Positive
    bytes_tasks: dict[Text, Parts] = {}
    bytes_evaluate_up: Count = 0
    bytes_evaluate_down: Count = 0
    virtual_seconds: Positive = 0.0
    virtual_clock: Positive = 0.0
    slowest: dict[Text, Number] = {}
    density: Number | None = None
    lost: Reasons = {}
    refused: Reasons = {}
    unscored: Reasons = {}
    why: dict[Text, Text] = {}
    abandoned: Text = ""
    scored: Count = 0
    figures: dict[Text, Number] = {}
    groups: Count = 0
    purity: Number = 1.0
    private_messages: list[Count] = []


class PrivacyContent(_Content):
    """The entry "privacy" of summary.json."""

    messages: Count
    epsilon: Number | None
    epsilon_replaced: Number | None
    delta: Number
    clip: Number
    noise: Number


class Diverged(_Content):
    """The entry "diverged" of summary.json."""

    training: list[Count] = []
    finetuning: list[Count] = []
    initial: list[Count] = []


class Summary(Headline):
    """The content of summary.json."""

    method: Text
    data: Text
    seed: Whole
    rounds: Count
    clients: Size
    cohort: Count
    partition: Text = ""
    scenario: Text = ""
    split: Text = ""
    validation: Number = 0.0
    engine: Text = ""
    train_examples: Number | None = None
    train_examples_clients: dict[Client, Count] = {}
    init: Text = ""
    init_sha256: Text | None = None
    freeze: Number | None = None
    groups: Count = 0
    group_sizes: list[Count] = []
    purity: Number | None = None
    scored: Count | None = None
    finetune: dict[Client, Scored] = {}
    density: Number | None
    density_clients: dict[Client, Number] = {}
    params: Count
    params_mean: Number | None
    params_frozen: Count = 0
    macs: Count = 0
    bytes_up: Count
    bytes_down: Count
    bytes_up_parts: Parts = {}
    bytes_down_parts: Parts = {}
    bytes_paper: Number | None
    bytes_evaluate_up: Count = 0
    bytes_evaluate_down: Count = 0
    bytes_deliver_up: Count = 0
    bytes_deliver_down: Count = 0
    lost: Parts = {}
    refused: Parts = {}
    abandoned: Count = 0
    virtual_seconds: Positive = 0.0
    figures: dict[Text, Number] = {}
    privacy: PrivacyContent | None = None
    prediction: Text = ""
    diverged: Diverged | None = None
    notes: list[Text] = []
    seconds: Positive
    seconds_shared_by: Count = 1

    @model_validator(mode="after")
    def _check_scored(self) -> Summary:
        """Check that a run whose clients were scored has what tables show."""
        if self.scored == 0:
            return self
        # Early summaries did not name their metric: it was accuracy.
        metric = self.metric or "accuracy"
        for place, scores in (("", self), *self.finetune.items()):
            if not scores.has_mean(metric):
                where = f" in finetune.{place}" if place else ""
                raise ValueError(f"there is no {metric}_mean{where}, and clients were scored")
        if self.density is None or self.params_mean is None:
            raise ValueError("density and params_mean must be numbers, as clients were scored")
        if self.validation_clients and not self.finetune.keys() <= self.validation_clients.keys():
            raise ValueError("validation_clients must have an entry for each key of finetune")
        return self


# ---- models/ -------------------------------------------------------------------------------------

Index = Annotated[dict[Client, FileName], Field(min_length=1)]


class PreparationOfInputs(_Content):
    """How raw inputs are prepared (:class:`fedgrove.data.preparation.Preparation`)."""

    mean: list[Number] | None = None
    std: list[Number] | None = None
    labels: list[Text] | None = None
    window: Count | None = None
    channels: list[Text] | None = None
    shape: list[Size] | None = None
    ahead: Size | None = None

    @model_validator(mode="after")
    def _check_fits_together(self) -> PreparationOfInputs:
        # Imported here because it takes torch, for which `fedgrove watch` does not wait.
        from ..data.preparation import Preparation

        # Its own rules; what it refuses is a ValueError, as pydantic wants it.
        Preparation.from_json(self.model_dump(include=set(PreparationOfInputs.model_fields)))
        return self


class UnitOfTargets(_Content):
    """What outputs mean in the units of the targets."""

    mean: list[Number]
    scale: list[Number]


class ClientEntry(_Content):
    """What models/preparation.json says about one client."""

    name: Text
    kind: Literal["classes", "labels", "numbers", ""]
    preparation: PreparationOfInputs
    examples: Count = 0
    test: Count = 0
    unit: UnitOfTargets | None = None
    group: Count | None = None
    task: Text | None = None
    first: Count = 0
    outputs: Size | None = None
    allowed: list[Count] | None = None


class PreparationContent(_Content):
    """The content of models/preparation.json."""

    format: Count
    shape: list[Size]
    outputs: Size
    labels: list[Text]
    groups: dict[Client, FileName]
    clients: dict[Client, ClientEntry]

    @model_validator(mode="after")
    def _check_sizes(self) -> PreparationContent:
        if math.prod(self.shape) * self.outputs > MOST_NUMBERS:
            raise ValueError("shape and outputs must be those of a network that fits into memory")
        for number, entry in self.clients.items():
            last = entry.first + (self.outputs if entry.outputs is None else entry.outputs)
            raw_shape = entry.preparation.shape
            if raw_shape is not None and len(raw_shape) != len(self.shape):
                raise ValueError(
                    f"clients.{number}.preparation.shape must have {len(self.shape)} numbers, "
                    "as the shape of the network's inputs"
                )
            if entry.group is not None and str(entry.group) not in self.groups:
                raise ValueError(f"clients.{number}.group must be a key of groups")
            if entry.outputs is not None and last > self.outputs:
                raise ValueError(f"clients.{number}.outputs must be outputs of the network")
            if entry.allowed and max(entry.allowed) >= last - entry.first:
                raise ValueError(f"clients.{number}.allowed must be classes of the client")
        return self


# ---- checkpoints and sweeps ----------------------------------------------------------------------


class ManifestContent(_Content):
    """The content of checkpoint/latest.json and previous.json, without the method's state."""

    format: Count
    synced: Flag
    round: Count
    attempt: Count
    lines: Count
    config: Digest
    metrics: Digest
    lengths: dict[Text, list[Positive]]
    state: dict[Text, Any]
    held: dict[Text, Any]
    tensors: FileName
    trees: list[FileName] = []
    memory: dict[Client, Version]
    memory_elsewhere: dict[Client, Version] = {}
    config_before: Digest | None = None


class KnownMasks(_Content):
    """What :meth:`fedgrove.wire.known_state.KnownState.state` returns."""

    clients: dict[Text, dict[Hex, list[Count]]]
    shapes: list[Any] | tuple[Any, ...]
    bank: list[Any] | tuple[Any, ...]
    room: Count


class MemberState(_Content):
    """How one run of a sweep stands."""

    state: Literal["done", "failed", "unfinished"]
    why: Text = ""


class SweepContent(_Content):
    """The content of sweep.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid: dict[Text, Any]
    members: Annotated[dict[FileName, MemberState], Field(min_length=1)]


class ChoiceContent(_Content):
    """The content of choice.json."""

    asked: dict[Text, Any]
    state: Literal["unfinished", "done"] = "unfinished"
    hindsight: dict[Text, Any] | None = None


class TensorsHeader(_Content):
    """The header of a safetensors file, as far as the format's own reader does not check it."""

    # A method may name its tensors as it likes: these names reach no output.
    order: list[Annotated[str, Field(strict=True)]] | None = None


# ---- checking ------------------------------------------------------------------------------------

T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}


def check_content(content: T, kind: Any, path: Path) -> T:
    """Return the content of a file of a run folder, if it is what the file must contain.

    Args:
        content: What was parsed.
        kind: A model of this module.
        path: The file, for the message.

    Raises:
        DamageError: A value is missing or has another type; the sentence names file and value.
    """
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    try:
        _adapters[kind].validate_python(content)
    except ValidationError as error:
        raise damaged(path, _explain(error)) from None
    return content


def _explain(error: ValidationError, before: tuple[str, ...] = ()) -> str:
    """Return the first thing that is wrong, as a part of a sentence."""
    first = error.errors(include_url=False)[0]
    # A key that is wrong is a part of its own place.
    place = clean_text(".".join(map(str, (*before, *first["loc"]))), 200)
    if first["type"] == "missing":
        return f"it has no {place}"
    if first["type"] == "value_error":
        # From a check of this module: the sentence may name the place itself.
        reason = str(first["ctx"]["error"])
        if not place:
            return reason
        if isinstance(first["input"], Mapping):
            return f"in {place}, {reason}"
        return f"{place} is {shown(first['input'])}, and {reason}"
    name = place or "its content"
    _, has_rule, rule = first["msg"].partition(" should ")
    if not has_rule:
        return f"{name} is {shown(first['input'])}, and {first['msg'].lower()}"
    return f"{name} is {shown(first['input'])}, and must {rule}"
