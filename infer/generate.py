"""Write answers with a draft, as they grow: the quickest way to see a draft work.

python -m infer.generate prompt="Explain speculative decoding."     the newest finished training run
python -m infer.generate checkpoint=DIR prompt="..." sampling.temperature=0.7 tree=chain
python -m infer.generate checkpoint=DIR prompts=FILE                answers as lines of JSON
"""

from conf.entry import entry_point
from infer.config import GenerateConf
from infer.inputs.command_start import start_command
from models.io.console import setup_logging


@entry_point("generate", GenerateConf)
def main(conf: GenerateConf) -> None:
    setup_logging()
    (directory,) = start_command(conf, conf.prompts, prompts_key="prompts")
    from infer.commands.generation import generate_from_checkpoint

    generate_from_checkpoint(conf, directory)


if __name__ == "__main__":
    main()
