"""Virtual environments for other libraries. Each environment also sees the packages of the current environment."""

import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path


def python_of(module, out):
    """Return the Python that runs an engine: the current Python, or the Python of the engine's environment.

    An environment is created when it is first needed.

    Returns:
        Path of the Python, or a RuntimeError with the reason why the environment could not be created.
    """
    requirements = getattr(import_module(f"suite.engines.{module}"), "REQUIREMENTS", None)
    if requirements is None:
        return sys.executable
    folder = (Path(out) / f"env-{module}").absolute()
    python = folder / "bin" / "python"
    # The file `ready` is written last, so that an incomplete environment is created again.
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
