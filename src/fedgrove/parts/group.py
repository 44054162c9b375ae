"""Which clients belong together: ``Grouping(vectors, groups) -> labels``, one vector per client.

Labels count from 0 in the order in which groups first appear, so they do not depend on how a
library numbers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import trees
from ..errors import check, unknown
from ..renamed import find_old_names
from ..seeds import torch_rng
from ..trees import Tree
from .aggregate import Average, Averaging

MAX_UPDATE_BYTES = 1 << 30
"""Bytes of whole updates that a server keeps at once; of further clients it keeps a sketch."""
SKETCH = 1 << 14
"""Numbers in a sketch of an update."""
MOST = 8
"""The most groups that are tried where their number is chosen."""
Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

LINKAGES = ("average", "complete", "single", "ward")
"""How the distance of two groups follows from the distances of their members."""
METRICS = ("cosine", "euclidean", "manhattan")
"""How the distance of two clients follows from their updates."""


class Grouping(Protocol):
    """A rule that divides clients by vectors that describe them.

    ``groups`` 0 leaves their number to the rule.
    """

    def __call__(self, vectors: Tensor, groups: int) -> list[int]:
        """The group of each row."""


def cosine_distances(vectors: Tensor) -> Tensor:
    r""":math:`d(k, k') = 1 - \frac{\Delta_k \cdot \Delta_{k'}}{|\Delta_k||\Delta_{k'}|}`.

    (CA-AFP, Eq. 4.) :math:`\Delta_k` -> row k of ``vectors``. A vector of zeros is at distance 1
    from all others.

    >>> cosine_distances(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]))[0]
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    x = vectors.double()
    # The smallest normal number instead of 0: a vector of zeros stays one and is not made NaN.
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    distances: Tensor = (1 - unit @ unit.T).clamp(0, 2)
    # A matrix product need not be symmetric to the last bit, nor its diagonal exactly 1.
    distances = (distances + distances.T) / 2
    distances.fill_diagonal_(0)
    return distances


@dataclass(frozen=True)
class Agglomerative:
    """Agglomerative clustering of updates, by their cosine as in CA-AFP and FedCHAR.

    ``groups`` 0: the number with the best silhouette, from 2 to 8. From a random start average
    linkage tends to split off single clients; a warm-up before the clustering, or
    ``linkage="complete"`` or ``"ward"``, gives groups of more even size. Ward's linkage merges the
    groups whose updates then vary least; with the cosine, updates are scaled to length 1 for it.
    """

    linkage: str = "average"
    """average, complete, single or ward."""
    metric: str = "cosine"
    """cosine, euclidean or manhattan. With the last two, clients with more steps, whose updates are
    longer, are far from others."""

    def __post_init__(self) -> None:
        if self.linkage not in LINKAGES:
            raise unknown("linkage", self.linkage, LINKAGES)
        if self.metric not in METRICS:
            raise unknown("metric", self.metric, METRICS)
        # Ward's linkage is defined by squared Euclidean distances.
        fits = self.linkage != "ward" or self.metric != "manhattan"
        check(fits, "metric", self.metric, "cosine or euclidean with linkage ward")

    def __call__(self, vectors: Tensor, groups: int) -> list[int]:
        """The group of each row.

        There are ``groups`` groups, or one per client where there are fewer clients.
        """
        distances = self._distances(vectors)
        n = len(vectors)
        if groups == 1 or n < 2:
            return [0] * n
        # A silhouette exists for 2 to n - 1 groups, so two clients cannot choose.
        if groups == 0 and n < 3:
            return [0] * n
        merges = self._merges(distances)
        if groups != 0:
            return renumbered(_divide(merges, min(groups, n)))
        divisions = []
        silhouettes = []
        for number in range(2, min(MOST, n - 1) + 1):
            labels = _divide(merges, number)
            divisions.append(labels)
            silhouettes.append(silhouette(distances, labels))
        # index() gives the first of equal ones: the fewest groups.
        return renumbered(divisions[silhouettes.index(max(silhouettes))])

    def several(self, vectors: Tensor, numbers: Sequence[int]) -> list[list[int]]:
        """Return the groups of clients for each of several numbers of groups.

        The merges are computed once: divisions differ only in how many of them are made.
        """
        n = len(vectors)
        if n < 2 or not numbers:
            return [[0] * n for _ in numbers]
        merges = self._merges(self._distances(vectors))
        return [renumbered(_divide(merges, min(number, n))) for number in numbers]

    def _distances(self, vectors: Tensor) -> Matrix:
        """The distance of every two clients."""
        if self.metric == "cosine":
            return cosine_distances(vectors).numpy()
        power = 2.0 if self.metric == "euclidean" else 1.0
        # One pair at a time: the short way by products loses the digits of small distances.
        exact = "donot_use_mm_for_euclid_dist"
        distances: Matrix = torch.cdist(
            vectors.double(), vectors.double(), p=power, compute_mode=exact
        ).numpy()
        return distances

    def _merges(self, distances: Matrix) -> Matrix:
        """The n - 1 merges down to one group, the nearest two first."""
        # Imported where it is used: it is slow to load, and most methods form no groups. (What
        # scikit-learn has for this calls it as well, and takes ten times as long to load.)
        from scipy.cluster.hierarchy import linkage

        n = len(distances)
        upper = distances[np.triu_indices(n, k=1)]
        if self.linkage == "ward" and self.metric == "cosine":
            # It is defined by Euclidean distances: |u - v|^2 = 2 (1 - cos) for vectors of length 1.
            upper = np.sqrt(2 * upper)
        merges: Matrix = linkage(upper, method=self.linkage)
        return merges


def _divide(merges: Matrix, groups: int) -> list[int]:
    """Labels of ``groups`` groups: the last of the n - 1 merges to one group are left out."""
    n = len(merges) + 1
    # Row i merges two clusters into cluster n + i; 0 to n - 1 are the single clients.
    members: dict[int, list[int]] = {client: [client] for client in range(n)}
    for i, (one, other) in enumerate(merges[: n - groups, :2].astype(int).tolist()):
        members[n + i] = members.pop(one) + members.pop(other)
    labels = [0] * n
    for label, clients in enumerate(members.values()):
        for client in clients:
            labels[client] = label
    return labels


def silhouette(distances: Matrix, labels: Sequence[int]) -> float:
    r"""Compute how far apart groups of clients are: the mean silhouette over clients.

    The silhouette of client k is :math:`(b_k - a_k) / \max(a_k, b_k)`.

    (Rousseeuw 1987.) :math:`a_k` -> the mean distance to the others of the client's group,
    :math:`b_k` -> that to the nearest other group. A client alone in its group counts 0.

    >>> far = np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]])
    >>> silhouette(far, [0, 0, 1])
    0.5
    """
    groups = np.unique(labels)
    is_member = np.asarray(labels)[:, None] == groups
    sums = distances @ is_member
    sizes = is_member.sum(0)
    own = np.where(is_member, sums, 0.0).sum(1) / np.maximum((is_member * sizes).sum(1) - 1, 1)
    nearest_other = np.where(is_member, np.inf, sums / sizes).min(1)
    largest = np.maximum(own, nearest_other)
    # Where all clients coincide, both are 0.
    value = (nearest_other - own) / np.where(largest == 0, 1.0, largest)
    is_alone = (is_member * sizes).sum(1) == 1
    return float(np.where(is_alone, 0.0, value).mean())


@dataclass(frozen=True)
class Bipartition:
    r"""Clustered federated learning (Sattler et al. 2020, Alg. 1): split in two, and again.

    A group is divided while its mean update is small against its members' (their pulls cancel out):
    :math:`|\bar\Delta| < \epsilon \max_k |\Delta_k|`, :math:`\epsilon` -> ``ratio``, along the cut
    that leaves the largest cosine between the halves as small as it can be (complete linkage on the
    cosine). ``groups`` is the most groups there will be, 0: any number.

    Differs from the paper: its two bounds are absolute numbers of one network; here they are one
    share of the largest update, and all clients report once instead of in every round.
    """

    ratio: float = 0.4

    def __post_init__(self) -> None:
        check(0 < self.ratio <= 1, "ratio", self.ratio, "in (0, 1]")

    def __call__(self, vectors: Tensor, groups: int) -> list[int]:
        """The group of each row."""
        waiting = [list(range(len(vectors)))]
        finished: list[list[int]] = []
        while waiting:
            # First in, first out: both halves of a part have their turn before a half of a half,
            # which matters where ``groups`` is a limit.
            part = waiting.pop(0)
            groups_now = len(waiting) + len(finished) + 1
            limit_is_reached = groups != 0 and groups_now >= groups
            # Two clients are not divided: each would be left alone.
            too_small = len(part) < 3
            if too_small or limit_is_reached or not self.divides(vectors[part].double()):
                finished.append(part)
                continue
            halves: tuple[list[int], list[int]] = ([], [])
            sides = Agglomerative("complete")(vectors[part], 2)
            for client, side in zip(part, sides, strict=True):
                halves[side].append(client)
            waiting += halves

        labels = [0] * len(vectors)
        for label, part in enumerate(finished):
            for client in part:
                labels[client] = label
        return renumbered(labels)

    def divides(self, updates: Tensor) -> bool:
        """Whether to split a group of clients in two: the members' updates cancel out."""
        return bool(updates.mean(0).norm() < self.ratio * updates.norm(dim=1).max())


def renumbered(labels: Sequence[int]) -> list[int]:
    """Return groups of clients numbered in the order of first appearance.

    >>> renumbered([2, 0, 2, 1])
    [0, 1, 0, 2]
    """
    number_of: dict[int, int] = {}
    numbers = []
    for label in labels:
        if label not in number_of:
            number_of[label] = len(number_of)
        numbers.append(number_of[label])
    return numbers


def nearest(vector: Tensor, centres: Mapping[int, Tensor]) -> int:
    """The group whose mean update has the largest cosine with the update of a late joiner.

    ``vector`` is the client's update, ``centres`` the mean update of each group.
    """
    rows = [vector.double()]
    for centre in centres.values():
        rows.append(centre.double())
    # Row 0 is the client; its distance to itself, column 0, is left out.
    distances = cosine_distances(torch.stack(rows))[0, 1:]
    return list(centres)[int(distances.argmin())]


@dataclass(frozen=True, kw_only=True)
class GroupedState:
    """A method's state: one model at first, and one for each group once clients are grouped."""

    round: int = 0
    clients: tuple[int, ...]
    """Those who report when the groups are formed: all, or a sample of many."""
    models: dict[int, Tree]
    """By group; before the clustering there is one model for all, under 0."""
    groups: dict[int, int] = field(default_factory=dict)
    """By client; empty before the clustering."""
    reference: Tree
    """The model from which the updates were made that clients were grouped by."""
    centres: dict[int, Tensor] = field(default_factory=dict)
    """By group: its mean update in the clustering, where late joiners find their group."""
    joined: int = -1
    """The last round before which clients outside that sample joined a group."""


State = TypeVar("State", bound=GroupedState)


def form_groups(state: State, updates: Updates, groups: Mapping[int, int]) -> State:
    """Divide the clients of one model by their updates; every group starts at that model.

    The round stays as it is.
    """
    shared = state.models[0]
    return replace(
        state,
        models=dict.fromkeys(sorted(set(groups.values())), shared),
        groups=dict(groups),
        reference=shared,
        centres=updates.centres(groups),
    )


def joining_before_round(state: GroupedState, clients: Iterable[int]) -> list[int]:
    """Clients that join a group in an exchange before the round, and then train in the round.

    Of many clients only a sample forms the groups, so most clients of a cohort have none yet. They
    join once before each round. (A client of the sample without a group missed the exchange in
    which groups were formed; it is not among them.)
    """
    if not state.groups or state.joined == state.round:
        return []
    return [k for k in clients if k not in state.groups and k not in state.clients]


class GroupMeans:
    """An average for each group of clients, from its first report on."""

    def __init__(self, rule: Averaging, models: Mapping[int, Tree]) -> None:
        self._rule = rule
        self._models = models
        self._means: dict[int, Average] = {}

    def add(self, group: int, tree: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's tree to its group's average."""
        if group not in self._means:
            self._means[group] = self._rule.start(self._models[group])
        self._means[group].add(tree, weight)

    def value(self) -> dict[int, Tree]:
        """Return the groups' next models; a group of which no client reported keeps its own."""
        models = dict(self._models)
        for group, mean in self._means.items():
            models[group] = mean.value()
        return models


def sketch(vector: Tensor, size: int = SKETCH) -> Tensor:
    r"""Return a count sketch of a client's update: a random sign and one of ``size`` sums each.

    (Charikar et al. 2002.) Inner products survive up to a standard deviation of about
    :math:`|x||y| / \sqrt{size}`: .008 of a cosine.
    """
    if vector.numel() <= size:
        return vector.float()
    # A fixed seed: sketches can be compared only if all clients share places and signs.
    rng = torch_rng(0, "sketch", vector.numel())
    places = torch.randint(size, (vector.numel(),), generator=rng)
    signs = torch.randint(2, (vector.numel(),), generator=rng) * 2.0 - 1
    return torch.zeros(size).index_add_(0, places, vector.float() * signs)


def flatten_update(update: Mapping[str, Tensor]) -> Tensor:
    """Return a client's update as one float32 vector for grouping; it may have come in 16 bits."""
    return trees.flatten(trees.map(Tensor.float, update))


class Updates:
    """Clients' updates as they come, in at most ``most_bytes`` bytes.

    Whole updates are kept while they fit. If not all will, sketches of all clients are kept too.
    Means over groups are computed after the groups are known, so they are over whole updates only:
    over all clients while these fit, else over the first ones that came.
    """

    def __init__(self, clients: int, most_bytes: int = MAX_UPDATE_BYTES) -> None:
        self._clients = clients
        self._most_bytes = most_bytes
        self.whole: dict[int, Tensor] = {}
        self._sketches: dict[int, Tensor] = {}

    def add(self, client: int, update: Mapping[str, Tensor]) -> None:
        """Add one client's update to those that groups are made from."""
        vector = flatten_update(update)
        update_bytes = 4 * max(1, vector.numel())
        # At least one is kept, however large: no group would have a centre otherwise.
        room = max(1, self._most_bytes // update_bytes)
        if len(self.whole) < room or client in self.whole:
            self.whole[client] = vector
        # Decided by the number of clients, not by what has come: all clients are compared by
        # sketches or none is.
        if self._clients > room:
            self._sketches[client] = sketch(vector)

    def divide(self, grouping: Grouping, groups: int) -> dict[int, int]:
        """The group of each client, by client number."""
        vectors = self._sketches or self.whole
        # By number, not by arrival: the groups do not depend on which client was faster.
        order = sorted(vectors)
        labels = grouping(torch.stack([vectors[k] for k in order]), groups)
        return dict(zip(order, labels, strict=True))

    def centres(self, groups: Mapping[int, int]) -> dict[int, Tensor]:
        """The mean of each group's whole updates; a group without a whole update has no mean."""
        members: dict[int, list[Tensor]] = {}
        # Clients in order of number: a sum's last bits depend on the order of its terms.
        for client in sorted(self.whole):
            members.setdefault(groups[client], []).append(self.whole[client])
        centres = {}
        for group in sorted(members):
            centres[group] = torch.stack(members[group]).double().mean(0).float()
        return centres


__getattr__ = find_old_names(__name__)
