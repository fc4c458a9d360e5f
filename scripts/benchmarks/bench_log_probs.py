"""Peak memory and time of log-probabilities and entropies without whole logits, forward and backward, beside the same with them.

    whole       `log_softmax` of all logits in fp32, gathered, and its entropy, as TRL did it before its head was fused
    chunked     `zeromesh.losses.token_scores`

`python scripts/benchmarks/bench_log_probs.py` takes 8192 tokens and a vocabulary of 131072 in fp32: logits of 4 GiB, and about
20 GiB of memory for the whole; `--tokens 2048 --vocabulary 32768` tries it. Each row runs in a process of its own, and its peak is
what that process had resident above its inputs. Differences are the largest of any value, and of the gradients over their norms.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_GIBIBYTE = 2**30
_ROWS = ("whole", "chunked")


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = (hidden @ weight.t()).float().log_softmax(-1)
    return logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logs.exp() * logs).sum(-1)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from zeromesh.losses import token_scores

    return token_scores(hidden, weight, None, targets)[:2]


def measure(row: str, options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Run one row in this process, and write its results to `out`."""
    score = {"whole": _whole, "chunked": _chunked}[row]
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden, weight = (
        torch.randn(size, options.width, generator=generator).to(dtype).requires_grad_()
        for size in (options.tokens, options.vocabulary)
    )
    targets = torch.randint(0, options.vocabulary, (options.tokens,), generator=generator)
    few = score(hidden[:2], weight[:64], targets[:2] % 64)  # What is loaded on the first use is no part of the peak.
    (few[0].sum() + few[1].sum()).backward()
    hidden.grad = weight.grad = None
    before, begun = _resident(), time.perf_counter()
    log_probs, entropy = score(hidden, weight, targets)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    seconds, peak = time.perf_counter() - begun, _resident() - before
    torch.save({"log_probs": log_probs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}, out)
    return {"peak": peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--width", type=int, default=1024, help="of hidden states")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--row", choices=_ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measure(options.row, options, options.results)))
        return
    found: dict[str, Any] = {}
    results: dict[str, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in _ROWS:
            file = Path(folder) / row
            command = [sys.executable, __file__, *sys.argv[1:], "--row", row, "--results", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{row} ended with {done.returncode}, perhaps out of memory: {done.stderr[-2000:]}")
            found[row] = json.loads(done.stdout)
            results[row] = torch.load(file)
            print(f"{row:8} peak {found[row]['peak'] / _GIBIBYTE:7.2f} GiB   {found[row]['seconds']:7.1f} s")
    found["ratio"] = found["chunked"]["peak"] / found["whole"]["peak"]
    print(f"chunked over whole: {found['ratio']:.3f} of the peak")
    for name, wanted in results["whole"].items():
        mine, wanted = results["chunked"][name].double(), wanted.double()
        gradient = name in ("hidden", "weight")
        apart = float((mine - wanted).norm() / wanted.norm() if gradient else (mine - wanted).abs().max())
        found[f"difference of {name}"] = apart
        print(f"{'gradient of ' if gradient else ''}{name}: {apart:.1e} apart")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
