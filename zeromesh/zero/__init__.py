"""The ZeRO engine: a model cut into units, units into flat buckets, and one path for all stages.

`engine.py` is what callers use, `passes.py` what happens in forward and backward. `hooks.py` alone registers hooks on the model.
"""
