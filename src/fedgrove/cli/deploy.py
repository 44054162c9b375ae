"""``fedgrove app`` and ``fedgrove keys``: a run over real machines, and who may take part in it."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from ..report.terminal import show_status
from . import complete
from . import options as o

if TYPE_CHECKING:
    from ..deploy.keys import Keys

Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        help="NAME or NAME:PRESET, see: fedgrove list methods; or FILE.py:Class",
        show_default=False,
        autocompletion=complete.methods,
    ),
]
Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="A folder that is empty or not there yet.", show_default=False
    ),
]
Nodes = Annotated[
    int, typer.Option("--nodes", help="How many nodes get a key.", metavar="N", parser=o.whole)
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        help="A name or address of the server, beside localhost; may be repeated.",
        metavar="HOST",
    ),
]


def app(
    ctx: typer.Context,
    method: Method,
    folder: Folder,
    data: o.Data = None,
    label: o.Label = None,
    client: o.ClientColumn = None,
    window: o.Window = None,
    stride: o.Stride = None,
    channels: o.Channels = None,
    time: o.TimeColumn = None,
    net: o.Net = None,
    partition: o.Partition = None,
    scenario: o.Scenario = None,
    split: o.Split = None,
    validation: o.Validation = None,
    clients: o.Clients = None,
    cohort: o.Cohort = None,
    rounds: o.Rounds = None,
    epochs: o.Epochs = None,
    batch: o.BatchSize = None,
    lr: o.Lr = None,
    finetune: o.Finetune = None,
    profile: o.Profile = None,
    seed: o.Seed = None,
    data_dir: o.DataDir = None,
    set: o.Set = None,
    evaluate: o.Evaluate = None,
    quorum: o.Quorum = None,
    deadline: o.Deadline = None,
    timeout: o.Timeout = None,
    norm_bound: o.NormBound = None,
    privacy: o.Privacy = None,
    freeze: o.Freeze = None,
    no_standardise: o.NoStandardise = False,
) -> None:
    """Write a Flower app of a method, for machines that keep their own data.

    flwr run takes it as it is. Where a node's data come from is one function, in data.py.
    """
    wrong = ctx.meta[o.WRONG]
    with show_status("loading torch") as say:
        from ..config.experiment import Federations
        from ..deploy.app import write_app
        from . import arguments

        say("reading the data")
        federations = Federations(data_dir)
        words = {**ctx.params, "engine": "serial", "device": "cpu", "precision": "fp32"}
        experiment = arguments.experiment(words, federations, wrong)
        written = write_app(experiment, folder, federations=federations, timeout=timeout)
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


def keys(folder: Folder, nodes: Nodes = 3, host: Hosts = None) -> None:
    """Make a CA, a certificate for the server and a key for each node; nothing is overwritten."""
    from ..deploy.keys import make_keys

    made = make_keys(folder, nodes, host or ())
    for line in registration(made):
        print(line)


def registration(made: Keys) -> list[str]:
    """What to do with keys that were made, line by line."""
    place = made.folder.absolute()

    def path(name: str) -> str:
        return shlex.quote(str(place / name))

    one = made.nodes[0]
    listens = "127.0.0.1" if made.host == "127.0.0.1" else "0.0.0.0"
    lines = [
        f"Keys for {len(made.nodes)} nodes: {place} (the certificate is for "
        f"{', '.join(made.hosts)})",
        "",
        "1. Start the server:",
        f"   flower-superlink --ssl-ca-certfile {path('ca.crt')} --ssl-certfile "
        f"{path('server.crt')} --ssl-keyfile {path('server.key')} --enable-supernode-auth "
        f"--host {listens} --port 8000 --database superlink.db "
        "--disable-runtime-dependency-installation",
        "",
        "2. Tell flwr where it is, in ~/.flwr/config.toml:",
        "   [superlink.mine]",
        f'   address = "{made.host}:8000"',
        f'   root-certificates = "{place / "ca.crt"}"',
        "",
        "3. Register the nodes, once:",
    ]
    for name in made.nodes:
        lines.append(f"   flwr supernode register {path(name + '.pub')} mine")
    lines += [
        "",
        f"4. Bring ca.crt and one key ({one}, ...) to each node, and start it there:",
        f"   flower-supernode --superlink {made.host}:8000 --root-certificates {path('ca.crt')} "
        f'--auth-supernode-private-key {path(one)} --node-config "partition-id=0"',
        "",
        "5. Train, from the folder of an app (fedgrove app METHOD DIR):",
        "   flwr run . mine --stream",
        "",
        "Keep ca.key off line: whoever has it can pretend to be the server.",
    ]
    return lines
