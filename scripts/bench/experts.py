"""One rank of `bench_experts.py`: a loop of one's own over a mixture of experts, in one of several ways."""

import json
import os
import sys
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

import zeromesh
import zeromesh.trainer.shard
from bench.thin_wire import INTERFACE, RESULT, sent

WAYS = ("alone", "fsdp2", "fsdp2+expert", "zeromesh", "zeromesh+expert")
STEPS, WARM = 10, 3


def made_by(way: str, folder: str, ranks: int) -> tuple[Any, Any]:
    """The model and its optimizer; `alone` each rank has the whole model, and nothing to do with the others."""
    system, _, expert = way.partition("+")
    if system == "zeromesh":
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        settings = {"parallel": {"expert": ranks if expert else 1}, "precision": {"compute": "float32"}}
        adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
        return zeromesh.shard(model, adamw, stage=3, **settings)
    if system == "alone":
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        how = DistributedConfig(fsdp_size=ranks, **({"ep_size": ranks} if expert else {}))
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    """Train for some steps; the first rank of each host prints the seconds of each step, MiB over imports, loss and bytes."""
    way, folder, tokens, microbatches = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    # What imports take is there before: of all ways alike.
    before = psutil.Process().memory_full_info().pss
    model, optimizer = made_by(way, folder, ranks)
    generator = torch.Generator().manual_seed(1)
    seconds, nbytes, loss, peak = [], [], 0.0, 0.0
    counted = os.environ["GLOO_SOCKET_IFNAME"] == INTERFACE
    for _ in range(STEPS):
        rows = torch.randint(0, 1024, (microbatches, ranks, 1, tokens), generator=generator)
        dist.barrier()
        began, bytes_before = time.perf_counter(), sent() if counted else 0
        loss = 0.0
        for batch in rows[:, rank]:
            part = model(input_ids=batch, labels=batch).loss / microbatches
            part.backward()
            loss += float(part.detach())
        peak = max(peak, psutil.Process().memory_full_info().pss - before)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        nbytes.append((sent() if counted else 0) - bytes_before)
    sums = torch.tensor([loss / ranks, peak], dtype=torch.float64)
    dist.all_reduce(sums)
    if rank == 0:
        found = {"seconds": seconds[WARM:], "bytes": nbytes[WARM:], "loss": float(sums[0]), "memory": float(sums[1])}
        print(RESULT + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
