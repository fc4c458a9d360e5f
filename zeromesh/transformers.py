"""`from zeromesh.transformers import Trainer`: transformers' class of that name, running on the engine."""

from zeromesh.trainer.integrations.transformers import Seq2SeqTrainer, Trainer, on_zeromesh

__all__ = ["Seq2SeqTrainer", "Trainer", "on_zeromesh"]
