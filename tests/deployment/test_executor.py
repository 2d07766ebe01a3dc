"""Tests of the executor of a SuperNode: the programs that it forks or starts, and the Flower commands that it needs."""

import os
import subprocess
import sys

import pytest

from lightning_fcl.deployment.node import ForkingPopen, read_command

pytestmark = pytest.mark.flower


def test_forking_popen_forks_for_a_client_and_starts_other_programs(tmp_path):
    told = tmp_path / "told"

    class Forks(ForkingPopen):
        @staticmethod
        def run_client():
            told.write_text(f"{os.getppid()} {sys.argv}")

    words = ["/bin/flwr-clientapp", "--token", "t"]
    child = Forks(words)
    assert os.waitpid(child.pid, 0) == (child.pid, 0)
    assert told.read_text() == f"{os.getpid()} {words}"  # The client ran in a fork of this process.
    told.unlink()
    other = Forks([sys.executable, "-c", "import os; print(os.getppid())"], stdout=subprocess.PIPE, text=True)
    assert other.communicate()[0].strip() == str(os.getpid()) and not told.exists()


def test_read_command_missing_command_names_flower_version():
    for name in ("flower-superexec", "flwr-clientapp"):
        assert callable(read_command(name))
    with pytest.raises(RuntimeError, match=r"command `flwr-none`, but flwr 1\.4[12]\.\d+ does not\. Install"):
        read_command("flwr-none")
