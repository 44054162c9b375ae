r"""FedKD: a shared mentee, sent as factors, and a personal mentor on every client (Wu, Wu, Lyu,
Huang & Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 2022).

Round :math:`t`, cohort :math:`S_t`; s the shared mentee, m_k a client's own mentor::

    s_k, m_k = E epochs of min L_t + D / (L_t^s + L_t^m), both at once   -> MutualDistillation
    s_k - s  = U S V, of the least rank that holds an energy T(t)        -> lowrank.split
    s        = sum_k n_k (s + U_k S_k V_k) / sum_k n_k                   -> recovered

T rises from .95 to .98 over the rounds (``Energy``). Only U, S and V are sent, and biases and norms
without factors; a matrix that is not worth factoring is sent in full. A mentor starts from the
first s that its client receives. A client uses s, or m_k (``use_mentor``). Without mentors
(``distil`` = 0) and with all of the energy this is FedAvg.

- Shared: a small model, distilled from mentors that are kept on the clients; its update is sent in
  factors.
- A client uses: the shared model, or its own mentor.
- Bytes in the paper: 8 d_mentee M T, an upper bound.
- Secure aggregation: no; clients send factors of their update, which must be multiplied before they
  are added.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import trees
from ..core import (
    Batch,
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
from ..errors import check, spell_option
from ..nets import Net, build, user_files
from ..nets.layout import probe
from ..parts.aggregate import Averaging, WeightedMean
from ..parts.local import LocalTraining
from ..parts.objective import Loss, Objective, ProblemLoss
from ..parts.one_model import dense_bytes
from ..problems import CLASSES, AnyProblem, restrict_outputs
from ..trees import Tree
from ..wire.codec import Codec, Smallest

if TYPE_CHECKING:
    from ..nets import Output


# ---- updates as products of thin matrices --------------------------------------------------------

# "Dynamic gradient approximation" of the paper. A weight of more than one dimension is seen as a
# matrix (outputs, the rest). Factors are sent in shapes that do not depend on the rank: rows that
# are not needed are zeros, which a codec leaves out.


@dataclass(frozen=True)
class Energy:
    r"""How much of an update's energy is sent: :math:`T = T_{start} + (T_{end} - T_{start})\,t`.

    :math:`t` is the share of the rounds that are over; ``first`` and ``last`` are
    :math:`T_{start}` and :math:`T_{end}`. With ``first`` = ``last`` = 1 nothing is factored.

    >>> Energy()(0.5), Energy(1.0, 1.0).is_all
    (0.965, True)
    """

    first: float = 0.95
    last: float = 0.98

    def __post_init__(self) -> None:
        check(0 < self.first <= 1, "first", self.first, "above 0, at most 1")
        check(self.first <= self.last <= 1, "last", self.last, f"in [{self.first}, 1], above first")

    def __call__(self, progress: float) -> float:
        """The share of the energy after a share ``progress`` of the rounds."""
        return self.first + (self.last - self.first) * progress

    @property
    def is_all(self) -> bool:
        """FedKD: whether an update always is sent with all its energy."""
        return self.first >= 1


def largest_rank(shape: tuple[int, ...]) -> int:
    """FedKD: the largest rank whose factors are fewer numbers than the matrix; 0 if there is none.

    Of K singular values, K (rows + columns + 1) numbers are sent in place of rows x columns.

    >>> largest_rank((64, 64)), largest_rank((16, 6, 5, 5)), largest_rank((10,))
    (31, 14, 0)
    """
    if len(shape) < 2:
        return 0
    rows = shape[0]
    columns = torch.Size(shape[1:]).numel()
    # The largest K with K (rows + columns + 1) < rows x columns.
    return (rows * columns - 1) // (rows + columns + 1)


def rank_at(singular_values: Tensor, energy: float) -> int:
    r"""FedKD: the least K with :math:`\sum_{i \le K} \sigma_i^2 \ge T \sum_i \sigma_i^2`, or 0.

    >>> rank_at(torch.tensor([3.0, 2.0, 1.0]), 0.9)
    2
    """
    squares = singular_values.double().square()
    total = squares.sum()
    if not total > 0:
        return 0
    enough = squares.cumsum(0) >= energy * total
    # The sum of all may miss an energy of 1 by rounding: then all are kept.
    reached = enough.nonzero()
    if not len(reached):
        return len(singular_values)
    return int(reached[0]) + 1


def factored(update: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """FedKD: an update's factors u, s and v, each padded with zeros beyond the rank.

    ``most`` is :func:`largest_rank`. None where that is not enough for the energy, or where the
    update is not finite and has no factors.
    """
    most = largest_rank(tuple(update.shape))
    matrix = update.reshape(len(update), -1)
    if not most or not bool(torch.isfinite(matrix).all()):
        return None
    left, singular_values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = rank_at(singular_values, energy)
    if rank > most:
        return None
    # Which of two opposite signs a solver gives is an accident of rounding: the entry of largest
    # size of each left vector is made positive.
    largest = left.gather(0, left.abs().argmax(0, keepdim=True)).squeeze(0)
    sign = torch.where(largest < 0, -1.0, 1.0).to(left)
    left = left * sign
    right = right * sign[:, None]
    u, s, v = empty_factors(update)
    u[:rank] = left.T[:rank]
    s[:rank] = singular_values[:rank]
    v[:rank] = right[:rank]
    return u, s, v


def empty_factors(update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FedKD: an update's factors of rank 0, in the shapes that are sent."""
    most = largest_rank(tuple(update.shape))
    rows = len(update)
    columns = update[0].numel()
    zeros = update.new_zeros
    return zeros(most, rows), zeros(most), zeros(most, columns)


def product(u: Tensor, s: Tensor, v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """FedKD: the matrix that factors stand for, in double precision and in its own shape.

    Three finite float32 may have a product that only double precision holds.
    """
    return ((u.double().T * s.double()) @ v.double()).reshape(shape)


def factorable(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """FedKD: the weights that factors may stand for."""
    return tuple(name for name, shape in shapes.items() if largest_rank(tuple(shape)))


def split(update: Tree, energy: float) -> tuple[Tree, Tree, Tree, Tree]:
    """FedKD: updates by name as (what is sent in full, u, s, v); their sum is what a receiver
    reads.

    A matrix that takes too many factors is sent in full next to factors of zeros, and the other way
    round.
    """
    whole: Tree = {}
    us: Tree = {}
    ss: Tree = {}
    vs: Tree = {}
    for name, matrix in update.items():
        found = factored(matrix, energy)
        if found is None:
            whole[name] = matrix
            found = empty_factors(matrix)
        else:
            whole[name] = torch.zeros_like(matrix)
        us[name], ss[name], vs[name] = found
    return whole, us, ss, vs


# ---- two models that teach each other ------------------------------------------------------------


MENTEE = "mentee."
MENTOR = "mentor."
"""How the names of their parameters begin in the tree of a :class:`Pair`."""


class Pair(nn.Module):
    """A mentee and a mentor as one module: its output is the logits of the first, then the other's.

    One Train stage moves both in one step. Optimisers work number by number, so that each moves as
    it would alone.
    """

    def __init__(self, mentee: nn.Module, mentor: nn.Module) -> None:
        super().__init__()
        self.mentee = mentee
        self.mentor = mentor

    def forward(self, x: Tensor) -> Tensor:
        """FedKD: both logits side by side, (examples, 2 outputs)."""
        return torch.cat([self.mentee(x), self.mentor(x)], 1)


def join(mentee: Tree, mentor: Tree) -> Tree:
    """FedKD: the tree of a pair of mentee and mentor."""
    pair = {MENTEE + name: value for name, value in mentee.items()}
    pair |= {MENTOR + name: value for name, value in mentor.items()}
    return pair


def part(pair: Tree, which: str) -> Tree:
    """FedKD: one network's tree of a pair, ``which`` being :data:`MENTEE` or :data:`MENTOR`."""
    mine = {}
    for name, value in pair.items():
        if name.startswith(which):
            mine[name.removeprefix(which)] = value
    return mine


@dataclass(frozen=True)
class MutualDistillation(Objective):
    r"""FedKD's losses of a pair, task loss and adaptive mutual distillation of both.

    :math:`L^s_t + L^m_t + \delta\,[D(m, s) + D(s, m)] / (L^s_t + L^m_t)` (Wu et al. 2022, Eqs. 1 to
    4): :math:`L_t` the task losses of mentee s and mentor m, :math:`D(a, b)` how far b's
    predictions are from a's, :math:`\delta` -> ``weight``. a and the divisor are constants: each
    network learns by its own task and towards the other, and neither by being taught badly.
    """

    only_in: ClassVar[str] = "fedkd"
    targets: ClassVar[tuple[str, ...] | None] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        check(self.weight >= 0, "weight", self.weight, "0 or more")

    def __call__(self, out: Output, params: Tree, batch: Batch, carry: Carry) -> Loss:
        """The sum of the two networks' losses; each network's gradient is that of its own."""
        own = carry.get("client", {})
        problem = out.net.problem
        mentee, mentor = out.logits.chunk(2, 1)
        examples = batch.weight.sum()

        def mean(per_example: Tensor) -> Tensor:
            return (per_example * batch.weight).sum() / examples

        mentee_task = mean(problem.losses(mentee, batch.y, own))
        mentor_task = mean(problem.losses(mentor, batch.y, own))
        apart = mean(divergence(problem, mentor.detach(), mentee, own))
        apart = apart + mean(divergence(problem, mentee.detach(), mentor, own))
        # Where both networks fit the data the losses are all but 0, and no divisor.
        tasks = (mentee_task + mentor_task).detach().clamp_min(SMALLEST_LOSS)
        return mentee_task + mentor_task + self.weight * apart / tasks, {}


SMALLEST_LOSS = 1e-3
"""The divisor of the distillation is at least this."""


def divergence(problem: AnyProblem, teacher: Tensor, learner: Tensor, own: Tree) -> Tensor:
    r"""FedKD: how far each example's prediction is from a teacher's.

    Of classes :math:`KL(p_{teacher} \,\|\, p_{learner})`; of numbers and of several labels, for
    which the paper has no rule, half the squared distance of the outputs.
    """
    if problem.name != CLASSES.name:
        return 0.5 * (learner - teacher).square().sum(1)
    taught = F.log_softmax(restrict_outputs(teacher, own), 1)
    learnt = F.log_softmax(restrict_outputs(learner, own), 1)
    return (taught.exp() * (taught - learnt)).sum(1)


# ---- the method ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The shared mentee."""

    round: int
    rounds: int
    model: Tree


@dataclass(frozen=True)
class FedKD:
    """A small model for all, sent as factors; each client has a larger one, which teaches it."""

    distil: float = 1.0
    """The weight of the distillation between mentor and mentee; 0: there are no mentors."""
    mentee: str = ""
    """The shared network by name, as --net takes it: "mlp:hidden=16"; "": that of the mentor, which
    is always the network of the run."""
    use_mentor: bool = False
    """Whether a client uses its mentor instead of the mentee."""
    energy: Energy = Energy()
    """How much of an update's energy is sent, in the first round and in the last."""
    mean: Averaging = WeightedMean()
    local: LocalTraining | None = None
    codec: Codec = Smallest()
    """It must leave zeros out: the shapes in which factors are sent do not depend on the rank."""

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
        """FedKD: the pair of a mentee and a mentor; the mentee alone if it is another network."""
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
        """The network that is sent: the run's, or one whose initial weights a seed decides."""
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
            f"clients use them: {spell_option('set', 'use_mentor=true')}",
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
            # Shapes do not depend on the rank: the server knows them before the client does.
            for packet, each in zip("usv", zip(*factors, strict=True), strict=True):
                forms[packet] = ExpectedPacket.of(dict(zip(names, each, strict=True)))
        return ExpectedReport(forms)

    def _factored(self, mentee: Net) -> tuple[str, ...]:
        """The weights that are sent as factors; never running statistics, nor any at full
        energy."""
        if self.energy.is_all:
            return ()
        params = mentee.layout.params
        return factorable({name: mentee.layout.shapes[name] for name in params})

    @property
    def paper_at_most(self) -> bool:
        """FedKD: whether the paper's count of bytes is an upper bound only.

        It is one if ranks follow from training.
        """
        return not self.energy.is_all

    def paper_bytes(self, net: Net, clients: int, cohort: int, rounds: int) -> int:
        """The mentee dense both ways: an upper bound, as ranks follow from training."""
        return dense_bytes(self._mentee(net, seed=0).layout.size, cohort, rounds)


def mentee_of(net: Net) -> Net:
    """FedKD: the network that is sent: the one named "mentee", or the run's."""
    return net.nets.get("mentee", net.nets["model"])


def recovered(give: Mapping[str, Packet], model: Tree) -> Tree:
    """FedKD: a client's mentee: s + U S V where factors came, and the rest as it came."""
    mentee = dict(give["model"].values)
    if "u" not in give:
        return mentee
    for name, u in give["u"].values.items():
        old = model[name].double()
        update = product(u, give["s"].values[name], give["v"].values[name], tuple(old.shape))
        # One of the two is zero: a matrix is sent in full or as factors.
        mentee[name] = old + mentee[name].double() + update
    return mentee


def begin_pair(carry: Carry, client: Client) -> Carry:
    """FedKD: the carry gets the mentee as it came, next to the client's mentor.

    A mentor starts at the mentee, or where that is another network at its own start.
    """
    rest = dict(carry)
    first = client.start if "mentee" in client.nets else carry["model"]
    # Taken out, so that old and new clients have equal sets of trees, and train at once.
    mentor = rest.pop("mentor", first)
    pair = join(carry["model"], mentor)
    return {**rest, "pair": trees.pick(pair, client.nets["pair"].layout.shapes)}


def part_ways(carry: Carry, client: Client) -> Carry:
    """FedKD: after training, mentee and mentor are two networks again."""
    local = trees.pick(part(carry["pair"], MENTEE), carry["model"])
    return {**carry, "local": local, "mentor": part(carry["pair"], MENTOR)}


def use_mentee(carry: Carry, client: Client) -> Carry:
    """FedKD: the client uses the mentee it was sent."""
    rest = dict(carry)
    # Taken out, so that old and new clients are scored at once.
    rest.pop("mentor", None)
    return rest


def use_mentor(carry: Carry, client: Client) -> Carry:
    """FedKD: the client uses its mentor, or else the mentee, or else the network's start."""
    rest = dict(carry)
    # Taken out, so that old and new clients are scored at once.
    own = rest.pop("mentor", carry.get("model", client.start))
    return {**rest, "model": own}
