"""The client side of the flower engine: does the task in a message and returns the reply.

The client's memory and the masks of earlier tasks are on the node's own disk
(``run.memory.folder``), so that a node can be restarted. The task names the version of the memory
to start from; after a lost reply that is an older version.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...core import Lost, Task
from ...errors import FedgroveError, UnknownMask, WireError
from ...runs.memory import join_trees, memory_file_name, read_tree, split_trees, write_tree
from ...runs.run import Run
from ...trees import Mask
from ...wire.codec import KnownMask, hash_mask
from ...wire.message import ResendRequest, read_task, write_resend_request
from ...wire.message_costs import encode_report, list_masks_to_remember
from ..work import CLIENT_FAILURES, lose_crashed, lose_unreadable, perform, store_memory
from .messages import Letter, Note, make_loss, name_codec, write_cost

KEPT = 4
"""This many versions of a client's memory stay on its disk, and the one that the server named last:
after lost replies it is older."""


def answer_letter(run: Run, client: int, letter: Letter) -> Letter:
    """Do the task in a letter from Flower; return the report, a mask request or a loss.

    Old versions of the client's memory are deleted, except the one that the task names.
    """
    codec = run.method.codec
    masks = StoredMasks(run.memory.folder, client)
    try:
        _check_codec(letter.codec, name_codec(codec))
        task = read_task(letter.data, codec, masks.known())
        if task.to != client:
            raise WireError(f"the task is for client {task.to}, and this is client {client}.")
    except UnknownMask as error:
        return Letter(
            write_resend_request(ResendRequest(client, error.packets), codec),
            codec=name_codec(codec),
            note={"answers": letter.task_id},
        )
    except WireError as error:
        sentence = f"client {client} could not read its task: {error}"
        return make_loss("unreadable", sentence)
    try:
        masks.keep(task, list_masks_to_remember(task, codec))
        memory = run.memory.read(client, task.memory)
        report, remembered = perform(run, task, memory)
        outcome = store_memory(run, task, report, remembered)
        forget_old_versions(run, client, task.memory)
    except CLIENT_FAILURES as error:
        # A full disk too: it is the disk of this client only.
        outcome = lose_crashed(task, error)
    if isinstance(outcome, Lost):
        return make_loss(outcome.reason, outcome.detail)
    try:
        head, packets, cost = encode_report(task, outcome, codec)
    except Exception as error:
        lost = lose_unreadable(task, error)
        return make_loss(lost.reason, lost.detail)
    # `macs` is for the clock of a simulation, and no part of the message.
    note: Note = {"answers": letter.task_id, "macs": outcome.macs, "cost": write_cost(cost)}
    return Letter(head, packets, name_codec(codec), note)


def _check_codec(given: str, own: str) -> None:
    if given != own:
        raise WireError(f"it is encoded with {given}, and this node uses {own}.")


def forget_old_versions(run: Run, client: int, named: str | None) -> None:
    """Delete old versions of a Flower node's memory, except the newest and the ``named`` one."""
    wanted = None
    if named is not None:
        wanted = memory_file_name(client, named)
    files = sorted(run.memory.folder.glob(f"client-{client:05d}.*.safetensors"), key=_age)
    for path in files[KEPT:]:
        if path.name != wanted:
            with suppress(OSError):
                path.unlink()


def _age(path: Path) -> float:
    """Return a key that sorts the newest file first, and a file that was just deleted last."""
    with suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class StoredMasks:
    """The masks of the last packets in a file, so that the server need not send them again."""

    folder: Path
    client: int

    @property
    def _path(self) -> Path:
        return self.folder / f"held-{self.client:05d}.safetensors"

    def known(self) -> dict[str, KnownMask | None]:
        """Return the masks that a Flower node stored, by packet; none if the file is damaged."""
        if not self._path.is_file():
            return {}
        with suppress(FedgroveError, OSError):
            masks = split_trees(read_tree(self._path))
            return {name: KnownMask(mask, hash_mask(mask)) for name, mask in masks.items()}
        return {}

    def keep(self, task: Task, names: list[str]) -> None:
        """Store the masks of these packets on a Flower node, instead of the last ones."""
        before = self.known()
        masks: dict[str, Mask] = {name: known.mask for name, known in before.items() if known}
        is_new = False
        for name in names:
            mask = task.send[name].mask
            assert mask is not None
            known = before.get(name)
            if known is None or known.digest != hash_mask(mask):
                masks[name] = mask
                is_new = True
        if is_new:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tree(self._path, join_trees(masks))
