"""Environments of other libraries: each has its own, over the packages of this one."""

import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path


def python_of(module, out):
    """The Python that runs an engine: this one, or that of an environment which is made when it is first asked for.

    Returns:
        Its path; or the reason why there is none, as a `RuntimeError`.
    """
    requirements = getattr(import_module(f"suite.engines.{module}"), "REQUIREMENTS", None)
    if requirements is None:
        return sys.executable
    folder = (Path(out) / f"env-{module}").absolute()
    python = folder / "bin" / "python"
    ready = folder / "ready"  # written last: an environment that was cut short is made anew
    if ready.exists() and ready.read_text() == "\n".join(requirements):
        return str(python)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and all the rest
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
    except subprocess.CalledProcessError as error:
        return RuntimeError(f"`{' '.join(requirements)}` could not be installed: exit {error.returncode}")
    ready.write_text("\n".join(requirements))
    return str(python)
