"""`python -m infer.plan`: estimate a draft's gain on a machine without loading any weights.

python -m infer.plan draft=qwen3-32b-eagle3 machine=trn2.48xlarge tree=chain tree.depth=3
"""

from conf.entry import entry_point
from infer.config import DecodePlanConf


@entry_point("infer_plan", DecodePlanConf)
def main(conf: DecodePlanConf) -> None:
    from infer.commands.decode_plan import print_decode_plan

    print_decode_plan(conf)


if __name__ == "__main__":
    main()
