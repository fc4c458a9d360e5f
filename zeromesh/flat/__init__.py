"""Flat buckets: how parameters lie in one buffer, and how ranks divide it. Pure; no other package computes offsets."""
