"""Every field of GRPOConfig, RLOOConfig and OnlineDPOConfig: what the textbook makes of it, from trl 0.14 to 1.16.

One table: a name means the same in each.

A field is IMPLEMENTED by its documented meaning, has NO_EFFECT on the gradient of the completions that were drawn
(before it is clipped), or is NOT_HERE: away from the value that leaves the gradient as it is, nothing is judged. Where
a release does not know a field, the textbook takes what that release documents instead: no clipping before 0.16
(`num_iterations` is 1 there), and as the loss the mean over each completion's tokens, or in 0.16 over all tokens.

Read in the help texts of trl 0.14.0, 0.15.2, 0.22.2 and 1.16.0, and of transformers 4.48, 4.52, 4.56 and 5.23.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_IMPLEMENTED = """
    beta bf16 deepspeed delta entropy_coef epsilon epsilon_high fp16 fsdp generation_batch_size
    gradient_accumulation_steps importance_sampling_level loss_type mask_truncated_completions max_completion_length
    max_length missing_eos_penalty multi_objective_aggregation neftune_noise_alpha normalize_advantages num_generations
    num_iterations off_policy_mask_threshold per_device_train_batch_size ref_model_mixup_alpha ref_model_sync_steps
    reward_clip_range reward_weights sapo_temperature_neg sapo_temperature_pos scale_rewards
    steps_per_generation sync_ref_model temperature top_entropy_quantile use_bias_correction_kl use_liger_loss use_vllm
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode
"""

# What chooses the completions, the step that follows, the devices' speed, the saving, the evaluation and the logs. The
# textbook asks for the gradient of those completions that were drawn, by any engine and from any distribution; the
# temperature in `generation_kwargs` is evidence.
_NO_EFFECT = """
    activation_checkpointing activation_checkpointing_kwargs cache_implementation cast_lm_head_to_fp32
    chat_template_kwargs disable_dropout ds3_gather_for_generation entropy_coef_delta entropy_coef_max entropy_coef_min
    entropy_target generation_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs learning_rate log_completions log_completions_hub_repo log_multimodal
    log_unique_prompts max_prompt_length max_tool_calling_iterations min_p model_init_kwargs num_completions_to_print
    num_generations_eval pad_to_multiple_of remove_unused_columns repetition_penalty shuffle_dataset top_k top_p
    transformers_continuous_batching_config trust_remote_code use_transformers_continuous_batching
    use_transformers_paged vllm_device vllm_dtype vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_guided_decoding_regex vllm_max_model_len vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
    wandb_log_unique_prompts

    _n_gpu accelerator_config adafactor adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size
    average_tokens_across_devices batch_eval_metrics bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug disable_tqdm dispatch_batches do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
    eval_use_gather_object evaluation_strategy fp16_backend fp16_full_eval fp16_opt_level fsdp_config
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism greater_is_better group_by_length
    half_precision_backend hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen
    include_tokens_per_second jit_mode_eval label_names label_smoothing_factor length_column_name liger_kernel_config
    load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
    logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    metric_for_best_model mp_parameters no_cuda num_train_epochs optim optim_args optim_target_modules output_dir
    overwrite_output_dir past_index per_device_eval_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size
    prediction_loss_only project push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope
    report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_safetensors save_steps save_strategy save_total_limit seed skip_memory_metrics split_batches tf32 torch_compile
    torch_compile_backend torch_compile_mode torch_empty_cache_steps torchdynamo tpu_metrics_debug tpu_num_cores
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu use_ipex
    use_legacy_prediction_loop use_mps_device warmup_ratio warmup_steps weight_decay

    dataset_num_proc gpu_memory_utilization judge max_new_tokens reward_model_path
"""

# Of RLOO before 0.22, whose trainer has no textbook; 0.22 gives their values to fields of other names, or drops them.
# Then of AsyncGRPO: how completions come, and not what is made of them.
_NO_EFFECT += """
    batch_size cliprange exp_name kl_coef local_batch_size local_mini_batch_size local_rollout_forward_batch_size
    micro_batch_size mini_batch_size normalize_advantage normalize_reward num_mini_batches num_ppo_epochs
    num_sample_generations num_total_batches response_length rloo_k sft_model_path stop_token stop_token_id
    token_level_kl total_episodes whiten_rewards world_size

    dtype fork_threshold_tokens heartbeat_stale_after_s max_inflight_tasks max_staleness queue_maxsize request_timeout
    token_budget weight_sync_steps weight_sync_timeout
"""
IMPLEMENTED, NO_EFFECT = frozenset(_IMPLEMENTED.split()), frozenset(_NO_EFFECT.split())


@dataclasses.dataclass(frozen=True)
class Left:
    """A field that the textbook does not implement."""

    neutral: tuple[Any, ...]  # values that leave the gradient as it is
    reason: str  # what the others do to it
    # whether the field has an effect in this trainer, where its value alone does not tell
    counts: Callable[[Any], bool] | None = None


def spreads(trainer: Any) -> bool:
    """Whether one row is computed by several processes: not where each has rows of its own."""
    config = getattr(trainer.args, "parallelism_config", None)
    return any(getattr(config, f"{kind}_size", 1) > 1 for kind in ("tp", "cp", "sp"))


NOT_HERE: dict[str, Left] = {
    "parallelism_config": Left((None,), "one row is computed by several accelerators", spreads),
    "router_aux_loss_coef": Left(
        (None, 0.0), "the router's loss is added", lambda trainer: bool(getattr(trainer, "aux_loss_enabled", False))
    ),
    "use_adaptive_entropy": Left((False,), "the entropy's weight moves by a rule of its own"),
    "use_liger_kernel": Left((False,), "its kernels replace the model's layers, and need a GPU"),
}

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_SCALES = {True: "group", False: "none"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of GRPO's definition, under the names that trl gives them; where two readings are documented, both.

    Those that are not listed here are what trl's help texts say.

    Attributes:
        temperature: of the policy: logits are divided by it before the softmax. It is what the tokens were drawn at.
        asked_temperature: the one that the arguments ask for.
        beta: weight of the KL divergence to the reference model, estimated as k3 (Schulman 2020): r - log r - 1.
        scale_rewards: `group`, `batch` or `none`: the standard deviation that advantages are divided by.
        epsilon: lower bound of the ratio is 1 - epsilon; None where the release does not clip.
        epsilon_high: the upper bound; the same as epsilon where None.
        generation_tokens: whether `dapo` takes the step's share of the tokens of a generation that several steps train
            on, and not the step's own tokens. "The global accumulated batch" leaves it open.
        truncated_count: whether those left out still count where the loss is divided. The help text leaves it open.
        padding_ends: whether a completion whose last token is the padding, drawn as a word, has an end. trl 1.16 takes
            it so; the help text leaves it open.
        kl_in_reward: weight of the KL divergence that RLOO takes off the reward.
        truncated_kl: whether it is taken off that of a truncated completion too. The help text leaves it open.
        length_padded: whether Online DPO's `max_length` counts the completion as it is padded. "Of the sequence" leaves
            it open.
        engine_weight: how the loss is multiplied with the ratio of the policy to the engine that drew; None: it is not.
        engine_bounds: least and largest of these ratios.
    """

    temperature: float = 1.0
    asked_temperature: float = 1.0
    beta: float = 0.0
    loss_type: str = "grpo"
    scale_rewards: str = "group"
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    mask_truncated_completions: bool = False
    truncated_count: bool = False
    padding_ends: bool = False
    generation_tokens: bool = False
    reward_weights: tuple[float, ...] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    max_completion_length: int | None = None
    top_entropy_quantile: float = 1.0
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    kl_in_reward: float = 0.0
    truncated_kl: bool = False
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None
    missing_eos_penalty: float | None = None
    max_length: int | None = None
    length_padded: bool = False
    vespo_k_pos: float = 2.0
    vespo_k_neg: float = 3.0
    vespo_lambda_pos: float = 3.0
    vespo_lambda_neg: float = 2.0
    engine_weight: str | None = None
    engine_bounds: tuple[float, float] = (-math.inf, math.inf)

    @classmethod
    def of(cls, args: Any) -> "Options":
        """Return the options that a GRPOConfig asks for."""
        given = {
            field.name: getattr(args, field.name) for field in dataclasses.fields(cls) if hasattr(args, field.name)
        }
        given["asked_temperature"] = given.get("temperature", 1.0)
        given["scale_rewards"] = _SCALES.get(given.get("scale_rewards", True), given.get("scale_rewards"))
        if given.get("reward_weights") is not None:
            given["reward_weights"] = tuple(float(weight) for weight in given["reward_weights"])
        if hasattr(args, "num_iterations") and not {"loss_type", "normalize_advantages"} & set(dir(args)):
            given["loss_type"] = "bnpo"  # trl 0.16 has one loss, over all tokens, and no name for it; RLOO has another
        if getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False):
            # 0.23 to 0.25 have one kind and no name for it; before 1.6 the upper bound was called a cap, and was alone
            given["engine_weight"] = getattr(args, "vllm_importance_sampling_mode", "token_truncate")
            cap = getattr(args, "vllm_importance_sampling_cap", None)
            most = getattr(args, "vllm_importance_sampling_clip_max", cap)
            least = getattr(args, "vllm_importance_sampling_clip_min", None)
            given["engine_bounds"] = (-math.inf if least is None else least, math.inf if most is None else most)
        return cls(**given)

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratio's: 1 - epsilon and 1 + epsilon_high; `cispo` has an upper one alone, epsilon_high itself."""
        low = math.inf if self.epsilon is None else self.epsilon
        high = low if self.epsilon_high is None else self.epsilon_high
        return {"cispo": (-math.inf, high)}.get(self.loss_type, (1 - low, 1 + high))

    @property
    def most_ratio(self) -> float:
        """The largest ratio, with a negative advantage too."""
        return math.inf if self.delta is None else self.delta

    @property
    def most_drift(self) -> float:
        """How far a completion with a negative advantage may have drifted, in nats a token."""
        return math.inf if self.off_policy_mask_threshold is None else self.off_policy_mask_threshold

    def readings(self) -> dict[str, "Options"]:
        """Return the options under each reading that their help texts allow, by what each says."""
        readings = {"": self}

        def open_to(line: str, **otherwise: Any) -> None:
            for name, options in list(readings.items()):
                readings["; ".join(filter(None, (name, line)))] = dataclasses.replace(options, **otherwise)

        if self.mask_truncated_completions:
            open_to("truncated completions count where the loss is divided", truncated_count=True)
            open_to("a completion that the padding's token ends is not truncated", padding_ends=True)
            if self.kl_in_reward:
                open_to("the KL divergence of a truncated completion is a part of its reward", truncated_kl=True)
        if self.loss_type in ("dapo", "cispo"):
            open_to("the loss is divided by the step's share of the generation's tokens", generation_tokens=True)
        if self.max_length is not None:
            open_to("prompts are cut as if all completions were as long as the longest", length_padded=True)
        return readings


def unlisted(config: type) -> set[str]:
    """Return the fields of a config that the table does not list."""
    return {field.name for field in dataclasses.fields(config)} - IMPLEMENTED - NO_EFFECT - set(NOT_HERE)


def why_not(
    trainer: Any, losses: Sequence[str] = LOSSES, not_here: Mapping[str, Left] = types.MappingProxyType({})
) -> list[str]:
    """Return why the gradient that a trainer's arguments ask for is not implemented: a line for each field, or none.

    Args:
        trainer: of an algorithm that there is a definition of.
        losses: the kinds of loss that it has.
        not_here: fields that this algorithm lacks, beside NOT_HERE.
    """
    args, lines = trainer.args, []
    for name, left in {**not_here, **NOT_HERE}.items():
        value = getattr(args, name, left.neutral[0])
        if left.counts(trainer) if left.counts else value not in left.neutral:
            value = getattr(trainer, name, value)  # the trainer may take its model's own
            lines.append(f"{name}={value!r}: {left.reason}")
    for name in sorted(unlisted(type(args))):
        field = type(args).__dataclass_fields__[name]
        if getattr(args, name, None) != _default(field):
            lines.append(f"{name}={getattr(args, name)!r}: the textbook does not know this option")
    optim = getattr(args, "optim", "")
    optim = getattr(optim, "value", optim)
    if "layerwise" in optim:
        lines.append(f"optim={optim!r}: it takes each gradient during the backward pass, and drops it")
    loss = getattr(args, "loss_type", losses[0])
    if loss not in losses:
        lines.append(f"loss_type={loss!r}: the textbook has {', '.join(losses)}")
    return lines


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
