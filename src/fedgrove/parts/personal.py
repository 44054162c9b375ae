"""Models of which a client keeps a part: what is received is shared, all else stays at home."""

from __future__ import annotations

from ..core import Carry, Client, Outcome, Packet


def complete(carry: Carry, client: Client) -> Carry:
    """Fill what was not received from what the client kept, or at first from the network's initial parameters.

    ``carry["received"]`` remembers what came; ``carry["model"]`` becomes the whole model, in the network's order.
    """
    received = carry.get("model", {})
    whole = {**client.start, **carry.get("kept", {}), **received}
    return {**carry, "received": received, "model": {k: whole[k] for k in client.layout.shapes}}


def share_received(carry: Carry, client: Client) -> Outcome:
    """Send back what was received, trained; keep the rest."""
    shared = {k: carry["local"][k] for k in carry["received"]}
    kept = {k: v for k, v in carry["local"].items() if k not in shared}
    return Outcome(
        {"model": Packet(shared)} if shared else {}, memory={"kept": kept} if kept else {}
    )
