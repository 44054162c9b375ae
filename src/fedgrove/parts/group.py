"""Who belongs together: ``Grouping(vectors, groups) -> labels``, one vector per client.

Labels count from 0 in the order in which groups first appear, so they do not depend on how a library numbers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .. import trees
from ..errors import check, unknown
from ..seeds import torch_rng

HELD = 1 << 30
"""Bytes of whole updates that a server holds at once; of further clients it keeps a sketch."""
SKETCH = 1 << 14
MOST = 8
"""The most groups that are tried where their number is chosen."""
LINKAGES = ("average", "complete", "single")


class Grouping(Protocol):
    """A rule that divides clients by vectors that describe them; ``groups`` 0 leaves their number to the rule."""

    def __call__(self, vectors: Tensor, groups: int) -> list[int]:
        """The group of each row."""


def cosine_distances(vectors: Tensor) -> Tensor:
    r""":math:`d(k, k') = 1 - \frac{\Delta_k \cdot \Delta_{k'}}{|\Delta_k||\Delta_{k'}|}` (CA-AFP, Eq. 4).

    A vector of zeros is at distance 1 from all others.

    >>> cosine_distances(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]))[0]
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    x = vectors.double()
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    far: Tensor = (1 - unit @ unit.T).clamp(0, 2)
    far = (far + far.T) / 2
    far.fill_diagonal_(0)
    return far


@dataclass(frozen=True)
class AverageLinkage:
    """Agglomerative clustering on the cosine of updates (CA-AFP, FedCHAR).

    ``groups`` 0: as many as give the best silhouette, from 2 to 8. From a random start average linkage tends to split
    off single clients; a warm-up before the clustering, or ``linkage="complete"``, gives groups of more even size.
    """

    linkage: str = "average"

    def __post_init__(self) -> None:
        if self.linkage not in LINKAGES:
            raise unknown("linkage", self.linkage, LINKAGES)

    def __call__(self, vectors: Tensor, groups: int) -> list[int]:
        """The group of each row; as many groups as asked for, or one per client where there are fewer clients."""
        far, n = cosine_distances(vectors).numpy(), len(vectors)
        if groups == 1 or n < 2 or (not groups and n < 3):
            return [0] * n
        if groups:
            return renumbered(self._divide(far, min(groups, n)))
        from sklearn.metrics import silhouette_score

        tried = {g: self._divide(far, g) for g in range(2, min(MOST, n - 1) + 1)}
        return renumbered(
            max(
                tried.values(),
                key=lambda labels: silhouette_score(far, labels, metric="precomputed"),
            )
        )

    def _divide(
        self, far: np.ndarray[tuple[int, ...], np.dtype[np.float64]], groups: int
    ) -> list[int]:
        from sklearn.cluster import AgglomerativeClustering

        rule = AgglomerativeClustering(
            n_clusters=groups, metric="precomputed", linkage=self.linkage
        )
        return [int(label) for label in rule.fit_predict(far)]


@dataclass(frozen=True)
class Bipartition:
    r"""Clustered federated learning (Sattler et al. 2020, Alg. 1): split in two, and either half again.

    A group is divided while its mean update is small against its members' (their pulls cancel out):
    :math:`|\bar\Delta| < \epsilon \max_k |\Delta_k|`, along the cut that leaves the largest cosine between the halves
    as small as it can be (complete linkage on the cosine). ``groups`` is the most groups there will be, 0: any number.

    Differs from the paper: its two bounds are absolute numbers of one network; here they are one share of the largest
    update, and all clients are asked once instead of in every round.
    """

    ratio: float = 0.4

    def __post_init__(self) -> None:
        check(0 < self.ratio <= 1, "ratio", self.ratio, "in (0, 1]")

    def __call__(self, vectors: Tensor, groups: int) -> list[int]:
        """The group of each row."""
        parts, done = [list(range(len(vectors)))], list[list[int]]()
        while parts:
            part = parts.pop(0)
            full = groups and len(parts) + len(done) + 1 >= groups
            if len(part) < 3 or full or not self.divides(vectors[part].double()):
                done.append(part)
                continue
            labels = AverageLinkage("complete")(vectors[part], 2)
            parts += [
                [k for k, label in zip(part, labels, strict=True) if label == side]
                for side in (0, 1)
            ]
        label_of = {k: i for i, part in enumerate(done) for k in part}
        return renumbered([label_of[k] for k in range(len(vectors))])

    def divides(self, updates: Tensor) -> bool:
        """Whether the members' pulls cancel out."""
        return bool(updates.mean(0).norm() < self.ratio * updates.norm(dim=1).max())


def renumbered(labels: Sequence[int]) -> list[int]:
    """The same groups, numbered by first appearance.

    >>> renumbered([2, 0, 2, 1])
    [0, 1, 0, 2]
    """
    order: dict[int, int] = {}
    return [order.setdefault(label, len(order)) for label in labels]


def nearest(vector: Tensor, centres: Mapping[int, Tensor]) -> int:
    """The group whose mean update has the largest cosine with a client's: where a late joiner goes."""
    far = cosine_distances(torch.stack([vector.double(), *(c.double() for c in centres.values())]))[
        0, 1:
    ]
    return list(centres)[int(far.argmin())]


def sketch(vector: Tensor, size: int = SKETCH) -> Tensor:
    r"""A count sketch: every number goes, with a random sign, into one of ``size`` sums (Charikar et al. 2002).

    Inner products survive up to a standard deviation of about :math:`|x||y| / \sqrt{size}`: .008 of a cosine.
    """
    if vector.numel() <= size:
        return vector.float()
    rng = torch_rng(0, "sketch", vector.numel())
    places = torch.randint(size, (vector.numel(),), generator=rng)
    signs = torch.randint(2, (vector.numel(),), generator=rng) * 2.0 - 1
    return torch.zeros(size).index_add_(0, places, vector.float() * signs)


class Updates:
    """Clients' updates as they come: whole ones while they fit into ``held`` bytes, sketches of all if not all will.

    Sums over groups are asked for after the groups are known, so they can be taken over whole updates only: over all
    clients while these fit, else over the first ones that came.
    """

    def __init__(self, clients: int, held: int = HELD) -> None:
        self._clients, self._held = clients, held
        self.whole: dict[int, Tensor] = {}
        self._sketches: dict[int, Tensor] = {}

    def add(self, client: int, update: Mapping[str, Tensor]) -> None:
        """Take one update in."""
        vector = trees.flat({k: v.float() for k, v in update.items()})
        room = max(1, self._held // (4 * max(1, vector.numel())))
        if len(self.whole) < room or client in self.whole:
            self.whole[client] = vector
        if self._clients > room:
            self._sketches[client] = sketch(vector)

    def divide(self, grouping: Grouping, groups: int) -> dict[int, int]:
        """The group of each client, by client number."""
        vectors = self._sketches or self.whole
        order = sorted(vectors)
        labels = grouping(torch.stack([vectors[k] for k in order]), groups)
        return dict(zip(order, labels, strict=True))

    def centres(self, groups: Mapping[int, int]) -> dict[int, Tensor]:
        """The mean of each group's whole updates; a group none of whose updates is held has none."""
        found: dict[int, list[Tensor]] = {}
        for k in sorted(self.whole):
            found.setdefault(groups[k], []).append(self.whole[k])
        return {g: torch.stack(rows).double().mean(0).float() for g, rows in sorted(found.items())}
