"""Profiles and traces from files: what they say, and what is refused."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest

from fedgrove import data
from fedgrove.core import ClientInfo
from fedgrove.data.devices import Device, Steps, read_devices
from fedgrove.errors import InputError

PROFILE = "client,up,down,speed,memory\n0,5,40,2.5,1000\n1,20,100,10,2000\n2,1,1,5,3000\n"
TRACE = "client,second,up,down\n0,0,5,40\n1,0,20,100\n0,60.5,0,0\n0,90,5,40\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("devices.csv").write_text(PROFILE)
    Path("times.csv").write_text(TRACE)
    return tmp_path


def test_a_profile_says_what_the_server_knows() -> None:
    read = read_devices("devices.csv")
    assert read.lines is not None
    assert read.lines[1] == Device(20.0, 100.0, 10.0, 2000)
    # The reference device does 1 GMAC/s.
    expected = ClientInfo(7, bandwidth=5.0, speed=2.5, memory=1000, downlink=40.0)
    assert read.info(7, client=0, seed=3) == expected
    assert (expected.up, expected.down) == (5.0, 40.0)
    assert read.files == {"devices.csv": hashlib.sha256(PROFILE.encode()).hexdigest()}


def test_a_trace_is_told_by_its_columns_wherever_it_is_named() -> None:
    steps = Steps((0.0, 60.5, 90.0), (5.0, 0.0, 5.0), (40.0, 0.0, 40.0))
    for words in ({"profile": "times.csv"}, {"trace": "times.csv"}):
        read = read_devices(**words)
        assert read.trace == {0: steps, 1: Steps((0.0,), (20.0,), (100.0,))}
        # With a trace alone the server knows its first bandwidths, and that devices are uniform.
        assert read.info(7, client=1, seed=0) == ClientInfo(7, bandwidth=20.0, downlink=100.0)
    both = read_devices("devices.csv", "times.csv")
    assert read_devices("times.csv", "devices.csv") == both
    assert list(both.files) == ["devices.csv", "times.csv"]
    # A profile is what the server knows, whatever the trace says.
    assert both.info(7, client=1, seed=0).speed == 10.0
    assert read_devices("phones", "times.csv").info(7, 0, 0).bandwidth in (5.0, 20.0, 100.0)
    assert read_devices("uniform", "times.csv").info(7, 1, 0) == ClientInfo(7)


def test_a_trace_that_begins_with_an_outage_is_known_by_what_comes_after() -> None:
    Path("dark.csv").write_text("client,second,up,down\n0,0,0,0\n0,5,3,4\n")
    assert read_devices("dark.csv").info(1, 0, 0) == ClientInfo(1, bandwidth=3.0, downlink=4.0)


def test_columns_may_stand_in_any_order_with_a_mark_spaces_and_empty_lines() -> None:
    text = "\ufeffmemory, client ,speed,down,up\n\n 1000 ,0,2.5,40,5\n"
    Path("odd.csv").write_text(text, encoding="utf-8")
    assert read_devices("odd.csv").lines == {0: Device(5.0, 40.0, 2.5, 1000)}


@pytest.mark.parametrize("name", ["digits", "crowd"])
def test_federations_have_the_devices_of_the_file(name: str) -> None:
    federation = data.load(name, clients=2, profile="devices.csv", trace="times.csv")
    assert [info.memory for info in federation.infos.values()] == [1000, 2000]
    assert federation.trace is not None
    assert federation.trace[0].seconds == (0.0, 60.5, 90.0)
    assert set(federation.files) == {"devices.csv", "times.csv"}
    # Workers may get it by pickling.
    assert pickle.loads(pickle.dumps(federation)).info(1).down == 100.0


def test_mixed_federations_keep_each_clients_trace() -> None:
    rooms = data.load("rooms", clients=3)
    tags = data.load("tags", clients=2, trace="times.csv")
    mixed = data.mix({"rooms": rooms, "tags": tags})
    assert mixed.trace is not None
    assert mixed.trace.keys() == {3, 4}
    assert mixed.trace[4].up == (20.0,)
    assert data.mix({"rooms": rooms, "more": data.load("tags", clients=2)}).trace is None


@pytest.mark.parametrize("name", ["digits", "crowd"])
def test_a_file_that_lacks_a_client_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^the profile devices.csv has no line for client 3, 4, "):
        data.load(name, clients=5, profile="devices.csv")
    message = r"^the trace times.csv has no line for client 2, and there are 3 clients, numbered f"
    with pytest.raises(InputError, match=message):
        data.load(name, clients=3, profile="devices.csv", trace="times.csv")


HEAD = "client,up,down,speed,memory\n"
TIMES = "client,second,up,down\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            HEAD + "0,0,1,1,1\n",
            "own.csv, line 2: up is '0'; it must be a number above 0, in Mbit/s",
        ),
        (HEAD + "0,1,-1,1,1\n", "line 2: down is '-1'; it must be a number above 0, in Mbit/s"),
        (HEAD + "0,1,1,nan,1\n", "line 2: speed is 'nan'; it must be a number above 0, in GMAC/s"),
        (HEAD + "0,1,inf,1,1\n", "line 2: down is 'inf'; it must be a number above 0"),
        (HEAD + "0,1,1,1,1.5\n", "line 2: memory is '1.5'; it must be a whole number of 1 or more"),
        (HEAD + f"0,1,1,1,{'9' * 5000}\n", "it must be a whole number of 1 or more"),
        (HEAD + "0,1,1,1,1\n\n-1,1,1,1,1\n", "line 4: client is '-1'; it must be a whole number"),
        (HEAD + "0,1,1,1,1\n0,2,2,2,2\n", "line 3: client 0 already has a line; give it only one."),
        (HEAD + "0,1,1,1\n", "own.csv has 4 cells in line 2 and 5 names of columns in the first"),
        (HEAD, "own.csv has only its first line; it must have a line for each client."),
        ("", "own.csv is empty; its first line must have the names of the columns."),
        ("client,bandwidth\n0,1\n", "has the columns client, bandwidth; a profile has"),
        (TIMES[:-1] + ",speed\n0,0,1,1,1\n", "has the columns client, second, up, down, speed; a"),
        (TIMES + "0,1,1,1\n", "line 2: client 0 begins at second 1; its first line must have s"),
        (TIMES + "0,0,1,1\n0,9,1,1\n0,8,1,1\n", "line 4: client 0 is at second 8 after second 9;"),
        (TIMES + "0,0,1,1\n0,0,2,2\n", "line 3: client 0 is at second 0 after second 0; put its"),
        (TIMES + "0,-1,1,1\n", "line 2: second is '-1'; it must be a number of 0 or more"),
        (TIMES + "0,0,-1,1\n", "line 2: up is '-1'; it must be a number of 0 (an outage) or more"),
        (TIMES + "0,0,1,1\n0,5,1,0\n", "the trace own.csv ends with an outage of client 0, and"),
    ],
)
def test_wrong_lines_are_refused_with_their_place(text: str, sentence: str) -> None:
    Path("own.csv").write_text(text)
    with pytest.raises(InputError) as refused:
        read_devices("own.csv")
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(".")


def test_files_that_are_none_and_words_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InputError, match=r"^the devices in nowhere.csv cannot be read: No such fi"):
        read_devices("nowhere.csv")
    with pytest.raises(InputError, match=r"^the devices in . cannot be read"):
        read_devices(trace=".")
    Path("bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"^bytes.csv is not text"):
        read_devices("bytes.csv")
    with pytest.raises(InputError, match=r"there is no profile 'phone'; did you mean 'phones'\?"):
        read_devices("phone")
    with pytest.raises(InputError, match=r"^times.csv and times.csv are both traces; give one"):
        read_devices("times.csv", "times.csv")
    with pytest.raises(InputError, match=r"^--profile is phones and devices.csv is a profile too"):
        read_devices("phones", "devices.csv")


@pytest.mark.parametrize("speed", ["1e-318", "1e300"])
def test_a_speed_that_no_device_has_is_refused(speed: str) -> None:
    """A round would take for ever, and a summary would hold a number that JSON has not."""
    Path("own.csv").write_text(f"client,up,down,speed,memory\n0,1,1,{speed},1\n")
    with pytest.raises(InputError, match=r"in GMAC/s, from 1e-06 to 1e\+09"):
        read_devices("own.csv")
