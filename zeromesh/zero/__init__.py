"""The ZeRO engine: a model cut into units, units into flat buckets, and one path for all stages."""
