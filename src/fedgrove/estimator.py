"""Estimators with the interface of scikit-learn: fit, predict and score over a federation.

They work with ``clone``, pipelines and searches of scikit-learn: parameters are stored unchanged,
``get_params`` and ``set_params`` return and change them, and attributes that ``fit`` sets end with
an underscore.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import nn

from . import api
from .core import AnyMethod
from .data import from_arrays
from .data.dataset import Array
from .errors import InputError, check, unknown
from .options.groups import VALIDATION
from .runs.model import Model, client_number, r2
from .runs.result import Result


class _Federated:
    """What both estimators have: parameters, a fit on arrays with groups, and the run it left."""

    _kind: ClassVar[str]
    """What scikit-learn calls it."""

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
        examples to where it gets no groups.
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

    # ---- parameters, as scikit-learn's clone wants them ------------------------------------------

    @classmethod
    def _names(cls) -> list[str]:
        parameters = inspect.signature(cls.__init__).parameters
        return [name for name in parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """What it was made with; ``deep`` changes nothing, as no parameter is an estimator."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Change what it was made with; the next ``fit`` goes by it."""
        for name, value in params.items():
            if name not in self._names():
                raise unknown(f"parameter of {type(self).__name__}", name, self._names())
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        changed = []
        for name, value in self.get_params().items():
            default = defaults[name].default
            if value is not default and value != default:
                changed.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def _estimator_type(self) -> str:
        """How older versions of scikit-learn tell classifiers from regressors."""
        return self._kind

    def __sklearn_tags__(self) -> Any:
        """How newer ones do; only they call it, so scikit-learn is there."""
        from sklearn.utils import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            ClassifierTags,
            InputTags,
            RegressorTags,
            Tags,
            TargetTags,
        )

        is_classifier = self._kind == "classifier"
        return Tags(
            estimator_type=self._kind,
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags() if is_classifier else None,
            regressor_tags=None if is_classifier else RegressorTags(),
            input_tags=InputTags(three_d_array=True),
        )

    # ---- fit -------------------------------------------------------------------------------------

    def _fit(self, x: Any, y: Array, groups: Any, block: Any) -> Self:
        """Run the federation; ``y`` is in the type that says what it is."""
        owners = None if groups is None else np.asarray(groups)
        if owners is not None:
            check(
                owners.shape == (len(y),),
                "groups",
                f"of shape {owners.shape}",
                f"the client of each of the {len(y)} examples",
            )
            if owners.dtype.kind == "O":
                # Names in a DataFrame's column are objects.
                owners = owners.astype(str)
        federation = from_arrays(
            np.asarray(x),
            y,
            owners,
            block=block,
            clients=self.clients,
            validation=self.validation,
            standardise=self.standardise,
            seed=self.seed,
        )
        self.result_: Result = api.run(
            self.method,
            data=federation,
            net=self.net,
            cohort=self.cohort,
            rounds=self.rounds,
            epochs=self.epochs,
            batch=self.batch,
            lr=self.lr,
            finetune=(self.finetune,),
            seed=self.seed,
            set=self.set or (),
            engine=self.engine,
            device=self.device,
            out=self.out,
            progress=self.progress,
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
        """What each example's own model says; without groups, what the model of all says."""
        self._check_fitted()
        rows = np.asarray(x)
        if groups is None:
            return np.asarray(getattr(self._model(None), ask)(rows))
        owners = np.asarray(groups)
        check(
            owners.shape == (len(rows),),
            "groups",
            f"of shape {owners.shape}",
            f"the client of each of the {len(rows)} examples",
        )
        answers: list[Any] = [None] * len(rows)
        for owner in np.unique(owners.astype(str)):
            mine = np.flatnonzero(owners.astype(str) == owner)
            client = client_number(str(owner), self.groups_, "the federation")
            for place, answer in zip(
                mine, getattr(self._model(client), ask)(rows[mine]), strict=True
            ):
                answers[place] = answer
        return np.asarray(answers)


class FederatedClassifier(_Federated):
    """Classes of examples that belong to clients, by any method.

    ``fit(X, y, groups=clients)`` trains a federation whose clients are the groups; without groups
    examples are dealt out at random. ``predict(X, groups=...)`` asks each client's own model;
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

    _kind = "classifier"

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
                f"y holds {len(self.classes_)} different numbers in {len(targets)} examples, which "
                "are no classes; to predict numbers take fedgrove.FederatedRegressor."
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


class FederatedRegressor(_Federated):
    """Numbers for examples that belong to clients; otherwise as :class:`FederatedClassifier`."""

    _kind = "regressor"

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
