"""Count the stays of a run's configuration before the story of the run begins.

python -m scripts.count_stays [-v]    # fails above the bound; -v lists the stays

A stay is a call, seen by sys.setprofile, that enters a function of another module of the product with the
configuration of the run among its arguments, be it the copy that the run is planned with. They are counted on the
demo, from `main` of `python -m train` until it calls `distill_draft`. What takes a group alone, such as `conf.data`,
can be read without the run and is no stay.
"""

import sys
from types import CodeType, FrameType

from conf.entry import compose
from scripts.count_lines import PRODUCT
from train.__main__ import main as train
from train.config.run import TrainConf

MAX_STAYS = 30
STORY = "train.distillation.distill_draft"


class StoryBeginsError(Exception):
    """The end of the count: the function that tells the run was called."""


class StayCounter:
    """A profile function that lists the stays until the story begins."""

    def __init__(self) -> None:
        self.stays: list[str] = []
        self.modules: dict[CodeType, str] = {}  # of the product, "" for others; most calls are of others

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (module := self.find_module(frame)):
            return
        name = f"{module}.{frame.f_code.co_name}"
        if name == STORY:
            raise StoryBeginsError
        caller = self.find_caller(frame)
        if caller != module and takes_run(frame):
            self.stays.append(f"{name} from {caller}")

    def find_caller(self, frame: FrameType) -> str:
        """Return the module of the product's function that called this one, if through other packages."""
        outer = frame.f_back
        while outer is not None and not self.find_module(outer):
            outer = outer.f_back
        return self.find_module(outer) if outer else "the command line"

    def find_module(self, frame: FrameType) -> str:
        """Return the module of a frame's function, or nothing if the product does not have it."""
        code = frame.f_code
        if code not in self.modules:
            module = frame.f_globals.get("__name__", "")
            self.modules[code] = module if module.partition(".")[0] in PRODUCT else ""
        return self.modules[code]


def takes_run(frame: FrameType) -> bool:
    """Return whether an argument of the call, or what a nested function closes over, is the run's configuration."""
    return any(isinstance(value, TrainConf) for value in frame.f_locals.values())


def list_stays(conf: TrainConf) -> list[str]:
    """Run a command of this configuration until the story begins; return its stays in order."""
    counter = StayCounter()
    sys.setprofile(counter)
    try:
        train.__wrapped__(conf)
    except StoryBeginsError:
        return counter.stays
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
