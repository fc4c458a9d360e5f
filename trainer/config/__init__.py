"""The configuration: its sections, how it is read from files, and how other libraries' settings become it."""

from zeromesh.trainer.config.trainer_config import TrainerConfig

__all__ = ["TrainerConfig"]
