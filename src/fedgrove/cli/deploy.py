"""``fedgrove app``, ``keys`` and ``proxy``: a run over real machines, and who may take part."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import KW_ONLY, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..options import OneRunOptions
from ..options.definition import Options, argument, option, option_class
from ..options.groups import METHOD, TimeoutOption
from ..report.terminal import show_status

if TYPE_CHECKING:
    from ..deploy.keys import Keys


FOLDER = argument("A folder that is empty or does not exist yet.", "DIR")


@option_class
class AppOptions(TimeoutOption, OneRunOptions):
    """Options of ``fedgrove app``."""

    not_typed = ("init", "trace", "faults", "per_task")
    method: str = field(metadata=argument(METHOD, "METHOD", complete="methods"))
    folder: str = field(metadata=FOLDER, kw_only=True)


def app_(options: AppOptions) -> None:
    """Write a Flower app that trains a method on machines that keep their own data.

    flwr run starts it unchanged. To read the data of your nodes, edit one function in data.py.
    """
    with show_status("loading torch") as say:
        from ..config.assemble import make_experiment
        from ..config.experiment import Federations
        from ..deploy.app import write_app

        say("reading the data")
        federations = Federations(options.data_dir)
        experiment = make_experiment(options, federations)
        written = write_app(
            experiment, options.folder, federations=federations, timeout=options.timeout
        )
    print(f"A Flower app for {written.clients} clients: {written.folder}")
    print(f"A node's data come from own_data in {written.folder / 'fedgrove_app' / 'data.py'}")
    print(f"The commands are in {written.folder / 'README.md'}; in short:")
    if find_spec("flwr") is None:
        print("  pip install 'fedgrove[flower]'     (Flower is not installed here)")
    print("  flower-superlink --insecure --disable-runtime-dependency-installation")
    node = "flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9100"
    print(f'  {node} --node-config "partition-id=0"     (one for each client, 0, 1, ...)')
    app = shlex.quote(str(written.folder))
    print(f"  flwr run {app} try --stream     (after [superlink.try] is in ~/.flwr/config.toml)")


@option_class
class KeysOptions(Options):
    """Options of ``fedgrove keys``."""

    folder: str = field(metadata=FOLDER)
    _: KW_ONLY
    nodes: int = option(3, "Number of nodes that get a key.", "N")
    host: Sequence[str] = option(
        (),
        "A name or address of the server, besides localhost; can be repeated.",
        "HOST",
        checked_as=Any,
        is_repeated=True,
    )


def keys(options: KeysOptions) -> None:
    """Create a certificate authority, a server certificate and node keys; overwrite nothing."""
    from ..deploy.keys import make_keys

    options.check()
    made = make_keys(options.folder, options.nodes, options.host)
    for line in registration(made):
        print(line)


def registration(made: Keys) -> list[str]:
    """Return what ``fedgrove keys`` prints about the next steps, line by line."""
    from ..deploy.proxy import PORT

    place = made.folder.absolute()

    def path(name: str) -> str:
        return shlex.quote(str(place / name))

    one = made.nodes[0]
    lines = [
        f"Keys for {len(made.nodes)} nodes: {place} (the certificate is for "
        f"{', '.join(made.hosts)})",
        "",
        "1. On the server, start the SuperLink. Whoever reaches its port can start runs, so it",
        "   listens on this machine only:",
        "   umask 077",
        f"   flower-superlink --ssl-ca-certfile {path('ca.crt')} --ssl-certfile "
        f"{path('server.crt')} --ssl-keyfile {path('server.key')} --enable-supernode-auth "
        "--host 127.0.0.1 --port 8000 --database superlink.db "
        "--disable-runtime-dependency-installation",
        "",
    ]
    if made.host == "127.0.0.1":
        port = 8000
        lines += [
            "2. Nodes on this machine connect to it directly. For nodes on other machines make",
            "   keys with --host, the server's name or address.",
        ]
    else:
        port = PORT
        lines += [
            "2. On the server, open a port for the nodes, and for nothing else:",
            f"   fedgrove proxy {shlex.quote(str(place))} --port {port}",
        ]
    lines += [
        "",
        "3. On the server, add the SuperLink to ~/.flwr/config.toml (on another machine too, with",
        f"   ssh -L 8000:127.0.0.1:8000 {made.host}):",
        "   [superlink.mine]",
        '   address = "127.0.0.1:8000"',
        f'   root-certificates = "{place / "ca.crt"}"',
        "",
        "4. Register the nodes, once:",
    ]
    for name in made.nodes:
        lines.append(f"   flwr supernode register {path(name + '.pub')} mine")
    lines += [
        "",
        f"5. Copy ca.crt and one key ({one}, ...) to each node, and start it there:",
        "   umask 077",
        f"   flower-supernode --superlink {made.host}:{port} --root-certificates {path('ca.crt')} "
        f'--auth-supernode-private-key {path(one)} --node-config "partition-id=0"',
        "",
        "6. Train, from the folder of an app (fedgrove app METHOD DIR):",
        "   flwr run . mine --stream",
        "",
        "Keep ca.key offline: whoever has it can pretend to be the server.",
    ]
    return lines


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
    """Let nodes reach a SuperLink that listens on this machine only, until Ctrl-C.

    Only requests of nodes whose public keys are in the folder are passed on.
    """
    options.check()
    from ..deploy.proxy import serve_nodes

    print(f"Nodes connect to {options.host}:{options.port}; Ctrl-C ends this.", flush=True)
    serve_nodes(options.folder, options.host, options.port, options.superlink)
