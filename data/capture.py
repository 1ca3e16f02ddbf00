"""`python -m data.capture`: store the target features that a draft trains on, for many runs.

python -m data.capture draft=NAME data=prepared data.path=outputs/prepare/RUN run_name=NAME

The same command resumes a killed capture and rewrites damaged files. docs/features.md has the layout and the sizes.
"""

import shlex
import sys

from conf.entry import entry_point, is_sweep
from data.config import CaptureConf
from models.command_processes import start_processes
from models.io.console import setup_logging


@entry_point("capture", CaptureConf)
def main(conf: CaptureConf) -> None:
    setup_logging()
    from data.sources.training_rows import check_reachable

    check_reachable(conf.data, conf.target, conf.draft.pretrained)
    start_processes(conf.parallel, conf.device, conf.target, is_sweep=is_sweep())
    from data.feature_capture import capture_features

    capture_features(conf, command=shlex.join(["python", "-m", "data.capture", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
