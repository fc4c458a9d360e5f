"""Pipeline parallelism: a model's blocks are cut into stages that ranks run one after the other, microbatch by microbatch.

`schedule` defines the actions of each rank, proves that they can run, and simulates their times. `stages` examines a model, cuts
it, and replaces other ranks' modules by stubs. `pipeline` runs a rank's actions as passes of the ZeRO engine; `executor` carries
a schedule out, `deferred_weight_grad` computes weight gradients separately, and `generation` continues prompts.
"""
