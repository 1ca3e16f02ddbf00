"""Whether prompts and answers have room in what a target can read."""

from data.eval_prompts.prompts import held_out
from infer.config import EvaluationConf
from models.errors import UserError
from models.target.target import Target, TargetConf


def check_prompts(target: TargetConf, conf: EvaluationConf) -> None:
    """Raises UserError for a prompt file that the target cannot read and answer. Loads no model.

    The demo's own prompts are short. Later turns are looked at when they are known.
    """
    if conf.prompts is None:
        return
    most = target.source.context()
    prompts = held_out(target.source.tokenizer(), conf.prompts, limit=conf.limit)
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    if most is not None and len(longest.ids) + conf.new_tokens > most:
        raise UserError(
            f"evaluation.prompts: prompt and answer must fit in the {most} positions of "
            f"{target.name}, got prompt {longest.id} of {len(longest.ids)} tokens and "
            f"evaluation.max_new_tokens={conf.new_tokens}; shorten the prompt or lower that"
        )


def check_context(target: Target, tokens: int) -> None:
    """Raises UserError for texts longer than the target has positions for."""
    most = getattr(target.config, "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise UserError(
            f"evaluation.max_new_tokens: prompt and answer must fit in the {most} positions of "
            f"{target.name}, got {tokens}; lower it or shorten the prompts"
        )
