"""Models of which only a part is shared: the rest is a client's own, or stays as it started."""

from __future__ import annotations

from .. import trees
from ..core import Carry, Client, Outcome, Packet, Setup
from ..errors import UnfitError, spell_option
from ..nets.layout import Layout
from ..trees import Tree


def complete(carry: Carry, client: Client) -> Carry:
    """Part of personal methods: fill what was not received from what the client kept.

    At first it has kept nothing, and the network's initial parameters stand in.
    ``carry["received"]`` remembers what came; ``carry["model"]`` becomes the whole model, in the
    network's order.
    """
    rest = dict(carry)
    # Taken out, so that all clients have equal sets of trees from here on, and train in one stack.
    kept = rest.pop("kept", {})
    received = carry.get("model", {})
    # The last one wins: the initial parameters, over them the client's own, over them what came.
    whole = {**client.start, **kept, **received}
    return {**rest, "received": received, "model": trees.pick(whole, client.layout.shapes)}


def share_received(carry: Carry, client: Client) -> Outcome:
    """Part of personal methods: send back what was received, trained; keep the rest."""
    shared = {}
    kept = {}
    # Each in the order it is known by: the packet's as received, the memory's as in the model.
    for name in carry["received"]:
        shared[name] = carry["local"][name]
    for name, value in carry["local"].items():
        if name not in shared:
            kept[name] = value
    # An empty packet would still cost the bytes of its header.
    packets = {}
    if shared:
        packets["model"] = Packet(shared)
    memory = {}
    if kept:
        memory["kept"] = kept
    return Outcome(packets, memory=memory)


def start_personal(carry: Carry, client: Client) -> Carry:
    """Part of personal methods: a client's first personal model is the network's start."""
    return {"personal": client.start, **carry}


def use_personal(carry: Carry, client: Client) -> Carry:
    """Part of personal methods: use the personal model, or else the received one or the start."""
    if "personal" in carry:
        used = dict(carry)
        # Taken out, so that old and new clients are scored at once.
        used["model"] = used.pop("personal")
        return used
    if "model" in carry:
        return carry
    return {**carry, "model": client.start}


# ---- a body that is shared, and a head that is not -----------------------------------------------


def start_body(setup: Setup, head: int) -> Tree:
    """Part of personal methods: the server starts with all but the last ``head`` layers.

    Raises:
        UnfitError: The network has no other layers.
    """
    layers = setup.layout.trained_layers
    if head >= len(layers):
        raise UnfitError(
            f"the last {head} layers are the head, and it has {len(layers)} with parameters: no "
            f"body is left. Use a smaller head ({spell_option('set', 'head=1')}), or a deeper net."
        )
    local = set(setup.layout.last(head))
    return {name: value for name, value in setup.params.items() if name not in local}


def count_body(layout: Layout, head: int) -> int:
    """Return the number of parameters below the last ``head`` layers."""
    # `last` names buffers too, which the papers do not count.
    return layout.count(set(layout.params) - set(layout.last(head)))


# ---- a rest that no client trains ----------------------------------------------------------------


def complete_from_start(carry: Carry, client: Client) -> Carry:
    """Part of personal methods: fill what was not received from the network's start.

    ``carry["received"]`` is what came and ``carry["fixed"]`` the rest, each by its names;
    ``carry["model"]`` becomes the whole model, in the network's order.
    """
    received = carry["model"]
    fixed = {name: leaf for name, leaf in client.start.items() if name not in received}
    model = trees.pick({**fixed, **received}, client.layout.shapes)
    return {**carry, "received": received, "fixed": fixed, "model": model}


def send_received(carry: Carry, client: Client) -> Outcome:
    """Part of personal methods: send back what was received, trained, under its mask."""
    shared = trees.pick(carry["local"], carry["received"])
    return Outcome({"model": Packet(shared, carry.get("model.mask"))})
