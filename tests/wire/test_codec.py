"""Codecs: what goes in comes out, to the bit; what it cost; how near the limit."""

from __future__ import annotations

import pickle
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedgrove import trees
from fedgrove.core import ExpectedPacket, Packet
from fedgrove.errors import InputError, WireError
from fedgrove.methods.adfedwcp.kmeans import cluster
from fedgrove.wire.codec import (
    COSTS,
    Bitmap,
    Chain,
    Chainable,
    Codebook,
    Delta,
    Dense,
    Encoded,
    Entropy,
    KnownMask,
    Planes,
    Smallest,
    Sparse,
    SubModel,
    Zstd,
    explain,
)
from fedgrove.wire.container import DTYPES
from fedgrove.wire.entropy import SMALLEST_FRAME, deflate, deflate_cached, entropy_bytes
from fedgrove.wire.tensors import find_book, to_words

CODECS: list[Chainable] = [
    Dense(),
    Bitmap(),
    SubModel(),
    Delta(),
    Sparse(),
    Codebook(),
    Dense() >> Entropy(),
    Bitmap() >> Planes(),
    Sparse() >> Entropy(),
    Codebook() >> Entropy(slack=0),
    Bitmap() >> Planes() >> Zstd(),
    Smallest(),
    Smallest(slack=0),
]


def words(value: Tensor, mask: Tensor | None = None) -> list[int]:
    """The bits of each element, 0 where the mask drops it."""
    bits = to_words(value)
    if mask is not None:
        bits = np.where(mask.reshape(-1).numpy(), bits, 0)
    return bits.tolist()


def check_round_trip(codec: Chainable, packet: Packet, known: KnownMask | None = None) -> bytes:
    """Encode and decode, compare every bit, and add up the cost."""
    encoded = codec.encode(packet, known)
    assert set(encoded.cost) == set(COSTS)
    assert min(encoded.cost.values()) >= 0
    assert sum(encoded.cost.values()) == len(encoded.data)
    assert codec.cost(packet, known) == encoded.cost
    like = ExpectedPacket.of(packet.values).tensors
    back = codec.decode(encoded.data, known, like)
    mask = packet.mask or {}
    back_mask = back.mask or {}
    assert (back.mask is None) == (packet.mask is None)
    assert list(back.values) == list(packet.values)
    assert set(back_mask) == set(mask)
    for name, value in packet.values.items():
        assert back.values[name].dtype == value.dtype
        assert back.values[name].shape == value.shape
        assert words(back.values[name]) == words(value, mask.get(name))
    for name, kept in mask.items():
        assert torch.equal(back_mask[name], kept)
    assert codec.encode(packet, known).data == encoded.data
    return encoded.data


# ---- round trips ---------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype and shape: noise in all bits, few distinct values, mostly zeros, or all equal."""
    dtype = draw(st.sampled_from(DTYPES))
    dims = draw(st.sampled_from([0, 1, 5, 63]))
    shape = draw(st.lists(st.integers(0, dims), max_size=2 if dims == 63 else 4).map(tuple))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    bits = rng.integers(0, 1 << 63, shape, dtype=np.int64).reshape(-1)
    kind = draw(st.sampled_from(["noise", "few", "zeros", "same"]))
    if len(bits) and kind == "few":
        bits = bits[bits.argsort() % 7]
    elif kind == "zeros":
        bits = bits * (rng.random(bits.shape) < 0.1)
    elif kind == "same":
        bits = np.full_like(bits, 3)
    if dtype == torch.bool:
        return torch.from_numpy(bits % 3 == 0).reshape(shape)
    narrow = torch.from_numpy(bits.astype(f"u{dtype.itemsize}").view(np.uint8)).view(dtype)
    return narrow.reshape(shape)


@st.composite
def packets(draw: st.DrawFn) -> Packet:
    names = draw(st.lists(st.text(max_size=8), unique=True, max_size=4))
    values = {name: draw(tensors()) for name in names}
    if draw(st.booleans()):
        return Packet(values)
    return Packet(values, draw(masks_of_some(values)))


@st.composite
def masks_of_some(draw: st.DrawFn, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """A mask for some of the tensors."""
    mask = {}
    for name, value in values.items():
        if draw(st.booleans()):
            mask[name] = draw(masks(value.shape))
    return mask


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Of any density, by element or by whole channels."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]))
    if len(shape) >= 2 and draw(st.booleans()):
        rows = torch.rand(shape[0], generator=generator) < density
        columns = torch.rand(shape[1], generator=generator) < 0.5
        grid = rows[:, None] & columns
        # one mask value for all the elements behind a row and a column
        broadcast = (shape[0], shape[1]) + (1,) * (len(shape) - 2)
        return grid.reshape(broadcast).expand(shape)
    return torch.rand(shape, generator=generator) < density


@settings(max_examples=250, deadline=None)
@given(packets(), st.sampled_from(CODECS))
def test_round_trip(packet: Packet, codec: Chainable) -> None:
    check_round_trip(codec, packet)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([Delta(), Sparse(), Sparse() >> Entropy(), Smallest(), Bitmap()]))
def test_round_trip_with_a_known_mask(data: st.DataObject, codec: Chainable) -> None:
    packet = data.draw(packets().filter(lambda p: p.mask is not None))
    held = data.draw(masks_of_some(dict(packet.values)))
    check_round_trip(codec, packet, KnownMask.of(held))
    check_round_trip(codec, packet, KnownMask.of(packet.mask or {}))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_at_length(codec: Chainable, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(70, 60, generator=generator)
    value = noise > 0 if dtype == torch.bool else (noise * 40).abs().to(dtype)
    mask = torch.rand(70, 60, generator=generator) < 0.3
    values = {"w": value, "none": value[:0], "thin": value[:, :0], "one": value[0, 0]}
    kept = {"w": mask, "thin": mask[:, :0], "one": mask[0, 0]}
    check_round_trip(codec, Packet(values, kept))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_odd_bits_survive(codec: Chainable) -> None:
    # two NaNs that differ in their payload, both zeros, infinity, the smallest number
    bits = [0x7FC00001, 0x7FC00002, -0x80000000, 0, 0x7F800000, 1]
    odd = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    check_round_trip(codec, Packet({"w": odd}))
    check_round_trip(codec, Packet({"w": odd}, {"w": torch.tensor([1, 1, 1, 0, 0, 1]) > 0}))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_the_mask_leaves_out_is_positive_zero(codec: Chainable) -> None:
    packet = Packet({"w": torch.tensor([-1.0, -0.0, float("nan")])}, {"w": torch.zeros(3) > 1})
    assert words(codec.decode(codec.encode(packet).data).values["w"]) == [0, 0, 0]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_views_gradients_and_inputs(codec: Chainable) -> None:
    w = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.eye(4, 6) > 0
    packet = Packet({"t": w.t(), "every": w[::2]}, {"t": mask})
    w_before = w.detach().clone()
    mask_before = mask.clone()
    check_round_trip(codec, packet)
    assert torch.equal(w, w_before)
    assert torch.equal(mask, mask_before)
    # what comes back may be written to
    codec.decode(codec.encode(packet).data).values["t"].add_(1)


def test_large_tensors_round_trip() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(400, 500, generator=generator)
    mask = w.abs() > 1.04
    few = cluster(w, torch.tensor(16), 16)
    more = cluster(w, torch.tensor(200), 200)
    for values in (w, few, more, w.double(), w.bfloat16()):
        for codec in (Smallest(), Smallest(slack=0), Dense() >> Planes() >> Entropy()):
            check_round_trip(codec, Packet({"w": values}, {"w": mask}))


# ---- which form is taken, and what it costs ------------------------------------------------------


def forms(codec: Chainable, packet: Packet, known: KnownMask | None = None) -> tuple[str, str]:
    """The forms that the mask and the values of the packet's only tensor took."""
    (line,) = explain(codec.encode(packet, known).data, known)
    return line.mask, line.values


def test_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(20, 10, 3, generator=generator)
    scattered = torch.rand(20, 10, 3, generator=generator) < 0.3
    rows = torch.rand(20, 10, 1, generator=generator)[:, :1] < 0.5
    channels = rows.expand(20, 10, 3)
    small = Smallest()
    assert forms(small, Packet({"w": w})) == ("none", "full")
    assert forms(small, Packet({"w": torch.where(scattered, w, 0.0)})) == ("zeros", "kept")
    assert forms(Codebook(), Packet({"w": w.sign()})) == ("none", "book")
    assert forms(SubModel(), Packet({"w": w}, {"w": channels})) == ("channels", "kept")
    assert forms(small, Packet({"w": w.sign()}, {"w": scattered})) == ("bits", "book")

    packet = Packet({"w": w}, {"w": scattered})
    assert forms(Dense(), packet) == ("bits", "full")
    assert forms(Bitmap(), packet) == ("bits", "kept")
    assert forms(small, packet) == ("bits", "kept")
    same = KnownMask.of({"w": scattered})
    flipped = scattered.clone()
    flipped[0, 0, 0] ^= True
    assert forms(small, packet, KnownMask.of({"w": flipped})) == ("flips", "kept")
    assert forms(small, packet, same) == ("same", "kept")
    assert forms(Bitmap(), packet, same) == ("bits", "kept")


def test_a_channel_mask_costs_a_bit_per_channel() -> None:
    mask = (torch.arange(64)[:, None, None] % 2 > 0).expand(64, 32, 9)
    packet = Packet({"w": torch.ones(64, 32, 9)}, {"w": mask})
    # 64 + 32 bits and a byte before each
    assert SubModel().encode(packet).cost["mask"] == 64 // 8 + 32 // 8 + 2
    assert Bitmap().encode(packet).cost["mask"] == 64 * 32 * 9 // 8 + 1


def test_static_codecs_cost_what_the_shapes_say() -> None:
    w = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(100, 100, dtype=torch.bool)
    mask[:30] = True
    cost = Dense().encode(Packet({"w": w})).cost
    assert (cost["values"], cost["mask"]) == (40_001, 0)
    cost = Bitmap().encode(Packet({"w": w}, {"w": mask})).cost
    assert (cost["values"], cost["mask"]) == (12_001, 1_251)


def test_the_cost_of_dense_golden() -> None:
    # "w" alone is the worked example of docs/wire.md: 28 bytes, of which a method byte and 2 * 4
    # are its values
    nothing = dict.fromkeys(COSTS, 0)
    small = Packet({"w": torch.tensor([1.0, 2.0])})
    assert Dense().cost(small) == nothing | {"values": 9, "header": 19}
    # A method byte before each stream; w: 15 * 4 bytes and 15 bits; scores.b: 7 * 2 bytes; on: 9
    # bits; e: no streams. The header: 8 bytes, an index of 8 + 14 + 8 + 8, and 4 of checksum.
    values = {
        "w": torch.ones(3, 5),
        "scores.b": torch.ones(7, dtype=torch.float16),
        "on": torch.ones(9, dtype=torch.bool),
        "e": torch.ones(0, 4),
    }
    mask = {"w": torch.ones(3, 5) > 0, "e": torch.ones(0, 4) > 0}
    assert Dense().cost(Packet(values, mask)) == nothing | {
        "values": 61 + 3,
        "mask": 3,
        "scores": 15,
        "header": 50,
    }


@settings(max_examples=150, deadline=None)
@given(packets())
def test_dense_costs_what_it_encodes(packet: Packet) -> None:
    known = KnownMask.of(packet.mask or {})
    # Twice: the second time the cost is a remembered one.
    for _ in range(2):
        assert Dense().cost(packet) == Dense().encode(packet).cost
        assert Dense().cost(packet, known) == Dense().encode(packet, known).cost


def test_the_cost_of_dense_tells_packets_apart() -> None:
    w = torch.zeros(9)
    mask = w > 0
    alike = [
        Packet({"w": w}),
        Packet({"v": w}),
        Packet({"scores": w}),
        Packet({"w": w.double()}),
        Packet({"w": w.reshape(3, 3)}),
        Packet({"w": w}, {}),
        Packet({"w": w}, {"w": mask}),
        Packet({"w": w, "v": w}, {"w": mask}),
        Packet({"w": w, "v": w}, {"v": mask}),
    ]
    for packet in alike:
        assert Dense().cost(packet) == Dense().encode(packet).cost


def test_the_cost_of_dense_refuses_what_encode_refuses() -> None:
    w = torch.zeros(2)
    # remembered, and still not the answer for the packets below
    Dense().cost(Packet({"w": w}, {"w": w > 0}))
    for packet in (
        Packet({"w": w}, {"v": w > 0}),
        Packet({"w": w}, {"w": w}),
        Packet({"w": w}, {"w": torch.zeros(3) > 0}),
        Packet({"w": w.to(torch.complex64)}),
    ):
        with pytest.raises(InputError):
            Dense().encode(packet)
        with pytest.raises(InputError):
            Dense().cost(packet)


def test_a_remembered_cost_cannot_be_changed_by_its_caller() -> None:
    packet = Packet({"w": torch.zeros(5)})
    cost = Dense().cost(packet)
    assert isinstance(cost, dict)
    cost["values"] += 1
    assert Dense().cost(packet)["values"] == 21


def test_a_codec_made_from_dense_costs_what_it_encodes() -> None:
    class Doubled(Dense):
        def encode(self, packet: Packet, known: KnownMask | None = None) -> Encoded:
            once = super().encode(packet, known)
            return Encoded(once.data * 2, {k: 2 * n for k, n in once.cost.items()})

    packet = Packet({"w": torch.zeros(5)})
    assert Doubled().cost(packet) == Doubled().encode(packet).cost
    assert Doubled().cost(packet)["values"] == 42


def test_scores_are_counted_apart() -> None:
    cost = Dense().encode(Packet({"w": torch.zeros(10), "scores.w": torch.zeros(10)})).cost
    assert (cost["values"], cost["scores"]) == (41, 41)


def test_an_unchanged_mask_costs_nothing() -> None:
    mask = {"w": torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.3}
    packet = Packet({"w": torch.randn(1000)}, mask)
    full = Sparse().encode(packet)
    again = Sparse().encode(packet, KnownMask.of(mask))
    assert full.cost["mask"] == 126
    assert again.cost["mask"] == 0
    # the digest
    assert again.cost["header"] == full.cost["header"] + 8


def test_an_unknown_mask_asks_for_a_full_resend() -> None:
    mask = {"w": torch.tensor([True, False, True])}
    data = Sparse().encode(Packet({"w": torch.ones(3)}, mask), KnownMask.of(mask)).data
    for held in (None, KnownMask.of({"w": torch.ones(3) > 0}), KnownMask.of({})):
        with pytest.raises(WireError, match="full resend"):
            Sparse().decode(data, held)


def test_a_digest_depends_on_names_shapes_and_bits_not_on_order() -> None:
    a = torch.tensor([True, False])
    b = torch.tensor([True, True])
    mask = {"a": a, "b": b}
    assert KnownMask.of(mask).digest == KnownMask.of({"b": b, "a": a}).digest
    others = [{"a": b, "b": a}, {"a": a}, {"a": a, "c": b}, {"a": a[None], "b": b}]
    assert len({KnownMask.of(m).digest for m in [mask, *others]}) == 5


def test_known_keeps_its_own_copy() -> None:
    mask = {"w": torch.tensor([True, False])}
    known = KnownMask.of(mask)
    mask["w"][1] = True
    assert known.mask["w"].tolist() == [True, False]


def test_chains_are_values() -> None:
    chain = Sparse() >> Codebook() >> Entropy()
    assert chain == Chain(Chain(Sparse(), Codebook()), Entropy())
    assert pickle.loads(pickle.dumps(chain)) == chain
    assert replace(Entropy(), slack=0.0) == Entropy(0.0)
    assert (Sparse() >> Codebook() >> Planes() >> Entropy()).allow == Smallest().allow
    with pytest.raises(InputError, match="slack is 2"):
        Entropy(slack=2)


# ---- near the limit ------------------------------------------------------------------------------

SHAPES = {
    "conv1": (64, 9, 5),
    "conv2": (64, 64, 5),
    "conv3": (128, 64, 3),
    "fc1": (300, 128),
    "fc2": (6, 300),
}


def network(density: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a small network (88,136 of them) and a magnitude mask."""
    generator = torch.Generator().manual_seed(0)
    values = {f"{k}.weight": torch.randn(s, generator=generator) * 0.05 for k, s in SHAPES.items()}
    return values, {k: v.abs() >= v.abs().quantile(1 - density) for k, v in values.items()}


def bound(mask: Tensor) -> float:
    return entropy_bytes(np.bincount(mask.reshape(-1).numpy(), minlength=2))


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5])
def test_masks_are_near_their_entropy(density: float) -> None:
    values, mask = network(density)
    encoded = Smallest().encode(Packet(values, mask))
    assert encoded.cost["mask"] <= 1.02 * sum(bound(m) for m in mask.values())


def test_masks_with_all_headers_are_near_their_entropy() -> None:
    values, mask = network(0.3)
    cost = Smallest().encode(Packet(values, mask)).cost
    assert cost["mask"] + cost["header"] <= 1.02 * sum(bound(m) for m in mask.values())


def test_masks_and_indices_are_near_their_entropy() -> None:
    values, _ = network(0.3)
    mask = {}
    clustered = {}
    limit = 0.0
    for name, value in values.items():
        few = cluster(torch.where(value.abs() > 0.0518, value, 0.0), torch.tensor(16), 16)
        clustered[name] = few
        mask[name] = few != 0
        _, kept_indices = few[mask[name]].unique(return_inverse=True)
        limit += bound(mask[name]) + entropy_bytes(np.bincount(kept_indices))
    cost = Smallest().encode(Packet(clustered, mask)).cost
    assert cost["values"] == 0
    assert cost["mask"] + cost["indices"] + cost["header"] <= 1.02 * limit


def test_sixteen_centroids_at_density_three_tenths() -> None:
    w = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    # the zero centroid is one of the 16
    few = cluster(torch.where(w.abs() > 1.0364, w, 0.0), torch.tensor(16), 16)
    mask = few != 0
    assert 0.29 < mask.float().mean() < 0.31
    encoded = Smallest().encode(Packet({"w": few}, {"w": mask}))
    assert len(encoded.data) <= 0.062 * 4 * w.numel()


def test_fp32_at_density_three_tenths() -> None:
    values, mask = network(0.3)
    assert len(Smallest().encode(Packet(values, mask)).data) <= 0.29 * 4 * 88_136


# ---- codebooks -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(1, 20_000), st.integers(0, 50)
)
def test_codebooks_are_found_when_they_are_there(itemsize: int, k: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    wide = rng.integers(0, 1 << min(63, 8 * itemsize), k, dtype=np.uint64)
    values = wide.astype(f"u{itemsize}")
    # a skewed draw, so that a sample misses the rare ones
    x = values[(k * rng.random(n) ** 4).astype(int)]
    book_and_index = find_book(x)
    assert (book_and_index is not None) == (len(np.unique(x)) <= 256)
    if book_and_index is not None:
        book, index = book_and_index
        assert book.tolist() == np.unique(x).tolist()
        assert (book[index] == x).all()


def test_zeros_that_a_mask_makes_cost_no_sign() -> None:
    """A ternary update of 88,000 weights, its zeros put there by a mask: 3,675 bytes.

    Zeros of a product, with the signs of what they were, would cost 14,167.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randn(88_000, generator=g)
    # Squares, with their signs: a few large changes among many small ones, as in an update.
    x = x * x.abs()
    # TernGrad: the sign of x times its largest magnitude m, kept with probability |x| / m.
    m = x.abs().max()
    drawn = torch.rand(len(x), generator=g) * m < x.abs()
    signs = {"w": x.sign() * m}
    ternary = trees.apply_mask(signs, {"w": drawn})
    product = {"w": signs["w"] * drawn}
    assert trees.equal(ternary, product)
    bytes_ternary = len(check_round_trip(Smallest(), Packet(ternary)))
    bytes_product = len(check_round_trip(Smallest(), Packet(product)))
    assert 3 * bytes_ternary <= bytes_product
    # One in twenty is kept: H(.05) = .29 bits say where, .05 their signs; 88,000 x .34 / 8 = 3,740.
    assert bytes_ternary < 4_000


# ---- short cuts ----------------------------------------------------------------------------------


def test_what_was_compressed_before_is_told_apart_by_all_its_bytes() -> None:
    # Two planes of one length that begin alike, and the first one again.
    first = np.tile(np.arange(64, dtype=np.uint8), 80)
    second = first.copy()
    second[3000:] = 7
    for content in (first, second, first, second):
        assert deflate_cached(content) == deflate(content.data)


def test_a_tensor_that_is_written_into_is_compressed_anew() -> None:
    codec = Smallest()
    value = torch.linspace(0.5, 2.0, 1 << 13)
    before = codec.encode(Packet({"w": value})).data
    # Its second half: the plane that was remembered begins with the same bytes.
    value[1 << 12 :] *= 1e-3
    after = codec.encode(Packet({"w": value})).data
    assert after != before
    assert torch.equal(codec.decode(after).values["w"], value)


@pytest.mark.parametrize("n", [1, 2, 9, 14, 15, 100])
def test_no_frame_is_shorter_than_the_smallest(n: int) -> None:
    # A repeated byte has the shortest frame there is.
    assert len(deflate(bytes(n))) >= SMALLEST_FRAME
