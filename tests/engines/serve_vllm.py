"""Greedy speculative serving by vLLM, run by the engines' Python: token ids and counters out.

    .venv-engines/bin/python tests/engines/serve_vllm.py TARGET DRAFT PROMPTS.json ANSWERS.json

PROMPTS.json is a list of lists of token ids. ANSWERS.json gets one object a prompt: `ids`, `rounds`
(verified drafts), `drafted`, `accepted` and `accepted_by_position` (tokens). Prompts run one at a
time: the engine's counters only grow, and differences give each prompt its own. Nothing of this
project is imported, because the engines' environment does not have it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# Read when the process starts or imports vLLM. One process, to see its errors here; no network.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "LD_PRELOAD": str(Path(sys.prefix, "lib", "libiomp5.so")),  # several times faster than GNU's
}


def main() -> None:
    arguments = parse_arguments()
    if os.environ.get("LD_PRELOAD") != SETTINGS["LD_PRELOAD"]:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    from vllm import SamplingParams

    llm = build_engine(arguments)
    # No end token: both sides decode the same number of tokens.
    greedy = SamplingParams(
        temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False
    )
    answers, before = [], counters(llm)
    for prompt in json.loads(arguments.prompts.read_text()):
        [output] = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        after = counters(llm)
        own = {name: subtract(after[name], before[name]) for name in after}
        answers.append({"ids": list(output.outputs[0].token_ids)} | own)
        before = after
    arguments.answers.write_text(json.dumps(answers))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("target", "draft", "prompts", "answers"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--method", default="eagle3", help="as the engine calls it")
    parser.add_argument("--drafted", type=int, default=3, help="draft tokens a round")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--slots", type=int, default=512, help="prompt, answer and drafts")
    return parser.parse_args()


def build_engine(arguments: argparse.Namespace):
    from vllm import LLM

    return LLM(
        model=str(arguments.target),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=arguments.slots,
        max_num_seqs=1,
        enable_prefix_caching=False,  # what one prompt left behind must not help the next
        disable_log_stats=False,  # the counters
        speculative_config={
            "method": arguments.method,
            "model": str(arguments.draft),
            "num_speculative_tokens": arguments.drafted,
        },
    )


def counters(llm) -> dict:
    """The engine's speculative counters since it started."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return {
        "rounds": found[f"{prefix}drafts"].value,
        "drafted": found[f"{prefix}draft_tokens"].value,
        "accepted": found[f"{prefix}accepted_tokens"].value,
        "accepted_by_position": found[f"{prefix}accepted_tokens_per_pos"].values,
    }


def subtract(after, before):
    if isinstance(after, list):
        return [subtract(a, b) for a, b in zip(after, before, strict=True)]
    return after - before


if __name__ == "__main__":
    main()
