"""The container: golden bytes, a reader written from the page, and what may be wrong with bytes."""

from __future__ import annotations

import random
import re
import struct
import time
import zlib
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from fedgrove.core import Packet
from fedgrove.errors import InputError, WireError
from fedgrove.wire import container, entropy, streams
from fedgrove.wire.codec import (
    Bitmap,
    Codebook,
    Dense,
    Entropy,
    KnownMask,
    Planes,
    Smallest,
    Sparse,
    Zstd,
)

STATUS = Path("/proc/self/status")


def rss(line: str) -> int:
    """VmRSS or VmHWM (the peak) in bytes, from the kernel."""
    for row in STATUS.read_text().splitlines():
        if row.startswith(line):
            _, kib, _ = row.split()
            return int(kib) << 10
    raise LookupError(line)


def reset_peak() -> int:
    """Forget the peak of earlier tests; what is held now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return rss("VmRSS")
    except OSError:
        pytest.skip("this system does not say how much memory was used")


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def entry(
    name: bytes = b"w",
    dtype: int = 0,
    form: int = 0,
    shape: tuple[int, ...] = (2,),
    shared: int = 0,
) -> bytes:
    written_name = entropy.varint(shared) + entropy.varint(len(name)) + name
    dims = b"".join(entropy.varint(d) for d in shape)
    return written_name + bytes([dtype, form, len(shape)]) + dims


def payload(index: bytes, body: bytes, flags: int = 0, count: int = 1) -> bytes:
    counts = entropy.varint(count) + entropy.varint(len(index))
    return sealed(b"fgrv\x01" + bytes([flags]) + counts + index + body)


# ---- golden bytes --------------------------------------------------------------------------------


def test_dense_golden() -> None:
    # magic "fgrv", version 1, flags 0 | 1 tensor, index of 7 bytes | shares 0, 1 letter "w",
    # float32 (0), form 0, 1 dimension of 2 | raw (0), 1.0 = 3f800000 and 2.0 = 40000000, low byte
    # first | CRC-32 of all that
    want = bytes.fromhex("66677276 01 00  01 07  00 01 77 00 00 01 02  00 0000803f 00000040")
    assert Dense().encode(Packet({"w": torch.tensor([1.0, 2.0])})).data == sealed(want)


def test_the_page_is_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    example = page.split("## Worked example")[1].split("```")[1]
    written = b""
    for row in example.strip().splitlines():
        # the bytes stand before the explanation
        digits, _ = re.split(r" {3,}|(?<=40) (?=raw)", row)
        written += bytes.fromhex(digits)
    assert Dense().decode(written).values["w"].tolist() == [1, 2]
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})  # type: ignore[index]


def test_bitmap_golden() -> None:
    # flags 1: masks | form 0x11: bits, kept | kept are places 0 and 3: bits 1001 from the low end
    # = 09 | -1 = ff, 5
    values = {"b": torch.tensor([-1, 7, 7, 5], dtype=torch.int8)}
    packet = Packet(values, {"b": torch.tensor([1, 0, 0, 1]) > 0})
    want = bytes.fromhex("66677276 01 01  01 07  00 01 62 04 11 01 04  00 09  00 ff 05")
    encoded = Bitmap().encode(packet)
    assert encoded.data == sealed(want)
    assert encoded.cost == {
        "values": 3,
        "mask": 2,
        "codebook": 0,
        "indices": 0,
        "scores": 0,
        "header": 19,
    }


def test_codebook_golden() -> None:
    # form 0x20: no mask, codebook | 2 entries (count less one: 01), raw, 0.0 and 1.0 | raw indices
    # 1 bit each, 0 1 1 0 1 0 0 0  1 from the low end: 16 01
    packet = Packet({"w": torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 0, 1])})
    want = bytes.fromhex(
        "66677276 01 00  01 07  00 01 77 00 20 01 09  01 00 00000000 0000803f  00 1601"
    )
    assert Codebook().encode(packet).data == sealed(want)


def test_codebook_of_five_packs_three_bits_each() -> None:
    # 0 1 2 3 4 0 0 0 0 1, three bits each, low bit first: 000 100 010 110 001 000 000 000 000 100;
    # as bytes, low bit first, 00010001 01100010 00000000 00010000 (two bits are left over)
    # = 88 46 00 08
    numbers = [0, 1, 2, 3, 4, 0, 0, 0, 0, 1]
    data = Codebook().encode(Packet({"w": torch.tensor(numbers, dtype=torch.float32)})).data
    assert data[-8:-4].hex(" ") == "88 46 00 08"
    assert Dense().decode(data).values["w"].tolist() == numbers


def test_second_name_shares_a_prefix() -> None:
    # "fc.bias" after "fc.weight" shares 3 bytes and adds "bias"
    data = Dense().encode(Packet({"fc.weight": torch.zeros(1), "fc.bias": torch.zeros(1)})).data
    assert bytes.fromhex("03 04") + b"bias" in data


def test_same_mask_golden() -> None:
    # flags 5: masks and a digest | form 0x13: same, kept | nothing for the mask | raw, 2.0
    mask = {"w": torch.tensor([False, True])}
    known = KnownMask.of(mask)
    data = Sparse().encode(Packet({"w": torch.tensor([1.0, 2.0])}, mask), known).data
    before = bytes.fromhex("66677276 01 05")
    after = bytes.fromhex("01 07 00 01 77 00 13 01 02  00 00000040")
    assert data == sealed(before + known.digest + after)
    # blake2b of 8 bytes over: name, 0, the shape as text, 0, the bits packed from the low end
    # (place 1 = 02)
    assert known.digest == blake2b(b"w\x002\x00\x02", digest_size=8).digest()


# ---- a stranger's entropy decoder, from docs/wire.md alone ---------------------------------------


def stranger(words: list[int], f: list[int], n: int) -> tuple[list[int], int]:
    """The symbols and the last state, by the recipe of the page; it uses up the words."""
    total = sum(f)
    edges = []
    below = 0
    for i, frequency in enumerate(f):
        edges.append(below * (2**24 - len(f)) // total + i)
        below += frequency
    edges.append(2**24)
    state = 0
    out = []
    for _ in range(n):
        while state < 2**32 and words:
            state = state << 32 | words.pop()
        q = state % 2**24
        s = max(i for i in range(len(f)) if edges[i] <= q)
        out.append(s)
        state = (state >> 24) * (edges[s + 1] - edges[s]) + q - edges[s]
    return out, state


def words_of(coded: bytes) -> list[int]:
    cursor = entropy.Cursor(memoryview(coded))
    n = cursor.varint(1 << 20, "words")
    assert len(coded) == cursor.at + 4 * n
    return list(struct.unpack(f"<{n}I", coded[cursor.at :]))


@pytest.mark.parametrize(("k", "n"), [(2, 7), (3, 100), (17, 900), (256, 3000)])
def test_a_stranger_reads_symbols(k: int, n: int) -> None:
    x = np.random.default_rng(k).integers(0, k, n).astype(np.uint8)
    f = entropy.frequencies(np.bincount(x, minlength=256))
    used = np.flatnonzero(f)
    ranks, state = stranger(
        words_of(entropy.ans_bytes(entropy.encode_ans(x, f))), f[used].tolist(), n
    )
    assert [used[r] for r in ranks] == x.tolist()
    assert state == 0


@pytest.mark.parametrize("density", [0.001, 0.3, 0.97])
def test_a_stranger_reads_bits(density: float) -> None:
    bits = np.random.default_rng(0).random(4000) < density
    packed = np.packbits(bits, bitorder="little")
    f = entropy.bit_frequencies(max(1, round(bits.mean() * 65536)))
    assert f.sum() == 1 << 22
    assert f.min() >= 1
    read, state = stranger(
        words_of(entropy.ans_bytes(entropy.encode_ans(packed, f))), f.tolist(), len(packed)
    )
    assert read == packed.tolist()
    assert state == 0


def test_frequency_table_golden() -> None:
    # scale 10; symbol 0: 768 = 6 * 128 = 80 06 as a varint; a zero, 0 more zeros; symbol 2: 256
    # = 80 02
    f = entropy.frequencies(np.array([3, 0, 1] + [0] * 253))
    assert entropy.table_bytes(f).hex(" ") == "0a 80 06 00 00 80 02"
    table = entropy.read_table(entropy.Cursor(memoryview(entropy.table_bytes(f))), 256, "x")
    assert table.tolist() == f.tolist()


# ---- what may be wrong ---------------------------------------------------------------------------

GOOD = bytes([0]) + struct.pack("<2f", 1, 2)


def refused(data: bytes, words: str, **kwargs: object) -> None:
    with pytest.raises(WireError, match=words) as caught:
        Dense().decode(data, **kwargs)  # type: ignore[arg-type]
    assert str(caught.value).endswith(".")


def test_the_helper_makes_a_good_payload() -> None:
    assert Dense().decode(payload(entry(), GOOD)).values["w"].tolist() == [1, 2]


def test_frames_are_refused() -> None:
    good = payload(entry(), GOOD)
    refused(b"", "not a fedgrove payload")
    refused(b"PK\x03\x04" + good[4:], "not a fedgrove payload")
    refused(sealed(b"fgrv\x02" + good[5:-4]), "version 2")
    refused(good[:-1], "checksum")
    refused(good[:-6] + bytes([good[-6] ^ 1]) + good[-5:], "checksum")
    refused(payload(entry(), GOOD, flags=8), "flags are 8")
    refused(payload(entry(), GOOD + b"x"), "1 bytes follow")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (entry(dtype=99), "dtype code 99"),
        (entry(form=6), "form 6"),
        (entry(form=0x30), "form 48"),
        (entry(form=1), "without masks"),
        (entry(shape=(1,) * 17), "17 dimensions"),
        (entry(shape=(1 << 41,)), "at most"),
        (entry(shape=(1 << 30, 0, 1 << 30)), "elements are allowed"),
        (entry(shape=(1 << 25,)), "without the expected shapes"),
        (entry(name=b"\xff"), "not UTF-8"),
        (entry(name=b"a" * 257), "length of a name"),
        (entry(shared=1), "shared part"),
        (entry() + b"\0", "after its last"),
        (entry()[:-1], "ends inside"),
        (entry(dtype=9, form=0x20), "booleans"),
        (b"\0\x81\x80\x80\x80\x80\x80\x80\x80\x80\x01", "63 bits"),
    ],
)
def test_indices_are_refused(index: bytes, words: str) -> None:
    refused(payload(index, GOOD), words)


def test_more_indices_are_refused() -> None:
    refused(payload(entry() + entry(), GOOD * 2, count=2), "twice")
    refused(payload(entry(), GOOD, count=1 << 15), "number of tensors")
    refused(payload(entry(form=0x13), GOOD, flags=1), "does not name it")
    refused(payload(entry(form=0x12), GOOD, flags=1), "needs two")


def test_like_is_checked() -> None:
    good = payload(entry(), GOOD)
    assert Dense().decode(good, like={"w": (torch.float32, (2,))}).values["w"].shape == (2,)
    refused(good, "shape", like={"w": (torch.float32, (3,))})
    refused(good, "torch.float64 of shape", like={"w": (torch.float64, (2,))})
    refused(good, "not expected", like={"v": (torch.float32, (2,))})
    refused(good, "lacks 'v'", like={"w": (torch.float32, (2,)), "v": (torch.float32, (2,))})
    # With like, a small payload may be a large tree: 40 million equal values.
    large = Smallest().encode(Packet({"w": torch.zeros(10_000_000)})).data
    assert len(large) < 100
    refused(large, "without the expected shapes")
    assert (
        Dense().decode(large, like={"w": (torch.float32, (10_000_000,))}).values["w"].numel()
        == 10_000_000
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends inside"),
        (GOOD[:-1], "ends inside"),
        (b"\x09" + GOOD[1:], "method 9"),
        (b"\x01\x7f\x00", "length of w"),
        (b"\x01\x09\x00", "ends inside"),
        (b"\x01\x04abcd", "cannot be read"),
        (b"\x02\x11", "scale"),
        (b"\x02\x01\x02\x01\x00\x00\x00\x00", "fewer than two"),
        (b"\x02\x01\x01\x01\x7f", "words"),
        (b"\x02\x01\x01\x01\x01\x00\x00\x00\x00", "end in a zero"),
        (b"\x02\x01\x01\x01\x04" + b"\x01\0\0\0" * 4, "more than 8 symbols"),
        (b"\x02\x0e\x01\x00\xff\x01", "more than 256 symbols|at most"),
    ],
)
def test_streams_are_refused(body: bytes, words: str) -> None:
    refused(payload(entry(), body), words)


def test_an_index_outside_the_codebook_is_refused() -> None:
    # three entries need 2 bits each; 3 is none of them
    book = b"\x02\x00" + struct.pack("<3f", 1, 2, 3)
    refused(payload(entry(form=0x20), book + b"\x00\x0f"), "codebook has 3 entries")


def bombs() -> dict[str, bytes]:
    zeros = b"\0" * (1 << 28)
    stated = zstandard.ZstdCompressor(level=1).compress(zeros)
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(zeros)
    # The window byte becomes a stated size of 8 (descriptor 0x20: one segment); the blocks still
    # hold 2^28.
    lying = silent[:4] + b"\x20\x08" + silent[6:]
    return {"stated": stated, "silent": silent, "lying": lying}


@pytest.fixture(scope="module")
def bomb_frames() -> dict[str, bytes]:
    return bombs()


@pytest.mark.parametrize("kind", ["stated", "silent", "lying"])
def test_bombs_are_refused_at_once(kind: str, bomb_frames: dict[str, bytes]) -> None:
    frame = bomb_frames[kind]
    stream = b"\x01" + entropy.varint(len(frame)) + frame
    index = sealed(b"fgrv\x01\x02\x01" + entropy.varint(16) + entropy.varint(len(frame)) + frame)
    for data in (payload(entry(), stream), index):
        before = reset_peak()
        # Of this process alone: the machine may be busy.
        start = time.process_time()
        refused(data, "frame of")
        assert time.process_time() - start < 0.1
        assert rss("VmHWM") - before < 8 << 20


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.float64])
def test_the_largest_unexpected_tree_takes_little_memory(dtype: torch.dtype) -> None:
    n = container.FREE_BYTES // (dtype.itemsize + container.WORKING_BYTES) - 1
    value = torch.zeros(n, dtype=dtype)
    value[7] = 1
    mask = torch.ones(n, dtype=torch.bool)
    mask[5] = False
    data = (Codebook() >> Entropy()).encode(Packet({"w": value}, {"w": mask})).data
    assert len(data) < 1000
    before = reset_peak()
    assert Dense().decode(data).values["w"][7] == 1
    assert rss("VmHWM") - before < 64 << 20


# ---- fuzz ----------------------------------------------------------------------------------------


def corpus() -> list[tuple[bytes, KnownMask]]:
    """Payloads of many forms, and what their receiver holds."""
    torch.manual_seed(0)
    w = torch.randn(16, 8, 3)
    few = torch.randn(16)[torch.randint(16, (16, 8, 3))]
    grid = (torch.rand(16, 1, 1) < 0.5) & (torch.rand(1, 8, 1) < 0.5)
    masks = [
        torch.rand(16, 8, 3) < 0.3,
        grid.expand(16, 8, 3),
        torch.ones(16, 8, 3, dtype=torch.bool),
    ]
    codecs = [
        Dense(),
        Bitmap(),
        Sparse() >> Entropy(),
        Smallest(),
        Codebook() >> Planes() >> Zstd(),
    ]
    out = []
    for mask in masks:
        known = KnownMask.of({"w": mask ^ (torch.rand(16, 8, 3) < 0.01)})
        packet = {
            "w": w,
            "few": few,
            "n": torch.arange(40),
            "on": torch.rand(90) < 0.2,
            "h": w[:4].bfloat16(),
        }
        masked = Packet(packet, {"w": mask, "few": mask})
        for codec in codecs:
            out.append((codec.encode(masked, known).data, known))
            out.append((codec.encode(masked).data, known))
            out.append((codec.encode(Packet(packet)).data, known))
    return out


def damaged(data: bytes, rng: random.Random) -> bytes:
    body = bytearray(data[:-4])
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        # half of the damage goes near the start, where the index is
        anywhere = rng.random() < 0.5
        at = rng.randrange(5, len(body) if anywhere else min(90, len(body)))
        match rng.randrange(5):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                body[at] ^= 1 << rng.randrange(8)
            case 2:
                del body[at : at + rng.randrange(1, 9)]
            case 3:
                body[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                body[at] = rng.choice([0, 1, 2, 3, 4, 127, 128, 255])
        if len(body) < 12:
            break
    return sealed(bytes(body)) if rng.random() < 0.98 else bytes(body)


def test_ten_thousand_damaged_payloads() -> None:
    rng = random.Random(0)
    good = corpus()
    for data, known in good:
        Dense().decode(data, known)
    read = 0
    before = reset_peak()
    for _ in range(10_000):
        data, known = rng.choice(good)
        try:
            Dense().decode(damaged(data, rng), known)
            # the damage may leave a valid payload: another value, another name
            read += 1
        except WireError:
            pass
    assert rss("VmHWM") - before < 64 << 20
    assert 0 < read < 7_000


def test_noise_is_refused() -> None:
    rng = random.Random(1)
    for _ in range(300):
        with pytest.raises(WireError):
            Dense().decode(sealed(b"fgrv\x01" + rng.randbytes(rng.randrange(1, 60))))


# ---- writing what cannot be read -----------------------------------------------------------------


def test_packets_are_checked() -> None:
    with pytest.raises(InputError, match="complex64"):
        Dense().encode(Packet({"w": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(InputError, match="not among"):
        Dense().encode(Packet({"w": torch.zeros(2)}, {"v": torch.ones(2) > 0}))
    with pytest.raises(InputError, match=r"torch\.bool"):
        Dense().encode(Packet({"w": torch.zeros(2)}, {"w": torch.ones(2)}))
    with pytest.raises(InputError, match="name"):
        Dense().encode(Packet({"w" * 300: torch.zeros(2)}))


def test_long_index_is_squeezed() -> None:
    names = {f"layers.{i}.attention.weight": torch.zeros(1) for i in range(200)}
    encoded = Dense().encode(Packet(names))
    assert encoded.data[5] == container.SHORT_INDEX
    assert encoded.cost["header"] < 200 * 12
    assert list(Dense().decode(encoded.data).values) == list(names)


def test_tools_of_a_stream_are_the_smallest() -> None:
    tools = streams.Tools(ans=True, zstd=True, planes=True)
    rng = np.random.default_rng(0)
    cases = {
        "fill": np.full(50, 3),
        "raw": rng.integers(0, 256, 50),
        "zstd": np.tile(np.arange(100), 20),
        "ans": (rng.random(3000) < 0.1).astype(int),
    }
    for want, x in cases.items():
        chunks = streams.write_values(x.astype(np.uint8), tools)
        assert entropy.StreamMethod(chunks[0][0]).name.lower() == want
