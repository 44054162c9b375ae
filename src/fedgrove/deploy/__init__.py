"""A run over real machines: a server without data, and nodes that keep theirs to themselves.

The two halves of a Flower app::

    server = fedgrove.deploy.server_app("config.toml", out="runs/mine", clients=3)
    client = fedgrove.deploy.client_app(own_data)

``own_data(partition, node_config)`` gives a :class:`fedgrove.data.Federation` that holds the data
of this node's client: with that number, or alone. ``fedgrove app`` writes such an app
(:mod:`.app`), ``fedgrove keys`` who may take part in it (:mod:`.keys`).
"""

from .labels import with_labels
from .node import client_app
from .server import serve, server_app

__all__ = ["client_app", "serve", "server_app", "with_labels"]
