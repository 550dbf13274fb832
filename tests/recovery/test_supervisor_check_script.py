import pytest

from autotune.errors import UserError
from autotune.problem.job import Script
from autotune.recovery.supervisor import check_script
from tests.conftest import make_job


def test_a_study_of_another_script_is_refused() -> None:
    job = make_job(script=Script(("train.py",), "."))
    check_script("s", job, "other/train.py")
    check_script("s", make_job(), "train.py")
    with pytest.raises(UserError, match=r"of train.py, not of eval.py"):
        check_script("s", job, "eval.py")
