"""Tests that run the commands of docs/deploy.md in an empty folder, as a new user does."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_fcl
from lightning_fcl.io.checkpoint import newest_checkpoint, read_checkpoint

from .conftest import load
from .machines import free_port

PAGE = Path(lightning_fcl.__file__).parents[1] / "docs" / "deploy.md"


class Page:
    """The code blocks of docs/deploy.md. The test replaces the folder and the ports by its own."""

    def __init__(self, folder, ports):
        text = PAGE.read_text().replace("/data", str(folder))
        for printed, port in ports.items():
            text = text.replace(printed, str(port))
        self.sections = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))

    def blocks(self, section, language):
        return re.findall(rf"^```{language}\n(.*?)^```$", self.sections[section], re.MULTILINE | re.DOTALL)

    def command(self, section, beginning):
        """Return the words of the only command that starts with `beginning` in the given section."""
        lines = "".join(self.blocks(section, "bash")).splitlines()
        (line,) = [line for line in lines if line.startswith(beginning)]
        return shlex.split(line)


def write_files(folder, blocks):
    """Write each block whose first line names a file to this file."""
    for block in blocks:
        if name := re.match(r"# ([\w-]+\.\w+)\n", block):
            (folder / name[1]).write_text(block)


def write_data(folder, header):
    """Write a table and a folder of arrays for each client and for the server."""
    rng = np.random.default_rng(0)
    for name, samples in (("0", 30), ("1", 22), ("2", 41), ("server", 24)):
        x = rng.normal(size=(samples, 2)).astype(np.float32)
        y = (x[:, 0] > x[:, 1]).astype(np.int64)
        rows = [f"{float(a)!r},{float(b)!r},{('sit', 'walk')[label]}" for (a, b), label in zip(x, y, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join([header, *rows]))
        (folder / name).mkdir()
        np.save(folder / name / "x.npy", x)
        np.save(folder / name / "y.npy", y)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("section", ["Data of the nodes", pytest.param("Data modules", marks=pytest.mark.long)])
def test_deploy_page_commands_write_report_and_equal_simulation(machines, tmp_path, section):
    at, own, rehearsal = machines(), "Data of the nodes", "Try a deployment on one machine"
    ports = [free_port() for _ in range(3)]
    page = Page(tmp_path, {"18000": at.port, "18090": ports[0]})

    def run(words):
        command = [str(at.bin / words[0]), *words[1:]]
        ended = subprocess.run(command, env=at.environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stdout + ended.stderr + at.logs()
        return ended.stdout + ended.stderr

    write_data(tmp_path, page.blocks(own, "text")[0].partition("\n")[0])
    for language in ("yaml", "python"):
        write_files(tmp_path, [*page.blocks(own, language), *page.blocks(section, language)])
    run(page.command(own, "lightning-fcl deploy flower"))
    if section == "Data modules":
        shutil.copy(tmp_path / "my_data.py", tmp_path / "app")
        with (tmp_path / "app" / "pyproject.toml").open("a") as project:
            project.write("\n" + page.blocks(section, "toml")[0])
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(page.blocks(rehearsal, "toml")[0])
    at.start("link", *page.command(rehearsal, "flower-superlink --insecure --port"))
    at.wait_for(at.listens)
    for client, port in enumerate(ports):
        for program in ("flower-supernode", "lightning-fcl deploy executor"):
            line = shlex.join(page.command(section, program)).replace(str(ports[0]), str(port))
            for printed in ('client="{}"', f"{tmp_path}/{{}}", "memories/{}"):
                line = line.replace(printed.format(0), printed.format(client))
            words = shlex.split(line)
            at.start(f"{program.split()[-1]}-{client}", *words)
    assert "Finished the run" in run(page.command(section, "flwr run"))
    run(page.command(section, "lightning-fcl fit"))
    assert all((tmp_path / "run" / name).is_file() for name in ("report.html", "results.json"))
    deployed, simulated = (
        read_checkpoint(load, newest_checkpoint(tmp_path / name / "checkpoints"))["state_dict"]
        for name in ("run", "simulated")
    )
    assert deployed.keys() == simulated.keys()
    assert all(torch.equal(value, simulated[name]) for name, value in deployed.items())
