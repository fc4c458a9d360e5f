"""What the benchmarks share: the workload, the systems that run it, and how time and memory are taken."""
