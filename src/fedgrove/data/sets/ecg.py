"""Heartbeats: the MIT-BIH Arrhythmia Database, one example per beat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..dataset import Array, Dataset, Floats, Ints, number_values
from ..federation import Defaults
from ..named_set import Arrays, FileFormat, NamedSet, read_npz

LABELS = ("normal", "supraventricular", "ventricular", "fusion", "paced or unknown")
"""The AAMI classes N, S, V, F and Q."""
CHANNELS = ("MLII or first lead", "other lead", "RR before", "RR after")
RATE = 360
"""Samples per second of the recordings, in which ``time`` and ``rr`` count."""
UNITS_PER_MILLIVOLT = 200
REACH = 256
"""The samples that a window covers."""
RECORD_SAMPLES = 650_000
"""The samples of the longest record."""
PACED_RECORDS = (102, 104, 107, 217)
"""Records of patients with a pacemaker."""


def read_packed_beats(paths: Sequence[Path]) -> Arrays:
    """Read the packed windows of beats, channels first."""
    names = ("x", "y", "record", "patient", "time", "block", "rr", "records", "leads")
    packed = read_npz(paths[0], names)
    arrays = {name: packed[name] for name in names}
    arrays["x"] = np.ascontiguousarray(np.moveaxis(packed["x"], 2, 1))
    return arrays


def make_mit_bih(arrays: Arrays) -> Dataset:
    """Make the data set: two leads in millivolts, and the RR intervals as two more channels.

    A premature beat looks like a normal one that comes early, so the interval to the beat before is
    needed to tell them apart. It is the same at all steps of a window. A client standardises its
    channels, so intervals are relative to the patient's own.
    """
    record = arrays["record"].astype(np.int64)
    leads = arrays["x"].astype(np.float32) / UNITS_PER_MILLIVOLT
    swapped = _find_swapped_leads(arrays["records"], arrays["leads"])
    rows = np.isin(record, swapped)
    leads[rows] = leads[rows][:, ::-1]
    intervals = fill_missing_intervals(arrays["rr"] / RATE, record).astype(np.float32)
    steps = leads.shape[2]
    constant = np.repeat(intervals[:, :, None], steps, axis=2)
    patient = number_values(arrays["patient"])
    # Records lie so far apart that windows of different ones never overlap.
    start = number_values(record) * (RECORD_SAMPLES + REACH) + arrays["time"].astype(np.int64)
    return Dataset(
        np.concatenate([leads, constant], axis=1),
        arrays["y"].astype(np.int64),
        LABELS,
        patient,
        number_values(arrays["block"]),
        start,
        reach=REACH,
        kinds=np.isin(record, PACED_RECORDS).astype(np.int64),
        names=_name_patients(patient, record),
        channels=CHANNELS,
        notes=("mit-bih: at most 1,000 normal beats of a record; kinds are paced or not",),
    )


def _find_swapped_leads(records: Array, leads: Array) -> Ints:
    """Return the records whose second lead is MLII, which is the first one in most."""
    is_swapped = leads[:, 1] == "MLII"
    swapped: Ints = records[is_swapped].astype(np.int64)
    return swapped


def fill_missing_intervals(intervals: Floats, record: Ints) -> Floats:
    """Replace intervals of 0, before the first beat and after the last, by the record's median.

    >>> fill_missing_intervals(np.array([[0.0, 0.8], [0.8, 0.6], [0.6, 0.0]]), np.zeros(3, int))
    array([[0.7, 0.8],
           [0.8, 0.6],
           [0.6, 0.7]])
    """
    filled = intervals.copy()
    for each in np.unique(record):
        own = np.flatnonzero(record == each)
        # The intervals before beats are those after the beats before them: one column has all.
        before = intervals[own, 0]
        known = np.concatenate([before[before > 0], intervals[own[-1:], 1]])
        median = float(np.median(known[known > 0]))
        filled[own] = np.where(intervals[own] > 0, intervals[own], median)
    return filled


def _name_patients(patient: Ints, record: Ints) -> tuple[str, ...]:
    """Return the name of each patient: its records, as in 201+202."""
    names = []
    for each in range(int(patient.max()) + 1):
        own = np.unique(record[patient == each])
        names.append("+".join(map(str, own.tolist())))
    return tuple(names)


SETS = {
    "mit-bih": NamedSet(
        about=(
            "heartbeats, 2 leads and 2 RR intervals, 4x128, 5 classes (very unbalanced), "
            "47 patients, 62,762 beats"
        ),
        defaults=Defaults(
            "har-cnn", cohort=10, rounds=50, epochs=3, batch=32, optimiser="Adam", lr=1e-3
        ),
        partition="natural",
        formats=(FileFormat(("mit_bih.npz",), read_packed_beats),),
        dataset=make_mit_bih,
        source="https://physionet.org/content/mitdb/1.0.0/",
    ),
}
