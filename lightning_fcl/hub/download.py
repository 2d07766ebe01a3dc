"""Files come from afar by pooch: verified, and whole or not at all."""

import os
import sys
from pathlib import Path

from lightning_fcl.errors import require
from lightning_fcl.evaluation.files import writing


def download(url: str, path: Path, digest: str, then: str = "") -> Path:
    """The file of a URL, if it is of the digest; one that is here and whole is not asked for again.

    Another one that is here stays until this one has come, whole.

    Args:
        then: What is to be done with a file that was downloaded by hand.
    """
    pooch = require("pooch", "downloads files and verifies them")
    requests = require("requests", "downloads files")
    with writing(path, then="try again"):
        if path.is_file() and pooch.hashes.hash_matches(str(path), digest):
            return path
        settings = (os.environ.get(name, "") for name in ("LIGHTNING_FCL_OFFLINE", "HF_HUB_OFFLINE"))
        if any(setting.lower() not in ("", "0", "false", "no") for setting in settings):
            raise ConnectionError(
                f"Expected {path} to be there, as nothing is downloaded in offline mode, but it is not. Unset "
                f"LIGHTNING_FCL_OFFLINE and HF_HUB_OFFLINE, or put {url} there."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        pooch.get_logger().setLevel("WARNING")  # the bar shows it
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=30)
        try:
            pooch.retrieve(url, digest, path.name, path.parent, downloader=downloader)
        except requests.RequestException as error:
            raise ConnectionError(
                f"Expected to download {url} but got: {error}. Try again, or download it by hand to {path}{then}."
            ) from error
        except ValueError as error:
            raise ValueError(
                f"Expected the file of digest {digest} from {url} but got: {error}. Nothing of it is kept. Ask its "
                "publisher for it, or for the digest that it has now."
            ) from error
    return path
