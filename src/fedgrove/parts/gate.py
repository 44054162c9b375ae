"""What every report passes before it is folded into a model: one that would spoil it is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Info, Packet, Report
from ..nets.layout import Layout


@dataclass(frozen=True)
class Gate:
    """Refuses reports that cannot be true, or would spoil the model, and says why.

    Those are values that are not finite, shapes that are not the network's, and counts that are not
    the client's. A leaf that carries the name of one of the network's tensors must have its shape,
    and a packet that comes back under the name it was sent under must hold the same tensors.
    ``examples`` must be what the client enrolled with: a client cannot buy weight by claiming more.
    """

    finite: bool = True

    def refuses(
        self,
        report: Report,
        layout: Layout,
        clients: Mapping[int, Info],
        sent: Mapping[str, Packet] | None = None,
    ) -> str | None:
        """Why a report cannot be used, as a sentence; None if it can.

        ``sent`` is what the client was sent.
        """
        client = f"client {report.of}"
        if report.of not in clients:
            return f"{client} is not one of the {len(clients)} clients enrolled."
        enrolled = clients[report.of].examples
        if report.examples != enrolled:
            return f"{client} claims {report.examples} examples but enrolled with {enrolled}."
        packets_sent = {} if sent is None else sent
        for name, packet in report.give.items():
            reason = self._refuses_packet(packet, layout)
            if reason is not None:
                return f"{client} sent {name} with {reason}"
            if name in packets_sent:
                one_sided = sorted(packet.values.keys() ^ packets_sent[name].values.keys())
                if one_sided:
                    return (
                        f"{client} sent {name} with other tensors than it got: "
                        f"{', '.join(one_sided)} on one side only."
                    )
        return None

    def _refuses_packet(self, packet: Packet, layout: Layout) -> str | None:
        # All shapes before any value: a wrong shape is the more telling reason.
        reason = _wrong_shape(packet.values, "values", layout)
        if reason is None and packet.mask is not None:
            reason = _wrong_shape(packet.mask, "a mask", layout)
        if reason is not None:
            return reason
        if self.finite:
            for name, value in packet.values.items():
                if value.is_floating_point() and not _is_finite(value):
                    return (
                        f"values that are not finite in {name}; "
                        "a lower lr or a gradient clip may help."
                    )
        return None


def _wrong_shape(tree: Mapping[str, Tensor], what: str, layout: Layout) -> str | None:
    """The first tensor whose shape is not the network's; names the network lacks are free."""
    for name, value in tree.items():
        if name in layout.shapes:
            given = tuple(value.shape)
            expected = tuple(layout.shapes[name])
            if given != expected:
                return f"{what} of shape {given} in {name}; the network has {expected}."
    return None


def _is_finite(value: Tensor) -> bool:
    """Whether all numbers are finite."""
    # One pass without a temporary in the usual case: a finite sum has only finite terms. A sum that
    # is not finite may only be too large, so then each number is looked at.
    if math.isfinite(float(value.sum())):
        return True
    return bool(torch.isfinite(value).all())
