"""`from zeromesh.losses import TokenScorer`: log-probabilities and entropies without whole logits, for losses of one's own."""

from zeromesh.kernels.chunked_head import TokenScores, token_scores
from zeromesh.trainer.losses.losses import TokenScorer

__all__ = ["TokenScorer", "TokenScores", "token_scores"]
