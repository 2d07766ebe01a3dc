"""Virtual environments for the compared libraries. They also use the packages of the current environment."""

import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path


def python_of(module, out):
    """Return the path of the Python for an engine. An engine without `REQUIREMENTS` uses the current Python.

    For any other engine, the function creates an environment in ``out`` at the first call.

    Returns:
        Path of the Python. If the environment could not be created, a RuntimeError with the reason is returned instead.
    """
    requirements = getattr(import_module(f"suite.engines.{module}"), "REQUIREMENTS", None)
    if requirements is None:
        return sys.executable
    folder = (Path(out) / f"env-{module}").absolute()
    python = folder / "bin" / "python"
    # The file `ready` is written last. Without this file, the environment is incomplete and is created again.
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == "\n".join(requirements):
        return str(python)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        # The environment uses torch and all other packages of the current environment.
        (packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
    except subprocess.CalledProcessError as error:
        return RuntimeError(f"could not install `{' '.join(requirements)}`: exit status {error.returncode}")
    ready.write_text("\n".join(requirements))
    return str(python)
