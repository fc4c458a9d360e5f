"""Pipeline parallelism: a model's blocks are cut into stages that ranks run one after the other, microbatch by microbatch."""
