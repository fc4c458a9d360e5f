"""`from zeromesh.transformers import Trainer`: transformers' own, with the engine under them."""

from zeromesh.trainer.integrations.transformers import Seq2SeqTrainer, Trainer, on_zeromesh

__all__ = ["Seq2SeqTrainer", "Trainer", "on_zeromesh"]
