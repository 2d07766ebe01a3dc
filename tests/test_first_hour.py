"""Tests of the first steps of a new user. The package is installed from its wheel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.long
def test_first_hour_script_passes():
    script = Path(__file__).with_name("first_hour.sh")
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("All first steps succeeded.\n")
