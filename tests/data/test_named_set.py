import functools
import gzip
import hashlib
import http.server
import importlib
import io
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from fedgrove import data
from fedgrove.data import named_set
from fedgrove.data.dataset import Dataset
from fedgrove.data.named_set import FileFormat, NamedSet
from fedgrove.data.sets import SETS, har, images
from fedgrove.errors import InputError


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDGROVE_DATA", raising=False)
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def mnist_files(n=(300, 60)):
    rng = np.random.default_rng(0)
    for part, count in zip(("train", "t10k"), n, strict=True):
        yield f"{part}-images-idx3-ubyte", idx(rng.integers(0, 256, (count, 28, 28)))
        yield f"{part}-labels-idx1-ubyte", idx(np.arange(count) % 10)


def cifar_batches(labels, names, n=60):
    rng = np.random.default_rng(1)
    for name in names:
        y = np.stack([np.zeros(n), np.arange(n) % 10], axis=1)[:, -labels:]
        rows = np.concatenate([y, rng.integers(0, 256, (n, 3072))], axis=1)
        yield name, rows.astype(np.uint8).tobytes()


def total(f):
    return sum(len(p) for c in f.clients.values() for p in (c.train, c.validation, c.test))


@pytest.mark.parametrize(
    ("folder", "name", "zipped"),
    [("mnist", "mnist", True), ("FashionMNIST/raw", "fashion-mnist", False)],
)
def test_idx_gzipped_or_not(tmp_path, folder, name, zipped):
    (tmp_path / folder).mkdir(parents=True)
    for file, blob in mnist_files():
        path = tmp_path / folder / (file + ".gz" * zipped)
        path.write_bytes(gzip.compress(blob) if zipped else blob)
    f = data.load(name, partition="iid", clients=4, standardise=False, data_dir=tmp_path)
    assert (f.shape, total(f), f.classes) == ((1, 28, 28), 360, 10)
    assert 0 <= float(f.clients[0].train.x.min()) < float(f.clients[0].train.x.max()) <= 1


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0\0\x08",
        b"\0\0\x08\x02\0",
        b"\0\0\x0d\x01\0\0\0\x01\0",
        idx(np.ones(9))[:-1],
        idx(np.ones(4)) + b"x",
    ],
)
def test_a_broken_idx_file_is_refused(tmp_path, blob):
    (tmp_path / "a").write_bytes(blob)
    (tmp_path / "b.gz").write_bytes(gzip.compress(blob + b"1234567890")[:-9])
    for name in ("a", "b.gz"):
        with pytest.raises(InputError, match="idx"):
            images.read_idx(tmp_path / name)


def test_files_that_do_not_agree_are_refused(tmp_path):
    (tmp_path / "mnist").mkdir()
    for file, blob in mnist_files():
        (tmp_path / "mnist" / file).write_bytes(
            idx(np.arange(299) % 10) if file.startswith("train-labels") else blob
        )
    with pytest.raises(InputError, match="360 examples, 359 labels"):
        data.load("mnist", data_dir=tmp_path)


def test_cifar10_binary_folder_and_archive_agree(tmp_path):
    inside = "cifar-10-batches-bin"
    batches = list(
        cifar_batches(1, [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"])
    )
    (tmp_path / "a" / inside).mkdir(parents=True)
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b" / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, blob in batches:
            (tmp_path / "a" / inside / name).write_bytes(blob)
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
    one = data.load("cifar10", clients=3, data_dir=tmp_path / "a", standardise=False)
    two = data.load("cifar10", clients=3, data_dir=tmp_path / "b", standardise=False)
    assert total(one) == total(two) == 360
    assert one.clients[1].test.x.equal(two.clients[1].test.x)
    first = np.frombuffer(batches[0][1], np.uint8)[1:3073].reshape(3, 32, 32)
    rows = [
        x
        for c in one.clients.values()
        for p in (c.train, c.validation, c.test)
        for x in p.x.numpy()
    ]
    assert any(np.allclose(x * 255, first, atol=1e-3) for x in rows)


def test_cifar100_takes_the_fine_label_and_the_whole_set_needs_no_note():
    ((_, blob),) = cifar_batches(2, ["train.bin"], n=60)
    arrays = images.read_records(blob, 2, "train.bin")
    assert arrays["y"].tolist() == [i % 10 for i in range(60)]
    with pytest.raises(InputError, match="truncated"):
        images.read_records(blob[:-1], 2, "train.bin")


def test_unpack_undoes_the_packing():
    rgb = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32)).astype(np.uint8)
    p = np.moveaxis(rgb, 1, 0).copy()
    p[0] -= p[1]
    p[2] -= p[1]
    down = np.diff(p, axis=2, prepend=np.zeros_like(p[:, :, :1]))
    both = np.diff(down, axis=3, prepend=np.zeros_like(p[..., :1]))
    assert np.array_equal(images.unpack(both), rgb)


RAW = """33,Jogging,49105962326000,-0.6946377,12.680544,0.50395286;
33,Jogging,49106062271000,5.012288,11.264028,0.95342433;33,Jogging,49106112167000,4.903325,10.882658,-0.08172209;

33,Jogging,49106222305000,-0.61291564,18.496431,3.0237172
33,Jogging,49106332290000,-1.1849703,12.108489,
17,Walking,0,0,0,1.5E-2;
17,Flying,1,2,3,4;
17,Walking,57871892287000,1.0,2.0,3.0,;
"""


def test_wisdm_text_with_its_defects(tmp_path):
    # Line 2 holds two records, line 3 none, line 4 lacks its semicolon, line 5 its last value
    # (skipped), line 7 an unknown activity (skipped), line 8 has a comma too many.
    (tmp_path / "a.txt").write_text(RAW)
    d = har.read_text_wisdm([tmp_path / "a.txt"])
    assert d["user"].tolist() == [33, 33, 33, 33, 17, 17]
    assert d["y"].tolist() == [1, 1, 1, 1, 5, 5]
    assert d["xyz"][:, 0].tolist() == pytest.approx(
        [-0.6946377, 5.012288, 4.903325, -0.61291564, 0, 1]
    )
    assert d["xyz"][4].tolist() == pytest.approx([0, 0, 0.015])


def test_wisdm_text_is_windowed_and_split_by_blocks(tmp_path):
    rng = np.random.default_rng(0)
    lines = []
    for user in (1, 2):
        for activity in ("Walking", "Sitting"):
            # (1650 - 200) // 100 + 1 = 15 windows
            for t, (a, b, c) in enumerate(rng.normal(size=(1650, 3))):
                lines.append(f"{user},{activity},{t},{a:.4f},{b:.4f},{c:.4f};")
    (tmp_path / "WISDM_ar_v1.1_raw.txt").write_text("\n".join(lines))
    f = data.load("wisdm", data_dir=tmp_path)
    assert (len(f.clients), f.shape, f.classes, f.notes) == (2, (3, 200), 6, ())
    # A piece of 3 of 15 for each of two activities.
    assert {len(c.test) for c in f.clients.values()} == {6}
    assert total(data.load("wisdm", data_dir=tmp_path, split="random")) == 60
    (tmp_path / "WISDM_ar_v1.1_raw.txt").write_text("nothing\n")
    with pytest.raises(InputError, match="no record"):
        data.load("wisdm", data_dir=tmp_path)


def uci_folder(root):
    """Two subjects, one per part; two activities each, two chains of five windows for each: 40."""
    rng = np.random.default_rng(0)
    for part, subject in (("train", 1), ("test", 2)):
        (root / part / "Inertial Signals").mkdir(parents=True)
        series = rng.normal(size=(4, 9, 64 * 6))
        rows = np.stack([s[:, 64 * i : 64 * i + 128] for s in series for i in range(5)])
        for j, signal in enumerate(har.SIGNALS):
            np.savetxt(
                root / part / "Inertial Signals" / f"{signal}_{part}.txt", rows[:, j], fmt="%.7e"
            )
        np.savetxt(root / part / f"y_{part}.txt", np.repeat([1, 1, 5, 5], 5), fmt="%d")
        np.savetxt(root / part / f"subject_{part}.txt", np.full(20, subject), fmt="%d")


def test_uci_har_text_folder_and_zip(tmp_path):
    uci_folder(tmp_path / "UCI HAR Dataset")
    d = har.read_text_uci([tmp_path / "UCI HAR Dataset"])
    assert d["x"].shape == (40, 9, 128)
    assert d["chain"].tolist() == np.repeat(np.arange(8), 5).tolist()
    assert sorted(set(d["y"].tolist())) == [0, 4]
    f = data.load("uci-har", data_dir=tmp_path)
    # One chain of two, for two activities.
    assert [len(c.test) for c in f.clients.values()] == [10, 10]
    (tmp_path / "z").mkdir()
    with zipfile.ZipFile(tmp_path / "z" / "UCI HAR Dataset.zip", "w") as archive:
        for file in (tmp_path / "UCI HAR Dataset").rglob("*.txt"):
            archive.write(file, file.relative_to(tmp_path))
    zipped = data.load("uci-har", data_dir=tmp_path / "z")
    assert zipped.clients[0].test.x.equal(f.clients[0].test.x)
    (tmp_path / "UCI HAR Dataset" / "test" / "y_test.txt").write_text("1\n2\n")
    with pytest.raises(InputError, match="do not agree"):
        data.load("uci-har", data_dir=tmp_path)


def test_unpacked_copy_is_used_until_the_file_changes(tmp_path):
    source = tmp_path / "a.bin"
    source.write_bytes(b"1")
    calls = []

    def read(paths):
        calls.append(paths)
        return {"x": np.arange(3)}

    for _ in range(2):
        assert named_set.read_unpacked("a", [source], read)["x"].tolist() == [0, 1, 2]
    assert len(calls) == 1
    source.write_bytes(b"22")
    named_set.read_unpacked("a", [source], read)
    assert len(calls) == 2
    for copy in (tmp_path / "cache" / "unpacked").iterdir():
        assert not copy.name.startswith(".part-")
        copy.write_bytes(b"damaged")
    assert named_set.read_unpacked("a", [source], read)["x"].tolist() == [0, 1, 2]
    assert len(calls) == 3


def test_unpacked_copy_is_not_used_by_a_reader_that_was_changed(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"1")
    monkeypatch.syspath_prepend(tmp_path)
    for number in (1, 20):
        code = f"import numpy\n\ndef read(paths):\n    return {{'x': numpy.array([{number}])}}\n"
        (tmp_path / "readers_of_a.py").write_text(code)
        monkeypatch.delitem(sys.modules, "readers_of_a", raising=False)
        # Python compiles a file again only if its second or its size is another one.
        importlib.invalidate_caches()
        read = importlib.import_module("readers_of_a").read
        for _ in range(2):
            arrays = named_set.read_unpacked("a", [tmp_path / "a.bin"], read)
            assert arrays["x"].tolist() == [number]


# ---- definitions that are wrong ------------------------------------------------------------------


def read_steps(paths):
    rows = [line.split(",") for line in paths[0].read_text().splitlines()]
    kinds = [("sit", "walk").index(kind) for kind, _ in rows]
    return {"x": np.array([[float(x)] for _, x in rows]), "y": np.array(kinds)}


def make_steps(arrays):
    return Dataset(arrays["x"], arrays["y"], ("sit", "walk"))


STEPS = NamedSet(
    about="steps",
    defaults=SETS["digits"].defaults,
    partition="iid",
    formats=(FileFormat(("steps.csv",), read_steps),),
    dataset=make_steps,
    source="the shop",
)


def test_what_a_reader_meets_in_a_file_is_a_sentence(tmp_path):
    (tmp_path / "steps.csv").write_text("sit,1\nrun,2\n")
    sentence = (
        rf"^steps cannot be read from '{tmp_path}/steps\.csv': ValueError: tuple\.index\(x\): x not "
        r"in tuple \(at test_named_set\.py, line \d+\)\. Get the file again from the shop; if it is "
        r"as published, correct the reader\.$"
    )
    with pytest.raises(InputError, match=sentence):
        named_set.read_dataset("steps", STEPS, None, tmp_path)
    (tmp_path / "steps.csv").write_text("sit,1\nwalk,2\n")
    assert named_set.read_dataset("steps", STEPS, None, tmp_path).y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (
            {"y": np.zeros(3, int)},
            "4 examples, 3 labels, labels from 0 up to 0, and names for 2; correct",
        ),
        (
            {"y": np.arange(4)},
            "4 examples, 4 labels, labels from 0 up to 3, and names for 2; correct",
        ),
        ({"user": np.zeros(2, int)}, "4 examples, 4 labels, 2 users, labels from 0 up to 0"),
    ],
)
def test_arrays_that_do_not_agree_are_refused(columns, sentence):
    whole = Dataset(np.zeros((4, 1)), np.zeros(4, int), ("sit", "walk"))
    made = replace(
        STEPS, formats=(), dataset=None, source="", make=lambda users: replace(whole, **columns)
    )
    with pytest.raises(InputError, match=f"the arrays of steps do not agree: {sentence}"):
        named_set.read_dataset("steps", made, None, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"formats": ()}, "has more or less than one of formats, make and federation"),
        ({"make": make_steps}, "has more or less than one of formats, make and federation"),
        ({"dataset": None}, "with formats has no dataset, or no source"),
        ({"source": ""}, "with formats has no dataset, or no source"),
        (
            {"formats": STEPS.formats[0]},
            r"^formats is FileFormat.*; it must be a tuple of FileFormat",
        ),
    ],
)
def test_a_definition_that_lacks_something_is_refused(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        replace(STEPS, **changes)


def test_the_files_of_a_set_are_no_text():
    with pytest.raises(InputError, match=r"^files is 'steps.csv'; it must be a tuple, as in \('"):
        FileFormat("steps.csv", read_steps)


def test_no_cache_no_copy_no_complaint(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    # A file: nothing can be written below it.
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path / "file"))
    arrays = named_set.read_unpacked("a", [tmp_path / "file"], lambda _: {"x": np.arange(2)})
    assert arrays["x"].tolist() == [0, 1]


@pytest.fixture
def server(tmp_path):
    """A source on this machine: the four files of a small MNIST."""
    (tmp_path / "www").mkdir()
    for name, blob in mnist_files():
        (tmp_path / "www" / f"{name}.gz").write_bytes(gzip.compress(blob))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path / "www")
    ) as s:
        thread = threading.Thread(target=s.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{s.server_port}/", tmp_path / "www"
        s.shutdown()
        thread.join()


def sources(url, folder, wrong=False):
    for file in images.IDX_FILES:
        md5 = hashlib.md5((folder / f"{file}.gz").read_bytes()).hexdigest()
        yield named_set.Download(f"{url}{file}.gz", "0" * 32 if wrong else md5, f"mnist/{file}.gz")


def test_download_with_its_checksum_then_from_the_cache(server, monkeypatch):
    monkeypatch.setitem(SETS, "mnist", replace(SETS["mnist"], downloads=tuple(sources(*server))))
    assert total(data.load("mnist", clients=3)) == 360
    for file in server[1].iterdir():
        file.unlink()
    assert total(data.load("mnist", clients=3)) == 360


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server, monkeypatch, tmp_path):
    monkeypatch.setitem(
        SETS, "mnist", replace(SETS["mnist"], downloads=tuple(sources(*server, wrong=True)))
    )
    with pytest.raises(InputError, match="could it be downloaded"):
        data.load("mnist")
    assert not list((tmp_path / "cache" / "mnist").glob("*.gz"))


def test_no_network_says_where_it_looked_and_what_to_do(monkeypatch, tmp_path):
    nowhere = named_set.Download("http://127.0.0.1:9/x.gz", "0" * 32, "mnist/x.gz")
    monkeypatch.setitem(SETS, "mnist", replace(SETS["mnist"], downloads=(nowhere,)))
    with pytest.raises(InputError) as caught:
        data.load("mnist", data_dir=tmp_path)
    for words in (str(tmp_path), "127.0.0.1:9", "FEDGROVE_DATA", "--data-dir"):
        assert words in str(caught.value)


def test_a_set_without_a_known_checksum_is_not_downloaded(tmp_path):
    with pytest.raises(InputError, match=r"uci_har\.npz.*archive\.ics\.uci\.edu.*FEDGROVE_DATA"):
        data.load("uci-har", data_dir=tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        data.load("uci-har", data_dir=tmp_path / "none")


def test_a_packed_file_that_is_not_one_is_refused(tmp_path):
    np.savez(tmp_path / "uci_har.npz", x=np.zeros((2, 128, 9)))
    with pytest.raises(InputError, match="no array y"):
        data.load("uci-har", data_dir=tmp_path)


def test_a_recipe_with_another_optimiser_is_refused():
    with pytest.raises(InputError, match=r"^optimiser is 'Adagrad'; it must be SGD or Adam\.$"):
        replace(SETS["digits"].defaults, optimiser="Adagrad")
