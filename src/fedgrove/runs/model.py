"""A trained model that is used: raw inputs in, names of classes or numbers out.

What a model needs next to its weights is in ``models/preparation.json`` of a run folder: how a
client's raw inputs were standardised, what its outputs mean, who is who::

    format            1
    shape, outputs    of the network
    labels            the names of its outputs
    groups            the file of each model that several clients are delivered
    clients           by number: name, examples, test, group; kind, unit and preparation; of a mixed
                      federation its task, with the first of its outputs and their number; the
                      classes it knows of, where these are not all
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import trees
from ..data.dataset import Array
from ..data.federation import Federation
from ..data.mix import resize_inputs
from ..data.preparation import IDENTITY, Preparation, channel_statistics
from ..errors import InputError, check, list_some
from ..problems import MixedProblem, SquaredError, Unit

if TYPE_CHECKING:
    from .run import Run

PREPARATION_FILE = "preparation.json"
"""Next to the weights, in ``models/``."""
PREPARATION_FORMAT = 1
AT_ONCE = 512
"""Examples of one pass: a long recording must not need more memory than there is."""
LISTED = 20
"""The number of clients that are listed where a name is unknown."""


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model with all that is between it and raw inputs.

    It takes one raw example of :attr:`shape` or a batch of them, as an array, a tensor or lists:
    pixels and sensor values as they were recorded. Windows that were cut from recordings may also
    come as they are recorded, a row for each moment. Of a DataFrame the columns are taken by their
    names, whatever their order and whatever else is there.
    """

    who: str
    """Whose model it is, in words."""
    module: nn.Module
    """The network with its weights; it takes standardised inputs of :attr:`net_shape`."""
    net_shape: tuple[int, ...]
    labels: tuple[str, ...]
    """The names of classes, of labels, or of the numbers that are predicted."""
    kind: str
    """What is predicted: "classes", "labels" or "numbers"; "": outputs of a problem of your own."""
    preparation: Preparation = IDENTITY
    """How raw inputs are standardised."""
    first: int = 0
    """The first of the network's outputs that are this model's."""
    allowed: tuple[int, ...] | None = None
    """The classes that the client knows of; None: all."""
    unit: Unit | None = None
    """What outputs mean in the units of the targets; None: they are as the network gives them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one raw example for a finished run's model.

        Sets that were mixed have other inputs than the network.
        """
        return self.preparation.shape or self.net_shape

    @property
    def classes(self) -> Array:
        """The classes that a run's model predicts: whole numbers if all names are, else names."""
        return _as_given(self.labels)

    def predict(self, x: Any) -> Any:
        """Predict with a finished run's model: class names, labels as 0 and 1, or numbers.

        One example gives one answer, a batch an array of them.
        """
        outputs, is_one = self._outputs(x)
        if self.kind == "classes":
            answers = self.classes[outputs.argmax(1).numpy()]
        elif self.kind == "labels":
            answers = (outputs > 0).long().numpy()
        else:
            answers = self._in_units(outputs).numpy()
            if answers.ndim == 2 and answers.shape[1] == 1:
                answers = answers[:, 0]
        return _one(answers, is_one)

    def predict_proba(self, x: Any) -> Any:
        """Return the probability of each class or label by a finished run's model."""
        if self.kind not in ("classes", "labels"):
            raise InputError(
                f"{self.who} predicts {self.kind or 'what is no class'}, which have no "
                "probabilities; call predict."
            )
        outputs, is_one = self._outputs(x)
        if self.kind == "classes":
            return _one(outputs.softmax(1).numpy(), is_one)
        return _one(outputs.sigmoid().numpy(), is_one)

    def outputs(self, x: Any) -> Any:
        """Return what a finished run's network outputs: logits, for classes."""
        outputs, is_one = self._outputs(x)
        return _one(outputs.numpy(), is_one)

    def score(self, x: Any, y: Any) -> float:
        """Score a finished run's model: the share that is right; for numbers R²."""
        answers = np.asarray(self.predict(x))
        truth = np.asarray(y)
        if self.kind not in ("classes", "labels"):
            return r2(truth, answers)
        return float((answers == truth.reshape(answers.shape)).mean())

    def standardised_by(self, x: Any) -> Model:
        """Return a run's model for a device whose own raw examples are ``x``.

        Where each client's inputs are standardised by its own data, a new device takes the mean and
        deviation of some of its own; no labels are needed.
        """
        rows, is_one = self._rows(x)
        if self.preparation.changes_nothing:
            raise InputError(f"{self.who} does not standardise; it takes inputs unchanged.")
        if is_one or len(rows) < 2:
            raise InputError(
                "you gave one example; a device's mean and deviation are those of two or more."
            )
        mean, deviation = channel_statistics(rows)
        own = replace(self.preparation, mean=tuple(mean.tolist()), std=tuple(deviation.tolist()))
        return replace(self, preparation=own)

    # ---- what is between -------------------------------------------------------------------------

    def _outputs(self, x: Any) -> tuple[Tensor, bool]:
        """The model's own outputs, one row per example; and whether one was given."""
        rows, is_one = self._rows(x)
        count = len(self.labels)
        found = [torch.zeros(0, count)]
        with torch.no_grad():
            for start in range(0, len(rows), AT_ONCE):
                inputs = torch.from_numpy(self.preparation.apply(rows[start : start + AT_ONCE]))
                if tuple(inputs.shape[1:]) != self.net_shape:
                    inputs = resize_inputs(inputs, self.net_shape)
                outputs = self.module(inputs).float()
                found.append(outputs[:, self.first : self.first + count])
        outputs = torch.cat(found)
        if not bool(torch.isfinite(outputs).all()):
            raise InputError(
                f"{self.who} gives outputs that are infinite or NaN: its training diverged, or "
                "these inputs are far from its training data."
            )
        if self.allowed is not None:
            is_unknown = torch.ones(count, dtype=torch.bool)
            is_unknown[list(self.allowed)] = False
            outputs = outputs.masked_fill(is_unknown, -torch.inf)
        return outputs, is_one

    def _rows(self, x: Any) -> tuple[Array, bool]:
        """A batch of what was given, channels first, or a sentence."""
        if isinstance(x, Tensor):
            x = x.detach().cpu().numpy()
        # Of pandas or polars, neither of which is needed.
        is_frame = hasattr(x, "columns") and hasattr(x, "to_numpy")
        if is_frame:
            x = self._named_columns(x)
        try:
            rows = np.asarray(x)
        except ValueError:
            raise InputError(
                f"you gave rows of different lengths; this model takes {self._takes}."
            ) from None
        if rows.dtype.kind not in "fiub":
            raise InputError(f"you gave values of type {rows.dtype}; a model takes numbers.")
        # A frame has a row for each moment, also where there are as many channels as samples.
        is_recorded = is_frame and rows.shape == self.shape[::-1]
        if is_recorded or self._is_as_recorded(rows.shape):
            rows = np.swapaxes(rows, -1, -2)
        is_one = rows.shape == self.shape
        if not is_one and rows.shape[1:] != self.shape:
            raise InputError(
                f"you gave {rows.shape}; this model takes {self._takes}{self._hint(rows.shape)}."
            )
        if not bool(np.isfinite(rows).all()):
            raise InputError("the inputs contain NaN or infinity; fill in or drop such rows.")
        return (rows[None] if is_one else rows), is_one

    def _named_columns(self, frame: Any) -> Array:
        """The channels of a frame, in the order in which the model was trained on them."""
        channels = self.preparation.channels
        if channels is None:
            return np.asarray(frame.to_numpy())
        names = {str(name): name for name in frame.columns}
        lacking = [name for name in channels if name not in names]
        if lacking:
            raise InputError(
                f"the frame you gave has no column {', '.join(lacking)}; this model takes "
                f"{', '.join(channels)}, and yours has {', '.join(list(names)[:12])}."
            )
        return np.stack([frame[names[name]].to_numpy() for name in channels], axis=1)

    def _is_as_recorded(self, given: tuple[int, ...]) -> bool:
        """Whether windows come with a row for each moment, which those of recordings may."""
        shape = self.shape
        if self.preparation.window is None or len(shape) != 2 or given[-2:] == shape:
            return False
        return given[-2:] == shape[::-1] and len(given) <= 3

    @property
    def _takes(self) -> str:
        """Describe the inputs that a finished run's model takes, for an error."""
        things = {1: "rows of features", 2: "windows", 3: "images"}
        named = f"{things.get(len(self.shape), 'examples')} {self.shape}"
        meaning = {2: "channels, then samples", 3: "channels, height, width"}.get(len(self.shape))
        if self.preparation.channels is not None and len(self.shape) == 2:
            meaning = f"channels {', '.join(self.preparation.channels)}; then samples"
        if meaning is not None:
            named += f" ({meaning})"
        return f"{named}, or a batch of them {('n', *self.shape)}".replace("'n'", "n")

    def _hint(self, given: tuple[int, ...]) -> str:
        """What may have gone wrong, where it shows."""
        if len(self.shape) == 2 and given[-2:] == self.shape[::-1]:
            return "; yours are the other way round: numpy.swapaxes(x, -1, -2)"
        if len(self.shape) == 3 and given[-3:] == (*self.shape[1:], self.shape[0]):
            return "; in yours the channels are last: numpy.moveaxis(x, -1, -3)"
        if len(self.shape) == 3 and self.shape[0] == 1 and given[-2:] == self.shape[1:]:
            return "; yours lack the channel: numpy.expand_dims(x, -3)"
        return ""

    def _in_units(self, outputs: Tensor) -> Tensor:
        if self.unit is not None:
            outputs = self.unit.targets_of(outputs)
        own = self.preparation
        if own.ahead is None or own.mean is None or own.std is None:
            return outputs
        # Samples that follow the input were standardised as it was, channel by channel.
        samples = outputs.reshape(len(outputs), -1, own.ahead)
        mean = torch.tensor(own.mean).reshape(1, -1, 1)
        deviation = torch.tensor(own.std).reshape(1, -1, 1)
        return (samples * deviation + mean).flatten(1)


def _one(answers: Array, is_one: bool) -> Any:
    """Return the single prediction of a finished run's model, if one example was given."""
    if not is_one:
        return answers
    answer = answers[0]
    # A plain number or text, not NumPy's: it prints as what it is.
    return answer.item() if isinstance(answer, np.generic) else answer


def _as_given(labels: Sequence[str]) -> Array:
    """Names of classes in the type that they had: labels are kept as text.

    >>> _as_given(["0", "10"]), _as_given(["walk", "run"])
    (array([ 0, 10]), array(['walk', 'run'], dtype='<U4'))
    """
    if set(labels) == {"False", "True"}:
        return np.array([label == "True" for label in labels])
    are_whole = all(label.removeprefix("-").isdecimal() for label in labels)
    if are_whole and all(str(int(label)) == label for label in labels):
        return np.array(list(map(int, labels)))
    return np.array(labels)


def r2(y: Array, predicted: Array) -> float:
    """Compute R² of a run's model: 1 - squared error / squared distance from the mean.

    >>> r2(np.array([1.0, 3.0]), np.array([1.0, 2.0]))
    0.5
    """
    truth = y.reshape(len(y), -1).astype(np.float64)
    error = ((truth - predicted.reshape(truth.shape)) ** 2).sum()
    spread = ((truth - truth.mean(axis=0)) ** 2).sum()
    if spread == 0:
        return 1.0 if error == 0 else 0.0
    return float(1 - error / spread)


# ---- what is kept next to the weights ------------------------------------------------------------


def describe_clients(
    run: Run, groups: Mapping[int, int], files: Mapping[int, str]
) -> dict[str, Any]:
    """Return the entries of a run's ``models/preparation.json`` about clients.

    ``groups`` are the numbers of those that are delivered a model that others get too, ``files``
    the files of these.
    """
    federation = run.federation
    clients = {}
    for k in run.served:
        entry = _client(federation, k, run.rounds)
        if k in groups:
            entry["group"] = groups[k]
        clients[str(k)] = entry
    return {
        "format": PREPARATION_FORMAT,
        "shape": list(federation.shape),
        "outputs": federation.classes,
        "labels": list(federation.labels),
        "groups": {str(group): file for group, file in files.items()},
        "clients": clients,
    }


def _client(federation: Federation, k: int, rounds: int) -> dict[str, Any]:
    """Return what models/preparation.json stores about a client."""
    problem = federation.problem
    entry: dict[str, Any] = {"name": federation.name_of(k)}
    data = None
    # The data may come from a function of the user's own, which may raise anything. The client was
    # lost for that, a note says why, and its model can still be used on others' inputs.
    with suppress(Exception):
        data = federation.client(k, rounds)
    if data is None:
        own = problem.for_task("")
        preparation = federation.preparation
    else:
        own = problem.for_task(data.info.task)
        preparation = federation.preparation_of(k, rounds)
        entry |= {"examples": data.info.examples, "test": len(data.test)}
    entry["kind"] = own.kind
    if isinstance(own.loss, SquaredError):
        entry["unit"] = asdict(own.loss.unit)
    entry["preparation"] = preparation.to_json()
    if data is not None and isinstance(problem, MixedProblem):
        task = problem.tasks[problem.number(data.info.task)]
        entry |= {"task": task.name, "first": task.first, "outputs": task.outputs}
    if data is not None and data.labels is not None:
        entry["allowed"] = list(data.labels)
    return entry


# ---- a model from what was kept ------------------------------------------------------------------


def client_model(
    about: Mapping[str, Any], client: int, tree: Mapping[str, Tensor], module: nn.Module
) -> Model:
    """Load a client's own model from a finished run."""
    entry = about["clients"][str(client)]
    who = f"the model of client {entry['name']}"
    preparation = Preparation.from_json(entry["preparation"])
    return _model(about, entry, filled(module, tree, who), who, preparation)


def shared_model(
    about: Mapping[str, Any], group: int, tree: Mapping[str, Tensor], module: nn.Module
) -> Model:
    """Load the model that a run delivers to the clients of a group, for raw inputs."""
    entries = [entry for entry in about["clients"].values() if entry.get("group") == group]
    tasks = {entry.get("task") for entry in entries}
    if len(tasks) > 1:
        named = ", ".join(sorted(map(str, tasks)))
        raise InputError(
            f"the model that clients share is for several tasks ({named}), which use its outputs "
            "in different ways; use the model of a client, such as result.model(0)."
        )
    who = f"the model that {len(entries)} clients share"
    preparations = [Preparation.from_json(entry["preparation"]) for entry in entries]
    shapes = {each.shape for each in preparations}
    if len(shapes) > 1:
        listed = list_some(sorted(map(str, shapes)))
        raise InputError(
            f"the clients that share a model have inputs of several shapes ({listed}); "
            "take the model of a client, as result.model(0)."
        )
    # Of a client whose data could not be made it is not known how many it has.
    preparation = pooled(preparations, [int(entry.get("examples", 0)) for entry in entries])
    # What one client does not know, another may.
    entry = {**entries[0], "allowed": None}
    return _model(about, entry, filled(module, tree, who), who, preparation)


def _model(
    about: Mapping[str, Any],
    entry: Mapping[str, Any],
    module: nn.Module,
    who: str,
    preparation: Preparation,
) -> Model:
    """Make the model of a finished run's client or group."""
    first = int(entry.get("first", 0))
    count = int(entry.get("outputs", about["outputs"]))
    labels = preparation.labels
    # A federation that was made by hand may say nothing of them.
    if labels is None or len(labels) != count:
        labels = tuple(about["labels"])[first : first + count]
    allowed = entry.get("allowed")
    unit = entry.get("unit")
    return Model(
        who=who,
        module=module,
        net_shape=tuple(about["shape"]),
        labels=labels,
        kind=entry["kind"],
        preparation=preparation,
        first=first,
        allowed=None if allowed is None else tuple(allowed),
        unit=None if unit is None else Unit(tuple(unit["mean"]), tuple(unit["scale"])),
    )


def pooled(preparations: Sequence[Preparation], examples: Sequence[int]) -> Preparation:
    """Return the preparation of all clients of a run together, for a shared model.

    >>> one, other = Preparation((0.0,), (1.0,)), Preparation((2.0,), (1.0,))
    >>> both = pooled([one, other], [5, 5])
    >>> both.mean, both.std
    ((1.0,), (1.4142135623730951,))
    """
    first = preparations[0]
    if all(each == first for each in preparations):
        return first
    channels = max(len(each.mean or ()) for each in preparations)
    # None stands for what changes nothing.
    means = np.array([each.mean or (0.0,) * channels for each in preparations])
    squares = np.array([each.std or (1.0,) * channels for each in preparations]) ** 2 + means**2
    # A client without examples still says how its channels are.
    weights = np.maximum(np.array(examples, dtype=np.float64), 1.0)
    weights /= weights.sum()
    mean = weights @ means
    deviation = np.sqrt(weights @ squares - mean**2)
    return replace(first, mean=tuple(mean.tolist()), std=tuple(deviation.tolist()))


def check_weights(tree: Mapping[str, Tensor], who: str) -> None:
    """Refuse a run's model whose training diverged; a version of today keeps no such model."""
    for name, leaf in tree.items():
        if not trees.is_finite_leaf(leaf):
            raise InputError(
                f"{who} has infinite or NaN weights in '{name}': its training diverged. Run it "
                "again with a lower learning rate (lr)."
            )


def filled(module: nn.Module, tree: Mapping[str, Tensor], who: str) -> nn.Module:
    """Return a copy of a run's module with the tree's values, ready to predict."""
    check_weights(tree, who)
    ready = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in ready.named_parameters():
            given = tuple(tree[name].shape) if name in tree else "missing"
            allowed = f"{tuple(parameter.shape)}, as in the net"
            check(given == tuple(parameter.shape), f"'{name}' of {who}", given, allowed)
        for name, tensor in [*ready.named_parameters(), *ready.named_buffers()]:
            if name in tree:
                tensor.copy_(tree[name])
    return ready.eval()


def client_number(client: Any, names: Mapping[int, str], where: str) -> int:
    """Return the number of a run's client from its name or number.

    >>> client_number("watch-07", {0: "watch-03", 1: "watch-07"}, "the run")
    1
    """
    for number, name in names.items():
        if client == name and isinstance(client, str):
            return number
    is_whole = isinstance(client, int | np.integer) and not isinstance(client, bool)
    is_number = is_whole or (isinstance(client, str) and client.isdecimal())
    if is_number and int(client) in names:
        return int(client)
    raise _no_client(client, names, where)


def _no_client(client: Any, names: Mapping[int, str], where: str) -> InputError:
    are_named = any(name != str(number) for number, name in names.items())
    near = difflib.get_close_matches(str(client), list(names.values()), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    if not are_named:
        return InputError(
            f"there is no client {client} in {where}; its {len(names)} clients are {min(names)} "
            f"to {max(names)}."
        )
    listed = ", ".join(list(names.values())[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} others"
    return InputError(f"there is no client {client!r} in {where}{hint} There are: {listed}.")
