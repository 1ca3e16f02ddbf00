"""Decode greedily with vLLM, prompt by prompt, as another process asks. Run by the engines' Python.

    .venv-engines/bin/python scripts/vllm_answers.py TARGET --method eagle3 --draft DIR --drafted 4

First comes a line that says what is ready: `{"version": ..., "threads": ...}`. Then each line read,
`{"ids": [prompt], "tokens": so many}`, is answered by one, `{"ids": [answer], "seconds": ...,
"graphs": compiled meanwhile}`. The clock runs from ids to ids and leaves the pipe out. Nothing of
this project is imported, because the engines' environment does not have it. What the engine says
goes to stderr.
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    arguments = parse_arguments()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed from here on
    import torch
    import vllm
    from torch._dynamo.utils import counters

    llm = vllm.LLM(**settings(arguments))
    print(json.dumps(ready(vllm, torch)), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        # no end token: everyone decodes the same number of tokens
        greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
        )
        compiled, began = counters["stats"]["unique_graphs"], time.perf_counter()
        [done] = llm.generate({"prompt_token_ids": asked["ids"]}, greedy, use_tqdm=False)
        answer = {
            "ids": list(done.outputs[0].token_ids),
            "seconds": time.perf_counter() - began,
            "graphs": counters["stats"]["unique_graphs"] - compiled,
        }
        print(json.dumps(answer), file=answers, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--method", help="as the engine calls it; none: one token at a time")
    parser.add_argument("--draft")
    parser.add_argument("--drafted", type=int, default=4, help="draft tokens a round")
    parser.add_argument("--slots", type=int, default=512, help="prompt, answer and drafts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    return parser.parse_args()


def settings(arguments: argparse.Namespace) -> dict:
    drafting = {
        "method": arguments.method,
        "model": arguments.draft,
        "num_speculative_tokens": arguments.drafted,
    }
    return {
        "model": arguments.target,
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "enforce_eager": arguments.eager,
        "max_model_len": arguments.slots,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # prompts come again, and must be read again
        "speculative_config": drafting if arguments.method else None,
    }


def ready(vllm, torch) -> dict:
    return {"version": vllm.__version__, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    main()
