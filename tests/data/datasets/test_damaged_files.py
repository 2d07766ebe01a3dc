"""Tests of damaged files and decompression bombs: errors contain the file's path, and reading takes little memory."""

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.data.datasets.images import read_image
from lightning_fcl.data.datasets.readers import read_arrays, read_lines, read_restricted_pickle

AGAIN = "Delete this copy and "


def npz(compressed):
    rng = np.random.default_rng(0)
    columns = {"X": rng.normal(size=(2, 3, 128)).astype(np.float32), "y": np.array([0, 5]), "user": np.array([0, 8])}
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **columns)
    return buffer.getvalue()


def encoded(file_format, size=(32, 32)):
    buffer = io.BytesIO()
    Image.effect_noise(size, 40).convert("RGB").save(buffer, file_format)
    return buffer.getvalue()


LAYOUTS = {
    "npz": ("hhar", "windows.npz", npz(False)),
    "compressed npz": ("hhar", "windows.npz", npz(True)),
    "PNG": ("core50", "core50_32x32/s1/o1/C_01_01_000.png", encoded("PNG")),
    "pickle": ("cifar100", "meta", None),
}


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path, cifar, put):
    """Return the content of a dataset file, and a function that tests a changed content.

    That function writes the changed content to the file, and returns the loaded data or the error message.
    """
    data_set, name, content = LAYOUTS[request.param]
    if data_set == "cifar100":
        put(tmp_path, cifar.files(cifar.contents))
        content = (tmp_path / name).read_bytes()

    def loaded(changed):
        path = put(tmp_path / name, changed)
        try:
            data = load_dataset(data_set, tmp_path)
        except ValueError as error:
            assert str(path) in str(error)
            return str(error)
        return data.x.tobytes(), data.y.tolist(), str(data.client_ids), data.classes

    return content, loaded


@pytest.mark.seconds
def test_load_dataset_flipped_bit_raises_or_has_no_effect(layout):
    content, loaded = layout
    whole = loaded(content)
    assert not isinstance(whole, str)
    for bit in np.random.default_rng(0).integers(8 * len(content), size=300).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        found = loaded(bytes(flipped))
        assert found == whole or (isinstance(found, str) and AGAIN in found), f"bit {bit}"


@pytest.mark.seconds
def test_load_dataset_truncated_file_raises(layout):
    content, loaded = layout
    # A PNG file without the checksum in its last 4 bytes can be read, so the test removes at least 5 bytes.
    for length in np.linspace(0, len(content) - 5, 50).astype(int).tolist():
        found = loaded(content[:length])
        assert isinstance(found, str) and AGAIN in found, f"{length} of {len(content)} bytes"


READERS = {
    ".npz": lambda path: read_arrays(path, ["x"]),
    ".png": lambda path: read_image(path, None, "RGB"),
    ".pkl": read_restricted_pickle,
    ".txt": lambda path: read_lines(path, f"{AGAIN}get it again."),
}


@pytest.mark.parametrize("suffix", READERS)
def test_readers_missing_or_unreadable_file_raises_with_path(tmp_path, suffix, refused):
    path, read = tmp_path / f"a{suffix}", READERS[suffix]
    message = refused(read, path, error=FileNotFoundError)
    assert message.startswith(f"Expected the file {path} but it is missing. {AGAIN}")
    path.mkdir()
    message = refused(read, path)
    assert message.startswith(f"Expected {path} to be a ") and f" but got: a folder. {AGAIN}" in message
    path.rmdir()
    # Opening a named pipe without `O_NONBLOCK` would block forever.
    os.mkfifo(path)
    assert " but got: a named pipe" in refused(read, path)
    path.unlink()
    path.write_bytes(b"hello")
    path.chmod(0)
    user = os.geteuid()
    # Root ignores file permissions. If root runs the tests, this test temporarily runs as another user.
    os.seteuid(user or 65534)
    try:
        message = refused(read, path)
    finally:
        os.seteuid(user)
    assert message.startswith(f"Expected {path} to be a ") and "Permission denied" in message and AGAIN in message


def member(header, claimed=None, zeros=0):
    """Return the bytes of an npz file with an array of zeros. `claimed` is the size that the zip directory states."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(zeros // 10**6):
                file.write(bytes(10**6))
        archive.infolist()[0].file_size = claimed or archive.infolist()[0].file_size
    return buffer.getvalue()


def zipped(content):
    """Return the bytes of an npz file whose member `x.npy` has the given bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", content)
    return buffer.getvalue()


def header(shape, dtype="|u1"):
    return {"descr": dtype, "fortran_order": False, "shape": shape}


def png(side):
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(99)), b"IEND"]
    framed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def jpeg(side):
    content = encoded("JPEG", (48, 48))
    return content.replace(struct.pack(">HH", 48, 48), struct.pack(">HH", side, side))


GIGABYTES = 2**40
LIMIT = "LIGHTNING_FCL_MAX_BYTES"
# For each file: its content, or its length if it is a sparse file of zeros, and a part of the expected message.
BOMBS = {
    "directory.npz": (member(header((5,)), 5_600_000_000), f"set {LIMIT} to at least"),
    "header.npz": (member(header((GIGABYTES, 2), "<f8")), f"float64 of shape ({GIGABYTES}, 2) in the 128 bytes"),
    "nothing.npz": (member(header((GIGABYTES, 0))), f"uint8 of shape ({GIGABYTES}, 0) in the 128 bytes"),
    "text.npz": (member(header((GIGABYTES,), "<U0")), f"<U0 of shape ({GIGABYTES},) in the 128 bytes"),
    "long.npz": (member(header((), "-" * 9000)), "Header info length"),
    "deep.npz": (zipped(np.lib.format.magic(1, 0) + b"\x84\x03{'descr': " + b"(" * 890), "but got: "),
    "packing.npz": (npz(True).replace(b"\x08\x00", b"\x0e\x00"), "packed by the unsupported method 14"),
    "rgb.png": (png(60_000), "exceeds limit"),
    "jpeg.png": (jpeg(60_000), "exceeds limit"),
    "ppm.png": (b"P6 60000 60000 255\n", "exceeds limit"),
    "frame.pkl": (b"\x80\x04\x95" + struct.pack("<Q", GIGABYTES) + b"N.", "but got: "),
    "bytes.pkl": (b"\x80\x04\x8e" + struct.pack("<Q", GIGABYTES) + b"N.", "but got: "),
    "bytearray.pkl": (b"\x80\x05\x96" + struct.pack("<Q", GIGABYTES) + b"N.", "but got: "),
    "text.pkl": (b"\x80\x04\x8d" + struct.pack("<Q", GIGABYTES) + b"N.", "but got: "),
    "memory.pkl": (b"\x80\x02Nr\xff\xff\xff\x7f.", "memo index 2147483647"),
    "sparse.npz": (GIGABYTES, "but got: "),
    "sparse.txt": (GIGABYTES, f"set {LIMIT} to at least"),
}
CHILD = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_damaged_files import READERS
def status(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name))
resource.setrlimit(resource.RLIMIT_AS, (1024 * status("VmSize") + 200_000_000,) * 2)
before = status("VmHWM")
for path in map(Path, sys.argv[2:]):
    try:
        READERS[path.suffix](path)
        print("read")
    except ValueError as error:
        print(error)
print(status("VmHWM") - before)
"""


@pytest.mark.seconds
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a memory limit of a process")
def test_readers_decompression_bomb_raises_before_allocation(tmp_path):
    bombs = {**BOMBS, "lying.npz": (member(header((872,)), 1000, zeros=400 * 10**6), "Bad CRC-32")}
    for name, (content, _) in bombs.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(content) if isinstance(content, int) else file.write(content)
    words = [sys.executable, "-c", CHILD, os.path.dirname(__file__), *(str(tmp_path / name) for name in bombs)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *messages, peak = done.stdout.splitlines()
    for (name, (_, said)), message in zip(bombs.items(), messages, strict=True):
        assert message.startswith(f"Expected {tmp_path / name} to be a ") and said in message and AGAIN in message
    # Reading takes less than 50 MB more than Python and NumPy. The unit is kB.
    assert int(peak) < 50_000


def test_readers_size_limit_follows_environment_variable(tmp_path, monkeypatch, refused):
    (tmp_path / "a.npz").write_bytes(member(header((3 * 10**6,)), zeros=3 * 10**6))
    (tmp_path / "a.png").write_bytes(encoded("PNG", (1000, 800)))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([{} for _ in range(6_800)]))
    (tmp_path / "a.txt").write_text("1\n" * 40_000)
    for suffix, read in READERS.items():
        path = tmp_path / f"a{suffix}"
        for limit, fits in ((None, True), ("4000000", True), ("3000000", False), ("3 GB", False)):
            monkeypatch.setenv(LIMIT, limit) if limit else monkeypatch.delenv(LIMIT, raising=False)
            if fits:
                read(path)
            else:
                message = refused(read, path)
                assert LIMIT in message and limit in message
                # A wrong value of the variable is no fault of the file.
                assert (str(path) in message) == limit.isdecimal()


def test_read_image_eps_raises(tmp_path, refused):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    assert "cannot identify image file" in refused(READERS[".png"], tmp_path / "a.png")
