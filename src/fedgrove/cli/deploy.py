"""``fedgrove app``, ``keys`` and ``proxy``: a run over real machines, and who may take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, field
from importlib.util import find_spec
from typing import Any

from ..options import OneRunOptions
from ..options.definition import Options, argument, option, option_class
from ..options.groups import METHOD, TimeoutOption
from ..report.terminal import show_status

FOLDER = argument("A folder that is empty or does not exist.", "DIR")


@option_class
class AppOptions(TimeoutOption, OneRunOptions):
    """Options of ``fedgrove app``."""

    not_typed = ("init", "trace", "faults", "per_task")
    method: str = field(metadata=argument(METHOD, "METHOD", complete="methods"))
    folder: str = field(metadata=FOLDER, kw_only=True)


def app_(options: AppOptions) -> None:
    """Write a Flower app that trains on machines with their own data.

    flwr run starts it unchanged. To read the data of your nodes, edit one function in data.py.
    """
    with show_status("loading torch") as say:
        from ..config.assemble import make_experiment
        from ..config.experiment import Federations
        from ..deploy.app import write_app
        from ..report.page import render

        say("reading the data")
        federations = Federations(options.data_dir)
        experiment = make_experiment(options, federations)
        written = write_app(
            experiment, options.folder, federations=federations, timeout=options.timeout
        )
    values = {
        "clients": written.clients,
        "folder": written.folder,
        "has_flower": find_spec("flwr") is not None,
    }
    print(render("app.txt", values, near=__file__), end="")


@option_class
class KeysOptions(Options):
    """Options of ``fedgrove keys``."""

    folder: str = field(metadata=FOLDER)
    _: KW_ONLY
    nodes: int = option(3, "Number of nodes that get a key.", "N")
    host: Sequence[str] = option(
        (),
        "A name or address of the server, in addition to localhost; can be repeated.",
        "HOST",
        checked_as=Any,
        is_repeated=True,
    )


def keys(options: KeysOptions) -> None:
    """Create a certificate authority, a server certificate and keys.

    Each node gets a key. Existing files are never overwritten.
    """
    from ..deploy.keys import make_keys
    from ..deploy.proxy import PORT
    from ..report.page import render

    options.check()
    made = make_keys(options.folder, options.nodes, options.host)
    is_local = made.host == "127.0.0.1"
    values = {
        "place": made.folder.absolute(),
        "nodes": made.nodes,
        "hosts": made.hosts,
        "host": made.host,
        # Nodes on this machine reach the SuperLink itself, others the proxy.
        "port": 8000 if is_local else PORT,
        "is_local": is_local,
    }
    print(render("keys.txt", values, near=__file__), end="")


@option_class
class ProxyOptions(Options):
    """Options of ``fedgrove proxy``."""

    folder: str = field(
        metadata=argument("The folder with server.crt, server.key, ca.crt and *.pub.", "KEYS")
    )
    _: KW_ONLY
    host: str = option("0.0.0.0", "The address to listen on.", "HOST")
    port: int = option(
        8443,
        "The port that nodes connect to.",
        "N",
        allowed="between 1 and 65535",
        check=lambda port: 0 < port < 65536,
    )
    superlink: str = option("127.0.0.1:8000", "The SuperLink.", "HOST:PORT")


def proxy(options: ProxyOptions) -> None:
    """Let nodes reach a SuperLink that listens on this machine only.

    Only requests of nodes whose public keys are in the folder are passed on.
    """
    options.check()
    from ..deploy.proxy import serve_nodes

    print(f"Nodes connect to {options.host}:{options.port}; press Ctrl-C to stop.", flush=True)
    serve_nodes(options.folder, options.host, options.port, options.superlink)
