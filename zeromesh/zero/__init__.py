"""The ZeRO engine: a model cut into units, units into flat buckets, and one path for all stages.

plan       model -> units -> parameter specs (pure)
phase      the legal life of a unit
unit       a unit and its buckets at run time
order      the recorded order of units, replayed for prefetch
reduction  gradients from autograd to summed shards
hooks      the only place that registers hooks on the model
norm       global norm and clipping
scaler     dynamic loss scale
engine     what ties them together
"""
