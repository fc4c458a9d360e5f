"""Pipeline parallelism: a model's blocks are cut into stages that ranks run one after the other, microbatch by microbatch.

`schedule` says what each rank does and proves and times it. `stages` examines a model, cuts it, and puts stubs in the place of what
other ranks have. `pipeline` is a rank's pipeline as a whole, whose actions are computed under ZeRO; `executor` carries a schedule
out, `deferred_weight_grad` computes weight gradients apart, `generation` continues prompts.
"""
