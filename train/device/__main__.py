"""Check what a device can do, before a run is paid for: `python -m train.device device=neuron`.

python -m train.device device=cuda stages=[operators,functions] minutes=30

Seven stages, each in a process of its own: what is installed, a matrix product, operators, training and decoding of a
small target, several processes, layers of large targets, ten steps of the demo. Every check prints PASS, or FAIL with a
remedy, and a failure gives the exit code 1. A page in Markdown and one in JSON, written to `output_dir`, tell others
what the device did.
"""

import sys
import tempfile
from pathlib import Path

from conf.entry import entry_point
from models.io.console import print_line, setup_logging
from models.io.files import prepare_folder
from train.config.device_check import DeviceCheckConf


@entry_point("device_check", DeviceCheckConf)
def main(conf: DeviceCheckConf) -> None:
    setup_logging()
    from models.device.host import Host
    from models.device.opening import choose_route
    from train.device.checks import Result
    from train.device.page import count_results, write_page
    from train.device.run import run_stages

    prepare_folder(Path(conf.output_dir))
    route = choose_route(conf.device.name.value, Host()).name
    with tempfile.TemporaryDirectory() as folder:
        stages = run_stages(conf, Path(folder) / "outcomes.jsonl")
        # A page after each stage, so that a command that is ended leaves what it measured.
        results = [(outcomes, write_page(outcomes, route, Path(conf.output_dir))) for outcomes in stages]
    outcomes, page = results[-1]
    print_line(f"{count_results(outcomes)}: {page}")
    if any(outcome.result == Result.FAIL for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
