"""transformers 4, by which NxD Inference reads drafts, reads what ours does.

Its configuration classes need no torch. A value that it does not find it replaces by its own
default in silence, so that nothing but a comparison shows a missing key.
"""

import json
import os
import subprocess
from pathlib import Path

from tests.support.saved_configs import OLDER, SAVED, save_draft

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PYTHON = ROOT / ".venv-transformers4" / "bin" / "python"


def test_transformers_4_reads_theta_and_scaling_of_every_checkpoint(tmp_path):
    folders = [save_draft(*case, tmp_path / " ".join(case)) for case in SAVED]
    command = [PYTHON, HERE / "read_configs.py", *folders]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    read = json.loads(done.stdout)
    for (family, draft), found in zip(SAVED, read, strict=True):
        expected = OLDER[family] | {"dtype": "bfloat16"}
        assert found == expected, f"{family}, {draft}"
