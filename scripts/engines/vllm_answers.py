"""Decode greedily with vLLM on request of a different process; runs in the engines' environment.

    .venv-engines/bin/python scripts/engines/vllm_answers.py TARGET --method eagle3 --draft DIR --drafted 4

The first output line reports readiness: `{"version": ..., "threads": ...}`. Each input line `{"ids": [prompt],
"tokens": count}` then yields one output line, `{"ids": [answer], "seconds": ..., "graphs": compiled during it}`. Times
run from ids to ids without the pipe. With `--count` an answer also has its `rounds`, the tokens that they `drafted`,
and those `accepted` at each position. Nothing of this project is imported, because the engines' environment does not
contain it. The engine's output goes to stderr.
"""

import argparse
import json
import os
import sys
import time

import numpy as np


def main() -> None:
    arguments = parse_arguments()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # redirects all prints from here on
    import torch
    import vllm
    from torch._dynamo.utils import counters

    llm = vllm.LLM(**settings(arguments))
    total = read_counters(llm) if arguments.count else {}
    status = {"version": vllm.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(status), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # End tokens are ignored, so that all engines decode the same number of tokens.
        greedy = vllm.SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
        compiled, began = counters["stats"]["unique_graphs"], time.perf_counter()
        [result] = llm.generate({"prompt_token_ids": request["ids"]}, greedy, use_tqdm=False)
        answer = {
            "ids": list(result.outputs[0].token_ids),
            "seconds": time.perf_counter() - began,
            "graphs": counters["stats"]["unique_graphs"] - compiled,
        }
        if arguments.count:
            before, total = total, read_counters(llm)
            answer |= {name: np.subtract(total[name], before[name]).tolist() for name in total}
        print(json.dumps(answer), file=answers, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--method", help="the engine's name of it; default: one token at a time")
    parser.add_argument("--draft", help="its folder; ngram has none")
    parser.add_argument("--drafted", type=int, default=4, help="draft tokens per round")
    parser.add_argument("--slots", type=int, default=512, help="for prompt, answer and drafts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--count", action="store_true", help="rounds and draft tokens")
    return parser.parse_args()


def settings(arguments: argparse.Namespace) -> dict:
    drafting = {"method": arguments.method, "num_speculative_tokens": arguments.drafted}
    if arguments.draft:
        drafting["model"] = arguments.draft
    elif arguments.method == "ngram":  # the lengths that its documentation shows
        drafting |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {
        "model": arguments.target,
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "enforce_eager": arguments.eager,
        "max_model_len": arguments.slots,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # repeated prompts must be prefilled again
        "disable_log_stats": not arguments.count,  # they include the counters
        "speculative_config": drafting if arguments.method else None,
    }


def read_counters(llm) -> dict:
    """Return rounds, draft tokens and accepted draft tokens by position since the start."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return {
        "rounds": metrics[f"{prefix}drafts"].value,
        "drafted": metrics[f"{prefix}draft_tokens"].value,
        "accepted": metrics[f"{prefix}accepted_tokens_per_pos"].values,
    }


if __name__ == "__main__":
    main()
