"""The prediction of a rank's memory, from the plan of the workload's model."""

import torch

from bench.account import Prediction
from bench.ours import configuration
from bench.workload import Workload
from zeromesh.offload import Purpose
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.setup.engine_options import engine_options
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import plan_model
from zeromesh.zero.memory_model import MemoryModel


def predict(workload: Workload, stage: int, activations: int) -> Prediction:
    """Bytes of each rank of `workload` at a ZeRO stage, whose activations were measured alone. Nothing is allocated."""
    options = engine_options(load_config(configuration(workload, stage, "runs")), accumulation=1)
    with torch.device("meta"):
        model = workload.build_model()
    plan = plan_model(model, workload.compute, GroupRules(options.optimizer).group_of)
    footprint = MemoryModel(plan_layouts(plan, workload.ranks), options, workload.ranks, workload.transport)
    staying = {purpose.name: nbytes for purpose, nbytes in footprint.terms.items()}
    shards = staying.pop(Purpose.GRADIENTS.name) if not options.gradients_keep_memory(torch.device("cpu")) else 0
    return Prediction(staying=staying, passing=footprint.gathered + shards, activations=activations)
