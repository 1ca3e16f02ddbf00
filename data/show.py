"""`python -m data.show`: show the tokens that a draft would train on, in color, before a run.

python -m data.show                                     the demo's prompts and the text that follows
python -m data.show data=prepared data.path=outputs/prepare/demo
python -m data.show data=jsonl data.path=FILE target=qwen3-8b documents=20

Only the target's tokenizer is loaded. The page outputs/show/RUN/sample.html shows the same.
"""

from conf.entry import entry_point
from data.config import ShowConf
from data.sources.training_rows import check_reachable
from models.io.console import setup_logging


@entry_point("show", ShowConf)
def main(conf: ShowConf) -> None:
    setup_logging()
    check_reachable(conf.data, conf.target)
    from data.viewer.console import show_documents

    show_documents(conf)


if __name__ == "__main__":
    main()
