"""What a node does with a task: its own half of a run, from bytes to bytes.

What the client remembers, and the masks that it holds of earlier tasks, are on its own disk
(``run.memory.folder``), so a node that is started again goes on as it was. Which version of its
memory counts, the task says: after a reply that was lost the client goes back to that one.
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
from ..work import CLIENT_FAILURES, crashed, perform, unreadable, with_memory
from .letter import Letter, Note, codec_name, cost_note
from .messages import lost_letter

KEPT = 4
"""So many versions of what a client remembers stay on its disk; the server goes back by one."""


def answer(run: Run, client: int, letter: Letter) -> Letter:
    """Do the task in a letter; the report, what the client lacks to read it, or why it is lost."""
    codec = run.method.codec
    held = HeldMasks(run.memory.folder, client)
    try:
        _check_codec(letter.codec, codec_name(codec))
        task = read_task(letter.data, codec, held.known())
        if task.to != client:
            raise WireError(f"the task is for client {task.to}, and this is client {client}.")
    except UnknownMask as error:
        return Letter(
            write_resend_request(ResendRequest(client, error.packets), codec),
            codec=codec_name(codec),
        )
    except WireError as error:
        sentence = f"client {client} could not read its task: {error}"
        return lost_letter("unreadable", sentence)
    try:
        held.keep(task, list_masks_to_remember(task, codec))
        memory = run.memory.read(client, task.memory)
        report, remembered = perform(run, task, memory)
        outcome = with_memory(run, task, report, remembered)
    except CLIENT_FAILURES as error:
        # A full disk too: it is this client's own.
        outcome = crashed(task, error)
    if isinstance(outcome, Lost):
        return lost_letter(outcome.reason, outcome.detail)
    try:
        head, packets, cost = encode_report(task, outcome, codec)
    except Exception as error:
        lost = unreadable(task, error)
        return lost_letter(lost.reason, lost.detail)
    # What it computed is for the clock of a simulation, and no part of the message.
    note: Note = {"macs": outcome.macs, "cost": cost_note(cost)}
    return Letter(head, packets, codec_name(codec), note)


def _check_codec(given: str, own: str) -> None:
    if given != own:
        raise WireError(f"it is written with {given}, and this node reads {own}.")


def forget_old_versions(run: Run, client: int, *named: str | None) -> None:
    """Delete what the client remembered long ago; what is ``named``, and the newest, stay."""
    wanted = {memory_file_name(client, version) for version in named if version}
    files = sorted(run.memory.folder.glob(f"client-{client:05d}.*.safetensors"), key=_age)
    for path in files[KEPT:]:
        if path.name not in wanted:
            with suppress(OSError):
                path.unlink()


def _age(path: Path) -> float:
    """The newest comes first; one that has just gone comes last."""
    with suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class HeldMasks:
    """The mask of the last packet of each name, in a file: the server may leave it out then."""

    folder: Path
    client: int

    @property
    def _path(self) -> Path:
        return self.folder / f"held-{self.client:05d}.safetensors"

    def known(self) -> dict[str, KnownMask | None]:
        """The masks by packet; none where the file is missing or damaged, as of a new node."""
        if not self._path.is_file():
            return {}
        with suppress(FedgroveError, OSError):
            masks = split_trees(read_tree(self._path))
            return {name: KnownMask(mask, hash_mask(mask)) for name, mask in masks.items()}
        return {}

    def keep(self, task: Task, names: list[str]) -> None:
        """Hold the masks of these packets of a task, in place of the last ones."""
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
