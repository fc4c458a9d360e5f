"""The common part of the benchmarks: the workload, the systems that run it, and how time and memory are taken."""
