"""Pipeline parallelism: a model's blocks cut into stages that ranks run one after the other, microbatch by microbatch.

`schedule` says what each rank does, `simulate` proves and times it, `picture` draws it, `cut` decides where a model is cut: all
pure. `probe` finds out what a model is made of, `stubs` stand for what others have, `stage` puts them into the model, `balance` is
the experts' loss across stages. `executor` carries a schedule out, `plain` runs stages without ZeRO, `deferred` computes weights'
gradients apart, `generate` continues prompts.
"""
