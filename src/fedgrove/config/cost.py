"""What a method will cost before anything is trained: bytes, time, parameters, MACs, memory."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from torch import Tensor, nn

from .. import methods
from ..core import (
    GRADIENT_PASSES,
    AnyMethod,
    ClientInfo,
    Engine,
    Measure,
    Report,
    Task,
    Train,
    count_paper_bytes,
)
from ..data import ClientData, Defaults, Examples, Federation
from ..data.devices import BandwidthTraces, read_devices
from ..data.federation import LazyClients
from ..engines.work import Computed, find_pass, run_stages
from ..errors import FedgroveError, InputError, check, spell_option
from ..nets import check_size
from ..options import CostOptions, ExperimentOptions
from ..options.groups import EvaluateOption, SeedOption
from ..parts.local import LocalTraining
from ..renamed import find_old_names
from ..report.tables import format_bytes, format_duration, format_kilobytes, or_dash
from ..report.terminal import Cell, Column, print_pairs, print_rows
from ..runs.clock import DIGITS, Times, times
from ..runs.files import NAME_DIGITS
from ..runs.lockstep import train_alone
from ..runs.memory import Memory, make_version
from ..runs.rounds import count_exchanges
from ..runs.rounds import plan as plan_tasks
from ..runs.run import Run, build, make_recipe, replace_recipe
from ..wire.codec import Bitmap, Dense
from ..wire.ledger import Ledger
from ..wire.message_costs import BroadcastCosts, count_report, count_task
from .experiment import Experiment, Federations, load_own_data, shorthand_settings, with_settings
from .grid import Variant, has_setting, list_methods, variants, write_settings
from .plan import Plan, plan

REPORTED_EXAMPLES = 9_999_999
"""Number of examples in the report of a stand-in client: no client needs more digits."""
EXAMPLES_TRAINED = 500
"""How many examples a client trains on where nothing is known of the data."""
LONGEST_NUMBER = 25
"""The longest a number gets in JSON: sign, 17 digits, point, exponent."""

MessageCosts = dict[str, dict[str, int]]
"""Direction -> part of the cost -> bytes."""


# ---- by options ----------------------------------------------------------------------------------


def estimate_costs(options: CostOptions, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Estimate what an experiment would cost with each method, on its data or a shape.

    Of several methods each takes the settings that it has; ``warn`` is called with a sentence for
    each setting that some of them lack.
    """
    options.check()
    # By name: a method that is given twice is counted once.
    by_name = {}
    for method in list_methods(options.methods, "cost"):
        made = methods.make(method)
        by_name[method if isinstance(method, str) else methods.name_of(made)] = made
    chosen = [Variant(name, method) for name, method in by_name.items()]
    settings = [*write_settings(options.set, is_varied=False), *shorthand_settings(vars(options))]
    rows = []
    if options.input is not None:
        recipe = LocalTraining()
        for name, method in _with_settings(chosen, settings, recipe, warn).items():
            rows.append({"method": name, **_estimate_shape_cost(options, method, recipe)})
        return rows
    check(options.examples is None, "examples", options.examples, "left out where there are data")
    federations = Federations(options.data_dir)
    values = options.values_of(ExperimentOptions, EvaluateOption, SeedOption)
    if options.data is None:
        # As if it had not been given: a caller may pass data or input, and None for the other.
        del values["data"]
    experiment = Experiment(chosen[0].method, **load_own_data(values))
    recipe = federations.recipe(experiment)
    for name, method in _with_settings(chosen, settings, recipe, warn).items():
        planned = plan(replace(experiment, method=method), Path(), federations)
        rows.append({"method": name, **estimate_plan_cost(planned)})
    return rows


def _with_settings(
    chosen: Sequence[Variant],
    settings: Sequence[str],
    recipe: LocalTraining,
    warn: Callable[[str], None],
) -> dict[str, AnyMethod]:
    """The methods with their settings, by name.

    Of several, each takes the settings that it has a field for, and every value of them, as in a
    sweep.
    """
    if len(chosen) == 1:
        only = chosen[0]
        return {only.label: with_settings(only.method, settings, recipe)}
    varied = variants(chosen, settings, recipe)
    for text in settings:
        # As they became: a part that another setting chose may have brought the field.
        having = {type(each.method) for each in varied if has_setting(each.method, text, recipe)}
        lacking = [each.label for each in chosen if type(each.method) not in having]
        if lacking:
            warn(f"{text} is not a setting of {', '.join(lacking)}.")
    return {variant.label: variant.method for variant in varied}


def estimate_plan_cost(planned: Plan) -> dict[str, Any]:
    """Estimate what a planned experiment would cost."""
    net = planned.experiment.net
    assert net is not None, "a plan has nothing left open"
    return estimate_run_cost(planned.run, net)


def _estimate_shape_cost(
    options: CostOptions, method: AnyMethod, recipe: LocalTraining
) -> dict[str, Any]:
    """The cost where the shape of an input, a net and a number of classes stand in for data."""
    if options.net is None or options.classes is None:
        needed = {"net": options.net, "classes": options.classes}
        missing = [spell_option(name) for name, value in needed.items() if value is None]
        raise InputError(
            f"{spell_option('input')} came without {' and '.join(missing)}; give them too, or "
            f"{spell_option('data')} in their place."
        )
    assert options.input is not None
    is_alone = options.given.get("data") is None
    check(is_alone, "data", options.data, f"left out where {spell_option('input')} is given")
    clients = 10 if options.clients is None else options.clients
    examples = EXAMPLES_TRAINED if options.examples is None else options.examples
    devices = read_devices(options.profile, options.trace).number_clients({})
    devices.check_clients(clients)
    return estimate_cost(
        method,
        net=options.net,
        shape=tuple(options.input),
        classes=options.classes,
        clients=clients,
        cohort=min(10, clients) if options.cohort is None else options.cohort,
        rounds=20 if options.rounds is None else options.rounds,
        recipe=recipe,
        info=lambda client: devices.info(examples, client, options.seed),
        trace=devices.numbered_trace,
        seed=options.seed,
        freeze=options.freeze,
    )


# ---- of one method -------------------------------------------------------------------------------


def estimate_cost(
    method: AnyMethod,
    *,
    net: str | nn.Module,
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    cohort: int,
    rounds: int,
    recipe: LocalTraining | None = None,
    info: Callable[[int], ClientInfo] = lambda client: ClientInfo(EXAMPLES_TRAINED),
    trace: BandwidthTraces | None = None,
    seed: int = 0,
    freeze: float = 0.0,
) -> dict[str, Any]:
    """Estimate an experiment's bytes and what a client needs, with clients of a few zeros.

    Args:
        method: The method.
        net: A name, ``file.py:Class`` or a module.
        shape: The shape of one input, without the batch.
        classes: The number of outputs.
        clients: The number of clients.
        cohort: The number of clients in a round.
        rounds: The number of rounds.
        recipe: The local training of a method that has none of its own.
        info: Returns the device of a client, with its number of examples; None: all are alike and
            train on 500 examples.
        trace: How bandwidths change, by client; None: they do not.
        seed: All randomness follows from it.
        freeze: The share of the net's layers that is not trained.

    ``bytes_up`` and ``bytes_down`` are upper bounds by the static codec (whose lengths follow from
    shapes and masks, not from values): the run is played to its end, one client really doing the
    work of each kind of task that comes up and answering for all others; messages are measured with
    every number in their heads at its longest. Evaluation and the delivery of the last model are
    not included, as in ``summary.json``. ``reduction_paper`` is 1 - bytes_paper / (8 d cohort
    rounds), d parameters; a method may say that bytes_paper is only a bound (``paper_at_most``, as
    that of AdFedWCP, at k_max). ``memory`` is that of one training step by ``recipe``, or by the
    method's own ``local``.

    ``per_device`` has, for one device in one round, what it sends, gets and computes and how long
    it takes (:mod:`.runs.clock`): the mean over the rounds that it takes part in, exchanges that
    complete no round (AdFedWCP's weighing) shared out among them; and of that the least, the median
    and the most over the devices that take part in any. ``virtual_seconds`` is the time of all
    rounds, if no client is dropped.

    >>> from fedgrove.methods import FedAvg
    >>> size = {"clients": 30, "cohort": 10, "rounds": 50}
    >>> numbers = estimate_cost(FedAvg(), net="har-cnn", shape=(9, 128), classes=6, **size)
    >>> numbers["params"], numbers["mib_paper"], numbers["reduction_paper"]
    (89254, 340.5, 0.0)
    """
    check(clients >= 1, "clients", clients, "1 or more")
    check_size(shape, classes)
    local = method.local or recipe or LocalTraining()
    federation = _stand_in_federation(shape, classes, clients, cohort, rounds, info)
    run, played = _play_with_zeros(method, local, federation, trace, net, seed, freeze)
    layout = run.net.layout
    paper = count_paper_bytes(method, run.net, clients, cohort, rounds)
    # Four bytes per parameter, down and up.
    dense = 8 * layout.size * cohort * rounds
    return {
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        **played.sent.totals(),
        "bytes_paper": paper,
        "mib_paper": None if paper is None else round(paper / 2**20, 1),
        "reduction_paper": None if paper is None else round(1 - paper / dense, 6),
        # Of a method whose messages' lengths follow from training, by the paper's formula too.
        "paper_at_most": bool(getattr(method, "paper_at_most", False)),
        "params": layout.size,
        "macs": layout.macs,
        "memory": layout.memory(local.batch, local.optimiser.slots),
        "virtual_seconds": round(played.seconds, DIGITS),
        "per_device": played.per_device(),
    }


def estimate_run_cost(run: Run, net: str | nn.Module) -> dict[str, Any]:
    """Estimate the cost of an experiment's run that was built and not started."""
    return estimate_cost(
        run.method,
        net=net,
        shape=run.federation.shape,
        classes=run.federation.classes,
        clients=len(run.infos),
        cohort=run.cohort,
        rounds=run.rounds,
        recipe=make_recipe(run.federation.defaults),
        info=run.federation.info,
        trace=run.federation.trace,
        seed=run.seed,
        freeze=run.frozen,
    )


def play_run(run: Run, net: str | nn.Module) -> Played:
    """Play a run that was built, with clients of a few zeros in place of its own."""
    local = run.method.local or make_recipe(run.federation.defaults)
    shape = run.federation.shape
    federation = _stand_in_federation(
        shape,
        run.federation.classes,
        len(run.infos),
        run.cohort,
        run.rounds,
        run.federation.info,
    )
    _, played = _play_with_zeros(
        run.method, local, federation, run.federation.trace, net, run.seed, run.frozen
    )
    return played


def forecast_work(run: Run, net: str | nn.Module) -> list[float]:
    """Return the multiply-accumulates of each round of a run, and last those of fine-tuning.

    Phases of a method may take many times as long as others: the progress line needs to know.
    """
    work = play_run(run, net).work
    epochs = max(run.finetune)
    examples = sum(run.federation.info(client).examples for client in run.served)
    tuning = GRADIENT_PASSES * run.net.layout.macs * epochs * examples
    return [*(float(work[number]) for number in range(run.rounds)), float(tuning)]


def _play_with_zeros(
    method: AnyMethod,
    local: LocalTraining,
    federation: Federation,
    trace: BandwidthTraces | None,
    net: str | nn.Module,
    seed: int,
    freeze: float,
) -> tuple[Run, Played]:
    """Play a method on a federation of stand-ins."""
    with tempfile.TemporaryDirectory() as scratch:
        run = build(
            _quick(method, local),
            federation,
            Memory(Path(scratch)),
            net=net,
            seed=seed,
            freeze=freeze,
        )
        return run, _play(run, replace_recipe(method, local), trace)


# ---- what coded messages will be -----------------------------------------------------------------

TRIAL_ROUNDS = 5
TRIAL_WORK = 1e11
"""Multiply-accumulates of a trial: about half a minute on two cores."""


def expect_bytes(planned: Plan, federations: Federations, engine: Engine) -> dict[str, int]:
    """Train the first rounds of a run with coded messages, and expect the bytes of all its rounds.

    How long such messages are follows from their values, which only training shows. Later rounds
    are expected to send as large a share of their upper bound as the last round that was tried.

    Returns:
        ``expected_up``, ``expected_down`` and ``trial_rounds``; nothing for a method whose messages
        are not coded, or whose first round would take too long.
    """
    if isinstance(planned.run.method.codec, Dense):
        return {}
    net = planned.experiment.net
    assert net is not None, "a plan has nothing left open"
    played = play_run(planned.run, net)
    rounds = 0
    work = 0
    while rounds < min(TRIAL_ROUNDS, planned.run.rounds):
        work += played.work[rounds]
        if work > TRIAL_WORK:
            break
        rounds += 1
    if not rounds:
        return {}
    try:
        sent = _try_rounds(planned.experiment, rounds, federations, engine)
    except FedgroveError:
        # The run itself will say so; its bounds are known.
        return {}
    expected = {}
    for direction in ("up", "down"):
        bound = played.bytes_by_round[direction]
        ahead = sum(bound[number] for number in range(rounds, planned.run.rounds))
        share = sent[direction][rounds - 1] / max(1, bound[rounds - 1])
        expected[f"expected_{direction}"] = round(sent[direction].total() + share * ahead)
    return {**expected, "trial_rounds": rounds}


def _try_rounds(
    experiment: Experiment, rounds: int, federations: Federations, engine: Engine
) -> dict[str, Counter[int]]:
    """The bytes of the first rounds by direction and round; nothing is scored or kept."""
    sent: dict[str, Counter[int]] = {"up": Counter(), "down": Counter()}

    class Enough(Exception):
        """The rounds of the trial are over."""

    def watch(line: Mapping[str, Any]) -> None:
        # An exchange that completes no round belongs to the round that it comes before.
        number = line["round"] - line["counts"]
        for direction, count in sent.items():
            count[number] += line[f"bytes_{direction}"]
        if line["round"] >= rounds:
            raise Enough

    unscored = replace(experiment, evaluate=0, score_on=0)
    with tempfile.TemporaryDirectory() as scratch, suppress(Enough):
        planned = plan(unscored, Path(scratch) / "run", federations)
        train_alone(planned.member(planned.create_folder(), watch), engine)
    return sent


def _stand_in_federation(
    shape: tuple[int, ...],
    classes: int,
    clients: int,
    cohort: int,
    rounds: int,
    info: Callable[[int], ClientInfo],
) -> Federation:
    """As many clients, each with its own device and two examples of zeros."""
    zeros = Examples(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64))
    return Federation(
        name="zeros",
        clients=LazyClients(StandIn(zeros, info), clients, info),
        classes=classes,
        labels=tuple(str(label) for label in range(classes)),
        shape=shape,
        defaults=Defaults("mlp", cohort, rounds, 1, 2, "SGD", 0.1),
    )


@dataclass(frozen=True)
class StandIn:
    """Makes clients that differ only in their devices."""

    examples: Examples
    info: Callable[[int], ClientInfo]

    def __call__(self, k: int) -> ClientData:
        """The same examples with another device."""
        return ClientData(self.examples, self.examples, self.examples, self.info(k))


def _quick(method: AnyMethod, local: LocalTraining) -> AnyMethod:
    """The method with batches of two and a codec whose lengths are static.

    All its epochs stay, as its stages may depend on them; of two examples they are short.
    """
    codec = method.codec if isinstance(method.codec, Dense) else Bitmap()
    short = replace(local, batch=2)
    quick: AnyMethod = replace(method, local=short, codec=codec)  # type: ignore[type-var]
    return quick


@dataclass
class Played:
    """What a run that was played to its end took."""

    sent: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0
    """On the virtual clock."""
    devices: dict[int, Counter[str]] = field(default_factory=dict)
    """By device: rounds, bytes_up, bytes_down, macs and seconds so far."""
    work: Counter[int] = field(default_factory=Counter)
    """By round: the multiply-accumulates of its exchanges."""
    bytes_by_round: dict[str, Counter[int]] = field(
        default_factory=lambda: {"up": Counter(), "down": Counter()}
    )

    def add(self, number: int, client: int, costs: MessageCosts, macs: int, taken: Times) -> None:
        """Count one task of a device in the estimated cost; ``number`` is that of the round."""
        self.sent.add(costs)
        self.work[number] += macs
        for direction, parts in costs.items():
            self.bytes_by_round[direction][number] += sum(parts.values())
        totals = self.devices.setdefault(client, Counter())
        for direction, parts in costs.items():
            totals[f"bytes_{direction}"] += sum(parts.values())
        totals["macs"] += macs
        # A float among whole numbers: each name has one type.
        totals["seconds"] += taken.total  # type: ignore[assignment]

    def complete(self, clients: Iterable[int]) -> None:
        """Count a round in the estimated cost, for those who took part in its last exchange."""
        for client in clients:
            self.devices[client]["rounds"] += 1

    def per_device(self) -> dict[str, dict[str, float]]:
        """Return the estimated cost of a device in a round: least, median and most over devices."""
        spreads = {}
        for name in ("bytes_up", "bytes_down", "macs", "seconds"):
            # Clients that only answered before the first round have no round of training.
            trained = filter(itemgetter("rounds"), self.devices.values())
            means = [totals[name] / totals["rounds"] for totals in trained]
            digits = DIGITS if name == "seconds" else None
            spreads[name] = {
                "min": round(min(means), digits),
                "median": round(median(means), digits),
                "max": round(max(means), digits),
            }
        return spreads


@dataclass(frozen=True)
class Done:
    """What a stand-in did for a task, and would do for any other of its kind."""

    report: Report
    costs: MessageCosts
    computed: Computed


def _play(run: Run, method: AnyMethod, trace: BandwidthTraces | None) -> Played:
    """All exchanges of a run, whose clients train as long as ``method`` would have them."""
    played = Played()
    state = run.initial_state
    # Tasks that look alike are done once: their answers would be as long.
    done: dict[Any, Done] = {}
    exchanges = 0
    while state.round < run.rounds:
        answers = []
        slowest = 0.0
        for task in plan_tasks(run, state):
            info = run.federation.info(task.to)
            # A client may look at its own device; how many examples it has changes no length.
            key = (_kind(task), replace(info, examples=0))
            if key not in done:
                done[key] = _do(run, task)
            known = done[key]
            macs = _macs(run, method, task, known.computed, info.examples)
            taken = times(
                info,
                None if trace is None else trace.get(task.to),
                played.seconds,
                bytes_down=sum(known.costs["down"].values()),
                macs=macs,
                bytes_up=sum(known.costs["up"].values()),
            )
            played.add(state.round, task.to, known.costs, macs, taken)
            slowest = max(slowest, taken.total)
            run.memory.accept(task.to, known.report.memory)
            answers.append(replace(known.report, of=task.to, examples=info.examples))
        played.seconds += slowest
        folded = run.method.fold(state, answers)
        exchanges = count_exchanges(run, state, folded, exchanges)
        if folded.round > state.round:
            played.complete(answer.of for answer in answers)
        state = folded
    return played


def _do(run: Run, task: Task) -> Done:
    """Do a task with a stand-in client, without training."""
    client = run.client(task, {})
    outcome, computed = run_stages(run, task, client)
    report = Report(task.to, outcome.give, REPORTED_EXAMPLES, outcome.metrics)
    if outcome.memory or outcome.states:
        # Nothing is written: only the version is sent, and the last is the longest.
        report = replace(report, memory=make_version(run.rounds, task.verb, "0" * NAME_DIGITS))
    return Done(report, _longest(run, task, report), computed)


def _macs(run: Run, method: AnyMethod, task: Task, computed: Computed, examples: int) -> int:
    """Count what a client with ``examples`` computes, by the stages of the method.

    The stand-in did the same stages in one epoch on two examples.
    """
    stages = [stage for stage in method.work(task.verb) if isinstance(stage, Train | Measure)]
    total = 0
    for stage, (_, per_example) in zip(stages, computed, strict=True):
        over, epochs = find_pass(run.nets[stage.net], stage)
        total += per_example * epochs * over.estimate_seen(examples)
    return total


def _kind(task: Task) -> Any:
    """What the lengths of both messages depend on: packets, masks, verb, version and numbers."""
    numbers = tuple(sorted((name, str(value)) for name, value in task.settings.items()))
    packets = []
    for name, packet in task.send.items():
        mask_shapes = _shapes(packet.mask or {})
        ones = tuple(int(leaf.count_nonzero()) for leaf in (packet.mask or {}).values())
        packets.append((name, _shapes(packet.values), mask_shapes, ones))
    return task.verb, task.memory, numbers, tuple(packets)


def _shapes(tree: Mapping[str, Tensor]) -> Any:
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items())


def _longest(run: Run, task: Task, report: Report) -> MessageCosts:
    """Both messages by part, with every number in their heads as long as it can get."""
    largest_id = run.federation.ids[-1]
    task = replace(task, to=largest_id, round=run.rounds)
    report = replace(report, of=largest_id)
    codec = run.method.codec
    down = dict(count_task(task, codec, run.known_state, BroadcastCosts()))
    up = dict(count_report(task, report, codec, run.known_state))
    down["header"] += _slack(task.settings)
    up["header"] += _slack(report.metrics)
    return {"down": down, "up": up}


def _slack(numbers: Mapping[str, Any]) -> int:
    """How much longer the numbers of a message head may get."""
    slack = 0
    for value in numbers.values():
        items = value if isinstance(value, Iterable) else [value]
        for item in items:
            slack += max(0, LONGEST_NUMBER - len(json.dumps(item)))
    return slack


# ---- for a terminal ------------------------------------------------------------------------------


def print_cost(cost: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the estimated cost of an experiment."""
    paper = "none"
    if cost["bytes_paper"] is not None:
        share = cost["reduction_paper"]
        direction = "less" if share >= 0 else "more"
        paper = f"{cost['mib_paper']:,} MiB, {abs(share):.1%} {direction} than dense"
        if cost.get("paper_at_most"):
            paper = f"at most {paper}"
    pairs = [
        ("clients, cohort, rounds", f"{cost['clients']}, {cost['cohort']}, {cost['rounds']}"),
        ("up, at most", format_bytes(cost["bytes_up"])),
        ("down, at most", format_bytes(cost["bytes_down"])),
    ]
    if "trial_rounds" in cost:
        tried = f"by a trial of {cost['trial_rounds']} rounds"
        for name in ("up", "down"):
            expected = format_bytes(cost[f"expected_{name}"])
            pairs.append((f"{name}, expected", f"{expected} ({tried})"))
    pairs += [
        ("paper's own count", paper),
        ("parameters", f"{cost['params']:,}"),
        ("multiply-accumulates", f"{cost['macs']:,} per sample"),
        ("memory of a step", format_bytes(cost["memory"])),
        ("virtual time of all rounds", format_duration(cost["virtual_seconds"])),
    ]
    for name, (least, middle, most) in _costs_per_device(cost).items():
        bound = ", at most" if name in ("up", "down") else ""
        pairs.append((f"{name} per device and round{bound}", f"{middle} ({least} to {most})"))
    print_pairs(pairs, file)


def print_costs(costs: Sequence[Mapping[str, Any]], file: IO[str] | None = None) -> None:
    """Print the estimated costs of several methods: totals, then one device in one round."""
    totals: list[dict[Column, Cell]] = []
    devices: list[dict[Column, Cell]] = []
    for cost in costs:
        totals.append(
            {
                Column("all rounds, at most", is_name=True): cost["method"],
                Column("up"): format_bytes(cost["bytes_up"]),
                Column("down"): format_bytes(cost["bytes_down"]),
                Column("paper\nMiB", 4): or_dash(cost["mib_paper"], "{:,}".format),
                Column("MACs per\nsample", 3): f"{cost['macs']:,}",
                Column("memory\nof a step", 2): format_bytes(cost["memory"]),
                Column("virtual\ntime", 1): format_duration(cost["virtual_seconds"]),
            }
        )
        cells = {Column("per device and round,\nup and down at most", is_name=True): cost["method"]}
        for name, (least, middle, most) in _costs_per_device(cost).items():
            # The median says most; then the costs of the worst device.
            cells[Column(f"{name}\nleast", 2)] = least
            cells[Column(f"{name}\nmedian")] = middle
            cells[Column(f"{name}\nmost", 1)] = most
        devices.append(cells)
    print_rows(totals, file)
    print(file=file)
    print_rows(devices, file)


def _costs_per_device(cost: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the costs of one device in one round: the least, the median and the most."""
    formats: dict[str, tuple[str, Callable[[Any], str]]] = {
        "up": ("bytes_up", _format_kilobytes),
        "down": ("bytes_down", _format_kilobytes),
        "work": ("macs", format_macs),
        "time": ("seconds", format_duration),
    }
    shown = {}
    for name, (key, format_value) in formats.items():
        values = cost["per_device"][key]
        shown[name] = [format_value(values[each]) for each in ("min", "median", "max")]
    return shown


def _format_kilobytes(n: float) -> str:
    return f"{format_kilobytes(n)} kB"


def format_macs(macs: int) -> str:
    """Format a number of multiply-accumulates in an estimated cost.

    >>> format_macs(2_500_000_000), format_macs(12_000_000), format_macs(0)
    ('2.5 GMAC', '12 MMAC', '0 MMAC')
    """
    if macs >= 10**9:
        return f"{macs / 10**9:,.3g} GMAC"
    return f"{macs / 10**6:.3g} MMAC"


__getattr__ = find_old_names(__name__)
