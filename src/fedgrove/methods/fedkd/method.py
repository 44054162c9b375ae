r"""FedKD: a shared mentee, sent as factors, and a mentor of every client's own (Wu, Wu, Lyu, Huang
& Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 2022).

Round :math:`t`, cohort :math:`S_t`; s the shared mentee, m_k a client's own mentor::

    s_k, m_k = E epochs of min L_t + D / (L_t^s + L_t^m), both at once   -> MutualDistillation
    s_k - s  = U S V, of the least rank that holds an energy T(t)        -> lowrank.split
    s        = sum_k n_k (s + U_k S_k V_k) / sum_k n_k                   -> recovered

T rises from .95 to .98 over the rounds (``Energy``). Only U, S and V travel, and biases and norms
as they are; a matrix that is not worth factoring travels whole. A mentor starts at the s that its
client first receives. A client uses s, or m_k (``use_mentor``). Without mentors (``distil`` = 0)
and with all of the energy this is FedAvg.

- Shared: a small model, sent back as factors of its update and taught by mentors that stay on the
  clients.
- A client uses: the shared model, or its own mentor.
- Bytes in the paper: 8 d_mentee M T, an upper bound.
- Secure aggregation: no; clients send factors of their update, which must be multiplied before they
  are added.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ... import trees
from ...core import (
    Carry,
    Client,
    Edit,
    ExpectedPacket,
    ExpectedReport,
    Give,
    Outcome,
    Packet,
    Report,
    Setup,
    Stage,
    Task,
    Train,
)
from ...errors import check
from ...nets import Net, build, user_files
from ...nets.layout import probe
from ...parts.aggregate import Averaging, WeightedMean
from ...parts.local import LocalTraining
from ...parts.objective import ProblemLoss
from ...parts.one_model import dense_bytes
from ...trees import Tree
from ...wire.codec import Codec, Smallest
from .lowrank import Energy, empty_factors, factorable, product, split
from .mutual import MENTEE, MENTOR, MutualDistillation, Pair, join, part


@dataclass(frozen=True)
class State:
    """The shared mentee."""

    round: int
    rounds: int
    model: Tree


@dataclass(frozen=True)
class FedKD:
    """A small model for all, sent as factors; beside it every client's own, which teaches it."""

    distil: float = 1.0
    """The weight of what the two learn from each other; 0: there are no mentors."""
    mentee: str = ""
    """The shared network by name, as --net takes it: "mlp:hidden=16"; "": as the mentor, which is
    always the run's own."""
    use_mentor: bool = False
    """Whether a client uses its mentor rather than the mentee."""
    energy: Energy = Energy()
    """How much of an update's energy is sent, at the first round and at the last."""
    mean: Averaging = WeightedMean()
    local: LocalTraining | None = None
    codec: Codec = Smallest()
    """One that leaves zeros out: factors travel in shapes that the rank does not decide."""

    def __post_init__(self) -> None:
        check(self.distil >= 0, "distil", self.distil, "0 or more")
        check(
            not user_files.is_file_spec(self.mentee),
            "mentee",
            self.mentee,
            "the name of a built-in network: fedgrove list nets",
        )

    # ---- the networks ----------------------------------------------------------------------------

    def nets(self, net: Net) -> Mapping[str, Net]:
        """The pair of a mentee and a mentor; the mentee by itself where it is another network."""
        if not self.distil:
            return {}
        # From torch's generator, which the run has seeded.
        mentee = self._mentee(net, seed=int(torch.randint(2**31, ())))
        pair = Pair(copy.deepcopy(mentee.module), copy.deepcopy(net.module))
        nets = {"pair": Net(pair, net.shape)}
        if self.mentee:
            nets["mentee"] = mentee
        return nets

    def _mentee(self, net: Net, seed: int) -> Net:
        """The network that travels: the run's, or one whose initial weights a seed decides."""
        if not self.mentee:
            return net
        outputs = probe(net.module, net.shape, batch=2).shape[1]
        module = build(self.mentee, net.shape, outputs, seed)
        like = next(iter(net.params().values()))
        return Net(module.to(like), net.shape)

    # ---- the server ------------------------------------------------------------------------------

    def init(self, setup: Setup) -> State:
        """The mentee's initial parameters."""
        has_mentors = self.distil > 0
        check(
            (has_mentors and self.use_mentor) or not self.mentee,
            "mentee",
            self.mentee,
            "left out, unless there are mentors (distil above 0), of the run's own network, and "
            "clients use them: --set use_mentor=true",
        )
        check(
            has_mentors or not self.use_mentor,
            "use_mentor",
            self.use_mentor,
            "false where there are no mentors (distil is 0)",
        )
        return State(0, setup.rounds, mentee_of(setup.net).params())

    def deliver(self, state: State, client: int) -> Mapping[str, Packet]:
        """The mentee; clients with mentors of another network use these."""
        if self.mentee:
            return {}
        return {"model": Packet(state.model)}

    def plan(self, state: State, cohort: Sequence[int]) -> list[Task]:
        """The cohort is sent the mentee, and how much of its energy to send back."""
        settings = {"energy": self.energy(state.round / state.rounds)}
        return [Task(client, {"model": Packet(state.model)}, settings) for client in cohort]

    def fold(self, state: State, reports: Iterable[Report]) -> State:
        """The weighted mean of the mentees that the factors stand for."""
        mean = self.mean.start(state.model)
        for report in reports:
            mean.add(recovered(report.give, state.model), report.examples)
        return replace(state, round=state.round + 1, model=mean.value())

    # ---- a client --------------------------------------------------------------------------------

    def work(self, verb: str) -> tuple[Stage, ...]:
        """Train both, send the mentee, keep the mentor; a client uses its mentor."""
        if verb == "use":
            if self.use_mentor:
                return (Edit(use_mentor),)
            return (Edit(use_mentee),)
        if not self.distil:
            train: tuple[Stage, ...] = (Train(ProblemLoss(), self.local),)
        else:
            train = (
                Edit(begin_pair),
                Train(
                    MutualDistillation(self.distil),
                    self.local,
                    start="pair",
                    end="pair",
                    net="pair",
                ),
                Edit(part_ways),
            )
        return {"train": (*train, Give(self._send, self._expected))}[verb]

    def _send(self, carry: Carry, client: Client) -> Outcome:
        """The mentee's update in factors, what has none as it is; the mentor stays."""
        memory = {"mentor": carry["mentor"]} if self.distil else {}
        local = carry["local"]
        if self.energy.is_all:
            return Outcome({"model": Packet(local)}, memory=memory)
        update = {}
        for name in self._factored(mentee_of(client.net)):
            update[name] = local[name] - carry["model"][name]
        whole, u, s, v = split(update, float(carry["settings"]["energy"]))
        give = {"model": Packet({**local, **whole})}
        # An empty packet would still cost the bytes of its header.
        if update:
            give |= {"u": Packet(u), "s": Packet(s), "v": Packet(v)}
        return Outcome(give, memory=memory)

    def _expected(self, task: Task, net: Net) -> ExpectedReport:
        mentee = mentee_of(net)
        params = mentee.params()
        forms = {"model": ExpectedPacket.of(params)}
        names = self._factored(mentee)
        if names:
            factors = [empty_factors(params[name]) for name in names]
            for packet, each in zip("usv", zip(*factors, strict=True), strict=True):
                forms[packet] = ExpectedPacket.of(dict(zip(names, each, strict=True)))
        return ExpectedReport(forms)

    def _factored(self, mentee: Net) -> tuple[str, ...]:
        """The weights that travel as factors; never running statistics, nor any at full energy."""
        if self.energy.is_all:
            return ()
        params = mentee.layout.params
        return factorable({name: mentee.layout.shapes[name] for name in params})

    @property
    def paper_at_most(self) -> bool:
        """Whether the paper's count is an upper bound, as where ranks follow from training."""
        return not self.energy.is_all

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The mentee dense both ways: an upper bound, as ranks follow from training."""
        return dense_bytes(self._mentee(net, seed=0).layout.size, cohort, rounds)


def mentee_of(net: Net) -> Net:
    """The network that travels: one of its own name, or the run's."""
    return net.nets.get("mentee", net.nets["model"])


def recovered(give: Mapping[str, Packet], model: Tree) -> Tree:
    """A client's mentee: s + U S V where factors came, and the rest as it came."""
    mentee = dict(give["model"].values)
    if "u" not in give:
        return mentee
    for name, u in give["u"].values.items():
        old = model[name].double()
        update = product(u, give["s"].values[name], give["v"].values[name], tuple(old.shape))
        # One of the two is zero: a matrix travels whole or as factors.
        mentee[name] = old + mentee[name].double() + update
    return mentee


def begin_pair(carry: Carry, client: Client) -> Carry:
    """The mentee as it came beside the client's mentor.

    A mentor starts at the mentee, or where that is another network at its own start.
    """
    rest = dict(carry)
    first = client.start if "mentee" in client.nets else carry["model"]
    # Taken out, so that old and new clients have the same trees, and train at once.
    mentor = rest.pop("mentor", first)
    pair = join(carry["model"], mentor)
    return {**rest, "pair": trees.pick(pair, client.nets["pair"].layout.shapes)}


def part_ways(carry: Carry, client: Client) -> Carry:
    """The two networks by themselves again, trained."""
    local = trees.pick(part(carry["pair"], MENTEE), carry["model"])
    return {**carry, "local": local, "mentor": part(carry["pair"], MENTOR)}


def use_mentee(carry: Carry, client: Client) -> Carry:
    """The client uses what it was sent."""
    rest = dict(carry)
    # Taken out, so that old and new clients are scored at once.
    rest.pop("mentor", None)
    return rest


def use_mentor(carry: Carry, client: Client) -> Carry:
    """The client uses its mentor; before it has one, the mentee, or else the network's start."""
    rest = dict(carry)
    # Taken out, so that old and new clients are scored at once.
    own = rest.pop("mentor", carry.get("model", client.start))
    return {**rest, "model": own}
