"""Differential privacy at the client: what leaves it is clipped and gets noise, or is refused.

A client's message is protected if it contains nothing but a change of something that the server
knows: a model that was sent to the client, or an update. Let u be that change over all packets as
one vector, C the clip and z the noise multiplier; the client sends the server's own values plus

    u · min(1, C / |u|) + N(0, (z·C)²) for each number that is kept.

Whatever a method computes before that, the message depends on the client's data through u alone.
Anything else (numbers next to the packets, masks that a client chose, scores, signs) is refused
(:func:`find_references`). docs/privacy.md describes what this guarantees, and what it does not.
"""

from __future__ import annotations

import importlib
import math
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
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
from ..errors import InputError, check, list_some, spell_option, unknown
from ..nets import Net
from ..trees import Tree
from .gate import is_same_mask
from .guard import explain_errors

if TYPE_CHECKING:
    from .run import Run

UPDATE = "update"
"""The name of packets that are a change, and not the changed model."""
SAMPLING_RATE = 1.0
"""The server draws the cohort and sees who answers: sampling hides no client from it."""
EXAMPLE = "clip=1.0,noise=0.8"
LEAST_NOISE = 1e-6
MOST_NOISE = 1e6
MOST_CLIP = 1e30
"""Limits of noise multiplier and clip: beyond them epsilon and the noise cannot be computed."""


@dataclass(frozen=True)
class Privacy:
    """How what leaves a client is protected.

    >>> Privacy.parse("clip=1,noise=0.8")
    Privacy(clip=1.0, noise=0.8, delta=1e-05, secret=False)
    """

    clip: float
    """The largest L2 norm of a change, over the whole message."""
    noise: float
    """The noise's standard deviation, in clips; 0: none, and no guarantee."""
    delta: float = 1e-5
    """The delta for which epsilon is reported."""
    secret: bool = False
    """Draw noise that cannot be drawn again, instead of from the run's seed, which the server
    knows: for real clients. Such a run cannot be repeated."""

    def __post_init__(self) -> None:
        check(self.clip > 0, "privacy clip", self.clip, "above 0")
        noise_is_valid = self.noise == 0 or LEAST_NOISE <= self.noise <= MOST_NOISE
        allowed = f"0, or from {LEAST_NOISE:g} to {MOST_NOISE:g}"
        check(noise_is_valid, "privacy noise", self.noise, allowed)
        clip_is_finite = self.clip <= MOST_CLIP or self.noise == 0
        allowed = f"at most {MOST_CLIP:g}, since noise is measured in clips"
        check(clip_is_finite, "privacy clip", self.clip, allowed)
        check(0 < self.delta < 1, "privacy delta", self.delta, "between 0 and 1")

    @classmethod
    def parse(cls, text: str) -> Privacy:
        """Parse the privacy of a run, ``--privacy clip=1.0,noise=0.8``."""
        names = [each.name for each in fields(cls)]
        numbers: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            name = name.strip()
            if name not in names:
                raise unknown("setting of privacy", name, names)
            if name in numbers:
                raise InputError(f"privacy is '{text}'; it names {name} twice.")
            try:
                numbers[name] = float(number)
            except ValueError:
                raise InputError(
                    f"privacy is '{text}'; it must be names with their numbers, such as {EXAMPLE}."
                ) from None
        for name in ("clip", "noise"):
            if name not in numbers:
                raise InputError(f"privacy is '{text}'; it must have {name}, as in {EXAMPLE}.")
        secret = numbers.pop("secret", 0.0)
        check(secret in (0, 1), "privacy secret", secret, "0 or 1")
        return cls(**numbers, secret=bool(secret))

    @property
    def does_nothing(self) -> bool:
        """Whether ``--privacy`` leaves messages unchanged."""
        return self.noise == 0 and self.clip == math.inf


# ---- what can be protected -----------------------------------------------------------------------


def find_references(task: Task, expected: ExpectedReport, net: Net, method: str) -> dict[str, Tree]:
    """Return the values that each reported packet's change starts from, for privacy.

    Args:
        task: The task.
        expected: What the report on it contains.
        net: The run's network.
        method: The method's name, for error messages.

    Returns:
        Values that the server knows, by packet; an empty tree for an update.

    Raises:
        InputError: The report contains anything that cannot be protected.
    """
    numbers = [*expected.metrics, *expected.optional]
    if numbers:
        raise _refuse(method, f"send numbers next to their model ({list_some(numbers)})")
    buffers = {name for each in (net, *net.nets.values()) for name in each.layout.buffers}
    references: dict[str, Tree] = {}
    for name, form in expected.packets.items():
        if form.mask == "own":
            raise _refuse(method, f"choose the mask of {name!r} from their data")
        if not all(dtype.is_floating_point for dtype, _ in form.tensors.values()):
            raise _refuse(method, f"send {name!r}, which does not consist of real numbers")
        statistics = sorted(buffers & form.tensors.keys())
        if statistics:
            # Noise could make a variance negative, and clipping by the norm of all leaves nothing
            # of the weights where statistics are large. Opacus refuses BatchNorm, too.
            raise InputError(
                f"with {spell_option('privacy')} clients cannot send running statistics of their "
                "data "
                f"({list_some(statistics)}); use a net without BatchNorm, such as "
                "bn-cnn2:norm=group, or fedbn, which keeps norm layers on the client."
            )
        references[name] = {}
        if name != UPDATE:
            sent = task.send.get(name)
            if sent is None or ExpectedPacket.of(sent.values).tensors != form.tensors:
                raise _refuse(
                    method, f"send {name!r}, which is not a change of what they were sent"
                )
            references[name] = sent.values
    return references


def _refuse(method: str, what: str) -> InputError:
    return InputError(
        f"{method} cannot run with {spell_option('privacy')}: its clients {what}, and noise on "
        "the model would not "
        "hide what this reveals about their data. docs/privacy.md lists the methods that can."
    )


def check_protected(run: Run) -> None:
    """Refuse a method that cannot be protected, and a missing accountant, before a run begins."""
    if run.privacy is None:
        return
    with explain_errors(run.method, "plan"):
        tasks = run.server.plan(run.initial_state, run.sample(run.cohort))
    check_tasks(run, tasks)
    # Another method is refused when it plans such an exchange.
    if isinstance(run.method, WithLaterMessages) and run.method.sends_later:
        raise _refuse(methods.name_of(run.method), run.method.sends_later)
    if run.privacy.noise > 0:
        _make_accountant()


def check_tasks(run: Run, tasks: Iterable[Task]) -> None:
    """Refuse tasks whose reports ``--privacy`` cannot protect, before any is sent."""
    if run.privacy is None:
        return
    for task in tasks:
        find_references(task, run.expected(task), run.net, methods.name_of(run.method))


# ---- what leaves a client ------------------------------------------------------------------------


def protect(
    run: Run, task: Task, expected: ExpectedReport, outcome: Outcome, client: Client
) -> Outcome:
    """Return what ``--privacy`` lets leave a client: its packets, clipped and with noise.

    Raises:
        InputError: The outcome is not what ``expected`` announces, or cannot be protected.
    """
    privacy = run.privacy
    if privacy is None or task.verb in SCORING_VERBS or privacy.does_nothing:
        return outcome
    method = methods.name_of(run.method)
    references = find_references(task, expected, run.net, method)
    # The server's gate would refuse the same, but by then it would have been sent.
    if outcome.metrics:
        numbers = list_some(list(outcome.metrics))
        raise _refuse(method, f"send numbers next to their model ({numbers})")
    if outcome.give.keys() != expected.packets.keys():
        sent = list_some(list(outcome.give))
        raise _refuse(method, f"send {sent}, which differs from what the method declares")
    changes: dict[str, Tree] = {}
    for name, packet in outcome.give.items():
        _check_form(method, name, packet, expected.packets[name])
        changes[name] = _find_change(packet, references[name])
    shrink = _find_shrink(changes, privacy.clip)
    if shrink == 1 and privacy.noise == 0:
        # As it is, to the bit: a difference and a sum would round.
        return outcome
    generator = None if privacy.secret else seeds.torch_rng(client.seed, "privacy")
    give = {}
    for name, packet in outcome.give.items():
        noised: Tree = {}
        for leaf, change in changes[name].items():
            # If the training diverged there is no direction to keep: noise alone is sent.
            clipped = change * shrink if shrink else torch.zeros_like(change)
            noise = _draw_normal(change.shape, generator)
            moved = clipped + privacy.noise * privacy.clip * noise
            noised[leaf] = _add_change(moved, packet, references[name], leaf)
        give[name] = Packet(noised, packet.mask)
    memory = outcome.memory
    if privacy.secret and memory:
        # The server sees the checksum of a memory in its version: with a salt it cannot try out
        # what the memory might be.
        salt = torch.tensor([secrets.randbits(62), secrets.randbits(62)])
        memory = {**memory, "privacy.salt": {"salt": salt}}
    return replace(outcome, give=give, memory=memory)


def _check_form(method: str, name: str, packet: Packet, form: ExpectedPacket) -> None:
    if packet.mask is None or form.mask is None or form.mask == "own":
        is_announced = packet.mask is form.mask
    else:
        is_announced = is_same_mask(packet.mask, form.mask)
    if ExpectedPacket.of(packet.values).tensors != form.tensors or not is_announced:
        raise _refuse(method, f"send {name!r} in a form that differs from what the method declares")


def _draw_normal(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Draw normal numbers; without a generator from the operating system, which has no seed."""
    if generator is not None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    count = shape.numel()
    bits = np.frombuffer(secrets.token_bytes(16 * count), np.uint64).reshape(2, count)
    # The upper 53 bits, which is what a double holds; never 0, which has no logarithm.
    first, second = ((bits >> 11) + 0.5) / 2.0**53
    # Box and Muller's transform.
    drawn = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return torch.from_numpy(drawn).reshape(shape)


def _find_change(packet: Packet, reference: Tree) -> Tree:
    """Return a packet's change from its reference, 0 outside its mask, in double precision."""
    change: Tree = {}
    for leaf, value in packet.values.items():
        # On the CPU, where noise is drawn: the same on every engine and device.
        moved = value.detach().cpu().double()
        if reference:
            moved = moved - reference[leaf].detach().cpu().double()
        change[leaf] = _apply_mask(moved, packet, leaf)
    return change


def _apply_mask(value: Tensor, packet: Packet, leaf: str) -> Tensor:
    """Return the value with 0 outside the packet's mask."""
    if packet.mask is None or leaf not in packet.mask:
        return value
    return value.masked_fill(~packet.mask[leaf].cpu(), 0)


def _find_shrink(changes: Mapping[str, Tree], clip: float) -> float:
    """Return the factor that makes all changes together no longer than ``clip``."""
    squares = [(leaf * leaf).sum() for change in changes.values() for leaf in change.values()]
    length = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    if not math.isfinite(length):
        return 0.0
    return 1.0 if length <= clip else clip / length


def _add_change(moved: Tensor, packet: Packet, reference: Tree, leaf: str) -> Tensor:
    """Return what is sent of a leaf: its reference plus the change, in the leaf's type."""
    like = packet.values[leaf]
    value = reference[leaf].detach().cpu().double() + moved if reference else moved
    # Rounding comes after the noise, and reveals nothing more. A half could overflow.
    most = torch.finfo(like.dtype).max
    value = value.clamp(-most, most).to(like.dtype)
    return _apply_mask(value, packet, leaf).to(like.device)


# ---- what it guarantees --------------------------------------------------------------------------


def list_messages(run: Run, tasks: Iterable[Task]) -> dict[str, list[int]]:
    """Return the entry of metrics.jsonl that lists who sent a message; nothing without privacy.

    Late and refused reports count too: they were sent.
    """
    if run.privacy is None:
        return {}
    return {"private_messages": [task.to for task in tasks if run.expected(task).packets]}


def summarise(run: Run, lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry "privacy" of summary.json; nothing without privacy."""
    privacy = run.privacy
    if privacy is None:
        return {}
    counts: Counter[int] = Counter()
    for line in lines:
        counts.update(line.get("private_messages", ()))
    messages = max(counts.values(), default=0)
    return {
        "privacy": {
            **asdict(privacy),
            "messages": messages,
            "sampling_rate": SAMPLING_RATE,
            "accountant": "opacus RDPAccountant",
            "epsilon": compute_epsilon(privacy.noise, messages, privacy.delta),
            # Two changes of length C are 2C apart: half the noise, measured in that.
            "epsilon_replaced": compute_epsilon(privacy.noise / 2, messages, privacy.delta),
        }
    }


def make_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return a run's privacy guarantee as a sentence, for tables and model cards."""
    if "privacy" not in summary:
        return []
    found = summary["privacy"]
    if found["epsilon"] is None:
        return ["--privacy has noise 0, so updates are clipped and nothing is guaranteed"]
    sentence = (
        f"differential privacy of clients: epsilon {found['epsilon']:.4g} at delta "
        f"{found['delta']:g} against the server, for the client that sent most messages "
        f"({found['messages']}); {found['epsilon_replaced']:.4g} if its data were replaced by any "
        f"other data; clip {found['clip']:g}, noise {found['noise']:g}, no amplification by "
        "sampling"
    )
    if found["secret"]:
        return [sentence]
    return [f"{sentence}; noise from the run's seed: a simulation, without protection"]


def compute_epsilon(noise: float, messages: int, delta: float) -> float | None:
    """Return a run's epsilon after some messages, by opacus' accountant, or None.

    None means that there is no guarantee.
    """
    if messages == 0:
        return 0.0
    if noise == 0:
        return None
    accountant = _make_accountant()
    accountant.history = [(noise, SAMPLING_RATE, messages)]
    with warnings.catch_warnings():
        # It warns if other orders would give a smaller bound; its result is a bound still.
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def _make_accountant() -> Any:
    try:
        with warnings.catch_warnings():
            # Warnings of opacus' own imports do not concern the user.
            warnings.simplefilter("ignore")
            # By name: opacus is an extra, and need not be there for a type checker either.
            accountants: Any = importlib.import_module("opacus.accountants")
    except ImportError:
        raise InputError(
            f"{spell_option('privacy')} needs opacus, which computes epsilon, and it is not "
            "installed here: "
            "pip install 'fedgrove[dp]'."
        ) from None
    return accountants.RDPAccountant()
