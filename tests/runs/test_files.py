"""A file is what was written, or its name is in a sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.errors import DamageError
from fedgrove.runs.files import (
    CHECKSUMS,
    check_inside,
    compute_checksum,
    format_checksums,
    read_bytes,
    read_checksums,
    read_listed,
    read_sealed,
    seal_json,
)

CONTENT: dict[str, Any] = {
    "round": 3,
    "state": {"pairs": [[0, 0.1], [1, float("inf")], [2, -0.0]]},
    "memory": {"0": "a", "10": "b"},
}


def test_a_digest_is_the_one_everybody_knows() -> None:
    # The SHA-256 of "abc", from FIPS 180-4's examples.
    assert (
        compute_checksum(b"abc")
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


@pytest.mark.parametrize("indent", [None, 1])
def test_a_sealed_file_comes_back(indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(seal_json(CONTENT, indent))
    assert read_sealed(tmp_path / "f") == CONTENT


@given(st.data())
def test_no_change_of_a_sealed_file_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("seal_json") / "f"
    whole = seal_json(CONTENT)
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "garbage"]))
    if kind == "flip":
        bit = 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
    elif kind == "cut":
        path.write_bytes(whole[:at])
    else:
        path.write_bytes(data.draw(st.binary()))
    sentence = ""
    found = CONTENT
    try:
        found = read_sealed(path)
    except DamageError as error:
        sentence = str(error)
    # Either it is refused by name, or the change is none: white space, as the last newline.
    assert found == CONTENT
    assert not sentence or str(path) in sentence


def test_a_file_without_a_seal_is_one_of_before_or_damaged(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('{"round": 1}')
    assert read_sealed(tmp_path / "f", new_keys=("format",)) == {"round": 1}
    with pytest.raises(DamageError):
        read_sealed(tmp_path / "f")
    with pytest.raises(DamageError):
        read_sealed(tmp_path / "f", new_keys=("round",))


@pytest.mark.parametrize("text", ["[1]", "", "3", "[" * 100_000, "\xff\xfe", '{"a": 1'])
def test_garbage_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text, encoding="latin-1")
    with pytest.raises(DamageError, match=f"{tmp_path / 'f'} is damaged"):
        read_sealed(tmp_path / "f")


def test_a_list_is_what_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    names = ["a.txt", "models/b"]
    for name in names:
        (tmp_path / name).write_text(name)
    digests = {name: compute_checksum(name.encode()) for name in names}
    (tmp_path / CHECKSUMS).write_bytes(format_checksums(digests))
    assert read_checksums(tmp_path) == digests
    assert read_listed(tmp_path, "models/b", digests) == b"models/b"
    if shutil.which("sha256sum"):
        command = ["sha256sum", "-c", CHECKSUMS]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "link", "link/x", "a/../../x", "zero\0"])
def test_what_is_outside_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    with pytest.raises(DamageError, match="outside"):
        check_inside(tmp_path / "run", name)


def test_what_is_inside_is_not_and_the_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "run" / "models").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "shortcut").symlink_to("models")
    for name in ("models/index.json", "shortcut/index.json", "new"):
        assert check_inside(tmp_path / "link", name) == tmp_path / "link" / name


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "summary.json")
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    for name in ("summary.json", "config.toml"):
        with pytest.raises(DamageError, match=f"{name} is damaged: it is not a file"):
            read_bytes(tmp_path / name)
