"""Tasks by name, and the class of transformers that builds a model for each."""

from __future__ import annotations

from typing import Literal

Head = Literal[
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "multiple_choice",
    "next_sentence_prediction",
    "image_classification",
    "video_classification",
    "semantic_segmentation",
    "image_text_to_text",
    "audio_classification",
    "speech_seq2seq",
    "ctc",
    "base",
]
"""`model.head`. `base` is the model without a head, which needs a `compute_loss`."""

AUTO_CLASSES: dict[Head, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "multiple_choice": "AutoModelForMultipleChoice",
    "next_sentence_prediction": "AutoModelForNextSentencePrediction",
    "image_classification": "AutoModelForImageClassification",
    "video_classification": "AutoModelForVideoClassification",
    "semantic_segmentation": "AutoModelForSemanticSegmentation",
    "image_text_to_text": "AutoModelForImageTextToText",
    "audio_classification": "AutoModelForAudioClassification",
    "speech_seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
    "base": "AutoModel",
}
