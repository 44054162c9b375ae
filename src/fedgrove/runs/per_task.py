"""A method once for each true task: the server knows who does what, and keeps the tasks apart.

In a federation that mixes data sets, a method with one model makes one model of all tasks. With
``per_task`` the server has a state of the method for each task (``ClientInfo.task``), as if each
task were a federation of its own: cohort, reports and deliveries go by the task of their client.
Clients notice nothing, and the method is any method, as it is. It is what an oracle would do, and
so the measure for methods that must find the tasks themselves.

All tasks start at the same initial parameters. The cohort of a round is drawn over all clients as
ever; a task of which no client is drawn, or none answers, keeps its state, and its round passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from .. import seeds
from ..core import (
    AnyMethod,
    ClientInfo,
    Packet,
    Report,
    Server,
    Setup,
    Task,
    WithChangingDevices,
    WithServerTraining,
)
from ..errors import EngineError, InputError


@dataclass(frozen=True)
class TaskStates:
    """The method's state for each task, as a chain, one link a task.

    A chain and no dictionary: a checkpoint holds no types, and finds them again by fields.
    """

    round: int
    """The least of the tasks' own: rounds that all have completed."""
    task: str
    state: Any
    others: TaskStates | None = None

    def by_task(self) -> dict[str, Any]:
        """The states of a run with several tasks, by task."""
        rest = {} if self.others is None else self.others.by_task()
        return {self.task: self.state, **rest}


def chain_states(states: Mapping[str, Any]) -> TaskStates:
    """Chain the states of all tasks of a run into one."""
    least = min(state.round for state in states.values())
    chain: TaskStates | None = None
    for task, state in reversed(list(states.items())):
        chain = TaskStates(least, task, state, chain)
    assert chain is not None
    return chain


@dataclass(frozen=True)
class PerTask:
    """The server's side of a method, once for each task."""

    method: AnyMethod
    task_of: Callable[[int, int], str]
    """The task of a client in a round."""
    clients: Sequence[int]
    """All clients, in order."""

    def init(self, setup: Setup) -> TaskStates:
        """Make the method's first state for each task of a run, with the task's clients."""
        members: dict[str, dict[int, ClientInfo]] = {}
        for client in setup.all_clients("has a state for each task"):
            # Scores after the last round are of clients as a next one would find them.
            for task in {self.task_of(client, at) for at in range(setup.rounds + 1)}:
                members.setdefault(task, {})[client] = setup.clients[client]
        if set(members) == {""}:
            raise InputError(
                "per_task is given, but the clients have no tasks; mix data sets "
                "(fedgrove.data.mix), or leave it out."
            )
        states = {}
        for task in sorted(members):
            # The run's sample is of all clients: where a method asks some, they are the first ones.
            share = len(members[task]) / len(setup.clients)
            cohort = max(1, round(share * setup.cohort))
            own = replace(setup, clients=members[task], sample=None, cohort=cohort)
            states[task] = self.method.init(own)
        return chain_states(states)

    def deliver(self, state: TaskStates, client: int) -> Mapping[str, Packet]:
        """Deliver to a client of the run the packets of its own task."""
        own = state.by_task()[self.task_of(client, state.round)]
        return self.method.deliver(own, client)

    def plan(self, state: TaskStates, cohort: Sequence[int]) -> list[Task]:
        """Plan the next exchange of a run with several tasks, one task after another."""
        # If only tasks are left that lag behind, and no client of theirs was drawn, the first go.
        most = len(cohort)
        return self._plan(state, cohort, most) or self._plan(state, self.clients, most)

    def _plan(self, state: TaskStates, clients: Sequence[int], most: int) -> list[Task]:
        planned: list[Task] = []
        for task, own in self._due(state):
            members = [k for k in clients if self.task_of(k, state.round) == task]
            for each in self.method.plan(own, members[:most]):
                # Who has switched away from the task is left out.
                if self.task_of(each.to, state.round) == task:
                    planned.append(each)
        return planned

    def fold(self, state: TaskStates, reports: Iterable[Report]) -> TaskStates:
        """Fold a run's reports, each into the state of its task."""
        states = state.by_task()
        folded: dict[str, Any] = {}
        # In the order of the tasks that were planned, and so one true task after another.
        for task, own_reports in groupby(reports, lambda r: self.task_of(r.of, state.round)):
            if task in folded:
                raise EngineError(
                    f"reports of task {task!r} are not next to each other; an engine must return "
                    "answers in the order of their jobs."
                )
            folded[task] = self.method.fold(states[task], own_reports)
        if not folded:
            # The quorum sees to it that somebody answers.
            return state
        reached = min(own.round for own in folded.values())
        for task, own in self._due(state):
            if task not in folded:
                folded[task] = replace(own, round=max(own.round, reached))
        return chain_states({**states, **folded})

    def train_server(self, state: TaskStates, server: Server) -> TaskStates:
        """Train on the server for each task of the run, if the method does so."""
        if not isinstance(self.method, WithServerTraining):
            return state
        states = {}
        for task, own in state.by_task().items():
            seed = seeds.derive(server.seed, task)
            states[task] = self.method.train_server(own, replace(server, seed=seed))
        return chain_states(states)

    def follow_devices(self, state: TaskStates, clients: Mapping[int, ClientInfo]) -> TaskStates:
        """Let the method follow the devices of the run's clients, for each task its members."""
        if not isinstance(self.method, WithChangingDevices):
            return state
        states = {}
        for task, own in state.by_task().items():
            members = {}
            for client, info in clients.items():
                if self.task_of(client, state.round) == task:
                    members[client] = info
            states[task] = self.method.follow_devices(own, members)
        return chain_states(states)

    def _due(self, state: TaskStates) -> Iterator[tuple[str, Any]]:
        """The tasks that have not completed the round at hand, with their states."""
        for task, own in state.by_task().items():
            if own.round == state.round:
                yield task, own


def states_by_task(state: Any) -> dict[str, Any]:
    """Return the states of a run by task; a run without tasks has the empty name."""
    return state.by_task() if isinstance(state, TaskStates) else {"": state}
