"""Former names of keys and options, so that an old command is answered with the new name.

NAME in a key stands for the name of a source of the mixture, which the user chooses.
"""

import re

ROWS_PER_STEP = "optim.rows_per_step, the rows of a whole step over all processes"
RENAMED_KEYS = {
    "answers.by": "answers.source",
    "answers.extra": "answers.extra_body",
    "answers.key_env": "answers.api_key_env",
    "copied": "ngram_tokens",
    "data.answers.by": "data.answers.source",
    "data.length": "data.row_length",
    "data.on_policy.every": "data.on_policy.interval",
    "draft.blocks": "draft.num_layers",
    "draft.noise": "draft.feature_noise",
    "draft.own_heads": "draft.separate_lm_heads",
    "draft.regression": "draft.feature_loss_weight",
    "draft.start": "draft.init_from",
    "draft.token": "draft.token_loss_weight",
    "draft.unroll": "draft.ttt_steps",
    "eval_prompts": "num_eval_prompts",
    "evaluation.batches": "evaluation.batch_sizes",
    "evaluation.limit": "evaluation.prompts_per_category",
    "headroom": "memory_margin",
    "log.every": "log.interval",
    "loss.chunk": "loss.logits_chunk",
    "machine.updates_at_once": "machine.is_accelerator",
    "mixture.sources.NAME.licence": "mixture.sources.NAME.license",
    "optim.accumulation": ROWS_PER_STEP,
    "optim.batch_size": f"optim.micro_batch_size, the most rows of one pass, and {ROWS_PER_STEP}",
    "optim.clip": "optim.max_grad_norm",
    "optim.decay": "optim.decay_ratio",
    "optim.min_lr": "optim.min_lr_ratio",
    "optim.warmup": "optim.warmup_ratio",
    "tree.branch": "tree.children",
    "tree.copied": "tree.ngram_tokens",
    "tree.width": "tree.beam_width",
}
RENAMED_OPTIONS = {("experiment", "qwen3-8b-eagle3-ultrachat"): "qwen3-8b-eagle3"}


def find_new_name(key: str) -> str | None:
    """Return the current name of a renamed configuration key, or None if it was not renamed.

    >>> find_new_name("mixture.sources.chat.licence")
    'mixture.sources.chat.license'
    """
    pattern = re.compile(r"(?<=^mixture\.sources\.)[^.]+")
    match = pattern.search(key)
    new_name = RENAMED_KEYS.get(pattern.sub("NAME", key))
    if match is None or new_name is None:
        return new_name
    return new_name.replace("NAME", match[0])
