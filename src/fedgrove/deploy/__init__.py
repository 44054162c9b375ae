"""A run over real machines: a server without data, and nodes that keep their own data.

The two sides of a Flower app::

    server = fedgrove.deploy.server_app("config.toml", out="runs/mine", clients=3)
    client = fedgrove.deploy.client_app(own_data)

``own_data(partition, node_config)`` returns a :class:`fedgrove.data.Federation` with the data of
this node's client: as client number ``partition``, or as its only client. ``fedgrove app`` writes
such an app (:mod:`.app`), and ``fedgrove keys`` writes its keys (:mod:`.keys`).
"""

from .node import client_app, with_labels
from .server import serve, server_app

__all__ = ["client_app", "serve", "server_app", "with_labels"]
