"""Draws the documentation's pictures from arithmetic and measurements: `python scripts/pictures/pictures.py [--check]`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from svg import Drawing

from zeromesh.flat.layout import ParameterSpec, build_layout
from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.options import STAGES, Placement
from zeromesh.pipeline.schedule import Kind, make_schedule, simulate

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
COLOURS = "abcd"
FLOORS_OF = {
    "trainer": (
        ("cli", "tools", "setup", "loop"),
        ("callbacks", "checkpoints", "hub", "monitoring"),
        ("models", "losses", "weights", "data", "config"),
    ),
    "zeromesh": (
        ("launch", "pipeline", "checkpoint"),
        ("zero", "optim", "weight_init", "units", "tensor"),
        ("mesh", "telemetry", "comm", "flat", "kernels"),
    ),
    "offload": (("activations", "memory", "io"),),
}
"""Rows of folders by floor: a folder imports those of lower rows, and of its own row only to one side."""


def comparison() -> str:
    """Peak memory and step time beside DeepSpeed and FSDP2, from the measurements that docs/benchmarks quotes."""
    measured = json.loads((FOLDER.parent / "benchmarks" / "step-epyc.json").read_text(encoding="utf-8"))["dtypes"]
    systems = (("zeromesh", "zeromesh-3", "fa"), ("FSDP2", "fsdp2", "fb"), ("DeepSpeed", "deepspeed-3", "fc"))
    panels = (("peak memory of a rank, MiB", "mebibytes"), ("time of a step, ms", "milliseconds"))
    drawing = Drawing(890, 236, "Peak memory and step time of zeromesh, FSDP2 and DeepSpeed at stage 3; shorter bars are better")
    left, width = 12, 445
    for panel, (title, quantity) in enumerate(panels):
        x, y = left + panel * width, 44.0
        drawing.text(x, 22, title, "bold")
        rows = {
            dtype: {each["system"]: each[quantity]["median"] for each in found["summaries"]} for dtype, found in measured.items()
        }
        scale = (width - 190) / max(value for row in rows.values() for value in row.values())
        for dtype, row in rows.items():
            drawing.text(x, y + 41, dtype, "soft")
            for name, system, colour in systems:
                length = row[system] * scale
                drawing.text(x + 46, y + 15, name, "small")
                drawing.rect(x + 112, y + 2, length, 18, colour)
                drawing.text(x + 118 + length, y + 15, f"{row[system]:.0f}", "small bold" if colour == "fa" else "small")
                y += 23
            y += 12
    drawing.text(
        left,
        226,
        "34 million parameters, AdamW, 2 CPU ranks, medians of one run on one machine: docs/benchmarks. Shorter is better.",
        "small soft",
    )
    return drawing.svg()


def stages() -> str:
    """Draw the bytes that four ranks hold between steps, by stage: AdamW, bfloat16 compute, float32 sums and master weights."""
    ranks, unit, left, top = 4, 8.5, 92, 70
    parts = (("parameters", "a", 2), ("gradients", "b", 4), ("master weights, moments", "c", 12))
    cell = sum(nbytes for _, _, nbytes in parts) * unit + 14
    drawing = Drawing(890, 302, "What each of four ranks holds at ZeRO stages 0 to 3")
    at = float(left)
    for name, colour, nbytes in parts:
        drawing.rect(at, 14, 14, 14, f"f{colour}")
        drawing.text(at + 20, 26, f"{name}: {nbytes} bytes")
        at += 45 + 6.6 * len(f"{name}: {nbytes} bytes")
    for rank in range(ranks):
        drawing.text(left + rank * cell, top - 12, f"rank {rank}", "soft")
    drawing.text(left + ranks * cell + 6, top - 24, "bytes per", "soft")
    drawing.text(left + ranks * cell + 6, top - 10, "parameter and rank", "soft")
    for stage, row in STAGES.items():
        y = top + stage * 58
        drawing.text(12, y + 22, f"stage {stage}", "bold")
        total = 0.0
        for index, (placement, (_, colour, nbytes)) in enumerate(
            zip((row.parameters, row.gradients, row.optimizer), parts, strict=True)
        ):
            sharded = placement is Placement.SHARDED
            passing = index == 0 and sharded
            total += 0 if passing else nbytes / ranks if sharded else nbytes
            start = left + sum(each[2] for each in parts[:index]) * unit
            for rank in range(ranks):
                x, width = start + rank * cell, nbytes * unit - 2
                drawing.rect(x, y, width, 34, "box dashed" if passing else f"f{colour} faint" if sharded else f"f{colour}")
                if sharded and not passing:
                    drawing.rect(x + rank * width / ranks, y, width / ranks, 34, f"f{colour}", 2)
        drawing.text(left + ranks * cell + 6, y + 22, f"{total:g} bytes", "bold")
    drawing.text(left, 292, "dashed: gathered for one unit at a time, around its use. Faint: what other ranks hold.", "small soft")
    return drawing.svg()


def buckets() -> str:
    """Parameters of a unit, its flat bucket, and three shards of it, laid out by `build_layout`."""
    shapes = {"attn.weight": (24, 40), "mlp.weight": (30, 40), "norm.weight": (40,)}
    specs = [
        ParameterSpec(fqn=name, shape=shape, dtype=torch.float32, requires_grad=True, group=int(name == "norm.weight"))
        for name, shape in shapes.items()
    ]
    layout = build_layout("block", specs, parts=3)
    left, width = 20, 800
    scale = width / layout.padded
    drawing = Drawing(840, 288, "The parameters of a unit in one flat bucket, cut into three shards")
    drawing.text(left, 20, "parameters of the unit: ordinary tensors, views of the bucket while the unit is gathered", "soft")
    for index, slot in enumerate(layout.slots):
        x, length = left + slot.where.start * scale, slot.where.length * scale
        colour = f"f{COLOURS[index]}"
        shown, above = (min(length - 16, left + width - 116 - x), x) if length > 100 else (104, left + width - 104)
        shape = " x ".join(map(str, slot.spec.shape))
        drawing.box(above, 30, shown, 34, f"{slot.spec.fqn.removesuffix('.weight')}  {shape}", colour)
        drawing.path([(above + shown / 2, 66), (x + length / 2, 120)], "arrow")
        drawing.rect(x, 122, length, 34, colour, 0)
        if length > 100:
            drawing.text(x + length / 2, 143, f"{slot.where.start} to {slot.where.end}", "middle on")
    for gap in layout.gaps():
        drawing.rect(left + gap.start * scale, 122, gap.length * scale, 34, "gap", 0)
    drawing.rect(left, 122, width, 34, "box", 0)
    words = f"the bucket: {layout.padded} elements, each parameter at a multiple of {layout.alignment}; hatched: zeros"
    drawing.text(left + 8, 176, words, "soft")
    for rank in range(layout.parts):
        where = layout.shard(rank)
        x, length = left + where.start * scale, where.length * scale
        drawing.path([(x, 158), (x, 212)], "line dashed")
        drawing.rect(x + 3, 212, length - 6, 40)
        names = " + ".join(piece.spec.fqn.removesuffix(".weight") for piece in layout.pieces(where))
        drawing.text(x + length / 2, 229, f"rank {rank}", "middle bold")
        drawing.text(x + length / 2, 245, names, "middle small soft")
    drawing.path([(left + width, 158), (left + width, 212)], "line dashed")
    drawing.text(left + 8, 276, f"shards: {layout.shard_length} elements each, cut anywhere in a parameter", "soft")
    return drawing.svg()


def step() -> str:
    """A step at stage 3 with three units and one microbatch; the last unit fits into `zero.gathered_budget`, and stays."""
    drawing = Drawing(860, 250, "One step at stage 3: gathers and reductions run beside the computation")
    left, unit = 120, 60
    for y, words in ((56, "computes"), (106, "gathers"), (156, "reduces"), (206, "is gathered")):
        drawing.text(12, y + 21, words, "bold")
        drawing.path([(left, y + 38), (850, y + 38)])
    for x, length, words in ((1, 3, "forward"), (4, 5, "backward"), (9.7, 2.3, "update")):
        drawing.text(left + x * unit, 28, words, "soft")
        drawing.path([(left + x * unit, 36), (left + (x + length) * unit - 6, 36)])
    computes = [(1, 1, 0), (2, 1, 1), (3, 1, 2), (4, 1.6, 2), (5.6, 1.6, 1), (7.2, 1.6, 0)]
    gathers = [(0.1, 0.8, 0), (1.1, 0.8, 1), (4.1, 0.8, 1), (5.7, 0.8, 0)]
    reduces = [(5.7, 0.9, 2), (7.3, 0.9, 1), (8.9, 0.7, 0)]
    whole = [(0.9, 1.1, 0), (1.9, 1.1, 1), (0, 12, 2), (4.9, 2.3, 1), (6.5, 2.3, 0)]
    for y, spans in ((56, computes), (106, gathers), (156, reduces)):
        for start, length, of in spans:
            words = f"unit {of}" if length >= 1 else str(of)
            drawing.box(left + start * unit, y, length * unit - 3, 32, words, f"f{COLOURS[of]}")
    for start, length, of in whole:
        drawing.rect(left + start * unit, 208 + of * 10, length * unit - 3, 7, f"f{COLOURS[of]}", 2)
    drawing.box(left + 9.7 * unit, 56, 0.9 * unit, 32, "norm", "box", "")
    drawing.box(left + 10.7 * unit, 56, 1.3 * unit, 32, "AdamW", "fd")
    return drawing.svg()


def mesh() -> str:
    """Eight ranks as pipeline 2 x shard 2 x tensor 2, and the groups that each axis makes of them."""
    shape = MeshShape(pipeline=2, shard=2, tensor=2)
    drawing = Drawing(820, 330, f"Eight ranks as {shape}")
    where: dict[int, tuple[float, float]] = {}
    for rank in range(shape.world_size):
        at = shape.coordinate(rank)
        where[rank] = (60 + at["pipeline"] * 400 + at["tensor"] * 160, 62 + at["shard"] * 110)
    for stage in range(shape.pipeline):
        drawing.rect(30 + stage * 400, 34, 330, 218, "box", 10)
        drawing.text(44 + stage * 400, 24, f"host {stage}: pipeline stage {stage}", "soft")
    for axis, colour in (("tensor", "a"), ("shard", "b"), ("pipeline", "c")):
        for group in shape.groups(axis):
            (x, y), (to_x, to_y) = where[group[0]], where[group[-1]]
            if axis != "pipeline":
                drawing.path([(x + 55, y + 28), (to_x + 55, to_y + 28)], f"l{colour} thick")
                continue
            at = shape.coordinate(group[0])
            edge, away = (y, -1) if at["shard"] == 0 else (y + 56, 1)
            over = edge + away * (8 + 8 * at["tensor"])
            drawing.path([(x + 55, edge), (x + 55, over), (to_x + 55, over), (to_x + 55, edge)], f"l{colour} thick")
    for rank, (x, y) in where.items():
        at = shape.coordinate(rank)
        drawing.rect(x, y, 110, 56, "on", 7)
        drawing.rect(x, y, 110, 56, "box", 7)
        drawing.text(x + 55, y + 24, f"rank {rank}", "middle bold")
        drawing.text(x + 55, y + 42, f"shard {at['shard']}, tensor {at['tensor']}", "middle small soft")
    told = {
        "tensor": ("a", "sums of activations, in every layer"),
        "shard": ("b", "parameters and gradients, once a step or microbatch"),
        "pipeline": ("c", "hidden states, once a microbatch"),
    }
    for row, axis in enumerate(reversed([axis for axis in AXES if axis in told])):
        colour, words = told[axis]
        drawing.path([(44, 274 + row * 22), (74, 274 + row * 22)], f"l{colour} thick")
        drawing.text(84, 279 + row * 22, axis, "bold")
        drawing.text(150, 279 + row * 22, f"{words}: ranks {', '.join(map(str, shape.group_of(0, axis)))} and others alike")
    return drawing.svg()


def checkpoint() -> str:
    """Two ranks write whole tensors in place; three ranks read what is theirs; the directory appears all at once."""
    drawing = Drawing(820, 330, "Two ranks write a checkpoint, three read it")
    left, width, files = 170, 620, (("embed.weight", 0.42), ("norm.weight", 0.06), ("head.weight", 0.52))
    drawing.text(12, 45, "2 ranks write", "bold")
    drawing.text(12, 119, "model.safetensors", "bold")
    drawing.text(12, 193, "3 ranks read", "bold")
    for count, y in ((2, 24), (3, 172)):
        for rank in range(count):
            x, length = left + rank * width / count, width / count
            drawing.box(x + 2, y, length - 4, 32, f"shard of rank {rank}", f"f{COLOURS[rank]}")
            begin, end = (58, 96) if y < 100 else (134, 170)
            drawing.path([(x + length / 2, begin), (x + length / 2, end)], "arrow")
            if rank:
                drawing.path([(x, 58 if count == 2 else 134), (x, 96 if count == 2 else 170)], "line dashed")
    at = float(left)
    for name, part in files:
        drawing.rect(at, 98, part * width, 34, "box", 0)
        if part > 0.1:
            drawing.text(at + part * width / 2, 119, name, "middle mono")
        at += part * width
    drawing.text(12, 137, "whole tensors", "small soft")
    drawing.text(12, 262, "all or nothing", "bold")
    words = ("step-100.tmp", "write, sync", "manifest.json", "rename: step-100")
    for index, each in enumerate(words):
        x = left + index * 160
        drawing.box(x, 240, 138, 36, each, "box" if index < 3 else "fc", "mono" if index < 3 else "mono on")
        if index:
            drawing.path([(x - 22, 258), (x - 3, 258)], "arrow")
    drawing.text(
        left, 304, "A kill before the last arrow leaves a directory that nobody reads, and the next start removes.", "small soft"
    )
    return drawing.svg()


def schedules() -> str:
    """One step of each schedule on four ranks, as simulated: forward 1, backward 2 units of time."""
    ranks, microbatches, left = 4, 8, 110
    names = ("gpipe", "1f1b", "zero_bubble")
    lines = {name: simulate(make_schedule(name, ranks=ranks, microbatches=microbatches)) for name in names}
    scale = 730 / max(line.duration for line in lines.values())
    drawing = Drawing(860, 30 + len(names) * 116, "One step of three pipeline schedules on four ranks")
    fill = {Kind.FORWARD: "fa", Kind.BACKWARD: "fc", Kind.BACKWARD_INPUT: "fc", Kind.BACKWARD_WEIGHT: "fd"}
    for x, style, words in ((left, "fa", "forward"), (210, "fc", "backward"), (320, "fd", "gradients of weights apart")):
        drawing.rect(x, 6, 14, 14, style)
        drawing.text(x + 20, 18, words)
    for row, (name, line) in enumerate(lines.items()):
        top = 34 + row * 116
        drawing.text(12, top + 38, name, "bold")
        drawing.text(12, top + 56, f"{line.bubble:.0%} idle", "soft")
        for rank, spans in enumerate(zip(line.actions, line.starts, line.ends, strict=True)):
            for action, start, end in zip(*spans, strict=True):
                x, width = left + start * scale, (end - start) * scale
                drawing.rect(x, top + rank * 24, width - 1, 21, fill[action.kind], 2)
                drawing.text(x + width / 2, top + rank * 24 + 15, str(action.microbatch), "middle small on")
    return drawing.svg()


def house() -> str:
    """The floors, from the highest to the lowest, with the folders of each in the order in which they import each other."""
    floors = (
        ("trainer/", "what a person touches", "fb", FLOORS_OF["trainer"]),
        ("zeromesh/", "the engine", "fa", FLOORS_OF["zeromesh"]),
        ("offload/", "where bytes rest", "fc", FLOORS_OF["offload"]),
    )
    drawing = Drawing(890, 350, "The three floors of the source and the folders of each; imports go down only")
    y = 12.0
    for name, words, colour, rows in floors:
        height = max(34 * len(rows) + 16, 62)
        drawing.rect(8, y, 874, height, "box")
        drawing.text(22, y + 28, name, "bold")
        drawing.text(22, y + 46, words, "small soft")
        for number, row in enumerate(rows):
            width = 700 / len(row)
            for place, folder in enumerate(row):
                drawing.box(170 + place * width, y + 11 + number * 34, width - 8, 26, folder, colour)
        y += height + 12
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "comparison.svg": comparison,
    "house.svg": house,
    "stages.svg": stages,
    "buckets.svg": buckets,
    "step.svg": step,
    "mesh.svg": mesh,
    "checkpoint.svg": checkpoint,
    "schedules.svg": schedules,
}


def main() -> int:
    """Write the pictures, or with --check compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 when a picture is out of date")
    if not parser.parse_args().check:
        for name, draw in PICTURES.items():
            (FOLDER / name).write_text(draw(), encoding="utf-8")
        return 0
    stale = [name for name, draw in PICTURES.items() if (FOLDER / name).read_text(encoding="utf-8") != draw()]
    if stale:
        print(f"{', '.join(stale)} out of date; run: python scripts/pictures/pictures.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
