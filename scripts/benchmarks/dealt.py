"""Compare tensor groups whose members learn rows of their own with those whose members repeat rows.

    python -m scripts.benchmarks.dealt

Four processes of one machine share a small random target, of whose features an EAGLE-3 layer with the demo's
vocabulary takes most of a step. With a row a step all learn the same one, with four rows each learns its own.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

PROCESSES = 4
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "data" / "demo" / "target"
SETTINGS = shlex.split("""
draft=demo draft.vocab_size=null draft.layers=[1,2] parallel.tensor=4 data.keep_features=false optim.epochs=null
data.demo.source=corpus data.demo.for_any_target=true data.demo.num_prompts=256 tree=chain tune=false evaluation=quick
evaluation.prompts_per_category=1 evaluation.max_new_tokens=2 interval.log=1 interval.eval=1000 resume=false
device=cpu device.compile=false device.threads=1
""")


def save_target(folder: Path) -> None:
    """Save a random target of three layers, whose four heads the processes divide."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=PROCESSES,
        num_key_value_heads=PROCESSES,
        head_dim=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(folder: Path, *, rows: int, steps: int) -> float:
    """Train for some steps of `rows` rows; return the median tokens/s of the second half."""
    words = [*SETTINGS, f"target.path={folder / 'target'}", f"optim.rows_per_step={rows}", f"optim.steps={steps}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}", "-m", "train"]
    command = [sys.executable, *launcher, *words, f"output_dir={folder}", f"run_name=rows-{rows}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = map(json.loads, (folder / f"rows-{rows}" / "metrics.jsonl").read_text().splitlines())
    speeds = [line["train/tokens_per_s"] for line in lines if "train/tokens_per_s" in line]
    return statistics.median(speeds[len(speeds) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        save_target(Path(name) / "target")
        for _ in range(args.repeats):
            repeated, dealt = (measure(Path(name), rows=rows, steps=args.steps) for rows in (1, PROCESSES))
            print(
                f"{repeated:,.0f} tokens/s of repeated rows, {dealt:,.0f} of dealt ones: {dealt / repeated:.2f} times"
            )


if __name__ == "__main__":
    main()
