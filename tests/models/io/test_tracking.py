"""Results go to W&B only if asked, into the run that trained the draft where it is known."""

import pytest
import wandb

from models.io.errors import UserError
from models.io.tracking import TrackedResults, TrackedRun, TrackerConf, Wandb, upload_results
from tests.support.reports.wandb_files import logged, read_records, run_ids

pytestmark = pytest.mark.no_shapes

OFFLINE = TrackerConf(wandb=Wandb.offline, project="mine")
TRAINING = TrackedRun(id="trained", project="drafts", entity=None)
RESULTS = TrackedResults(
    prefix="eval_report",
    figures={"tree/speedup": 2.0, "tree/lossless": "yes"},
    columns=["mode"],
    rows=[["tree"]],
    page="<p>all</p>",
)


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "again").mkdir()
    return folder


def test_nothing_is_sent_unless_asked(folder):
    upload_results(TrackerConf(), folder, RESULTS, TRAINING)
    assert not list(folder.iterdir())


def test_results_continue_the_run_that_trained_the_draft(folder):
    upload_results(OFFLINE, folder, RESULTS, TRAINING)
    assert run_ids(folder) == [("trained", "drafts", "")]  # without a name, it keeps its own
    (values,) = logged(folder)
    assert values["eval_report/tree/speedup"] == 2.0
    assert values["eval_report/tree/lossless"] == "yes"
    assert values["eval_report/table/nrows"] == 1
    assert values["eval_report/page/_type"] == "html-file"
    kinds = {record.WhichOneof("record_type") for record in read_records(folder)}
    assert not kinds & {"environment", "stats", "output_raw"}  # so that those of the training stay


def test_results_without_a_training_start_a_run_of_their_own(folder):
    upload_results(OFFLINE, folder, RESULTS)
    ((run_id, project, name),) = run_ids(folder)
    assert (project, name) == ("mine", "again")
    assert run_id != "trained"


def test_a_tracker_that_fails_is_reported_in_a_single_line_with_the_folder_of_the_results(folder, monkeypatch):
    def fail(**_):
        raise wandb.errors.CommError("no way there.\nTraceback ...")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError) as error:
        upload_results(OFFLINE, folder, RESULTS)
    expected = f"log.wandb: W&B must take the results, got no way there; they are in {folder}"
    assert str(error.value) == expected
