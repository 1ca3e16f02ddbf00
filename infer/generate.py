"""Write answers with a draft, as they grow: the quickest way to see a draft work.

python -m infer.generate prompt="Explain speculative decoding."     the newest finished training run
python -m infer.generate checkpoint=DIR prompt="..." sampling.temperature=0.7 tree=chain
python -m infer.generate checkpoint=DIR prompts=FILE                answers as lines of JSON
"""

from conf.entry import entry_point
from infer.config import GenerateConf
from infer.inputs.checkpoint_paths import open_checkpoints
from infer.inputs.input_checks import check_inputs
from models.io.console import print_line, setup_logging


@entry_point("generate", GenerateConf)
def main(conf: GenerateConf) -> None:
    setup_logging()
    (directory,) = open_checkpoints([conf.checkpoint] if conf.checkpoint else None, print_line)
    check_inputs(conf.tree, conf.prompts, key="prompts")
    from infer.commands.generation import generate_from_checkpoint

    generate_from_checkpoint(conf, directory)


if __name__ == "__main__":
    main()
