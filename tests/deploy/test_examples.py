"""examples/deploy: the units are sound, their ports fit together, and no key enters an image."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_private_restarts_and_has_a_user_that_is_made(unit: Path) -> None:
    text = unit.read_text()
    assert "UMask=0077" in text
    assert "Restart=always" in text
    assert ("StateDirectory=" in text) == ("StateDirectoryMode=0700" in text)
    user = re.search(r"^User=(.*)$", text, re.MULTILINE)
    assert user
    assert f"\nu {user[1]} - " in (DEPLOY / "sysusers.conf").read_text()


def test_ports_fit_together_and_the_superlink_is_on_loopback() -> None:
    link = (DEPLOY / "superlink.service").read_text()
    assert "--host 127.0.0.1" in link
    assert "--port 8000" in link
    proxy = (DEPLOY / "superlink-proxy.service").read_text()
    assert "--port 8443 --superlink 127.0.0.1:8000" in proxy
    node = (DEPLOY / "supernode@.service").read_text()
    assert "SUPERLINK=fl.example.org:8443" in node
    # Each instance has its own.
    for word in ("PORT=910%i", "node:/etc/fedgrove/node-%i", "StateDirectory=fedgrove-node/%i"):
        assert word in node
    nginx = (DEPLOY / "nginx.conf").read_text()
    assert "listen 8443 ssl" in nginx
    assert "proxy_pass https://127.0.0.1:8000" in nginx
    compose = (DEPLOY / "compose.yaml").read_text()
    assert compose.count("--superlink=superlink:8443") == 2
    for path in DEPLOY.iterdir():
        assert path.is_dir() or "0.0.0.0" not in path.read_text(), path


def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed: the units are not verified")
    files = []
    for unit in UNITS:
        # A program that exists in place of the one that is not installed here.
        text = re.sub(r"/opt/fedgrove/bin/[\w-]+", "/bin/true", unit.read_text())
        copy = tmp_path / unit.name.replace("@", "@0")
        copy.write_text(text)
        files.append(str(copy))
    got = subprocess.run([program, "verify", *files], capture_output=True, text=True, timeout=60)
    named = [line for line in got.stderr.splitlines() if str(tmp_path) in line or "super" in line]
    assert not named, named
    assert got.returncode == 0, got.stderr


def test_an_image_gets_the_package_and_no_key() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    # Everything is left out but for these.
    assert rules[0] == "*"
    let_in = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert set(let_in) == {"pyproject.toml", "README.md", "LICENSE", "src"}


@pytest.mark.slow
def test_the_package_builds_from_what_an_image_gets(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: the package is not built")
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__"))
    words = ("install", "-q", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "in"))
    got = subprocess.run(
        [sys.executable, "-m", "pip", *words, str(clone)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert got.returncode == 0, got.stderr
    assert (tmp_path / "in" / "fedgrove" / "deploy" / "proxy.py").is_file()
