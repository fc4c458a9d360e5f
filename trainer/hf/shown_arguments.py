"""A configuration as transformers' `TrainingArguments`, for callbacks that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import TrainingArguments

from zeromesh.trainer.best import goal_of

if TYPE_CHECKING:
    from zeromesh.trainer.config import TrainerConfig


def arguments_of(config: TrainerConfig) -> TrainingArguments:
    """Arguments that say what a configuration says, as far as they have words for it."""

    def strategy(every: int | str) -> dict[str, Any]:
        return (
            {"strategy": "epoch"}
            if isinstance(every, str)
            else {"strategy": "steps" if every else "no", "steps": every or 1}
        )

    log, evaluate, save = map(strategy, (config.run.log_every, config.run.eval_every, config.checkpoint.every_steps))
    schedule = (
        "cosine" if config.schedule.name not in transformers.SchedulerType._value2member_map_ else config.schedule.name
    )
    arguments = TrainingArguments(
        output_dir=f"{config.run.output_dir}/{config.run.name}",
        run_name=config.run.name,
        per_device_train_batch_size=config.batch.micro_size,
        per_device_eval_batch_size=config.batch.eval_micro_size or config.batch.micro_size,
        max_steps=config.run.max_steps,
        num_train_epochs=config.run.epochs or 1,
        learning_rate=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        adam_epsilon=config.optimizer.eps,
        max_grad_norm=config.run.clip_norm,
        lr_scheduler_type=schedule,
        warmup_steps=config.schedule.warmup_steps,
        logging_strategy=log["strategy"],
        logging_steps=log.get("steps", 1),
        logging_first_step=config.run.log_first_step,
        eval_strategy=evaluate["strategy"],
        eval_steps=evaluate.get("steps", 1),
        save_strategy=save["strategy"],
        save_steps=save.get("steps", 1),
        save_total_limit=config.checkpoint.keep_last,
        metric_for_best_model=config.run.metric,
        greater_is_better=goal_of(config.run.metric, config.run.metric_goal) == "highest",
        seed=config.run.seed % 2**32,
        label_smoothing_factor=config.run.label_smoothing,
        push_to_hub=config.hub.push,
        hub_model_id=config.hub.repository,
        hub_private_repo=config.hub.private,
        hub_revision=config.hub.revision,
        hub_strategy="end",
        report_to=[],
        use_cpu=True,
        disable_tqdm=False,
    )
    # Not checked against the strategies: the run judges by every evaluation, and saves when one is best.
    arguments.load_best_model_at_end = config.run.load_best
    return arguments
