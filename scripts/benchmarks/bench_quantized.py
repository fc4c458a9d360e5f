"""Frozen bases in four bits: memory and time of adapters over them, generation, and how fast they are encoded.

    encode      elements a second that one core encodes and decodes: `encode`
    train       a step of 512 tokens with LoRA of rank 16 on all linear layers, blocks recomputed, beside PEFT with bitsandbytes and
                beside the same base in bfloat16, in memory and from file: `train`
    plan        what `zeromesh plan` says of cards of 8 to 24 GB
    generate    a decode step of four prompts with parameters on file, in nf4 and in bfloat16: `generate`

`python scripts/benchmarks/bench_quantized.py --folder /a/disk` runs all with a Llama of 1.06 billion parameters, which it
writes there first (2 GiB; about 10 GiB of memory). Rows run in turn, `--rounds` times. `--out` gets JSON.
`--shape 8b --only "nf4" --rounds 1 --steps 3 train` asks whether one of 8.03 billion parameters (those of Llama 3: 16 GB of disk,
and 5 for the cache) can be trained here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.launch import RunError, run_ranks
from bench.processes import python_path
from bench.report import MEBIBYTE, Spread
from bench.workload import Workload

_SHAPES = {
    "1b": {"layers": 18},
    "8b": {
        "layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
_NF4: dict[str, Any] = {"model": {"weights": "nf4"}}
_FILE: dict[str, Any] = {"zero": {"stage": 3}, "offload": {"parameters": "file"}}
_TRAINED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "nf4": ("ours", 1, {"zero": {"stage": 0}, **_NF4}),
    "nf4, 2 ranks": ("ours", 2, {"zero": {"stage": 3}, **_NF4}),
    "nf4, base on file": ("ours", 1, _FILE | _NF4),
    "bfloat16": ("ours", 1, {"zero": {"stage": 0}}),
    "bfloat16, base on file": ("ours", 1, _FILE),
    "PEFT, nf4 by bitsandbytes": ("peft", 1, {"four_bits": True}),
    "PEFT, bfloat16": ("peft", 1, {"four_bits": False}),
}


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="what to measure; all if nothing is named")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the model, the cache and runs lie")
    parser.add_argument("--shape", choices=_SHAPES, default="1b", help="of the model, by its parameters")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row, in turn")
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first two are not timed")
    parser.add_argument("--tokens", default="512", help="of each sequence; with commas, of the first ones in turn: 16,512")
    parser.add_argument("--only", default="", help="measure the row of this name, or those that contain it")
    parser.add_argument("--out", type=Path, default=None, help="a file for JSON")
    options = parser.parse_args()
    folder = options.folder / f"zeromesh-bench-quantized-{options.shape}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "large").is_dir():
        command = [sys.executable, "-m", "bench.inference", "model"]
        given = json.dumps({"folder": str(folder), **_SHAPES[options.shape]})
        subprocess.run([*command, given], env={"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}, check=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found: dict[str, Any] = {"time": time.strftime("%F %T")}
    failures: list[str] = []
    for part in options.parts or _PARTS:
        found[part] = _PARTS[part](folder, options, failures)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _run(name: str, what: str, ranks: int, arguments: dict[str, Any], failures: list[str]) -> list[dict[str, Any]]:
    began = time.perf_counter()
    try:
        return run_ranks("bench.quantized", Workload(ranks=ranks), [what, json.dumps(arguments)], timeout=4 * 3600)
    except RunError as error:
        failures.append(f"{name}: {error}")
        return []
    finally:
        print(f"{name} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)


def _encode(_folder: Path, _options: argparse.Namespace, failures: list[str]) -> list[dict[str, Any]]:
    rows = _run("encode", "encode", 1, {"count": 1 << 25}, failures)
    for row in rows:
        print(f"\nnf4 on one core: {row['encoded'] / 1e6:.0f}M elements a second encoded, {row['decoded'] / 1e6:.0f}M decoded")
    return rows


def _train(folder: Path, options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    chosen = [name for name in _TRAINED if name == options.only] or [name for name in _TRAINED if options.only in name]
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name in found:
            what, ranks, how = _TRAINED[name]
            lengths = list(map(int, options.tokens.split(",")))
            arguments = {"model": str(folder / "large"), "steps": options.steps, "tokens": lengths}
            arguments |= {"folder": str(folder / "runs"), "sections": how, "ranks": ranks} if what == "ours" else how
            if rows := _run(name, what, ranks, arguments, failures):
                found[name].append(rows)
    print(
        "\n| | s a step | peak above imports, all ranks, MiB | by the ledger, MiB | start, s: first, then |\n|---|---|---|---|---|"
    )
    for name, runs in [(name, runs) for name, runs in found.items() if runs]:
        times = [max(each) for run in runs for each in zip(*(row["step_seconds"] for row in run), strict=True)]
        seconds = Spread.of(times).text(2) if times else "not timed"
        peak = statistics.median(sum(row["peak_bytes"] for row in run) for run in runs) / MEBIBYTE
        ledger = statistics.median(sum(row.get("ledger_bytes", 0) for row in run) for run in runs) / MEBIBYTE
        starts = [max(row["start_seconds"] for row in run) for run in runs]
        print(f"| {name} | {seconds} | {peak:.0f} | {ledger:.0f} | {', '.join(f'{each:.1f}' for each in starts)} |")
    return found


def _generate(folder: Path, options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name, sections in {"nf4, file": _FILE | _NF4, "bfloat16, file": _FILE}.items():
            arguments = {"folder": str(folder / "runs"), "model": str(folder / "large"), "sections": sections, "steps": 4}
            found.setdefault(name, []).extend(_run(name, "generate", 1, arguments, failures))
    print("\n| | s a step | peak above imports, MiB | start, s |\n|---|---|---|---|")
    for name, rows in found.items():
        steps = Spread.of([each for row in rows for each in row["step_seconds"]])
        peak, start = (statistics.median(row[key] for row in rows) for key in ("peak_bytes", "start_seconds"))
        print(f"| {name} | {steps.text(2)} | {peak / MEBIBYTE:.0f} | {start:.1f} |")
    return found


def _plan(folder: Path, options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    model = {"source": str(folder / "large"), "lora": {"rank": 16, "targets": "all-linear"}, **_NF4["model"]}
    config = {"model": model, "data": {"sequence_length": 512}, "precision": {"compute": "bfloat16"}}
    path, found = folder / "plan.json", dict[str, Any]()
    path.write_text(json.dumps(config | {"batch": {"global_size": 1, "micro_size": 1}}), encoding="utf-8")
    print("\n| card | the fastest layout that fits | memory, GiB | step, s |\n|---|---|---|---|")
    for card in ("8GB", "12GB", "16GB", "24GB"):
        command = [sys.executable, "-m", "zeromesh", "plan", str(path), "--ranks", "1", "--device", card, "--json"]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True, check=False)
        if done.returncode:
            failures.append(f"plan for {card}: {done.stderr.decode()[-500:]}")
            continue
        found[card] = row = json.loads(done.stdout)[0]
        made = row["layout"]
        rest = {name: made[f"offload.{name}"] for name in ("optimizer", "parameters", "activations")}
        tiers = [
            f"{each.get('fraction', 1):.0%} of the {name} on {each['tier']}" if isinstance(each, dict) else f"{name} on {each}"
            for name, each in rest.items()
            if each != "none"
        ]
        kept = made["model.activation_checkpointing"]
        layout = ", ".join([f"stage {made['zero.stage']}", f"activation checkpointing {kept}", *tiers])
        print(f"| {card} | {layout} | {row['device_bytes'] / 2**30:.1f} | {row['seconds']:.2f} |", flush=True)
    return found


_PARTS: dict[str, Callable[[Path, argparse.Namespace, list[str]], Any]] = {
    "encode": _encode,
    "train": _train,
    "generate": _generate,
    "plan": _plan,
}

if __name__ == "__main__":
    sys.exit(main())
