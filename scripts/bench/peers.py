"""The systems that zeromesh is measured beside, each set up as its own documentation does it.

local       no communication, every rank alone: the ceiling. In bf16 without fp32 master weights, as ddp
ddp         DistributedDataParallel
fsdp2       fully_shard around every block and the root; `fsdp2-keep` does not reshard after forward
deepspeed   DeepSpeed's ZeRO stages 1, 2, 3
shard       zeromesh's own engine under a plain loop, stages 1, 2, 3
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeromesh
import zeromesh.trainer.shard  # Before memory is counted, as of the others.
from bench.workload import Workload
from zeromesh.weight_init.weight_sources import SeededSource

Step = Callable[[Tensor], Tensor]
"""One training step on `[micro, sequence]` token ids; gives this rank's loss."""


def make_peer(system: str, workload: Workload, device: torch.device) -> Step:
    """Build the model and the system around it."""
    if system.startswith("deepspeed-") and workload.offload != "none":
        return _deepspeed(_built_by_deepspeed(workload), workload, int(system.removeprefix("deepspeed-")))
    if system.startswith("shard-"):
        with torch.device("meta"):
            model: Any = workload.build_model()
        return _shard(model, workload, int(system.removeprefix("shard-")))
    model = workload.build_model()
    initialise(model, workload)
    model.to(device)
    if workload.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if system.startswith("deepspeed-"):
        return _deepspeed(model, workload, int(system.removeprefix("deepspeed-")))
    if system.startswith("fsdp2"):
        return plain_step(sharded(model, workload, keep=system == "fsdp2-keep"), workload)
    model.to(workload.compute)
    if system == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(model, workload)


def _shard(model: Any, workload: Workload, stage: int) -> Step:
    rates: Any = {"lr": workload.learning_rate, "betas": workload.betas, "weight_decay": workload.weight_decay}
    compute = str(workload.compute).removeprefix("torch.")
    options: Any = {"stage": stage, "precision": {"compute": compute}}
    net, optimizer = zeromesh.shard(
        model, torch.optim.AdamW(model.parameters(), **rates), {"run": {"seed": workload.seed}}, **options
    )

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(workload.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def initialise(model: nn.Module, workload: Workload) -> None:
    """The weights that zeromesh starts from, so that losses can be compared."""
    with torch.device("meta"):
        twin = workload.build_model()
    source = SeededSource(twin, workload.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, 0, parameter.numel()).view(parameter.shape))
    source.close()


def plain_step(net: Any, workload: Workload) -> Step:
    """One step of torch's fused AdamW."""
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=workload.learning_rate, betas=workload.betas, weight_decay=workload.weight_decay, fused=True
    )

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = net(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def sharded(model: Any, workload: Workload, *, keep: bool) -> Any:
    """The model with every block and the root sharded."""
    policy = MixedPrecisionPolicy()
    if workload.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(workload.device, (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    return model


def _tiers(workload: Workload) -> dict[str, Any]:
    """DeepSpeed's words for what rests where."""
    device = {"host": "cpu", "optimizer": "nvme", "file": "nvme"}.get(workload.offload)
    place = {"device": device, "nvme_path": workload.folder or tempfile.gettempdir()}
    tiers = {"offload_optimizer": place} if device else {}
    return tiers | ({"offload_param": place} if workload.offload in ("host", "file") else {})


def _built_by_deepspeed(workload: Workload) -> Any:
    """The model, partitioned while it is built: as DeepSpeed asks for where parameters rest elsewhere."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": workload.micro,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "zero_optimization": {"stage": 3, **_tiers(workload)},
    }
    torch.manual_seed(workload.seed)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        return workload.build_model()


def deepspeed_engine(model: Any, workload: Workload, stage: int) -> Any:
    """DeepSpeed's engine around the model."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": workload.micro,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "contiguous_gradients": True, **_tiers(workload)},
        "gradient_clipping": workload.clip,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": workload.learning_rate,
                "betas": list(workload.betas),
                "weight_decay": workload.weight_decay,
                "torch_adam": workload.offload == "none",
            },
        },
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())[0]


def _deepspeed(model: Any, workload: Workload, stage: int) -> Step:
    engine = deepspeed_engine(model, workload, stage)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
