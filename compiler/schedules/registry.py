"""The schedules by name: adding one is one file and one row."""

from __future__ import annotations

from titan.compiler.schedules.gpipe import gpipe
from titan.compiler.schedules.one_f_one_b import one_f_one_b
from titan.compiler.schedules.order import Schedule

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
}
