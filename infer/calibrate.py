"""Search for a draft's best static tree, by how often each of its candidates is accepted.

python -m infer.calibrate                   the newest finished training run
python -m infer.calibrate checkpoint=DIR nodes=24 depth=4
python -m infer.eval tree=static tree.file=outputs/infer.calibrate/calibrate/tree.json
"""

import tempfile

from conf.entry import entry_point
from infer.checkpoint_paths import open_checkpoints
from infer.config import CalibrateConf
from infer.input_checks import check_inputs
from models.console import print_line, setup_logging
from models.files import open_output_file


@entry_point("calibrate", CalibrateConf)
def main(conf: CalibrateConf) -> None:
    setup_logging()
    (directory,) = open_checkpoints([conf.checkpoint] if conf.checkpoint else None, print_line)
    check_inputs(conf.tree, conf.prompts, key="prompts")
    with open_output_file(conf.output) as file:  # fails now if the folder is not writable
        tempfile.TemporaryFile(dir=file.parent).close()
    from infer.tree_calibration import calibrate_checkpoint

    calibrate_checkpoint(conf, directory)


if __name__ == "__main__":
    main()
