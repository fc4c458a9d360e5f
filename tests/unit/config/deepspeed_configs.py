"""DeepSpeed configurations as transformers' documentation shows them, which people have copied, and some of DeepSpeed's own."""

from typing import Any

import yaml

DOCUMENTED: dict[str, dict[str, Any]] = yaml.safe_load("""
zero1: {zero_optimization: {stage: 1}}
zero2:
  zero_optimization: &stage2
    stage: 2
    offload_optimizer: &cpu {device: cpu, pin_memory: true}
    allgather_partitions: true
    allgather_bucket_size: 5.0e+8
    overlap_comm: true
    reduce_scatter: true
    reduce_bucket_size: 5.0e+8
    contiguous_gradients: true
    round_robin_gradients: true
zero3-gathered:
  zero_optimization: &gathered
    stage: 3
    overlap_comm: true
    contiguous_gradients: true
    sub_group_size: 1.0e+9
    reduce_bucket_size: auto
    stage3_prefetch_bucket_size: auto
    stage3_param_persistence_threshold: auto
    stage3_max_live_parameters: 1.0e+9
    stage3_max_reuse_distance: 1.0e+9
    stage3_gather_16bit_weights_on_model_save: true
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto
zero3: {zero_optimization: &stage3 {<<: *gathered, offload_optimizer: *cpu, offload_param: *cpu}}
zero2-whole: &whole
  fp16: &fp16 {enabled: auto, loss_scale: 0, loss_scale_window: 1000, initial_scale_power: 16, hysteresis: 2, min_loss_scale: 1}
  bf16: {enabled: auto}
  optimizer: {type: AdamW, params: {lr: auto, betas: auto, eps: auto, weight_decay: auto}}
  scheduler: {type: WarmupLR, params: &warmup {warmup_min_lr: auto, warmup_max_lr: auto, warmup_num_steps: auto}}
  zero_optimization: *stage2
  gradient_accumulation_steps: auto
  gradient_clipping: auto
  steps_per_print: 2000
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto
  wall_clock_breakdown: false
zero3-whole:
  <<: *whole
  scheduler: &decay {type: WarmupDecayLR, params: {<<: *warmup, total_num_steps: auto}}
  zero_optimization: *stage3
nvme:
  <<: *whole
  zero_optimization:
    <<: *stage3
    offload_optimizer: {device: nvme, nvme_path: /local_nvme, pin_memory: true, buffer_count: 4, fast_init: false}
    offload_param:
      {device: nvme, nvme_path: /local_nvme, pin_memory: true, buffer_count: 5, buffer_size: 1.0e+8, max_in_cpu: 1.0e+9}
    aio: {block_size: 262144, queue_depth: 32, thread_count: 1, single_submit: false, overlap_events: true}
fp16: {fp16: {<<: *fp16, enabled: true}, train_micro_batch_size_per_gpu: 4}
fp16-auto: {fp16: *fp16}
bf16: {bf16: {enabled: true}, communication_data_type: fp32}
gradients: {gradient_accumulation_steps: auto, gradient_clipping: auto}
scheduler: {scheduler: *decay}
optimizer: {optimizer: {type: AdamW, params: {lr: 3.0e-5}}, zero_allow_untested_optimizer: true}
inference:
  fp16: {enabled: false}
  bf16: {enabled: false}
  zero_optimization:
    stage: 3
    offload_param: *cpu
    overlap_comm: true
    contiguous_gradients: true
    reduce_bucket_size: 1048576
    stage3_prefetch_bucket_size: 943718.4
    stage3_param_persistence_threshold: 10240
  steps_per_print: 2000
  train_batch_size: 2
  train_micro_batch_size_per_gpu: 1
  wall_clock_breakdown: false
deepspeed-readme:
  train_batch_size: 8
  gradient_accumulation_steps: 1
  optimizer: {type: Adam, params: {lr: 0.00015}}
  fp16: {enabled: true}
  zero_optimization: true
deepspeed-cifar:
  train_batch_size: 16
  zeromesh: {run: {max_steps: 3000}}
  steps_per_print: 2000
  optimizer: {type: Adam, params: {lr: 0.001, betas: [0.8, 0.999], eps: 1.0e-8, weight_decay: 3.0e-7}}
  scheduler: {type: WarmupLR, params: {warmup_min_lr: 0, warmup_max_lr: 0.001, warmup_num_steps: 1000}}
  gradient_clipping: 1.0
  prescale_gradients: false
  bf16: {enabled: false}
  fp16: {<<: *fp16, enabled: true, fp16_master_weights_and_grads: false, loss_scale_window: 500, initial_scale_power: 15}
  wall_clock_breakdown: false
  zero_optimization:
    stage: 0
    allgather_partitions: true
    reduce_scatter: true
    allgather_bucket_size: 50000000
    reduce_bucket_size: 50000000
    overlap_comm: true
    contiguous_gradients: true
    cpu_offload: false
""")
"""By name. The batch of some is for two ranks."""
