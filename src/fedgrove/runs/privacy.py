"""Differential privacy at the client: what leaves it is clipped and gets noise, or it is refused.

A message of a client is protected where all that it holds is a change of something that the server
knows: a model that was sent to the client, or an update. Let u be that change over all packets as
one vector, C the clip and z the noise multiplier; the client sends the server's own values plus

    u · min(1, C / |u|) + N(0, (z·C)²) for each number that is kept.

Whatever a method computes before that, the message depends on the client's data through u alone.
What cannot be treated so (numbers beside the packets, masks that a client chose, scores, signs) is
refused (:func:`protected`): it is better to refuse than to promise. docs/privacy.md says what this
guarantees, and what it does not.
"""

from __future__ import annotations

import importlib
import math
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import methods, seeds
from ..core import (
    SCORING_VERBS,
    Client,
    ExpectedPacket,
    ExpectedReport,
    Outcome,
    Packet,
    Task,
    WithLaterMessages,
)
from ..errors import InputError, check, unknown
from ..nets import Net
from ..trees import Mask, Tree
from .guard import explain_errors

if TYPE_CHECKING:
    from .run import Run

UPDATE = "update"
"""What methods call a packet that is a change already, and not the changed model."""
SAMPLING_RATE = 1.0
"""The server draws the cohort and sees who answers: to it, sampling hides nobody."""
EXAMPLE = "clip=1.0,noise=0.8"


@dataclass(frozen=True)
class Privacy:
    """How what leaves a client is protected.

    >>> Privacy.parse("clip=1,noise=0.8")
    Privacy(clip=1.0, noise=0.8, delta=1e-05, secret=False)
    """

    clip: float
    """The longest a change may be, in the L2 norm over the whole message."""
    noise: float
    """The noise's standard deviation, in clips; 0: none, and no guarantee."""
    delta: float = 1e-5
    """The delta for which epsilon is told."""
    secret: bool = False
    """Draw noise that nobody can draw again, instead of from the run's seed, which the server
    knows: for real clients. Such a run cannot be repeated."""

    def __post_init__(self) -> None:
        check(self.clip > 0, "privacy clip", self.clip, "above 0")
        check(0 <= self.noise < math.inf, "privacy noise", self.noise, "0 or more, and finite")
        clip_is_finite = self.clip < math.inf or self.noise == 0
        check(clip_is_finite, "privacy clip", self.clip, "finite, since noise is measured in clips")
        check(0 < self.delta < 1, "privacy delta", self.delta, "between 0 and 1")

    @classmethod
    def parse(cls, text: str) -> Privacy:
        """From the words of the command line: ``clip=1.0,noise=0.8``."""
        names = [each.name for each in fields(cls)]
        numbers: dict[str, float] = {}
        for word in text.split(","):
            name, _, number = word.partition("=")
            name = name.strip()
            if name not in names:
                raise unknown("word of privacy", name, names)
            if name in numbers:
                raise InputError(f"privacy is '{text}'; it names {name} twice.")
            try:
                numbers[name] = float(number)
            except ValueError:
                raise InputError(
                    f"privacy is '{text}'; it must be words with their numbers, as {EXAMPLE}."
                ) from None
        for name in ("clip", "noise"):
            if name not in numbers:
                raise InputError(f"privacy is '{text}'; it must say {name}, as in {EXAMPLE}.")
        secret = numbers.pop("secret", 0.0)
        check(secret in (0, 1), "privacy secret", secret, "0 or 1")
        return cls(**numbers, secret=bool(secret))

    @property
    def does_nothing(self) -> bool:
        """Whether messages leave as they are."""
        return self.noise == 0 and self.clip == math.inf


# ---- what can be protected -----------------------------------------------------------------------


def protected(task: Task, expected: ExpectedReport, net: Net, method: str) -> dict[str, Tree]:
    """For each packet of the answer, the values that the server knows and the change starts from.

    An update starts from nothing, and has an empty tree. Refused is a method whose answer holds
    anything else: ``expected`` says what, and is made from the task alone.
    """
    numbers = [*expected.metrics, *expected.optional]
    if numbers:
        raise _refusal(method, f"send numbers beside their model ({_few(numbers)})")
    buffers = {name for each in (net, *net.nets.values()) for name in each.layout.buffers}
    known: dict[str, Tree] = {}
    for name, form in expected.packets.items():
        if form.mask == "own":
            raise _refusal(method, f"choose the mask of {name!r} from their data")
        if not all(dtype.is_floating_point for dtype, _ in form.tensors.values()):
            raise _refusal(method, f"send {name!r}, which is no real numbers")
        statistics = sorted(buffers & form.tensors.keys())
        if statistics:
            # Noise could make a variance negative, and clipping by the norm of all leaves nothing
            # of the weights where statistics are large. Opacus refuses BatchNorm, too.
            raise InputError(
                f"with --privacy clients cannot send running statistics of their data "
                f"({_few(statistics)}); take a net without BatchNorm, as bn-cnn2:norm=group, or "
                "fedbn, which keeps norm layers at home."
            )
        known[name] = _reference(task, name, form, method)
    return known


def _reference(task: Task, name: str, form: ExpectedPacket, method: str) -> Tree:
    """What the server knows of a packet, or nothing if it is an update."""
    if name == UPDATE:
        return {}
    sent = task.send.get(name)
    if sent is None or ExpectedPacket.of(sent.values).tensors != form.tensors:
        raise _refusal(method, f"send {name!r}, which is no change of what they were sent")
    return sent.values


def _refusal(method: str, what: str) -> InputError:
    return InputError(
        f"{method} cannot run with --privacy: its clients {what}, and noise on the model would "
        "not hide what that tells of their data. docs/privacy.md lists the methods that can."
    )


def _few(names: Sequence[str], most: int = 3) -> str:
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed}, ..."


def check_protected(run: Run) -> None:
    """Refuse a method that cannot be protected, and a missing accountant, before a run begins."""
    if run.privacy is None:
        return
    name = methods.name_of(run.method)
    with explain_errors(run.method, "plan"):
        tasks = run.server.plan(run.initial_state, run.sample(run.cohort))
    check_tasks(run, tasks)
    # A method that does not say so is refused when it plans such an exchange.
    if isinstance(run.method, WithLaterMessages) and run.method.sends_later:
        raise _refusal(name, run.method.sends_later)
    if run.privacy.noise > 0:
        _accountant()


def check_tasks(run: Run, tasks: Iterable[Task]) -> None:
    """Refuse tasks whose answers cannot be protected, before any is sent."""
    if run.privacy is None:
        return
    name = methods.name_of(run.method)
    for task in tasks:
        protected(task, run.expected(task), run.net, name)


# ---- what leaves a client ------------------------------------------------------------------------


def protect(
    run: Run, task: Task, expected: ExpectedReport, outcome: Outcome, client: Client
) -> Outcome:
    """What may leave a client of what it wants to give."""
    privacy = run.privacy
    if privacy is None or task.verb in SCORING_VERBS or privacy.does_nothing:
        return outcome
    method = methods.name_of(run.method)
    known = protected(task, expected, run.net, method)
    # The server's gate would refuse the same, but by then it would have been sent.
    if outcome.metrics:
        raise _refusal(method, f"send numbers beside their model ({_few(list(outcome.metrics))})")
    if outcome.give.keys() != expected.packets.keys():
        raise _refusal(method, f"send {_few(list(outcome.give))}, which is not what was announced")
    changes: dict[str, Tree] = {}
    for name, packet in outcome.give.items():
        form = expected.packets[name]
        if ExpectedPacket.of(packet.values).tensors != form.tensors or not _same(
            packet.mask, form.mask
        ):
            raise _refusal(method, f"send {name!r} in another form than was announced")
        changes[name] = _change(packet, known[name])
    shrink = _shrink(changes, privacy.clip)
    if shrink == 1 and privacy.noise == 0:
        # As it is, to the bit: a difference and a sum would round.
        return outcome
    generator = None if privacy.secret else seeds.torch_rng(client.seed, "privacy")
    give = {}
    for name, packet in outcome.give.items():
        noised: Tree = {}
        for leaf, change in changes[name].items():
            # Where the training diverged there is no direction to keep: noise alone is sent.
            clipped = change * shrink if shrink else torch.zeros_like(change)
            noise = _standard_normal(change.shape, generator)
            moved = clipped + privacy.noise * privacy.clip * noise
            noised[leaf] = _put(moved, packet, known[name], leaf)
        give[name] = Packet(noised, packet.mask)
    memory = outcome.memory
    if privacy.secret and memory:
        # Versions of a memory are named by a checksum of it, which the server sees: with a salt
        # nobody can try out what the memory might be.
        salt = torch.tensor([secrets.randbits(62), secrets.randbits(62)])
        memory = {**memory, "privacy.salt": {"salt": salt}}
    return replace(outcome, give=give, memory=memory)


def _standard_normal(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Normal numbers; without a generator from the operating system, which no seed gives again."""
    if generator is not None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    count = shape.numel()
    words = np.frombuffer(secrets.token_bytes(16 * count), np.uint64).reshape(2, count)
    # The upper 53 bits, which is what a double holds; never 0, of which there is no logarithm.
    first, second = ((words >> 11) + 0.5) / 2.0**53
    # Box and Muller's transform.
    drawn = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return torch.from_numpy(drawn).reshape(shape)


def _same(mask: Mask | None, announced: Mask | str | None) -> bool:
    if mask is None or not isinstance(announced, dict):
        return mask is None and announced is None
    if mask.keys() != announced.keys():
        return False
    return all(torch.equal(mask[name].cpu(), announced[name].cpu()) for name in mask)


def _change(packet: Packet, known: Tree) -> Tree:
    """The packet's change of what the server knows, 0 outside its mask; in double precision."""
    change: Tree = {}
    for leaf, value in packet.values.items():
        # On the CPU, where noise is drawn: the same on every engine and device.
        moved = value.detach().cpu().double()
        if known:
            moved = moved - known[leaf].detach().cpu().double()
        change[leaf] = _kept(moved, packet, leaf)
    return change


def _kept(value: Tensor, packet: Packet, leaf: str) -> Tensor:
    """The value with 0 where the packet's mask leaves nothing."""
    if packet.mask is None or leaf not in packet.mask:
        return value
    return value.masked_fill(~packet.mask[leaf].cpu(), 0)


def _shrink(changes: Mapping[str, Tree], clip: float) -> float:
    """What all changes together are multiplied by, so that they are no longer than ``clip``."""
    squares = [(leaf * leaf).sum() for change in changes.values() for leaf in change.values()]
    length = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    if not math.isfinite(length):
        return 0.0
    return 1.0 if length <= clip else clip / length


def _put(moved: Tensor, packet: Packet, known: Tree, leaf: str) -> Tensor:
    """What is sent of a leaf: what the server knows, moved, in the type that it had."""
    like = packet.values[leaf]
    value = moved
    if known:
        value = known[leaf].detach().cpu().double() + moved
    # Rounding comes after the noise, and tells nothing more. A half could overflow.
    most = torch.finfo(like.dtype).max
    value = value.clamp(-most, most).to(like.dtype)
    return _kept(value, packet, leaf).to(like.device)


# ---- what it guarantees --------------------------------------------------------------------------


def list_messages(run: Run, tasks: Iterable[Task]) -> dict[str, list[int]]:
    """Whose message an exchange holds, for its line of metrics.jsonl; nothing without privacy.

    Whoever was asked counts, also where the answer came too late or was refused: it was sent.
    """
    if run.privacy is None:
        return {}
    return {"private_messages": [task.to for task in tasks if run.expected(task).packets]}


def summarise(run: Run, lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What summary.json says under ``privacy``; nothing without."""
    privacy = run.privacy
    if privacy is None:
        return {}
    counts: Counter[int] = Counter()
    for line in lines:
        counts.update(line.get("private_messages", ()))
    messages = max(counts.values(), default=0)
    return {
        "privacy": {
            "clip": privacy.clip,
            "noise": privacy.noise,
            "delta": privacy.delta,
            "secret": privacy.secret,
            "messages": messages,
            "sampling_rate": SAMPLING_RATE,
            "accountant": "opacus RDPAccountant",
            "epsilon": epsilon(privacy.noise, messages, privacy.delta),
            # Two changes of length C are 2C apart: half the noise, measured in that.
            "epsilon_replaced": epsilon(privacy.noise / 2, messages, privacy.delta),
        }
    }


def make_notes(figures: Mapping[str, Any]) -> list[str]:
    """The guarantee as a sentence, for tables and model cards; ``figures`` are of the summary."""
    if "privacy" not in figures:
        return []
    told = figures["privacy"]
    if told["epsilon"] is None:
        return ["--privacy has noise 0, so updates are clipped and nothing is guaranteed"]
    sentence = (
        f"differential privacy of clients: epsilon {told['epsilon']:.4g} at delta "
        f"{told['delta']:g} against the server, for the client that sent most messages "
        f"({told['messages']}); {told['epsilon_replaced']:.4g} if its data were exchanged for any "
        f"others; clip {told['clip']:g}, noise {told['noise']:g}, no amplification by sampling"
    )
    if told["secret"]:
        return [sentence]
    return [f"{sentence}; noise from the run's seed: a simulation, not a protection"]


def epsilon(noise: float, messages: int, delta: float) -> float | None:
    """What opacus' accountant says of so many messages with this noise; None: no guarantee."""
    if messages == 0:
        return 0.0
    if noise == 0:
        return None
    accountant = _accountant()
    accountant.history = [(noise, SAMPLING_RATE, messages)]
    with warnings.catch_warnings():
        # It warns where other orders would give a smaller bound; what it gives is a bound still.
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def _accountant() -> Any:
    try:
        with warnings.catch_warnings():
            # What opacus' own imports say is none of the user's business.
            warnings.simplefilter("ignore")
            # By name: opacus is an extra, and need not be there for a type checker either.
            accountants: Any = importlib.import_module("opacus.accountants")
    except ImportError:
        raise InputError(
            "--privacy needs opacus, whose accountant says what epsilon is, and it is not "
            "installed here: pip install 'fedgrove[dp]'."
        ) from None
    return accountants.RDPAccountant()
