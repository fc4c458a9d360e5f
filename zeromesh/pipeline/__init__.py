"""Pipeline parallelism: the model's blocks cut into stages, and schedules of actions that an executor carries out."""
