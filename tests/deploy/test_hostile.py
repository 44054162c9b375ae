"""Hostile nodes with valid keys, over real processes: a SuperLink under TLS, and what it costs the server.

The nodes are processes that speak to the SuperLink themselves (``raw_node.py``).
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from tests.deploy.processes import Site, wait_for

from fedgrove import methods
from fedgrove.config.experiment import Experiment
from fedgrove.core import Packet
from fedgrove.deploy.app import write_app
from fedgrove.deploy.keys import make_keys

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BOMBERS = 5
ROUNDS = 20
"""Together 100 hostile replies, besides those of the other hostile nodes."""
CLIENTS = 5 + BOMBERS
KINDS = ("honest", "honest", "replay", "buyer", "silent", *["bombs"] * BOMBERS, "impostor")
"""What each node does; the last one has a valid key of its own, and says that it is client 0."""
FLAT = 64
"""MiB by which the server may grow between the first rounds and the last ones."""


def write_bombs(folder: Path, codec: object) -> None:
    """Answers that are small on the wire and large when they are decoded, and one that is large."""
    encode = codec.encode  # type: ignore[attr-defined]
    # 23 bytes each, and 80 MB or 4 MB when they are decoded.
    large = encode(Packet({"w": torch.zeros(20_000_000)})).data
    small = encode(Packet({"w": torch.zeros(1_000_000)})).data
    bombs = {
        "packed": {"update": large},
        "many": {f"p{n}": small for n in range(100)},
        "unpacked": {"update": bytes(8_000_000)},
        "noise": {"update": os.urandom(10_000)},
    }
    for kind, packets in bombs.items():
        (folder / kind).mkdir(parents=True)
        lengths = [[name, len(data)] for name, data in packets.items()]
        head = {"of": 5, "examples": 5, "metrics": {}, "packets": lengths}
        text = json.dumps(head).encode()
        (folder / kind / "0000.head").write_bytes(struct.pack("<I", len(text)) + text)
        for number, (name, data) in enumerate(packets.items(), start=1):
            (folder / kind / f"{number:04d}.{name}").write_bytes(data)


def server_memory(site: Site) -> tuple[int, int]:
    """Resident memory of the server's half, now and at its highest, in MiB; 0 if it is not there."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            env = (path / "environ").read_bytes()
            status = (path / "status").read_text()
        except OSError:
            continue
        is_ours = f"FEDGROVE_HOME={site.path}".encode() in env
        if is_ours and any(b"serverapp" in word for word in words):
            numbers = dict(line.split(":", 1) for line in status.splitlines())
            return tuple(int(numbers[k].split()[0]) // 1024 for k in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    return 0, 0


def test_hostile_nodes_cost_their_own_reports(tmp_path: Path) -> None:
    site = Site(tmp_path)
    try:
        make_keys(site.keys, CLIENTS + 1)
        site.start_link()
        site.register(CLIENTS + 1)
        words = {"data": "digits", "clients": CLIENTS, "cohort": CLIENTS, "rounds": ROUNDS}
        wanted = Experiment(methods.make("stc"), evaluate=0, **words)
        app = write_app(wanted, tmp_path / "app", timeout=60)
        write_bombs(tmp_path / "bombs", wanted.method.codec)
        for k, kind in enumerate(KINDS):
            partition = 0 if kind == "impostor" else k
            shown = "honest" if kind == "impostor" else kind
            site.start(
                f"node-{k}",
                *("python", str(Path(__file__).with_name("raw_node.py")), str(site.port)),
                *(str(site.keys), str(k), str(partition), shown),
                *(str(tmp_path / "bombs"), str(app.folder)),
            )
        out = tmp_path / "run"
        run = site.start_run(
            app.folder, "hostile", out=str(out), keys=str(site.keys), quorum=CLIENTS - 2, grace=90
        )
        memory: dict[int, tuple[int, int]] = {}

        def has_ended() -> bool:
            if (out / "metrics.jsonl").is_file():
                done = len((out / "metrics.jsonl").read_text().splitlines())
                now = server_memory(site)
                if now[0]:
                    memory[done] = now
            return run.process.poll() is not None

        wait_for("the run ends", has_ended, 1500)
        print(run.text)
        for done, (now, highest) in memory.items():
            print(f"round {done}: server {now} MiB, at most {highest} MiB")
        summary = json.loads((out / "summary.json").read_text())
        notes = "\n".join(summary["notes"])
        print(notes, summary["lost"], summary["refused"])
        # Two clients never enrol; nobody waits for them.
        assert summary["lost"]["unsent"] == 2 * ROUNDS
        bombs = BOMBERS * ROUNDS
        assert sum(summary["refused"].values()) + summary["lost"].get("unreadable", 0) >= bombs
        assert summary["refused"]["duplicate"] == ROUNDS - 1
        assert "client 3 cannot enrol: info.examples is 1000000000" in notes
        assert f"the node with the key node-{CLIENTS} reports that it is client 0" in notes
        assert "Traceback" not in run.text
        early = max(memory[done][0] for done in memory if done <= 3)
        late = max(memory[done][0] for done in memory if done >= ROUNDS // 2)
        assert late - early <= FLAT, memory
    finally:
        site.close()


TRANSPORT = ("honest", "honest", "honest", "honest", "stuck", "garbage", "dateless", "seer")
"""What each node does in the second run: the last ones send what Flower itself stumbles over."""
FEW_ROUNDS = 8


def test_no_node_holds_up_or_ends_a_run(tmp_path: Path) -> None:
    """Replies that are announced and never come, that are no message, or that are stored without a date; and a
    node that announces what the server will send to others, so that the SuperLink refuses to take it.
    """
    site = Site(tmp_path)
    nodes = len(TRANSPORT)
    try:
        make_keys(site.keys, nodes)
        site.start_link()
        site.register(nodes)
        words = {"data": "digits", "clients": nodes, "cohort": nodes, "rounds": FEW_ROUNDS}
        wanted = Experiment(methods.make("fedavg"), evaluate=0, **words)
        app = write_app(wanted, tmp_path / "app", timeout=20)
        (tmp_path / "bombs").mkdir()
        for k, kind in enumerate(TRANSPORT):
            site.start(
                f"node-{k}",
                *("python", str(Path(__file__).with_name("raw_node.py")), str(site.port)),
                *(str(site.keys), str(k), str(k), kind, str(tmp_path / "bombs"), str(app.folder)),
            )
        out = tmp_path / "run"
        run = site.start_run(app.folder, "transport", out=str(out), keys=str(site.keys), grace=90)
        wait_for("the run ends", lambda: run.process.poll() is not None, 900)
        print(run.text)
        summary = json.loads((out / "summary.json").read_text())
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        lost = set()
        for line in lines:
            for clients in line.get("lost", {}).values():
                lost.update(clients)
        assert lost == {4, 5, 6, 7}
        assert summary["lost"]["unreadable"] >= FEW_ROUNDS
        assert "late" in summary["lost"]
        # Two rounds wait for those that never answer, and then nobody does.
        assert sum(line["seconds"] > 20 for line in lines) <= 5
        assert "Traceback" not in run.text
    finally:
        site.close()
