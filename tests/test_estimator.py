"""Estimators keep to scikit-learn's conventions, and learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedgrove as fg
from fedgrove.errors import InputError

QUICK: dict[str, Any] = {"rounds": 4, "lr": 0.05, "engine": "serial"}


def points() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw examples of three users, each in units of its own; up or down by the first feature."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4))
    y = np.where(x[:, 0] > 0, "up", "down")
    user = np.repeat(np.arange(3), 40)
    return x * (1 + 4 * user)[:, None] + 10 * user[:, None], y, np.array(["a", "b", "c"])[user]


@pytest.fixture(scope="session")
def fitted() -> fg.FederatedClassifier:
    x, y, user = points()
    return fg.FederatedClassifier("fedavg", **QUICK).fit(x, y, groups=user)


def test_each_users_own_model_is_asked(fitted: fg.FederatedClassifier) -> None:
    x, y, user = points()
    assert fitted.score(x, y, groups=user) > 0.9
    # The rows are answered in their order, whatever the order of users.
    order = np.random.default_rng(1).permutation(120)
    answers = fitted.predict(x, groups=user)
    assert np.array_equal(fitted.predict(x[order], groups=user[order]), answers[order])
    own = fitted.result_.model("b").predict_proba(x[user == "b"])
    assert np.allclose(fitted.predict_proba(x[user == "b"], groups=user[user == "b"]), own)


def test_what_fit_leaves(fitted: fg.FederatedClassifier) -> None:
    x, _, _ = points()
    assert fitted.classes_.tolist() == ["down", "up"]
    assert fitted.groups_ == {0: "a", 1: "b", 2: "c"}
    assert fitted.n_features_in_ == 4
    assert fitted.result_.summary["method"] == "fedavg"
    # Without groups the model that all share.
    assert fitted.predict(x).shape == (120,)
    assert np.allclose(fitted.predict_proba(x).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("labels", [[1.0, 2.5], [7, 3], [True, False]])
def test_classes_come_back_as_they_were_given(labels: list[Any]) -> None:
    x, y, user = points()
    given = np.where(y == "up", labels[0], labels[1]).astype(np.array(labels).dtype)
    model = fg.FederatedClassifier("local", **{**QUICK, "rounds": 1}).fit(x, given, groups=user)
    answers = model.predict(x, groups=user)
    assert answers.dtype == given.dtype
    assert set(answers.tolist()) <= set(labels)
    with pytest.raises(InputError, match="local has no model that clients share"):
        model.predict(x)


def test_parameters_as_scikit_learn_wants_them() -> None:
    model = fg.FederatedClassifier("ditto", rounds=7, set={"mu": 0.5})
    assert model.get_params()["rounds"] == 7
    twin = clone(model)
    assert twin is not model
    assert twin.get_params() == model.get_params()
    assert repr(twin) == "FederatedClassifier(method='ditto', rounds=7, set={'mu': 0.5})"
    assert twin.set_params(rounds=3).rounds == 3
    with pytest.raises(InputError, match=r"no parameter .*'roundz'; did you mean 'rounds'"):
        twin.set_params(roundz=3)
    assert is_classifier(model)
    assert is_regressor(fg.FederatedRegressor())
    assert not is_classifier(fg.FederatedRegressor())


def test_in_searches_and_pipelines() -> None:
    x, y, _ = points()
    model = fg.FederatedClassifier("fedavg", clients=3, **{**QUICK, "rounds": 2})
    assert len(cross_val_score(model, x, y, cv=2)) == 2
    search = GridSearchCV(model, {"rounds": [1, 2]}, cv=2).fit(x, y)
    assert search.best_params_["rounds"] in (1, 2)
    line = make_pipeline(StandardScaler(), model).fit(x, y)
    assert line.score(x, y) > 0.5


def test_numbers() -> None:
    x, _, user = points()
    number = np.repeat(np.arange(3), 40)
    # By the second feature, in the units that every user's has after standardisation.
    y = 500 + 20 * (x[:, 1] - 10 * number) / (1 + 4 * number)
    model = fg.FederatedRegressor("fedavg", **{**QUICK, "rounds": 15}).fit(x, y, groups=user)
    assert model.predict(x, groups=user).shape == (120,)
    assert abs(model.predict(x, groups=user).mean() - 500) < 20
    assert model.score(x, y, groups=user) > 0.5


def test_what_is_refused(fitted: fg.FederatedClassifier) -> None:
    x, y, user = points()
    with pytest.raises(InputError, match="not fitted yet"):
        fg.FederatedClassifier().predict(x)
    with pytest.raises(InputError, match=r"no client 'd' .* There are: a, b, c"):
        fitted.predict(x[:1], groups=["d"])
    with pytest.raises(InputError, match=r"groups is 'of shape \(2,\)'"):
        fitted.predict(x, groups=user[:2])
    with pytest.raises(InputError, match=r"groups is 'of shape \(2,\)'"):
        fg.FederatedClassifier().fit(x, y, groups=user[:2])
    with pytest.raises(InputError, match=r"one class for each example"):
        fg.FederatedClassifier().fit(x, np.zeros((120, 2)))
    with pytest.raises(InputError, match=r"120 different numbers in 120 .*FederatedRegressor"):
        fg.FederatedClassifier().fit(x, np.linspace(0, 1, 120))
    with pytest.raises(InputError, match=r"you gave \(120, 3\); this model takes rows of features"):
        fitted.predict(x[:, :3])
