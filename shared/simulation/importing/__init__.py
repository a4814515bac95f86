"""Recorded calls of other systems, turned into traces: text in, `TraceQuery` out.

    csv_import.py   a table, one row per call           ─┐
    otel_import.py  OpenTelemetry GenAI spans           ─┴─► recording.py ─► assemble.py ─► queries
                    (otel_spans.py reads the files)                          structure.py: who
                                                                             waited for whom

Rows and spans that cannot be used are listed, never silently dropped.
"""

from shared.simulation.importing.assemble import assemble
from shared.simulation.importing.csv_import import read_csv
from shared.simulation.importing.otel_import import read_otel
from shared.simulation.importing.recording import (
    AttributeNames,
    Imported,
    Problem,
    RecordedCall,
    Recording,
    Summary,
)

__all__ = [
    "AttributeNames",
    "Imported",
    "Problem",
    "RecordedCall",
    "Recording",
    "Summary",
    "assemble",
    "read_csv",
    "read_otel",
]
