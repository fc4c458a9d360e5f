"""Flat buckets: how parameters lie in one buffer and how that buffer is split between ranks.

`split` is integer arithmetic, `layout` says which parameter lies where, `placement` says what a ZeRO stage does with
parameters, gradients and optimizer state. All of it is pure: no storage, no communication. Nothing outside this package
computes an offset.
"""
