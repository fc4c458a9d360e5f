"""The ZeRO engine: a model cut into units, units into flat buckets, and one path for all stages.

`engine.py` is the interface, and `passes.py` runs forward and backward. `hooks.py` alone registers hooks on the model.
"""
