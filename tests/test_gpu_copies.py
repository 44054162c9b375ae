"""Tensors with a cached copy; here both sides are on the CPU, and the copy has other numbers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from fedgrove import gpu_copies, trees
from fedgrove.core import Packet, Report, Task
from fedgrove.nets import Net
from fedgrove.parts.aggregate import WeightedMean
from fedgrove.runs import gate
from fedgrove.runs.gate import Ruler, measure_lengths

LIKE = {"w": torch.zeros(2, 2), "b": torch.zeros(1)}


def clients(rows: torch.Tensor) -> list[trees.Tree]:
    return [trees.unflatten(row, LIKE) for row in rows]


def vector_of(tree: trees.Tree) -> torch.Tensor:
    vector = trees.as_vector(tree)
    assert vector is not None
    return vector


def test_a_part_has_the_part_of_its_copy() -> None:
    here = torch.arange(10.0).view(2, 5).clone()
    gpu_copies.keep_copy(here, here + 100)
    _, second = clients(here)
    found = gpu_copies.find_copy(vector_of(second))
    assert found is not None
    assert found.tolist() == [105.0, 106.0, 107.0, 108.0, 109.0]
    leaf = gpu_copies.find_copy(second["w"])
    assert leaf is not None
    assert leaf.tolist() == [[105.0, 106.0], [107.0, 108.0]]
    assert gpu_copies.read_on(second["b"], torch.device("cpu")) is second["b"]


def test_leaves_of_rows_are_stacked_in_any_order() -> None:
    here = torch.arange(15.0).view(3, 5).clone()
    there = here + 100
    gpu_copies.keep_copy(here, there)
    first, second, third = clients(here)
    found = gpu_copies.stack_rows([third["w"], first["w"], third["w"]])
    assert found is not None
    assert found.tolist() == [
        [[110.0, 111.0], [112.0, 113.0]],
        [[100.0, 101.0], [102.0, 103.0]],
        [[110.0, 111.0], [112.0, 113.0]],
    ]
    # Another place in the row, another memory, none that has a copy, other strides.
    assert gpu_copies.stack_rows([first["b"], vector_of(second)[:1]]) is None
    assert gpu_copies.stack_rows([first["w"], torch.zeros(3, 5)[0, :4].view(2, 2)]) is None
    assert gpu_copies.stack_rows([first["w"].clone(), first["w"]]) is None
    assert gpu_copies.stack_rows([first["w"], second["w"].T]) is None
    assert gpu_copies.stack_rows([vector_of(first)[:0], vector_of(third)[5:]]) is None
    there.add_(1)
    assert gpu_copies.stack_rows([first["w"], second["w"]]) is None


@pytest.mark.parametrize("side", ["here", "there"])
def test_a_copy_ends_when_either_side_is_written_to(side: str) -> None:
    here = torch.zeros(2, 5)
    there = torch.zeros(2, 5)
    gpu_copies.keep_copy(here, there)
    first, second = clients(here)
    assert gpu_copies.find_copy(vector_of(first)) is not None
    # Also through a view of another client: what is counted is counted for the whole.
    written = second["b"] if side == "here" else there[1]
    written.add_(1)
    assert gpu_copies.find_copy(vector_of(first)) is None
    assert gpu_copies.find_copy(here) is None


def test_a_new_tensor_has_none() -> None:
    here = torch.zeros(2, 5)
    gpu_copies.keep_copy(here, torch.zeros(2, 5))
    first, _ = clients(here)
    assert gpu_copies.find_copy(vector_of(first) + 0) is None
    assert gpu_copies.find_copy(vector_of(first).clone()) is None
    # Every other number is no part of its memory.
    assert gpu_copies.find_copy(vector_of(first)[::2]) is None
    assert gpu_copies.find_copy(here.view(torch.int32)) is None


def test_a_copy_goes_with_the_last_view() -> None:
    gc.collect()
    before = gpu_copies.count_bytes()
    here = torch.zeros(2, 5)
    gpu_copies.keep_copy(here, torch.zeros(2, 5))
    first, second = clients(here)
    del here, first
    gc.collect()
    assert gpu_copies.count_bytes() == before + 40
    assert gpu_copies.find_copy(vector_of(second)) is not None
    del second
    gc.collect()
    assert gpu_copies.count_bytes() == before


def test_a_view_gets_none() -> None:
    with pytest.raises(ValueError, match="this is a view"):
        gpu_copies.keep_copy(torch.zeros(10).view(2, 5), torch.zeros(2, 5))


def test_all_can_be_let_go() -> None:
    here = torch.zeros(5)
    gpu_copies.keep_copy(here, torch.zeros(5))
    gpu_copies.drop_all()
    assert gpu_copies.find_copy(here) is None


def test_the_mean_reads_gpu_copies() -> None:
    here = torch.zeros(2, 5)
    gpu_copies.keep_copy(here, torch.tensor([[1.0] * 5, [4.0] * 5]))
    mean = WeightedMean().start(LIKE)
    first, second = clients(here)
    mean.add(first, 1)
    # (1 * 1) / 1
    assert mean.value()["b"].tolist() == [1.0]
    mean.add(second, 2, None)
    # On the sums' own device a vector is read where it is: (1 * 1 + 2 * 0) / 3.
    assert mean.value()["b"].tolist() == [pytest.approx(1 / 3)]


def test_the_length_of_what_was_sent_reads_gpu_copies() -> None:
    here = torch.zeros(5)
    gpu_copies.keep_copy(here, torch.tensor([3.0, 0.0, 4.0, 0.0, 12.0]))
    sent = Packet(trees.unflatten(here, LIKE))
    assert Ruler().length(sent) == 13.0
    assert Ruler().length(sent, ("w",)) == 5.0


def test_what_one_client_was_sent_is_not_brought_to_a_card() -> None:
    here = torch.tensor([[3.0, 0.0, 4.0, 0.0, 12.0]])
    # Numbers that cannot be read: to ask this device would be an error.
    gpu_copies.keep_copy(here, torch.empty(1, 5, device="meta"))
    (changed,) = clients(here)
    task = Task(0, {"model": Packet(LIKE)})
    assert measure_lengths(Report(0, {"model": Packet(changed)}), task) == {"model": (13.0, 0.0)}


def test_a_length_reads_gpu_copies() -> None:
    here = torch.zeros(1, 5)
    gpu_copies.keep_copy(here, torch.tensor([[3.0, 0.0, 4.0, 0.0, 12.0]]))
    (changed,) = clients(here)
    task = Task(0, {"model": Packet(LIKE)})
    report = Report(0, {"model": Packet(changed)})
    # sqrt(9 + 16 + 144) = 13, from zeros.
    assert measure_lengths(report, task) == {"model": (13.0, 0.0)}
    # From (3, 0, 4, 0, 0), which is 5 long, only the last one differs: 12.
    sent = {"w": torch.tensor([[3.0, 0.0], [4.0, 0.0]]), "b": torch.zeros(1)}
    task = Task(0, {"model": Packet(sent)})
    assert measure_lengths(report, task, Ruler()) == {"model": (12.0, 5.0)}
    # Of what was not sent, or has another shape, all counts; it is then measured on the CPU.
    task = Task(0, {"model": Packet({"w": sent["w"]})})
    assert measure_lengths(report, task, Ruler()) == {"model": (5.0, 5.0)}
    # Nothing was sent under its name: all of it is new.
    assert measure_lengths(report, Task(0), Ruler()) == {"model": (13.0, 0.0)}


def test_a_stack_is_measured_at_once() -> None:
    """Rows of a stack, cut to the columns asked for; each client has its own length."""
    here = torch.zeros(3, 5)
    gpu_copies.keep_copy(
        here, torch.tensor([[3.0, 4.0, 0, 0, 2], [0, 0, 0, 0, 3], [6, 8, 0, 0, 4.0]])
    )
    first, second, third = clients(here)
    found = gpu_copies.find_row(vector_of({"b": second["b"]}))
    assert found is not None
    rows, row = found
    assert (rows.tolist(), row) == ([[2.0], [3.0], [4.0]], 1)
    # What spans two rows is no row.
    assert gpu_copies.find_row(here.view(-1)[3:7]) is None
    ruler = Ruler()
    task = Task(0, {"model": Packet(LIKE)})
    lengths = []
    for tree in (first, second, third):
        ruler.start_report()
        packet = Packet({"w": tree["w"]})
        lengths.append(measure_lengths(Report(0, {"model": packet}), task, ruler)["model"][0])
    # sqrt(9 + 16), 0, sqrt(36 + 64).
    assert lengths == [5.0, 0.0, 10.0]


def test_a_vector_is_brought_once_and_whole() -> None:
    cpu = torch.device("cpu")
    model = trees.pack_leaves({"w": torch.ones(2, 2), "b": torch.full((1,), 3.0)})
    first = gpu_copies.find_or_make_copy(model["w"], cpu)
    assert first is not None
    assert first.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    # It is another one than the model's own, and the next leaf lies behind it.
    assert first.data_ptr() != model["w"].data_ptr()
    second = gpu_copies.find_or_make_copy(model["b"], cpu)
    assert second is not None
    assert second.data_ptr() == first.data_ptr() + 16
    model["w"].add_(1)
    # It was written to, so it is brought anew.
    third = gpu_copies.find_or_make_copy(model["b"], cpu)
    assert third is not None
    assert third.data_ptr() != second.data_ptr()
    # A row of a stack is not: all other clients would come along.
    assert gpu_copies.find_or_make_copy(torch.zeros(2, 5)[0], cpu) is None
    assert gpu_copies.find_or_make_copy(torch.zeros(5), cpu) is None


def test_what_comes_back_has_a_copy() -> None:
    there = torch.arange(3.0)
    here = gpu_copies.copy_to_cpu(there)
    assert here.tolist() == [0.0, 1.0, 2.0]
    assert gpu_copies.find_copy(here) is not None
    assert here.data_ptr() != there.data_ptr()


def test_trees_of_two_types_are_not_joined() -> None:
    tree = {"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}
    assert trees.pack_leaves(tree) == tree
    assert trees.pack_leaves({}) == {}
    joined = trees.pack_leaves(LIKE)
    assert trees.as_vector(joined) is not None
    assert trees.equal(joined, LIKE)


def test_what_batch_norm_writes_ends_a_copy() -> None:
    """Torch does not count it, so the net does: an Edit may adapt statistics to a client."""
    net = Net(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), (1, 2, 2))
    tree = trees.pack_leaves(net.params())
    vector = vector_of(tree)
    gpu_copies.keep_copy(vector._base, torch.zeros(vector.numel()))
    x = torch.randn(4, 1, 2, 2)
    net.run(tree, x, train=False)
    assert gpu_copies.find_copy(vector) is not None
    net.run(tree, x, train=True)
    assert gpu_copies.find_copy(vector) is None


def test_clients_that_were_sent_something_else_each_are_measured_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []
    lengths_of_rows = gate._row_lengths

    def counted(rows: torch.Tensor, sent: torch.Tensor | None) -> list[float]:
        measured.append(len(rows))
        return lengths_of_rows(rows, sent)

    monkeypatch.setattr(gate, "_row_lengths", counted)
    here = torch.zeros(4, 5)
    gpu_copies.keep_copy(here, torch.ones(4, 5))
    ruler = Ruler()
    for tree in clients(here):
        ruler.start_report()
        own = Packet({k: v.clone() for k, v in LIKE.items()})
        measure_lengths(Report(0, {"model": Packet(tree)}), Task(0, {"model": own}), ruler)
    assert measured == [1, 1, 1, 1]
    # Nothing was sent to any: the first alone, and then all at once.
    for tree in clients(here):
        ruler.start_report()
        measure_lengths(Report(0, {"own": Packet(tree)}), Task(0), ruler)
    assert measured == [1, 1, 1, 1, 1, 4]
