"""Values of the field: workflows, queries, calls, instances, traces.

Standard library and msgspec only.
"""
