"""The cost of building the mesh of many ranks: `python scripts/benchmarks/bench_scale.py`, on one core, without processes.

For each number of ranks it builds what every one of them has: its coordinate, neighbours and groups on all axes, and its shards of
the flat buckets of a Llama of 70 billion parameters, cut over pipeline and tensor; then what each rank computes of the world as
a whole, once: its list, the order of ranks, who is far. The exponent is that of the growth from the row before; 1 is in proportion
to the ranks. A second table has pipeline schedules: made, proven (`validate`) and simulated, with the time for each of their
actions. A third one plans that Llama on H100s, in hosts of 8: the layouts that are estimated, and how many fit, with the time from
the configuration to the ranked table. Peak memory is that of the process so far, imports included. Takes about a minute.

    --ranks     numbers of ranks, by default 64 256 1024 4096 16384
"""

import argparse
import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from zeromesh.flat.layout import BucketLayout, ParameterSpec, ShardPiece, build_layout
from zeromesh.mesh.mesh_shape import AXES, Axis, MeshShape
from zeromesh.mesh.rank_order import ProcessLocation, mesh_picture, rank_order, tensor_groups_warning
from zeromesh.pipeline.schedule import ScheduleName, make_schedule, simulate, validate

BLOCKS, HIDDEN, WIDE, KEYS, VOCABULARY, HOST = 80, 8192, 28672, 1024, 128256, 8
GROUPS: tuple[tuple[Axis, ...], ...] = (("replicate", "shard"), ("shard",), ("replicate",), ("tensor",), ("pipeline",))
"""The axes of the sets that each rank has, besides the world."""
SCHEDULES: tuple[tuple[ScheduleName, int, int, int], ...] = (
    ("1f1b", 16, 1, 64),
    ("1f1b", 64, 1, 512),
    ("zero_bubble", 64, 1, 512),
    ("interleaved", 16, 4, 64),
    ("interleaved", 64, 8, 512),
)
"""Name, ranks, chunks and microbatches."""

Layouts = dict[tuple[int, int], list[BucketLayout]]
RankParts = tuple[dict[str, int], list[tuple[int, ...]], list[int], list[tuple[ShardPiece, ...]]]
Made = TypeVar("Made")


def shape_of(ranks: int) -> MeshShape:
    """Tensor 8, pipeline up to 16, shard up to 4, and replicas: 16 x 8 x 4 x 8 for 4096 ranks. `ranks` is a power of 2, from 8."""
    pipeline = min(16, ranks // HOST)
    data = ranks // HOST // pipeline
    return MeshShape(pipeline=pipeline, replicate=data // min(4, data), shard=min(4, data), tensor=HOST)


def layouts_of(shape: MeshShape) -> Layouts:
    """The flat buckets of each stage and each position along the tensor axis: ranks that differ in others have the same."""
    return {
        (stage, tensor): [build_layout(name, specs, shape.shard) for name, specs in _units(shape, stage)]
        for stage in range(shape.pipeline)
        for tensor in range(shape.tensor)
    }


def _units(shape: MeshShape, stage: int) -> Iterator[tuple[str, list[ParameterSpec]]]:
    ends = {0: "embed_tokens", shape.pipeline - 1: "lm_head"}
    sizes = {"q": HIDDEN, "k": KEYS, "v": KEYS, "o": HIDDEN, "gate": WIDE, "up": WIDE, "down": WIDE}
    for block in range(stage * BLOCKS // shape.pipeline, (stage + 1) * BLOCKS // shape.pipeline):
        norms = [_spec(f"{block}.{name}_norm", HIDDEN) for name in ("input", "post")]
        yield (f"layers.{block}", [_spec(f"{block}.{n}", size // shape.tensor, HIDDEN) for n, size in sizes.items()] + norms)
    if stage in ends:
        yield ends[stage], [_spec(ends[stage], VOCABULARY // shape.tensor, HIDDEN)]


def _spec(name: str, *shape: int) -> ParameterSpec:
    return ParameterSpec(fqn=name, shape=shape, dtype=torch.bfloat16, requires_grad=True)


def part_of(shape: MeshShape, layouts: Layouts, rank: int) -> RankParts:
    """Return the parts of one rank: its coordinate, its groups, their numbers and its neighbours, and what its shards hold."""
    at = shape.coordinate(rank)
    groups = [shape.group_of(rank, *axes) for axes in GROUPS]
    numbers = [shape.group_index(rank, *axes) for axes in GROUPS]
    numbers += [shape.neighbour(rank, "pipeline", step, wrap=True) or 0 for step in (-1, 1)]
    return at, groups, numbers, [each.pieces(each.shard(at["shard"])) for each in layouts[at["pipeline"], at["tensor"]]]


def parts_of(shape: MeshShape, layouts: Layouts) -> list[RankParts]:
    """Return the parts of all ranks."""
    return [part_of(shape, layouts, rank) for rank in range(shape.world_size)]


def world_of(shape: MeshShape) -> str:
    """Return the view of all the others that a rank computes, once at the start."""
    places = [ProcessLocation(host=f"host {rank // HOST}") for rank in range(shape.world_size)]
    shape.group_of(0, *AXES)
    ordered = [places[process] for process in rank_order(places)]
    return tensor_groups_warning(shape, ordered) + mesh_picture(shape, ordered, here=0)


def timed(call: Callable[[], Made]) -> tuple[float, Made]:
    """Processor seconds that a call takes, and what it returns."""
    gc.freeze()  # the collector would look at all that was imported, amid one call or another
    began = time.process_time()
    made = call()
    return time.process_time() - began, made


def print_ranks(counts: Sequence[int]) -> None:
    """The table of ranks."""
    print("| ranks | mesh | all ranks' parts, s | exponent | one rank's view of the world, ms | peak MiB |")
    print("|---|---|---|---|---|---|")
    before: tuple[int, float] | None = None
    for ranks in counts:
        shape = shape_of(ranks)
        world, _ = timed(partial(world_of, shape))
        built, layouts = timed(partial(layouts_of, shape))
        more, _ = timed(partial(parts_of, shape, layouts))
        seconds = built + more
        grown = f"{math.log(seconds / before[1]) / math.log(ranks / before[0]):.2f}" if before else ""
        sizes = " x ".join(map(str, shape.sizes))
        print(f"| {ranks} | {sizes} | {seconds:.3f} | {grown} | {1e3 * world:.1f} | {_peak_mib()} |", flush=True)
        before = ranks, seconds


def print_schedules() -> None:
    """The table of schedules."""
    print("| schedule | ranks x chunks | microbatches | actions | made, s | proven, s | simulated, s | us an action | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, ranks, chunks, microbatches in SCHEDULES:
        made, schedule = timed(partial(make_schedule, name, ranks=ranks, chunks=chunks, microbatches=microbatches))
        proven, _ = timed(partial(validate, schedule))
        simulated, _ = timed(partial(simulate, schedule, transfer=0.1))
        actions = sum(map(len, schedule.actions))
        times = f"{made:.3f} | {proven:.3f} | {simulated:.3f} | {1e6 * simulated / actions:.2f}"
        print(f"| {name} | {ranks} x {chunks} | {microbatches} | {actions} | {times} | {_peak_mib()} |", flush=True)


def print_plans(counts: Sequence[int]) -> None:
    """The table of plans. Each is made anew, with its model and traces."""
    # Later than the mesh, whose memory would be that of the trainer's libraries too.
    from zeromesh.trainer.config.load import load_config
    from zeromesh.trainer.planning.auto import subject_of
    from zeromesh.trainer.planning.machine import find_machine
    from zeromesh.trainer.planning.planner import Plan, Planner

    machine = find_machine("h100")
    model = f"{{model_type: llama, hidden_size: {HIDDEN}, intermediate_size: {WIDE}, num_hidden_layers: {BLOCKS}, "
    model += f"num_attention_heads: 64, num_key_value_heads: 8, vocab_size: {VOCABULARY}}}"
    keys = [f"model.config={model}", "data.sequence_length=4096", "batch.global_size=2048", "precision.compute=bfloat16"]

    def plan(ranks: int) -> Plan:
        return Planner(subject_of(load_config(None, keys), device=machine.device.kind), machine).plan(ranks)

    print("| ranks | layouts | that fit | planned, s | exponent | peak MiB |")
    print("|---|---|---|---|---|---|")
    plan(HOST)  # what is imported at the first trace is no part of a plan
    before: tuple[int, float] | None = None
    for ranks in counts:
        seconds, made = timed(partial(plan, ranks))
        grown = f"{math.log(seconds / before[1]) / math.log(ranks / before[0]):.2f}" if before else ""
        fits = sum(row.fits for row in made.rows)
        print(f"| {ranks} | {len(made.rows)} | {fits} | {seconds:.2f} | {grown} | {_peak_mib()} |", flush=True)
        before = ranks, seconds


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    counts = parser.parse_args().ranks
    print_ranks(counts)
    print()
    print_schedules()
    print()
    print_plans(counts)


if __name__ == "__main__":
    main()
