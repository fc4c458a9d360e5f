"""What workers need, for the process that they are forked from: they share its pages, and start at once. That has one thread by its
environment: with `set_num_threads` it would have a pool, which autograd's threads of several devices race for in a fork."""

import peft  # noqa: F401
import pytest  # noqa: F401
import torch.distributed  # noqa: F401
import transformers.optimization  # noqa: F401
from transformers import (  # noqa: F401
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

import zeromesh.trainer.cli.main
import zeromesh.trainer.trainer  # noqa: F401
from tests.conformance import cases  # noqa: F401
from tests.support import trainer_cases  # noqa: F401
