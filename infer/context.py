"""Checks that prompts and answers fit in the context of a target."""

from data.eval_prompts.prompts import load_eval_prompts
from infer.config import EvaluationConf
from models.errors import UserError
from models.target.target import Target, TargetConf


def check_prompts(target: TargetConf, conf: EvaluationConf) -> None:
    """Check that every prompt of the file fits with its answer; raise UserError otherwise.

    No model is loaded. The demo's own prompts are short and not checked; later turns are checked
    by `check_context` as soon as they are known.
    """
    if conf.prompts is None:
        return
    context = target.context_length()
    prompts = load_eval_prompts(target.load_tokenizer(), conf.prompts, limit=conf.limit)
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    if context is not None and len(longest.ids) + conf.new_tokens > context:
        raise UserError(
            f"evaluation.prompts: prompt and answer must fit in the {context} positions of "
            f"{target.name}, got prompt {longest.id} of {len(longest.ids)} tokens and "
            f"evaluation.max_new_tokens={conf.new_tokens}; shorten the prompt or lower that"
        )


def check_context(target: Target, tokens: int) -> None:
    """Check that the target has positions for so many tokens; raise UserError otherwise."""
    context = getattr(target.config, "max_position_embeddings", None)
    if context is not None and tokens > context:
        raise UserError(
            f"evaluation.max_new_tokens: prompt and answer must fit in the {context} positions of "
            f"{target.name}, got {tokens}; lower it or shorten the prompts"
        )
