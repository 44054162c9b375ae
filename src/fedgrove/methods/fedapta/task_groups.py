"""Which devices do the same task, found from the updates of their last layers (FedAPTA, Alg. 3).

The steps, each a function: distances between devices (:func:`distances`), HDBSCAN on them
(:class:`Hdbscan`), clusters are divided by the groups so far (:func:`refined`), noise joins its
nearest neighbour (:func:`settled`), clusters that agree are one (:func:`merged`), devices move to
the one that they agree with best (:func:`adjusted`), settled devices of a group stay together
(:func:`together`), and clusters get the numbers of the groups they continue (:func:`matched`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import check, unknown
from ...parts.group import renumbered
from .task_memory import Trace, agreement

DISTANCES = ("cosine", "l1", "l2", "inner")
"""How two updates are compared; the paper's choice, and those of its Figure 3."""
NOISE = -1
"""What HDBSCAN calls a device that is in no cluster."""
NEIGHBOURS = 2
"""HDBSCAN's min_samples: a device and its nearest neighbour say how dense it is around it. With as
many as the smallest cluster has, its default, devices between two tasks join them."""
SWEEPS = 3
"""How often devices may move to clusters that they agree with better."""


@dataclass(frozen=True)
class Hdbscan:
    """Clusters of devices by the direction in which their last layers moved.

    The paper's literal rule is ``Hdbscan(min_size=2, common=False, memory=False, merge=0,
    outputs=False, adjust=False)``: it compares this round's updates alone. Updates of one task
    agree while a model learns; once it has learnt, what is left of them is each device's own pull,
    and devices of one task point away from each other. So by default a device is compared by the
    sum of its updates so far, the first of which count most.
    """

    distance: str = "cosine"
    """cosine, l1, l2 or inner (the inner product)."""
    min_size: int = 3
    """The smallest cluster, HDBSCAN's min_cluster_size. With 2, chance pairs split a task."""
    common: bool = True
    """Whether a cosine is over the weights that both devices have; without, devices of one ratio
    look alike whatever their tasks, since they lack the same weights."""
    memory: bool = True
    """Whether a device is compared by the sum of its updates; False: by this round's alone."""
    fade: float = 0.85
    """In that sum each update counts this share of the one before."""
    settle: float = 0.5
    """A device is settled by an update shorter than this share of its first: it has learnt its
    task, and later updates say nothing of which it is. Its sum is then final, and it leaves its
    group only if its task changes, or with all settled devices of its group. 0: never."""
    forget: float = 0.2
    """A device forgets its earlier updates if the new one agrees (as a cosine) by so much more with
    another group than with its own: its task has changed. An update that is shorter than the
    device's first counts less. Nothing without ``memory``."""
    merge: float = 0.6
    """Clusters are one if devices of different ones agree, on average, at least this share of what
    devices within them do; 0: never. For cosines only."""

    outputs: bool = True
    """Whether devices whose updates change different outputs of the last layer, as in
    classification and regression, are of different tasks whatever their cosine."""
    adjust: bool = True
    """Whether each device ends up in the cluster with whose sum it agrees best. HDBSCAN goes by
    nearest neighbours, of which a device with few examples may have the wrong ones."""

    def __post_init__(self) -> None:
        if self.distance not in DISTANCES:
            raise unknown("distance", self.distance, DISTANCES)
        check(self.min_size >= 2, "min_size", self.min_size, "2 or more devices")
        check(0 < self.fade <= 1, "fade", self.fade, "in (0, 1]")
        check(0 <= self.settle <= 1, "settle", self.settle, "in [0, 1]")
        check(self.forget > 0, "forget", self.forget, "above 0")
        check(0 <= self.merge <= 1, "merge", self.merge, "in [0, 1]")

    def __call__(
        self, vectors: Tensor, present: Tensor, before: Sequence[int] | None = None
    ) -> list[int]:
        """The cluster of each row, from 0 in order of first appearance; :data:`NOISE` for none.

        If HDBSCAN finds no cluster, as among fewer rows than ``min_size``, all are noise. With
        ``merge``, ``before`` are the groups so far (:data:`NOISE` for a device without one): groups
        that were apart stay so unless they agree, whatever HDBSCAN joins.
        """
        if not self.common:
            present = torch.ones_like(present)
        apart = distances(vectors, present, self.distance)
        labels = hdbscan(apart, self.min_size)
        merges = self.merge > 0 and self.distance == "cosine"
        if merges and before is not None:
            labels = refined(labels, before, self.min_size)
        labels = settled(labels, apart)
        if merges:
            labels = merged(labels, 1 - apart, self.merge)
        if self.adjust:
            labels = adjusted(labels, vectors, present)
        return labels


def by_outputs(
    grouping: Hdbscan,
    vectors: Tensor,
    present: Tensor,
    before: Sequence[int],
    outputs: Sequence[Tensor],
) -> list[int]:
    """FedAPTA: clusters, found separately among devices that train different outputs.

    Classification and regression share the first rows of one last layer. There their updates may
    agree by chance more than two updates of one task do, so the cosine alone confuses them; but
    which rows an update changes shows the task for certain. Devices among which HDBSCAN finds no
    cluster stay in their groups; if all devices train the same outputs, all are noise.
    """
    rows_of: dict[tuple[bool, ...], list[int]] = {}
    for row, moved in enumerate(outputs):
        rows_of.setdefault(tuple(moved.tolist()), []).append(row)
    if len(rows_of) == 1 or not grouping.outputs:
        return grouping(vectors, present, before)
    result = [NOISE] * len(vectors)
    count = 0
    for rows in rows_of.values():
        groups = {place: before[row] for place, row in enumerate(rows) if before[row] != NOISE}
        labels = grouping(vectors[rows], present[rows], [before[row] for row in rows])
        # All are noise, or none is.
        if NOISE in labels:
            apart = distances(vectors[rows], present[rows], grouping.distance)
            placed = stay(groups, range(len(rows)), apart)
            labels = renumbered([placed[place] for place in range(len(rows))])
        for row, label in zip(rows, labels, strict=True):
            result[row] = count + label
        count += max(labels) + 1
    return renumbered(result)


LITERAL = Hdbscan(min_size=2, common=False, memory=False, merge=0.0, outputs=False, adjust=False)
"""Alg. 3 as it is printed."""


# ---- how far devices are from each other ---------------------------------------------------------


def distances(vectors: Tensor, present: Tensor, distance: str = "cosine") -> Tensor:
    r"""FedAPTA: the distance of every two devices' vectors, over the entries both have.

    Entries where ``present`` is false are 0 in ``vectors``.

    cosine: :math:`1 - \Delta_i \cdot \Delta_j / (|\Delta_i||\Delta_j|)` (Eq. 4), both lengths over
    the entries that *both* rows have. l1, l2: the length of the difference. inner: how far the
    inner product is below the largest one there is, in units of that.

    >>> rows = torch.tensor([[3.0, 4.0], [3.0, 0.0]])
    >>> distances(rows, torch.tensor([[True, True], [True, False]]))[0, 1].item()
    0.0
    >>> distances(rows, torch.ones(2, 2).bool())[0, 1].item()
    0.4
    """
    x = vectors.double()
    if distance == "cosine":
        has = present.double()
        # Row i, column j: the square of i's length over what j has.
        squares = (x * x) @ has.T
        lengths = (squares * squares.T).sqrt()
        # The smallest normal number instead of 0: a row of zeros is at distance 1 from all others.
        apart = 1 - (x @ x.T) / lengths.clamp_min(torch.finfo(torch.float64).tiny)
        apart = apart.clamp(0, 2)
    elif distance == "inner":
        products = x @ x.T
        largest = products.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        apart = (largest - products) / largest
    else:
        apart = torch.cdist(x, x, p=1.0 if distance == "l1" else 2.0)
    # A matrix product need not be symmetric to the last bit, nor its diagonal exactly 0.
    apart = (apart + apart.T) / 2
    apart.fill_diagonal_(0)
    return apart


# ---- clusters ------------------------------------------------------------------------------------


def hdbscan(apart: Tensor, min_size: int) -> list[int]:
    """FedAPTA: the clusters that HDBSCAN finds (Campello et al. 2013), and :data:`NOISE`."""
    # The library refuses fewer rows than this.
    if len(apart) < max(2, min_size):
        return [NOISE] * len(apart)
    # Imported where it is used: scikit-learn is slow to load.
    from sklearn.cluster import HDBSCAN

    model = HDBSCAN(
        min_cluster_size=min_size, min_samples=NEIGHBOURS, metric="precomputed", copy=True
    )
    labels: list[int] = model.fit_predict(apart.numpy()).tolist()
    return labels


def settled(labels: Sequence[int], apart: Tensor) -> list[int]:
    """FedAPTA: a device that is noise joins its nearest neighbour's cluster.

    If there is no cluster, all stay noise.

    >>> apart = torch.tensor([[0.0, 1, 9, 4], [1, 0, 9, 2], [9, 9, 0, 3], [4, 2, 3, 0]])
    >>> settled([5, 5, 2, -1], apart)
    [0, 0, 1, 0]
    """
    clustered = [row for row, label in enumerate(labels) if label != NOISE]
    if not clustered:
        return list(labels)
    result = list(labels)
    for row, label in enumerate(labels):
        if label == NOISE:
            neighbour = clustered[int(apart[row, clustered].argmin())]
            result[row] = labels[neighbour]
    return renumbered(result)


def refined(labels: Sequence[int], before: Sequence[int], min_size: int) -> list[int]:
    """FedAPTA: clusters divided by the groups their devices were in; small ones are noise.

    >>> refined([0, 0, 0, 0, 0, 1, 1], before=[4, 4, 8, 8, 4, 8, 4], min_size=2)
    [0, 0, 1, 1, 0, -1, -1]
    """
    pieces = list(zip(labels, before, strict=True))
    sizes = Counter(pieces)
    numbers: dict[tuple[int, int], int] = {}
    result = []
    for piece in pieces:
        is_cluster = piece[0] != NOISE and sizes[piece] >= min_size
        if is_cluster:
            result.append(numbers.setdefault(piece, len(numbers)))
        else:
            result.append(NOISE)
    return result


def merged(labels: Sequence[int], similarity: Tensor, share: float) -> list[int]:
    """FedAPTA: clusters of devices that agree become one: the two that agree most, repeatedly.

    Two agree if the mean similarity across them is at least ``share`` of the smaller of their mean
    similarities within, which must be above 0.

    >>> within, across = 0.5, 0.4
    >>> pair = torch.tensor([[1, within], [within, 1]])
    >>> other = torch.full((2, 2), across)
    >>> similarity = torch.cat([torch.cat([pair, other], 1), torch.cat([other, pair], 1)])
    >>> merged([0, 0, 1, 1], similarity, 0.7), merged([0, 0, 1, 1], similarity, 0.9)
    ([0, 0, 0, 0], [0, 0, 1, 1])
    """
    result = list(labels)
    while True:
        best = share
        pair = None
        members = _members(result)
        numbers = sorted(members)
        for place, one in enumerate(numbers):
            for other in numbers[place + 1 :]:
                within = min(_within(similarity, members[one]), _within(similarity, members[other]))
                across = float(similarity[members[one]][:, members[other]].mean())
                if within > 0 and across / within >= best:
                    best = across / within
                    pair = (one, other)
        if pair is None:
            break
        one, other = pair
        for row in members[other]:
            result[row] = one
    return result if NOISE in result else renumbered(result)


def adjusted(labels: Sequence[int], vectors: Tensor, present: Tensor) -> list[int]:
    """FedAPTA: every device moves to the cluster that it agrees with best, repeatedly.

    The device itself is left out of the sum that it is compared with.

    At most :data:`SWEEPS` times, or until none moves. Noise stays noise.

    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.2], [0.0, 1.0], [0.1, 1.0]])
    >>> adjusted([0, 0, 1, 1, 1], rows, torch.ones(5, 2).bool())
    [0, 0, 0, 1, 1]
    """
    result = list(labels)
    if NOISE in result:
        return result
    # Converted once, not for each comparison of a row.
    vectors = vectors.double()
    for _ in range(SWEEPS):
        sums = {}
        for label, rows in _members(result).items():
            sums[label] = vectors[rows].sum(0)
        moved = []
        for row, label in enumerate(result):
            update = Trace(vectors[row], present[row])
            best = label
            # Without the row itself, or every row would agree best with the sum it is in.
            most = agreement(update, sums[label] - vectors[row])
            for other, direction in sums.items():
                if other == label:
                    continue
                agrees = agreement(update, direction)
                if agrees > most:
                    best = other
                    most = agrees
            moved.append(best)
        if moved == result:
            break
        result = moved
    return renumbered(result)


def _members(labels: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        if label != NOISE:
            members.setdefault(label, []).append(row)
    return members


def _within(similarity: Tensor, rows: Sequence[int]) -> float:
    """The mean over pairs of different rows; 1 for a single row."""
    count = len(rows)
    if count == 1:
        return 1.0
    block = similarity[rows][:, rows]
    return float((block.sum() - block.diagonal().sum()) / (count * (count - 1)))


# ---- groups that last from round to round --------------------------------------------------------


def stay(groups: Mapping[int, int], devices: Sequence[int], apart: Tensor) -> dict[int, int]:
    """FedAPTA: the groups as they were; a newcomer joins its nearest neighbour's, or group 0.

    >>> far = torch.tensor([[0.0, 1, 3], [1, 0, 2], [3, 2, 0]])
    >>> stay({4: 7, 6: 9}, devices=[4, 5, 6], apart=far)
    {4: 7, 6: 9, 5: 7}
    """
    result = dict(groups)
    placed_rows = [row for row, k in enumerate(devices) if k in groups]
    for row, k in enumerate(devices):
        if k in groups:
            continue
        if placed_rows:
            neighbour = placed_rows[int(apart[row, placed_rows].argmin())]
            result[k] = groups[devices[neighbour]]
        else:
            result[k] = 0
    return result


def matched(labels: Mapping[int, int], groups: Mapping[int, int], fresh: int) -> dict[int, int]:
    """FedAPTA: a group number for each cluster: that of the group it shares most devices with.

    ``labels`` and ``groups`` are by device: its new cluster, and the group it was in. Clusters are
    matched so that the number of devices shared in all is largest (Hungarian method). A cluster
    left over, or one that shares no device with its match, is a new group, numbered from ``fresh``.

    >>> matched({1: 0, 2: 0, 3: 1, 4: 1, 5: 1}, groups={1: 7, 2: 7, 3: 7, 4: 9}, fresh=10)
    {0: 7, 1: 9}
    """
    clusters = sorted(set(labels.values()))
    # How many devices each cluster has from each group; newcomers were in none.
    shared: Counter[tuple[int, int]] = Counter()
    continuing = set()
    for device, cluster in labels.items():
        if device in groups:
            shared[cluster, groups[device]] += 1
            continuing.add(groups[device])
    known = sorted(continuing)
    numbers: dict[int, int] = {}
    if known:
        # Imported where it is used: most methods form no groups.
        from scipy.optimize import linear_sum_assignment

        table = []
        for cluster in clusters:
            table.append([shared[cluster, group] for group in known])
        rows, columns = linear_sum_assignment(table, maximize=True)
        for row, column in zip(rows, columns, strict=True):
            # The method matches what is left over, too: two that share no device are not one group.
            if table[row][column]:
                numbers[clusters[row]] = known[column]
    for cluster in clusters:
        if cluster not in numbers:
            numbers[cluster] = fresh
            fresh += 1
    return dict(sorted(numbers.items()))


def together(labels: Sequence[int], before: Sequence[int], is_settled: Sequence[bool]) -> list[int]:
    """FedAPTA: settled devices of one group all take the cluster that most of them are in.

    Of equally many the one of the smallest number. A group can join another so, but is not divided,
    and no settled device leaves it alone.

    >>> together([0, 0, 1, 1, 1], [4, 4, 4, 8, 8], [True, True, True, True, False])
    [0, 0, 0, 1, 1]
    """
    votes: dict[int, Counter[int]] = {}
    for label, group, settles in zip(labels, before, is_settled, strict=True):
        if settles:
            votes.setdefault(group, Counter())[label] += 1
    result = list(labels)
    for row, group in enumerate(before):
        if is_settled[row]:
            count = votes[group]
            result[row] = min(count, key=lambda label: (-count[label], label))
    return renumbered(result)
