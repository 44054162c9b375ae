"""Old names that keep working for one release, with a DeprecationWarning. Delete it after 0.2.

To rename something public, add a line to one of the tables below.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES: dict[str, str | tuple[str, ...]] = {
    "fedgrove.channels.choice": "fedgrove.channels.selection",
    "fedgrove.channels.find": "fedgrove.channels.find_groups",
    "fedgrove.channels.thin": "fedgrove.channels.small_net",
    "fedgrove.nets.custom": "fedgrove.nets.user_files",
    "fedgrove.costs.estimate": "fedgrove.config.cost",
    "fedgrove.data.crowd": "fedgrove.data.sets.generated",
    "fedgrove.data.files": "fedgrove.data.named_set",
    "fedgrove.data.generated": "fedgrove.data.sets.generated",
    "fedgrove.data.har": "fedgrove.data.sets.har",
    "fedgrove.data.images": "fedgrove.data.sets.images",
    "fedgrove.data.lazy": "fedgrove.data.federation",
    "fedgrove.data.own": "fedgrove.data.readers",
    "fedgrove.data.profile": "fedgrove.data.devices",
    "fedgrove.data.reading": "fedgrove.data.readers",
    "fedgrove.data.several": "fedgrove.data.mix",
    "fedgrove.nets.given": "fedgrove.nets.initial_weights",
    "fedgrove.nets.har": "fedgrove.nets.networks",
    "fedgrove.nets.images": "fedgrove.nets.networks",
    "fedgrove.nets.mlp": "fedgrove.nets.networks",
    "fedgrove.nets.resnet": "fedgrove.nets.networks",
    "fedgrove.nets.shufflenet": "fedgrove.nets.networks",
    "fedgrove.nets.state": "fedgrove.nets.forward_state",
    "fedgrove.parts.anneal": "fedgrove.methods.adfedwcp.anneal",
    "fedgrove.parts.bandit": "fedgrove.methods.fedmp",
    "fedgrove.parts.blocks": "fedgrove.methods.pfedgate",
    "fedgrove.parts.byte_budget": "fedgrove.methods.grove.byte_budget",
    "fedgrove.parts.centroids": "fedgrove.methods.adfedwcp.centroids",
    "fedgrove.parts.channel_rules": "fedgrove.methods.fedapta.channel_rules",
    "fedgrove.parts.choose": "fedgrove.methods.ifca",
    "fedgrove.parts.drift": "fedgrove.methods.fedapta.drift",
    "fedgrove.parts.evidence": ("fedgrove.methods.ca_afp.evidence", "fedgrove.parts.gradient"),
    "fedgrove.parts.fisher": "fedgrove.methods.fedlayerprune.fisher",
    "fedgrove.parts.gamma": "fedgrove.methods.safl.slimming",
    "fedgrove.parts.gate": "fedgrove.runs.gate",
    "fedgrove.parts.generator": "fedgrove.methods.fedgen",
    "fedgrove.parts.head_evidence": "fedgrove.methods.grove.head_evidence",
    "fedgrove.parts.holdings": "fedgrove.methods.grove.client_views",
    "fedgrove.parts.hybrid": "fedgrove.methods.fedlayerprune.hybrid",
    "fedgrove.parts.importance": "fedgrove.methods.adfedwcp.importance",
    "fedgrove.parts.imprint": "fedgrove.methods.adfedwcp.importance",
    "fedgrove.parts.kmeans": "fedgrove.methods.adfedwcp.kmeans",
    "fedgrove.parts.labels": "fedgrove.methods.fedlc",
    "fedgrove.parts.layer_importance": "fedgrove.methods.fedapta.layer_ratios",
    "fedgrove.parts.lowrank": "fedgrove.methods.fedkd",
    "fedgrove.parts.model_size": "fedgrove.methods.fedprune",
    "fedgrove.parts.monotone": "fedgrove.methods.fedapta.layer_ratios",
    "fedgrove.parts.mutual": "fedgrove.methods.fedkd",
    "fedgrove.parts.rates": "fedgrove.methods.fedlayerprune.rates",
    "fedgrove.parts.schedule": (
        "fedgrove.methods.ca_afp.phases",
        "fedgrove.methods.fedlayerprune.rates",
        "fedgrove.methods.safl.slimming",
    ),
    "fedgrove.parts.scores": "fedgrove.parts.score",
    "fedgrove.parts.sketch": "fedgrove.methods.pfed1bs",
    "fedgrove.parts.slimming": "fedgrove.methods.safl.slimming",
    "fedgrove.parts.stability": "fedgrove.methods.grove.stability",
    "fedgrove.parts.task_groups": "fedgrove.methods.fedapta.task_groups",
    "fedgrove.parts.task_memory": "fedgrove.methods.fedapta.task_memory",
    "fedgrove.parts.teacher": ("fedgrove.methods.moon", "fedgrove.methods.fedntd"),
    "fedgrove.parts.ternary": "fedgrove.methods.stc.ternary",
    "fedgrove.parts.versions": "fedgrove.methods.stc.versions",
    "fedgrove.parts.vote": "fedgrove.methods.fedlayerprune.hybrid",
    "fedgrove.report.figures": "fedgrove.report.charts",
    "fedgrove.report.over_seeds": "fedgrove.report.seed_averages",
    "fedgrove.runs.store": "fedgrove.runs.memory",
    "fedgrove.twins": "fedgrove.gpu_copies",
    "fedgrove.wire.count": "fedgrove.wire.message_costs",
    "fedgrove.wire.forms": "fedgrove.wire.tensors",
    "fedgrove.wire.held": "fedgrove.wire.known_state",
}
"""Modules that moved: old name, new name; several where the names of one went to several."""

NAMES = {
    "fedgrove.channels.find_groups": {
        "channel_mask": "make_channel_mask",
        "channels_left": "find_kept_channels",
        "groups_of": "find_groups",
        "removable_groups": "require_groups",
    },
    "fedgrove.channels.groups": {
        "channels_of": "read_channels",
        "checked": "complete_channels",
        "expand": "expand_channels",
        "has_filters": "find_channels_with_filters",
        "without_removed": "drop_removed",
    },
    "fedgrove.channels.selection": {
        "best_in_steps": "select_best_in_steps",
        "drawn": "select_random",
        "nested": "select_first",
        "rolling": "select_window",
    },
    "fedgrove.channels.shrink": {
        "cut": "cut_channels",
        "structured": "find_small_net",
    },
    "fedgrove.channels.submodel": {
        "add": "add_submodel",
        "channels_in": "read_packet_channels",
        "cut_out": "extract_submodel",
        "every": "all_channels",
        "infilled": "fill_missing_channels",
        "mask_of": "make_client_mask",
        "masked_packet": "make_masked_packet",
        "mean_of": "average_submodels",
        "own": "restore_submodel",
        "recovered": "restore_full_width",
        "size_at": "count_params_at",
        "slim": "slim_submodel",
        "travels": "list_shared_tensors",
    },
    "fedgrove.channels.widths": {
        "largest_that_fits": "choose_largest_that_fits",
        "width_for": "choose_width",
        "widths": "measure_widths",
    },
    "fedgrove.config.cost": {"cost": "estimate_cost", "of_run": "estimate_run_cost"},
    "fedgrove.core": {
        "Form": "ExpectedPacket",
        "Holds": "ExpectedReport",
        "Info": "ClientInfo",
        "LOSSES": "LOST_REASONS",
        "Settings": "TaskSettings",
        "Start": "Setup",
        "WithFigures": "WithServerMetrics",
        "bytes_of_paper": "count_paper_bytes",
        "no_packets": "expected_no_packets",
        "what_was_sent": "expected_as_sent",
    },
    "fedgrove.errors": {"NotHeld": "UnknownMask"},
    "fedgrove.nets": {
        "fitting": "find_fitting",
        "is_ours": "is_built_in",
    },
    "fedgrove.nets.user_files": {
        "file_of": "find_user_file",
        "files_named_in": "find_files_in_pickle",
        "find": "find_net_class",
        "is_spec": "is_file_spec",
        "load": "build_user_net",
    },
    "fedgrove.data.devices": {"info": "draw_device", "read": "read_devices"},
    "fedgrove.data.mix": {
        "is_several": "names_several",
        "shaped": "resize_inputs",
        "tasks_of": "split_names",
    },
    "fedgrove.data.partition": {"KINDS": "PARTITIONS", "deal": "assign_units"},
    "fedgrove.data.scenario": {"KINDS": "SCENARIOS"},
    "fedgrove.data.split": {"KINDS": "SPLITS"},
    "fedgrove.export.formats": {"ExportOptions": "ExportRequest"},
    "fedgrove.methods.grove.byte_budget": {"Exchange": "SampleMessages"},
    "fedgrove.methods.grove.client_views": {"Sent": "SentChange"},
    "fedgrove.nets.norms": {"KINDS": "NORM_KINDS"},
    "fedgrove.parts.device_widths": {
        "client_ratios": "fedgrove.methods.fedapta.channel_rules.client_ratios",
        "SharedWidths": "fedgrove.methods.heterofl.State",
    },
    "fedgrove.parts.group": {"HELD": "MAX_UPDATE_BYTES"},
    "fedgrove.parts.objective": {
        "Clustered": "fedgrove.methods.clusterfl.Clustered",
    },
    "fedgrove.parts.quantise": {
        "Centroids": "fedgrove_lab.bench.kmeans.Centroids",
        "cluster": "fedgrove_lab.bench.kmeans.cluster",
        "QSGD": "fedgrove.methods.fedpaq.QSGD",
        "Uniform": "UniformQuantiser",
    },
    "fedgrove.parts.robust": {"Held": "CollectedTrees"},
    "fedgrove.parts.score": {
        "Blend": "fedgrove.methods.ca_afp.score.Blend",
        "coherence": "fedgrove.methods.ca_afp.score.coherence",
        "consistency": "fedgrove.methods.ca_afp.score.consistency",
        "relative": "fedgrove.methods.ca_afp.score.relative",
        "sensitivity": "fedgrove.methods.fedsnip.sensitivity",
    },
    "fedgrove.problems": {
        "Sums": "MetricSums",
        "Task": "TaskProblem",
        "Tasks": "MixedProblem",
        "mean_over_outputs": "average_outputs",
        "restricted": "restrict_outputs",
    },
    "fedgrove.runs.clock": {"NobodyInTime": "NoClientInTime"},
    "fedgrove.runs.faults": {"KINDS": "FAULT_KINDS"},
    "fedgrove.seeds": {
        "one_thread": "single_thread",
        "own_randomness": "preserve_rng",
        "threads": "use_threads",
    },
    "fedgrove.trees": {
        "WORDS": "INTEGER_TYPES",
        "both": "and_masks",
        "chosen": "select",
        "count": "count_true",
        "flat": "flatten",
        "joined": "pack_leaves",
        "masked": "apply_mask",
        "places": "find_true",
        "unflat": "unflatten",
        "vector": "as_vector",
    },
    "fedgrove.wire.codec": {
        "Known": "KnownMask",
        "Line": "ExplainedTensor",
        "Measured": "MeasuredTensor",
        "digest_of": "hash_mask",
        "refers_to_masks": "can_refer_to_masks",
    },
    "fedgrove.wire.known_state": {"Contents": "StoredMask", "Held": "KnownState"},
    "fedgrove.wire.ledger": {"causes": "sum_by_cause"},
    "fedgrove.wire.message": {
        "Lacks": "ResendRequest",
        "write_lacks": "write_resend_request",
    },
    "fedgrove.report.charts": {
        "Drawing": "Chart",
        "bars": "draw_bars",
        "heat": "draw_heat_map",
        "rows_of": "draw_rows",
        "xy": "draw_xy",
    },
    "fedgrove.report.seed_averages": {
        "over_seeds": "average_over_seeds",
        "paired": "paired_difference",
    },
}
"""Names that changed inside a module, or moved out of it: old name, new name."""

STATE_FIELDS = {
    "asked": "weighed",
    "held": "client_versions",
    "holdings": "client_views",
    "told": "reported",
}
"""Fields of methods' states that changed, for checkpoints written before: old name, new name."""


def find_renamed(module: str, name: str) -> Any:
    """Return what ``module`` calls ``name`` today, and warn.

    A module calls this in its ``__getattr__``, for names that it does not have.

    Args:
        module: The dotted name of the module.
        name: The old name.

    Raises:
        AttributeError: ``name`` is not an old name of this module.
    """
    new = NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, new_name = new.rpartition(".")
    # A name without a module stays in its own.
    home = home or module
    _warn(f"{module}.{name}", f"{home}.{new_name}")
    return getattr(importlib.import_module(home), new_name)


def _warn(old: str, new: str) -> None:
    message = f"{old} is now {new}; the old name goes with the next release."
    # Level 3 is the line of the user's that names it, for attributes.
    warnings.warn(message, DeprecationWarning, stacklevel=3)


class _OldModules(MetaPathFinder, Loader):
    """Finds a module under its old name: an empty module that looks names up in the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        is_parent = any(old.startswith(f"{fullname}.") for old in MODULES)
        if fullname not in MODULES and not is_parent:
            return None
        return ModuleSpec(fullname, self, is_package=is_parent)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in; the new module itself must keep its own ``__spec__``."""
        if spec.name not in MODULES:
            # A package that is gone, with modules that have new names.
            return ModuleType(spec.name)
        names = MODULES[spec.name]
        if isinstance(names, str):
            names = (names,)
        homes = [importlib.import_module(name) for name in names]
        _warn(spec.name, " and ".join(names))
        stand_in = ModuleType(spec.name, homes[0].__doc__)

        def find(name: str) -> Any:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {spec.name!r} has no attribute {name!r}")

        stand_in.__getattr__ = find  # type: ignore[method-assign]
        return stand_in

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""


def find_old_modules() -> None:
    """Let ``import`` find modules under their old names; asked last, after all other finders."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
