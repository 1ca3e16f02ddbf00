"""Count the stays of a run's configuration before the story of the run begins.

python -m scripts.count_stays [-v]    # fails above the bound; -v lists the stays

A stay is a call, seen by sys.setprofile, that enters a function of another module of the product with the
configuration of the run among its arguments, be it the copy that the run is planned with. They are counted on the
demo, from `main` of `python -m train` until it calls `distill_draft`. What takes a group alone, such as `conf.data`,
can be read without the run and is no stay.
"""

import sys
from types import FrameType

from conf.entry import compose
from scripts.count_lines import PRODUCT
from train.__main__ import main as train
from train.config.run import TrainConf

MAX_STAYS = 30
STORY = "train.distillation.distill_draft"


class StoryBeginsError(Exception):
    """The end of the count: the function that tells the run was called."""


def find_module(frame: FrameType) -> str:
    """Return the module of a frame's function, or nothing if the product does not have it."""
    module = frame.f_globals.get("__name__", "")
    return module if module.partition(".")[0] in PRODUCT else ""


def find_caller(frame: FrameType) -> str:
    """Return the module of the product's function that called this one, if through other packages."""
    outer = frame.f_back
    while outer is not None and not find_module(outer):
        outer = outer.f_back
    return find_module(outer) if outer else "the command line"


def list_stays(conf: TrainConf) -> list[str]:
    """Run a command of this configuration until the story begins; return its stays in order."""
    stays: list[str] = []

    def note_stay(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (module := find_module(frame)):
            return
        name = f"{module}.{frame.f_code.co_name}"
        if name == STORY:
            raise StoryBeginsError
        caller = find_caller(frame)
        # Locals are at first the arguments, and what a nested function closes over.
        if caller != module and any(isinstance(value, TrainConf) for value in frame.f_locals.values()):
            stays.append(f"{name} from {caller}")

    sys.setprofile(note_stay)
    try:
        train.__wrapped__(conf)
    except StoryBeginsError:
        return stays
    finally:
        sys.setprofile(None)
    raise RuntimeError(f"the run ended without a call of {STORY}")


def main() -> None:
    """Print the count, with `-v` also the stays; exit with 1 above the bound."""
    stays = list_stays(compose("train", TrainConf, ["device=cpu", "resume=false"]))
    print(f"stays of the configuration before {STORY}: {len(stays)}; at most {MAX_STAYS}")
    if "-v" in sys.argv:
        print("".join(f"    {stay}\n" for stay in stays), end="")
    sys.exit(len(stays) > MAX_STAYS)


if __name__ == "__main__":
    main()
