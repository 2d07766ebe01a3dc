"""A SuperLink, SuperNodes and their executors as processes on the loopback interface."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import lightning_fcl

HASTE = """
import sys
import time

import flwr.common.constant as constant


def runs(*programs):
    return any(word.endswith(programs) for word in sys.orig_argv)


constant.HEARTBEAT_MIN_INTERVAL = {beat}
# A server needs the default interval, because its start can take long.
if not runs("flower-superlink", "flower-superexec", "flwr-serverapp"):
    constant.HEARTBEAT_DEFAULT_INTERVAL = {beat}
    constant.HEARTBEAT_CALL_TIMEOUT = {beat} / 2
constant.MAX_RETRY_DELAY = 1
if runs("flower-supernode"):
    wait = time.sleep
    time.sleep = lambda seconds: wait(min(seconds, 0.5))
"""

EXECUTORS = """
import json
import os
import signal
import sys

from lightning_fcl.deployment.node import preload_imports, run_executor

preload_imports()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    log, words = json.loads(line)
    if not (child := os.fork()):
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        run_executor(words)
        os._exit(0)
    print(child, flush=True)
"""


class Fork:
    """A forked process, with those methods of `subprocess.Popen` that the tests use."""

    def __init__(self, pid):
        self.pid = pid

    def wait(self, seconds=900.0):
        ends = time.monotonic() + seconds
        while self._is_there():
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("a fork", seconds)
            time.sleep(0.05)

    def _is_there(self):
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in "ZX"
        return False


class Machines:
    """A SuperLink, SuperNodes and their executors as local processes. `close` ends all processes."""

    def __init__(self, folder, words=("--insecure",), trust=("--insecure",)):
        self.folder, self.trust, self.running, self.ports = folder, list(trust), {}, {}
        self.words = list(words)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.bin = Path(sys.executable).parent
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(lightning_fcl.__file__).parents[1]),
        }

    def start(self, name, *words, **options):
        with (self.folder / f"{name}.log").open("a") as log:
            options = {"stdout": log, "stderr": log, "env": self.environment, "cwd": self.folder, **options}
            command = [str(self.bin / words[0]), *map(str, words[1:])]
            self.running[name] = subprocess.Popen(command, start_new_session=True, **options)

    def link(self, *more):
        off = "--disable-runtime-dependency-installation"
        state = [*(more or ("--database", self.folder / "link.db")), off]
        self.start("link", "flower-superlink", *self.words, "--port", self.port, *state)
        self.wait_for(self.listens)

    def listens(self):
        with socket.socket() as there:
            return there.connect_ex(("127.0.0.1", self.port)) == 0

    def node(self, name, config, *more):
        """Start a SuperNode and its executor."""
        self.supernode(name, config, *more)
        self.executor(name)

    def supernode(self, name, config, *more):
        port = self.ports.setdefault(name, free_port())
        own = ["--superlink", self.address, "--port", port, "--isolation", "process"]
        self.start(name, "flower-supernode", *self.trust, *own, "--node-config", config, *more)

    def executor(self, name):
        """Start the executor of a SuperNode as a fork of a process that has already imported the required packages."""
        if "executors" not in self.running:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self.start("executors", "python", "-c", EXECUTORS, **pipes)
        of_all = self.running["executors"]
        words = ["--runtime-api-address", f"127.0.0.1:{self.ports[name]}", "--insecure"]
        of_all.stdin.write(json.dumps([str(self.folder / f"{name}-stays.log"), words]) + "\n")
        self.running[f"{name}-stays"] = Fork(int(of_all.stdout.readline()))

    def own_executor(self, name):
        """Start the executor of a SuperNode with the command of docs/deploy.md."""
        at = ["--runtime-api-address", f"127.0.0.1:{self.ports[name]}"]
        self.start(f"{name}-stays", "lightning-fcl", "deploy", "executor", *at, "--insecure")

    def sends(self, name):
        """Return whether a SuperNode is sending an answer, according to its log."""
        log = (self.folder / f"{name}.log").read_text()
        return log.rfind("Sending: ") > log.rfind("Sent successfully")

    def hasten(self, beat):
        """Make Flower poll for messages more often than every 3 s, and notice lost nodes after 2 * ``beat`` seconds."""
        (self.folder / "haste").mkdir()
        (self.folder / "haste" / "sitecustomize.py").write_text(HASTE.format(beat=beat))
        self.environment["PYTHONPATH"] = f"{self.folder / 'haste'}:{self.environment['PYTHONPATH']}"

    def flwr(self, *words, check=True):
        command = [str(self.bin / "flwr"), *map(str, words)]
        options = {"capture_output": True, "text": True, "env": self.environment, "cwd": self.folder, "timeout": 900}
        ended = subprocess.run(command, **options)
        assert not check or ended.returncode == 0, ended.stdout + ended.stderr + self.logs()
        return ended

    def connect(self, more=""):
        """Write the configuration of `flwr`: the address of the SuperLink and the trusted certificate."""
        connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self.address}"\n'
        trusted = "insecure = true" if "--insecure" in self.trust else f'root-certificates = "{self.trust[-1]}"'
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text(f"{connection}{trusted}\n{more}\n")

    def run(self, app, options="", **settings):
        self.connect(options)
        said = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items())
        self.flwr("run", app, "here", "--run-config", said)

    def stream(self, app, settings):
        """Run an app, and return the output of `flwr run --stream` until the end of the run."""
        said = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        ended = self.flwr("run", app, "here", "--stream", "--run-config", said, check=False)
        return re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout + ended.stderr)

    def signal(self, name, number):
        os.killpg(self.running[name].pid, number)

    def kill(self, name):
        self.signal(name, signal.SIGKILL)
        self.running.pop(name).wait()

    def wait_for(self, there, seconds=900):
        ends = time.monotonic() + seconds
        while not (found := there()):
            assert time.monotonic() < ends, self.logs()
            time.sleep(0.1)
        return found

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def close(self):
        for number in (signal.SIGCONT, signal.SIGTERM):
            for process in self.running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        ends = time.monotonic() + 5
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, ends - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.running.clear()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
