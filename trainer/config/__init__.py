"""The configuration: its sections, its reading from files, and the translation of other libraries' settings."""

from zeromesh.trainer.config.trainer_config import TrainerConfig

__all__ = ["TrainerConfig"]
