"""A smoke run: the whole way of a run on a few examples, to see in seconds that nothing breaks.

The same method, net, data and faults, but four clients with 32 examples each, one local epoch, and
two rounds, or the fewest that the method takes. Its figures mean nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ..core import AnyMethod
from ..data import ClientData, Federation
from ..data.federation import Examples
from ..errors import InputError
from ..parts.local import LocalTraining
from ..runs.run import make_recipe, replace_recipe
from .experiment import Experiment, Federations
from .plan import plan

CLIENTS = 4
EXAMPLES = 32
"""Of a client to train on; half as many to test, a quarter to validate."""
TRIED_ROUNDS = (2, 4, 8, 16, 32, 64, 128)
"""How many are tried, until the method has enough."""
SHORTEST_LENGTHS = {"every": 1, "until": 2, "guided": 1, "tune": 1}
"""Lengths in rounds or epochs that methods have, as short as they can be."""


def smoke(experiment: Experiment, federations: Federations) -> Experiment:
    """Return the experiment as small as it can be, for a smoke test."""
    federation = federations.of(experiment)
    small = smaller(federation)
    recipe = experiment.method.local
    if recipe is None:
        recipe = make_recipe(federation.defaults)
    lengths = (0, 1) if max(experiment.finetune) > 0 else (0,)
    net = federation.defaults.net if experiment.net is None else experiment.net
    small_experiment = dataclasses.replace(
        experiment.on(small),
        method=shorter(experiment.method, recipe),
        net=net,
        rounds=TRIED_ROUNDS[0],
        # Not all of them, so that clients are drawn too.
        cohort=max(1, len(small.clients) - 1),
        finetune=lengths,
        evaluate=1,
        score_on=None,
    )
    return _with_enough_rounds(small_experiment, federations)


def _with_enough_rounds(experiment: Experiment, federations: Federations) -> Experiment:
    """The experiment with the first number of rounds that its method does not refuse."""
    for rounds in TRIED_ROUNDS:
        longer = dataclasses.replace(experiment, rounds=rounds)
        try:
            plan(longer, Path(), federations)
            return longer
        except InputError as error:
            if not str(error).startswith("rounds is "):
                raise
            refusal = error
    raise refusal


def shorter(method: AnyMethod, recipe: LocalTraining) -> AnyMethod:
    """Return the method of a smoke test, with one local epoch and the shortest lengths."""
    short = replace_recipe(method, dataclasses.replace(recipe, epochs=1))
    # The fields of a frozen dataclass, and not its properties.
    fields = vars(short)
    lengths: Any = {k: n for k, n in SHORTEST_LENGTHS.items() if type(fields.get(k)) is int}
    made: AnyMethod = dataclasses.replace(short, **lengths)  # type: ignore[type-var]
    return made


def smaller(federation: Federation) -> Federation:
    """Return the clients of a smoke test: a few, with a few examples each."""
    chosen = _spread(len(federation.clients), CLIENTS)
    clients = {}
    later = {}
    names = {}
    for new, place in enumerate(chosen):
        k = federation.ids[place]
        if k in federation.names:
            names[new] = federation.names[k]
        clients[new] = _fewer(federation.client(k))
        if k in federation.later:
            # In the second round, so that the change is seen as well.
            _, changed = federation.later[k][-1]
            later[new] = ((1, _fewer(changed)),)
    cohort = min(federation.defaults.cohort, len(clients))
    return dataclasses.replace(
        federation,
        clients=clients,
        later=later,
        names=names,
        # A trace goes by the clients' numbers, which are others here.
        trace=None,
        files={},
        defaults=dataclasses.replace(federation.defaults, cohort=cohort),
    )


def _fewer(client: ClientData) -> ClientData:
    """Return a client of a smoke test, with a few examples in each part."""
    train = _some(client.train, EXAMPLES)
    return dataclasses.replace(
        client,
        train=train,
        validation=_some(client.validation, EXAMPLES // 4),
        test=_some(client.test, EXAMPLES // 2),
        info=dataclasses.replace(client.info, examples=len(train)),
    )


def _some(examples: Examples, most: int) -> Examples:
    """Return a few examples for a smoke test, evenly spread."""
    rows = torch.tensor(_spread(len(examples), most), dtype=torch.long)
    return Examples(examples.x[rows], examples.y[rows])


def _spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of the numbers below ``count``, evenly spread.

    >>> _spread(3, 4), _spread(10, 4)
    ([0, 1, 2], [0, 2, 5, 7])
    """
    if count <= most:
        return list(range(count))
    return [place * count // most for place in range(most)]
