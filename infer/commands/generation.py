"""Answer one prompt on the terminal while the answer grows, or a file of prompts into a file."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

from rich.text import Text

from data.chat.answer_parsing import build_exact_message, decode_answer, renders_to
from data.chat.template import ChatTemplate
from data.chat.text_stream import TextStream
from data.eval_prompts.prompts import EvalPrompt, build_prompt, load_eval_prompts, read_prompt_rows
from infer.config import GenerateConf
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from infer.engine.requests import Generation, Request
from infer.inputs.checkpoint_paths import resolve_target
from infer.inputs.command_inputs import load_checkpoint_target
from infer.inputs.memory_check import DecodingSize
from infer.measure.bench import WARMUP_TOKENS, decode_prompts
from infer.measure.context_limits import check_context
from infer.results.samples import list_accepted
from models.drafts.ngram import NgramDraft
from models.drafts.registry import load_draft
from models.io.console import CONSOLE, IS_MAIN_PROCESS, print_line, track_progress
from models.io.files import add_partial_suffix, open_output_file, write_text_atomically
from models.parallel.processes import leave_processes
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer, read_context_length, read_vocab_size
from models.targets.target import Target

ACCEPTED_STYLE = "green"  # tokens that the draft proposed; the others are the target's own


def generate_from_checkpoint(conf: GenerateConf, directory: Path) -> None:
    """Load a draft with its target, answer the prompt or those of the file, and write the answers in their order."""
    target_conf = resolve_target(conf.target, [directory])
    prompts = load_prompts(target_conf, conf)
    longest, batch = max(len(prompt.ids) for prompt in prompts), min(conf.batch, len(prompts))
    size = DecodingSize(
        batch=batch, prompt_tokens=longest, new_tokens=conf.max_new_tokens, set_batch=lambda batch: f"batch={batch}"
    )
    slots = longest + conf.max_new_tokens
    check_context(read_context_length(target_conf), slots, key="max_new_tokens")
    if conf.answers_file is not None and IS_MAIN_PROCESS:
        with open_output_file(conf.answers_file) as file, file.open("a"), add_partial_suffix(file).open("a"):
            pass  # Both can be written, which is known before anything is decoded.
    target = load_checkpoint_target(target_conf, conf, [directory], size)
    draft = load_draft(directory, target)
    verifying_target = draft.get_verifying_target(target)
    if conf.tree.is_lookup:
        print_line(f"draft: n-gram lookup alone, without the checkpoint's, as {conf.tree.file} says")
    proposing = NgramDraft() if conf.tree.is_lookup else draft
    decoder = Decoder(verifying_target, proposing, conf.tree.build(), sampling=conf.sampling, slots=slots, batch=batch)
    with target.cpu_threads():
        if target.device.has_static_shapes:
            compile_graphs(decoder, prompts)
        if conf.prompts is None:
            generations = [print_answer(decoder, verifying_target, prompts[0], conf)]
        else:
            generations = answer_prompts(decoder, verifying_target, prompts, conf)
    if conf.answers_file is not None and IS_MAIN_PROCESS:
        lines = [describe_answer(conf, verifying_target, *answer) for answer in zip(prompts, generations, strict=True)]
        with open_output_file(conf.answers_file) as file:
            write_text_atomically(file, "".join(lines))
        print_line(f"answers: {conf.answers_file}")
    leave_processes()


def compile_graphs(decoder: Decoder, prompts: list[EvalPrompt]) -> None:
    """Compile the graphs of all answers before the first one, and print what that takes."""
    device = decoder.target.device
    longest = "up to an hour" if device.compiles_slowly else "seconds to minutes"
    print_line(
        f"compiling before the first answer: {longest} a "
        "graph, less once it is in the compiler's cache; device.compile=false starts at once"
    )
    graphs = list_graphs(decoder.session, [len(prompt.ids) for prompt in prompts])
    with device.expect_graphs(graphs, print_line):
        for prompt in {bucket_length(len(prompt.ids)): prompt for prompt in prompts}.values():
            new_tokens = min(WARMUP_TOKENS, decoder.slots - len(prompt.ids))
            decode_prompts(decoder, [prompt], max_new_tokens=new_tokens, stops_at_eos=False)


def load_prompts(target: TargetConf, conf: GenerateConf) -> list[EvalPrompt]:
    """Return the prompt of the command line, or those of the file; load no model."""
    tokenizer, vocab_size = load_tokenizer(target), read_vocab_size(target)
    if conf.prompts is not None:
        prompts = load_eval_prompts(
            tokenizer, conf.prompts, limit=None, key="prompts", vocab_size=vocab_size, template=conf.template
        )
        places = {row["id"]: place for place, row in enumerate(read_prompt_rows(conf.prompts, key="prompts"))}
        return sorted(prompts, key=lambda prompt: places[prompt.id])  # as in the file, not by category
    assert conf.prompt is not None
    return [build_prompt(tokenizer, conf.prompt, conf.template, vocab_size)]


def print_answer(decoder: Decoder, target: Target, prompt: EvalPrompt, conf: GenerateConf) -> Generation:
    """Print an answer while it grows, and then what its rounds took; return it."""
    stream, start = TextStream(target.tokenizer, skip_special_tokens=True), time.perf_counter()

    def show(text: str | None, *, is_accepted: bool) -> None:
        if CONSOLE.is_terminal:
            CONSOLE.print(Text(text or "", style=ACCEPTED_STYLE if is_accepted else ""), end="", soft_wrap=True)
        elif IS_MAIN_PROCESS:  # as it is, tabs too, which Rich turns into spaces
            print(text or "", end="", flush=True, file=CONSOLE.file)

    def show_new_tokens(request: Request) -> None:
        generation, num_shown = request.generation, len(stream.ids)
        flags = list_accepted(generation)
        for token, is_accepted in list(zip(generation.ids, flags, strict=True))[num_shown:]:
            show(stream.read(token), is_accepted=is_accepted)

    (generation,) = decoder.decode(
        [prompt.ids],
        row_ids=[prompt.row_id],
        max_new_tokens=conf.max_new_tokens,
        eos_ids=target.eos_ids,
        stop=conf.stop,
        on_tokens=show_new_tokens,
    )
    show(stream.finish(), is_accepted=list_accepted(generation)[-1])
    print_line(f"\n\n{describe_speed([generation], time.perf_counter() - start)}")
    return generation


def answer_prompts(decoder: Decoder, target: Target, prompts: list[EvalPrompt], conf: GenerateConf) -> list[Generation]:
    """Return the answers in the order of the prompts, and print what their rounds took.

    The main process writes each as it is finished to the partial file, which an interrupt leaves.
    """
    requests = {
        Request(ids=prompt.ids, row_id=prompt.row_id, max_new_tokens=conf.max_new_tokens): prompt for prompt in prompts
    }
    waiting, start = iter(requests), time.perf_counter()
    finished = decoder.stream(lambda count: list(islice(waiting, count)), eos_ids=target.eos_ids, stop=conf.stop)
    assert conf.answers_file is not None
    partial = add_partial_suffix(Path(conf.answers_file))
    if IS_MAIN_PROCESS:
        print_line(f"answers as they are finished: {partial}")
        with open_output_file(str(partial)) as file:
            file.write_text("")  # of an earlier command, which was interrupted
    for request in track_progress(finished, "answers", total=len(requests)):
        if IS_MAIN_PROCESS:
            line = describe_answer(conf, target, requests[request], request.generation)
            with open_output_file(str(partial)) as file, file.open("a") as lines:
                lines.write(line)
    generations = [request.generation for request in requests]
    print_line(describe_speed(generations, time.perf_counter() - start))
    return generations


def describe_answer(conf: GenerateConf, target: Target, prompt: EvalPrompt, generation: Generation) -> str:
    """Return the line of a prompt and its answer: a row of training data, and of a file of prompts."""
    has_end = generation.ids[-1] in target.eos_ids
    written = decode_answer(target.tokenizer, generation.ids[:-1] if has_end else generation.ids)
    is_stopped = has_end or any(string in written for string in conf.stop)
    is_cut = len(generation.ids) == conf.max_new_tokens and not is_stopped
    arguments = {key: value for key, value in prompt.template_kwargs.items() if key != "tools"}
    inputs = {"tools": prompt.template_kwargs.get("tools"), "chat_template_kwargs": arguments}
    line = {
        "id": prompt.id,
        "category": prompt.category,
        **({"messages": prompt.messages} if prompt.messages else {"prompt": prompt.text}),
        **{key: value for key, value in inputs.items() if value},
        "answer": describe_message(target.tokenizer, prompt, written) if prompt.messages else written,
        "finish_reason": "length" if is_cut else "stop",
        "tokens": len(generation.ids),
        "rounds": generation.rounds,
    }
    return json.dumps(line) + "\n"


def describe_message(tokenizer: Any, prompt: EvalPrompt, text: str) -> str | list[dict[str, Any]]:
    """Return the answer in a chat as the text that the template writes, or else as a list of its message."""
    chat = ChatTemplate(tokenizer=tokenizer, arguments=prompt.template_kwargs)
    if renders_to(chat, prompt.messages, {"role": "assistant", "content": text}, text):
        return text
    return [build_exact_message(chat, prompt.messages, text)]


def describe_speed(generations: list[Generation], seconds: float) -> str:
    """Return the tokens, how many rounds they took, and the speed; the time and first tokens are with the prompts."""
    tokens = sum(len(generation.ids) for generation in generations)
    rounds = sum(generation.rounds for generation in generations)
    by_rounds = sum(generation.decoded_tokens for generation in generations)
    prompts = "the prompt" if len(generations) == 1 else f"{len(generations):,} prompts"
    per_round = f", {by_rounds / rounds:.2f} per round" if rounds else ""
    return (
        f"{count_of(tokens, 'token')}, {tokens / seconds:.1f} tokens/s: {tokens - by_rounds:,} from reading {prompts}, "
        f"{by_rounds:,} from {count_of(rounds, 'round')}{per_round}"
    )


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count_of(1, "round"), count_of(1234, "token")
    ('1 round', '1,234 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
