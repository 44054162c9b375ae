"""What stands before every fold: a report that would spoil the model is refused, with a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Info, Packet, Report
from ..nets.layout import Layout


def _finite(v: Tensor) -> bool:
    """Whether all numbers are finite: if their sum is, they are; a sum that is not may only be too large."""
    return math.isfinite(float(v.sum())) or bool(torch.isfinite(v).all())


@dataclass(frozen=True)
class Gate:
    """Refuses reports with values that are not finite, shapes that are not the network's, or counts that are not true.

    A leaf that carries the name of one of the network's tensors must have its shape, and a packet that comes back
    under the name it was sent under must hold the same tensors. ``examples`` must be what the client enrolled with: a
    client cannot buy weight by claiming more.
    """

    finite: bool = True

    def refuses(
        self,
        report: Report,
        layout: Layout,
        clients: Mapping[int, Info],
        sent: Mapping[str, Packet] | None = None,
    ) -> str | None:
        """Why a report cannot be used, as a sentence; None if it can. ``sent`` is what the client was sent."""
        who = f"client {report.of}"
        if report.of not in clients:
            return f"{who} is not one of the {len(clients)} clients enrolled."
        if report.examples != clients[report.of].examples:
            return f"{who} claims {report.examples} examples but enrolled with {clients[report.of].examples}."
        for name, packet in report.give.items():
            if reason := self._packet(packet, layout):
                return f"{who} sent {name} with {reason}"
            if (
                sent
                and name in sent
                and (odd := sorted(packet.values.keys() ^ sent[name].values.keys()))
            ):
                return f"{who} sent {name} with other tensors than it got: {', '.join(odd)} on one side only."
        return None

    def _packet(self, packet: Packet, layout: Layout) -> str | None:
        for tree, what in ((packet.values, "values"), (packet.mask or {}, "a mask")):
            for k, v in tree.items():
                if k in layout.shapes and tuple(v.shape) != tuple(layout.shapes[k]):
                    return f"{what} of shape {tuple(v.shape)} in {k}; the network has {tuple(layout.shapes[k])}."
        if self.finite:
            for k, v in packet.values.items():
                if v.is_floating_point() and not _finite(v):
                    return f"values that are not finite in {k}; a lower lr or a gradient clip may help."
        return None
