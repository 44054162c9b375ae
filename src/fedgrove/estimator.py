"""Estimators with the interface of scikit-learn: fit, predict and score over a federation.

They work with ``clone``, pipelines and searches of scikit-learn: parameters are stored unchanged,
and attributes that ``fit`` sets end with an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from torch import nn

from . import api
from .config.assemble import make_experiment
from .config.experiment import Federations
from .core import AnyMethod
from .data import from_arrays
from .data.dataset import Array
from .errors import InputError, check, unknown
from .options import RunOptions
from .options.definition import make_options
from .options.groups import VALIDATION
from .runs.model import Model, client_number, r2
from .runs.result import Result


class _Federated(BaseEstimator):  # type: ignore[misc]
    """What both estimators have: parameters, a fit on arrays with groups, and the run it left."""

    def __init__(
        self,
        method: str | AnyMethod = "fedavg",
        *,
        rounds: int | None = None,
        net: str | nn.Module | None = None,
        cohort: int | None = None,
        epochs: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        finetune: int = 0,
        clients: int | None = None,
        validation: float = VALIDATION,
        standardise: bool = True,
        seed: int = 0,
        set: Mapping[str, Any] | None = None,
        engine: str = "auto",
        device: str = "auto",
        out: str | Path | None = None,
        progress: bool = False,
    ) -> None:
        """Take the options of :func:`fedgrove.run`.

        ``finetune`` is one number of epochs. ``clients`` is how many clients ``fit`` deals its
        examples to where it gets no groups. Without ``out`` the run folder is temporary.
        """
        self.method = method
        self.rounds = rounds
        self.net = net
        self.cohort = cohort
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.finetune = finetune
        self.clients = clients
        self.validation = validation
        self.standardise = standardise
        self.seed = seed
        self.set = set
        self.engine = engine
        self.device = device
        self.out = out
        self.progress = progress

    def set_params(self, **params: Any) -> Self:
        """Change what it was made with; the next ``fit`` uses it."""
        names = self._get_param_names()
        for name in params:
            if name not in names:
                raise unknown(f"parameter of {type(self).__name__}", name, names)
        super().set_params(**params)
        return self

    # ---- fit -------------------------------------------------------------------------------------

    def _fit(self, x: Any, y: Array, groups: Any, block: Any) -> Self:
        """Run the federation; ``y`` is in the type that says what it is."""
        owners = None if groups is None else _read_groups(groups, len(y))
        options = self.get_params(deep=False)
        division = {name: options.pop(name) for name in ("clients", "validation", "standardise")}
        federation = from_arrays(np.asarray(x), y, owners, block=block, seed=self.seed, **division)
        options |= {"data": federation, "finetune": (self.finetune,), "set": self.set or ()}
        made = make_options(RunOptions, options, "fit")
        federations = Federations()
        experiment = make_experiment(made, federations, engine=made)
        # A search fits hundreds of times: without `out` nothing is kept.
        self.result_: Result = api.train_experiment(
            experiment, self.out, federations, made, self.progress
        )
        rows = self.result_.clients()
        self.groups_: dict[int, str] = {row["client"]: row["name"] for row in rows}
        self.n_features_in_: int = int(federation.shape[0])
        self._models: dict[int | None, Model] = {}
        return self

    def _model(self, client: int | None) -> Model:
        """The model of a client, or the one of all; read once."""
        if client not in self._models:
            self._models[client] = self.result_.model(client)
        return self._models[client]

    def __sklearn_is_fitted__(self) -> bool:
        """Whether ``fit`` was called."""
        return hasattr(self, "result_")

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise InputError(f"{type(self).__name__} is not fitted yet; call fit(X, y) first.")

    def _each(self, x: Any, groups: Any, ask: str) -> Array:
        """What each example's own model predicts; without groups, the prediction of the shared
        model."""
        self._check_fitted()
        rows = np.asarray(x)
        if groups is None:
            return np.asarray(getattr(self._model(None), ask)(rows))
        owners = _read_groups(groups, len(rows)).astype(str)
        answers: list[Any] = [None] * len(rows)
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            client = client_number(str(owner), self.groups_, "the federation")
            own_answers = getattr(self._model(client), ask)(rows[mine])
            for place, answer in zip(mine, own_answers, strict=True):
                answers[place] = answer
        return np.asarray(answers)


def _read_groups(groups: Any, examples: int) -> Array:
    """Return the client of each example; names are text."""
    owners = np.asarray(groups)
    given = f"of shape {owners.shape}"
    allowed = f"the client of each of the {examples} examples"
    check(owners.shape == (examples,), "groups", given, allowed)
    # Names in a DataFrame's column are objects.
    return owners.astype(str) if owners.dtype.kind == "O" else owners


class FederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """Classes of examples that belong to clients, by any method.

    ``fit(X, y, groups=clients)`` trains a federation whose clients are the groups; without groups
    examples are distributed at random. ``predict(X, groups=...)`` asks each client's own model;
    without groups the model that all share, where the method has one. X is raw, (n, F), (n, C, L)
    or (n, C, H, W).

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(60, 4))
    >>> y = np.where(x[:, 0] > 0, "up", "down")
    >>> model = FederatedClassifier("fedavg", rounds=3, engine="serial", lr=0.05)
    >>> model = model.fit(x, y, groups=np.repeat([3, 5, 8], 20))
    >>> model.classes_
    array(['down', 'up'], dtype='<U4')
    >>> model.score(x, y) > 0.8
    True
    """

    def fit(self, X: Any, y: Any, groups: Any = None, *, block: Any = None) -> Self:
        """Train; ``groups`` names the client of each example, ``block`` what belongs together."""
        targets = np.asarray(y)
        if targets.ndim != 1:
            raise InputError(
                f"y has the shape {targets.shape}; a classifier takes one class for each example."
            )
        self.classes_: Array = np.unique(targets)
        # Classes may be floats, but then each is there more often than once.
        if targets.dtype.kind == "f" and len(self.classes_) > len(targets) / 2:
            raise InputError(
                f"y contains {len(self.classes_)} different numbers in {len(targets)} examples, "
                "which are not classes; to predict numbers use fedgrove.FederatedRegressor."
            )
        # By number, so that what is predicted has the type that was given, floats too.
        numbers = np.searchsorted(self.classes_, targets)
        return self._fit(X, numbers, groups, block)

    def predict(self, X: Any, groups: Any = None) -> Array:
        """The class of each example, as y had it."""
        numbers = self._each(X, groups, "predict")
        return np.asarray(self.classes_[numbers])

    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """The probability of each of ``classes_``."""
        return self._each(X, groups, "predict_proba")

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """The share of examples whose class is right."""
        return float((self.predict(X, groups) == np.asarray(y)).mean())


class FederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """Numbers for examples that belong to clients; otherwise as :class:`FederatedClassifier`."""

    def fit(self, X: Any, y: Any, groups: Any = None, *, block: Any = None) -> Self:
        """Train; ``groups`` names the client of each example, ``block`` what belongs together."""
        targets = np.asarray(y, dtype=np.float64)
        return self._fit(X, targets, groups, block)

    def predict(self, X: Any, groups: Any = None) -> Array:
        """The numbers of each example, in the units of y."""
        return self._each(X, groups, "predict")

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """R²: 1 at best, 0 for one who always predicts the mean."""
        return r2(np.asarray(y, dtype=np.float64), self.predict(X, groups))
