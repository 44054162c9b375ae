"""`fedgrove doctor --deploy` on a SuperLink of its own: as `fedgrove keys` prints it, and open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.deploy.processes import Site, free_port, wait_for

from fedgrove.deploy import doctor
from fedgrove.deploy.doctor import Check, check_server
from fedgrove.deploy.keys import make_keys
from fedgrove.errors import InputError

pytest.importorskip("flwr")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/net").exists(), reason="running programs are listed in /proc, as on Linux"
)


def examined(site: Site) -> tuple[int, str]:
    """The exit code and the table of the command."""
    got = subprocess.run(
        [sys.executable, "-m", "fedgrove", "doctor", "--deploy", str(site.keys)],
        capture_output=True,
        text=True,
        env=site.env | {"COLUMNS": "400"},
        timeout=120,
    )
    assert not got.stderr
    return got.returncode, got.stdout


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    make_keys(made.keys, 1, ["fl.example.org"])
    before = os.umask(0o077)
    try:
        yield made
    finally:
        os.umask(before)
        made.close()


@pytest.mark.slow
def test_the_printed_set_up_has_no_problem(site: Site) -> None:
    """Each of these is what others on the network must meet."""
    site.start_link()
    link = site.port
    site.port = free_port()
    words = ("--host", "127.0.0.1", "--port", str(site.port), "--superlink", f"127.0.0.1:{link}")
    site.start("proxy", "python", "-m", "fedgrove", "proxy", str(site.keys), *words)
    wait_for("the proxy listens", site._listens, 60)
    code, table = examined(site)
    print(table)
    assert code == 0, table
    assert f"127.0.0.1:{link}, this machine only" in table
    assert f"127.0.0.1:{site.port} refuses it to anyone who only has ca.crt (403)" in table
    assert f"127.0.0.1:{site.port} refuses anyone who only has ca.crt (401)" in table
    assert "PROBLEM" not in table
    # What is wrong later is found: rights to a key, the database and a run folder.
    (site.keys / "node-0").chmod(0o644)
    (site.path / "superlink.db").chmod(0o640)
    run = site.path / "runs" / "first"
    run.mkdir(parents=True)
    for name in ("config.toml", "checksums.txt"):
        (run / name).touch()
    run.chmod(0o755)
    code, table = examined(site)
    assert code == 1
    for what in ("node-0 (644)", "superlink.db (640)", "first (755)"):
        assert f"PROBLEM: other users have rights to {site.path}" in table
        assert what in table


@pytest.mark.slow
def test_a_superlink_without_certificates_is_found(site: Site) -> None:
    """It uses no folder of keys, so it could be anybody's; the worst of all must not be left out."""
    site.start(
        "superlink",
        *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(site.port)),
        *("--database", "superlink.db", "--disable-runtime-dependency-installation"),
    )
    wait_for("the SuperLink listens", site._listens, 90)
    code, table = examined(site)
    print(table)
    assert code == 1
    [tls] = [line for line in table.splitlines() if line.startswith("SuperLink: TLS")]
    assert "PROBLEM: none" in tls
    assert f"127.0.0.1:{site.port} admits every key" in table
    # It is not the one that has this folder's certificates.
    [running] = [line for line in table.splitlines() if line.startswith("running")]
    assert "PROBLEM: SuperLink (" in running


ROOT = Path(__file__).parents[2]
OPEN = """
ip link set lo up || exit 77
exec "$@"
"""


@pytest.mark.slow
def test_an_open_server_is_found(tmp_path: Path) -> None:
    """One address for everything, in a network of its own that reaches nothing."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        pytest.skip("unshare or ip is not installed: no open server is started")
    got = subprocess.run(
        [unshare, "-n", "sh", "-c", OPEN, "sh", sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        # Before all other folders: one of them may have a package of tests too.
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
    )
    if got.returncode == 77 or "unshare:" in got.stderr:
        pytest.skip("this user cannot make a network of its own: no open server is started")
    print(got.stdout)
    assert got.returncode == 1, got.stdout + got.stderr
    assert "open to the network; start it with --host 127.0.0.1" in got.stdout
    assert "lets everyone start runs and register nodes, with only ca.crt" in got.stdout
    assert "admits every key, even one that was not registered; start the SuperLink" in got.stdout
    assert "PROBLEM: 022; start it after `umask 077`" in got.stdout
    assert "superlink.db (644)" in got.stdout


def run_open_server(path: Path) -> int:
    """Start a SuperLink with everything on one open address, and examine it."""
    os.umask(0o022)
    site = Site(path)
    make_keys(site.keys, 1)
    try:
        site.start(
            "superlink",
            *("flower-superlink", "--ssl-ca-certfile", str(site.keys / "ca.crt")),
            *("--ssl-certfile", str(site.keys / "server.crt")),
            *("--ssl-keyfile", str(site.keys / "server.key"), "--host", "0.0.0.0"),
            *("--port", str(site.port), "--database", "superlink.db"),
        )
        wait_for("the SuperLink listens", site._listens, 90)
        code, table = examined(site)
    finally:
        site.close()
    print(table)
    return code


def found(checks: list[Check], name: str) -> Check:
    [check] = [check for check in checks if check.name == name]
    return check


def test_nothing_runs_and_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"server\.crt does not exist; give the folder of keys"):
        check_server(tmp_path)
    make_keys(tmp_path / "keys", 1)
    checks = check_server(tmp_path / "keys")
    wrong = [check.name for check in checks if not check.is_right]
    # Another program on this machine may have started a SuperLink without certificates.
    assert [name for name in wrong if not name.startswith("SuperLink: ")] == ["running"]
    assert found(checks, "server.crt: names").found == "localhost, 127.0.0.1"


def test_certificates_that_end_soon_or_belong_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path / "keys", 1)
    make_keys(tmp_path / "others", 1)
    shutil.copy(tmp_path / "others" / "ca.crt", tmp_path / "keys" / "ca.crt")
    checks = check_server(tmp_path / "keys")
    assert found(checks, "server.crt: issuer").found == "another authority"

    class Later(datetime):
        @classmethod
        def now(cls, zone: object = None) -> datetime:
            return datetime(datetime.now(UTC).year + 2, 12, 31, tzinfo=UTC)

    monkeypatch.setattr(doctor, "datetime", Later)
    checks = check_server(tmp_path / "others")
    is_late = (Later.now() - datetime.now(UTC)).days > 825 - 30
    assert found(checks, "ca.crt: dates").is_right != is_late


def test_an_app_without_a_timeout(tmp_path: Path) -> None:
    app = tmp_path / "flwr" / "apps" / "mine"
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text("[tool.flwr.app.config]\ntimeout = 0\n")
    assert not doctor.check_timeouts([tmp_path / "flwr"]).is_right
    (app / "pyproject.toml").write_text("[tool.flwr.app.config]\ntimeout = 600\n")
    assert doctor.check_timeouts([tmp_path / "flwr"]).found == "mine: 600 s"
    # Without the option the server takes its own default.
    (app / "pyproject.toml").write_text("[tool.flwr.app.config]\nout = 'a'\n")
    assert doctor.check_timeouts([tmp_path / "flwr"]).found == "mine: 600 s"


if __name__ == "__main__":
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.exit(run_open_server(Path(sys.argv[1])))
