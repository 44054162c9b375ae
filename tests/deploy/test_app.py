"""Apps, keys and the commands that we write down: files and sentences; processes are elsewhere."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import ssl
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.loopback import Loopback

from fedgrove import api, data, methods
from fedgrove.cli.app import app as cli
from fedgrove.config.experiment import Experiment
from fedgrove.deploy import keys as keys_module
from fedgrove.deploy import serve, with_labels
from fedgrove.deploy.app import write_app
from fedgrove.deploy.keys import make_keys
from fedgrove.deploy.server import _read_options
from fedgrove.errors import InputError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"

NET = """
from torch import nn

from layers import hidden


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(hidden), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.layers(x)
"""
METHOD = """
from dataclasses import dataclass
from fedgrove.methods import FedProx

@dataclass(frozen=True)
class Mine(FedProx):
    '''FedProx by another name.'''
    mu: float = 0.5
"""


def command(*words: str) -> None:
    """A command of fedgrove, in this process."""
    cli(list(words), standalone_mode=False)


def users(folder: Path) -> None:
    """Two people; the first never runs."""
    folder.mkdir()
    for k, activities in enumerate((["sit", "walk"], ["run", "sit", "walk"])):
        rows = ["ax,ay,activity"]
        for a, activity in enumerate(activities):
            rows += [f"{a + i % 5},{i % 3 - k},{activity}" for i in range(40)]
        (folder / f"watch-{k}.csv").write_text("\n".join(rows) + "\n")


def own_data_of(app: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function that an app's nodes call, imported as they do."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "fedgrove_app":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(app))
    return importlib.import_module("fedgrove_app.data").own_data


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for each test, and the usual umask, which the two sides of an app change."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    yield
    os.umask(before)


# ---- apps ----------------------------------------------------------------------------------------


def test_an_app_trains_as_serial_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its own two halves, as Flower would import them, over messages in this process."""
    pytest.importorskip("flwr")
    words = ("--data", "digits", "--clients", "3", "--rounds", "2", "--epochs", "1")
    command("app", "fedavg", "app", *words, "--evaluate", "0", "--seed", "5")
    assert "A Flower app for 3 clients: app" in capsys.readouterr().out
    monkeypatch.setenv("FEDGROVE_HOME", str(tmp_path / "home"))
    own_data_of(tmp_path / "app", monkeypatch)
    client = importlib.import_module("fedgrove_app.client").app
    importlib.import_module("fedgrove_app.server")
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    given = config["tool"]["flwr"]["app"]["config"]
    assert given == {
        "out": "runs/fedavg-digits",
        "clients": 3,
        "quorum": 2,
        "grace": 60,
        "wait": 600,
        "timeout": 600,
        "most_examples": 100.0,
        "keys": "",
    }
    # Its README explains each of them.
    readme = (tmp_path / "app" / "README.md").read_text()
    assert [name for name in given if f"`{name}`" not in readme] == []
    grid = Loopback(dict.fromkeys(range(3), client))
    path = tmp_path / "app" / "fedgrove_app" / "config.toml"
    result = serve(grid, path, **_read_options(dict.fromkeys(given), given), code=path.parent)
    assert result.folder.path == tmp_path / "runs" / "fedavg-digits"
    serial = api.run(
        "fedavg",
        data="digits",
        clients=3,
        rounds=2,
        evaluate=0,
        seed=5,
        set={"local.epochs": 1},
        engine="serial",
        progress=False,
    )
    for key in ("accuracy_mean", "accuracy_clients", "bytes_up"):
        assert result.summary[key] == serial.summary[key]
    # Nobody else reads the server's run folder or a node's personal model.
    for folder in (tmp_path / "runs", tmp_path / "home"):
        for path in (folder, *folder.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_an_app_carries_ones_own_method_and_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they import from their folder; each node reads its own file, numbered alike."""
    users(tmp_path / "users")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "net.py").write_text(NET.replace("nn.LazyLinear(", "nn.Linear(2, "))
    (mine / "layers.py").write_text("hidden = 7\n")
    (tmp_path / "method.py").write_text(METHOD)
    words = ("--data", "users/", "--label", "activity", "--net", "mine/net.py:Net")
    command("app", "method.py:Mine", "app", *words, "--rounds", "2", "--set", "mu=0.25")
    package = tmp_path / "app" / "fedgrove_app"
    carried = sorted(p.name for p in (package / "code").iterdir())
    assert carried == ["layers.py", "method.py", "net.py"]
    config = tomllib.loads((package / "config.toml").read_text())
    assert config["run"]["net"] == "net.py:Net"
    assert config["method"]["type"] == "method.py:Mine"
    assert config["method"]["mu"] == 0.25
    assert list(config["code"]) == ["method.py"]
    assert not {"data", "label", "partition", "clients"} & set(config["run"])
    # The folder is not needed any more: a node has one with its own file.
    shutil.move(tmp_path / "users" / "watch-0.csv", tmp_path / "node-0.csv")
    shutil.rmtree(tmp_path / "users")
    (tmp_path / "node").mkdir()
    shutil.move(tmp_path / "node-0.csv", tmp_path / "node" / "watch-0.csv")
    own_data = own_data_of(tmp_path / "app", monkeypatch)
    federation = own_data(0, {"data": str(tmp_path / "node")})
    assert federation.labels == ("run", "sit", "walk")
    assert federation.classes == 3
    assert federation.client(0).train.y.unique().tolist() == [1, 2]


def test_a_path_with_quotes_is_written_as_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users(tmp_path / 'the "users"')
    experiment = Experiment(methods.make("fedavg"), data='the "users"', label="activity")
    write_app(experiment, tmp_path / "app")
    own_data_of(tmp_path / "app", monkeypatch)
    written = sys.modules["fedgrove_app.data"]
    assert str(tmp_path / 'the "users"') == written.PLACE
    assert written.LABELS == ["run", "sit", "walk"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    experiment = Experiment(methods.make("fedavg"), clients=3)
    write_app(experiment, tmp_path / "app")
    before = (tmp_path / "app" / "README.md").read_bytes()
    with pytest.raises(InputError, match="app is not empty"):
        write_app(experiment, tmp_path / "app")
    assert (tmp_path / "app" / "README.md").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is not empty"):
        write_app(experiment, tmp_path / "file")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"data": "digits+motion"}, "over a network all clients have one task"),
        ({"faults": "crash=0.1"}, "real devices fail by themselves"),
        ({"profile": "devices.csv"}, "a node describes its own device"),
        ({"privacy": "clip=1,noise=1"}, "given with secret=1, over a network"),
        ({"cohort": 9}, "cohort"),
    ],
)
def test_what_nodes_cannot_have_is_refused(
    words: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    experiment = Experiment(methods.make("fedavg"), clients=3, **words)
    with pytest.raises(InputError, match=re.escape(sentence)):
        write_app(experiment, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_a_file_that_flower_would_leave_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(METHOD)
    with pytest.raises(InputError, match="looks like a test"):
        command("app", "test_mine.py:Mine", "app", "--clients", "3")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("clients", 0),
        ("clients", "3"),
        ("clients", None),
        ("out", ""),
        ("wait", -1),
        ("timeout", "x"),
        ("quorum", 4),
        ("quorum", 0),
        ("grace", -1),
        ("most_examples", 0.5),
        ("most_examples", "x"),
        ("keys", 5),
    ],
)
def test_wrong_words_in_an_apps_configuration_are_refused(word: str, value: Any) -> None:
    given = {"out": "runs/a", "clients": 3}
    assert _read_options({**dict.fromkeys(("wait", "timeout")), **given}, {})["timeout"] == 600
    assert _read_options({**given, "timeout": 0}, {})["timeout"] is None
    nothing = dict.fromkeys(("out", "clients", "wait", "timeout"))
    with pytest.raises(InputError, match=f"^{word} is "):
        _read_options(nothing, {**given, word: value})


# ---- labels --------------------------------------------------------------------------------------


def test_labels_are_numbered_alike() -> None:
    own = data.from_arrays([[0.0], [1.0]] * 8, ["sit", "walk"] * 8, ["a"] * 16)
    seen = with_labels(own, ["run", "sit", "walk"])
    before, after = own.client(0).train, seen.client(0).train
    assert (after.y == before.y + 1).all()
    assert (after.x == before.x).all()
    assert seen.preparation_of(0).labels == ("run", "sit", "walk")
    assert with_labels(own, ["sit", "walk"]) is own


def test_a_label_that_nobody_knows_is_refused() -> None:
    own = data.from_arrays([[0.0], [1.0]] * 8, ["sit", "fly"] * 8, ["a"] * 16)
    with pytest.raises(InputError, match="have the labels fly, and the app knows run, sit"):
        with_labels(own, ["run", "sit"])


# ---- keys ----------------------------------------------------------------------------------------


def test_keys_fit_and_are_private(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("cryptography")
    command("keys", "keys", "--nodes", "2", "--host", "fl.example.org", "--host", "10.0.0.5")
    folder = tmp_path / "keys"
    names = {"ca.key", "ca.crt", "server.key", "server.crt", "partitions.toml"}
    names |= {"node-0", "node-0.pub", "node-1", "node-1.pub"}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Key and certificate belong together, and the CA has signed it, for these hosts and no other.
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    for host in ("localhost", "127.0.0.1", "fl.example.org", "10.0.0.5"):
        assert shaken(server, folder / "ca.crt", host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shaken(server, folder / "ca.crt", "example.org")
    make_keys(tmp_path / "others", 1)
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shaken(server, tmp_path / "others" / "ca.crt", "localhost")
    said = capsys.readouterr().out
    for k in (0, 1):
        assert f"flwr supernode register {folder / f'node-{k}.pub'} mine" in said
    # The SuperLink listens on its own machine; nodes come through the proxy.
    assert 'address = "127.0.0.1:8000"' in said
    assert f"fedgrove proxy {folder} --port 8443" in said
    assert "--superlink fl.example.org:8443" in said
    for word in ("--enable-supernode-auth", "--auth-supernode-private-key", "--host 127.0.0.1"):
        assert word in said
    assert said.count("umask 077") == 2
    assert "0.0.0.0" not in said


def shaken(server: ssl.SSLContext, ca: Path, host: str) -> bool:
    """A TLS handshake in memory."""
    client = ssl.create_default_context(cafile=str(ca))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=host)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (near, far, near, far):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return near.version() == "TLSv1.3"


def test_a_folder_that_was_there_becomes_private(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o755)
    command("keys", str(folder), "--nodes", "1")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["notes.txt", "ca.crt", "node-0"])
def test_the_rights_of_a_folder_with_files_do_not_change(name: str, tmp_path: Path) -> None:
    """Not of a home, of a run, or of the root of a system."""
    folder = tmp_path / "home"
    folder.mkdir()
    # Whatever the umask of the tests.
    folder.chmod(0o755)
    (folder / name).write_text("mine")
    with pytest.raises(InputError, match="give"):
        make_keys(folder, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [path.name for path in folder.iterdir()] == [name]


def test_flower_reads_the_nodes_keys(tmp_path: Path) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    make_keys(tmp_path / "keys", 1)
    private = (tmp_path / "keys" / "node-0").read_bytes()
    public = (tmp_path / "keys" / "node-0.pub").read_bytes()
    key = serialization.load_ssh_private_key(private, None)
    known = serialization.load_ssh_public_key(public)
    assert key.public_key().public_numbers() == known.public_numbers()
    assert known.curve.name == "secp384r1"


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    make_keys(tmp_path / "keys", 1)
    before = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    with pytest.raises(InputError, match=r"ca\.key.*never overwritten"):
        make_keys(tmp_path / "keys", 2)
    assert {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "node-1").write_text("mine")
    with pytest.raises(InputError, match="node-1 already exists"):
        make_keys(tmp_path / "other", 2)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["node-1"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file exists"):
        make_keys(tmp_path / "file", 1)


@pytest.mark.parametrize("host", ["", "fl.example.org:8000", "https://a", "a b", "ä.de"])
def test_a_host_that_is_none_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--host is"):
        make_keys(tmp_path / "keys", 1, [host])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("nodes", [0, -1, 10_001])
def test_a_number_of_nodes_that_is_none_is_refused(nodes: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nodes is"):
        make_keys(tmp_path / "keys", nodes)


def test_without_flower_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'fedgrove\[flower\]'"):
        make_keys(tmp_path / "keys", 1)


# ---- what we tell people to type -----------------------------------------------------------------


def written_commands(tmp_path: Path, capsys: Any) -> list[list[str]]:
    """Every command of Flower's in docs, units, compose file, README of an app, and `keys`."""
    make_keys_and_app(tmp_path)
    texts = [capsys.readouterr().out, (tmp_path / "app" / "README.md").read_text()]
    for page in ("deploy.md", "flower.md"):
        texts.append((ROOT / "docs" / page).read_text())
    for unit in DEPLOY.glob("*.service"):
        texts.append(unit.read_text().replace("ExecStart=/opt/fedgrove/bin/", ""))
    found = []
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            if re.match(r" *(flower-superlink|flower-supernode|flwr) .*-", line):
                found.append(shlex.split(line.partition("     (")[0]))
    compose = (DEPLOY / "compose.yaml").read_text()
    for block in re.findall(r"command:\n((?: +- .*\n)+)", compose):
        words = [line.strip().removeprefix("- ") for line in block.splitlines()]
        if words[0] == "fedgrove":
            continue
        found.append([word.partition("=")[0] for word in words])
    return found


def make_keys_and_app(tmp_path: Path) -> None:
    command("keys", "keys", "--nodes", "1")
    command("app", "fedavg", "app", "--clients", "3")


@pytest.mark.slow
def test_flower_knows_every_flag_that_we_write(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("flwr")
    helps: dict[tuple[str, ...], str] = {}
    commands = written_commands(tmp_path, capsys)
    programs = {words[0] for words in commands}
    assert programs == {"flower-superlink", "flower-supernode", "flwr"}
    assert len(commands) >= 10
    for words in commands:
        program = (words[0],) if words[0] != "flwr" else tuple(_subcommand(words))
        if program not in helps:
            helps[program] = help_of(program)
        for word in words:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                assert re.search(rf"{flag}(?![\w-])", helps[program]), f"{flag} of {program}"


def _subcommand(words: list[str]) -> list[str]:
    return words[:3] if words[1] == "supernode" else words[:2]


def help_of(program: tuple[str, ...]) -> str:
    got = subprocess.run(
        [str(Path(sys.executable).parent / program[0]), *program[1:], "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": "/nonexistent", "FLWR_TELEMETRY_ENABLED": "0", "COLUMNS": "200"},
        timeout=60,
    )
    assert got.returncode == 0, got.stderr
    return got.stdout
