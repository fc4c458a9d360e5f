"""DeepSpeed configurations as transformers' documentation shows them, which people have copied, and some of DeepSpeed's own."""

from typing import Any

AUTO = "auto"
FP16 = {
    "enabled": AUTO,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}}
WARMUP_DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": AUTO}}  # type: ignore[dict-item]
CPU = {"device": "cpu", "pin_memory": True}
BATCH = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
STAGE_2 = {
    "stage": 2,
    "offload_optimizer": CPU,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "offload_optimizer": CPU,
    "offload_param": CPU,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
NVME = {
    **STAGE_3,
    "offload_optimizer": {
        "device": "nvme",
        "nvme_path": "/local_nvme",
        "pin_memory": True,
        "buffer_count": 4,
        "fast_init": False,
    },
    "offload_param": {
        "device": "nvme",
        "nvme_path": "/local_nvme",
        "pin_memory": True,
        "buffer_count": 5,
        "buffer_size": 1e8,
        "max_in_cpu": 1e9,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
}

DOCUMENTED: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": STAGE_2},
    "zero3": {"zero_optimization": STAGE_3},
    "zero2-whole": {
        "fp16": FP16,
        "bf16": {"enabled": AUTO},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": STAGE_2,
        **BATCH,
    },
    "zero3-whole": {
        "fp16": FP16,
        "bf16": {"enabled": AUTO},
        "optimizer": ADAMW,
        "scheduler": WARMUP_DECAY,
        "zero_optimization": STAGE_3,
        **BATCH,
    },
    "nvme": {
        "fp16": FP16,
        "bf16": {"enabled": AUTO},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": NVME,
        **BATCH,
    },
    "zero3-gathered": {
        "zero_optimization": {
            **{name: value for name, value in STAGE_3.items() if not name.startswith("offload")},
            "stage": 3,
        },
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
    },
    "fp16": {"fp16": {**FP16, "enabled": True}, "train_micro_batch_size_per_gpu": 4},
    "fp16-auto": {"fp16": FP16},
    "bf16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    "gradients": {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO},
    "scheduler": {"scheduler": WARMUP_DECAY},
    "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}, "zero_allow_untested_optimizer": True},
    "inference": {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": CPU,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 1024 * 1024,
            "stage3_prefetch_bucket_size": 0.9 * 1024 * 1024,
            "stage3_param_persistence_threshold": 10 * 1024,
        },
        "steps_per_print": 2000,
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    },
    "deepspeed-readme": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    "deepspeed-cifar": {
        "train_batch_size": 16,
        "zeromesh": {"run": {"max_steps": 3000}},
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": True,
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    },
}
"""By name. The batch of some is for two ranks."""
