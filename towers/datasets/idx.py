"""IDX files, the format of MNIST: 0, 0, type, rank | rank big-endian uint32 sizes | values."""

import gzip
import math
import os
import stat
import struct
import zlib
from typing import IO

import numpy as np

# The values of a gzipped file must fit into this: twice the largest of the MNIST family (EMNIST
# ByClass, 547 MB). Deflate packs up to 1032:1, so that a small file could fill all memory.
MAX_GZIP_BYTES = 2**30

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_RATIO = 1032  # of deflate; zlib's documentation, "Maximum Compression Factor"
_MAX_RANK = 4
_CHUNK = 2**20
_UINT8 = 0x08
_OTHER_TYPES = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in an IDX file of unsigned bytes, gzipped or not (told by its first bytes).

    Takes memory for the values that the file delivers, never for what its header promises.
    Format: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database", section "File formats".

    Args:
        path: the file.

    Returns:
        uint8, of rank 1 to 4, at least one value, writable.

    Raises:
        ValueError: naming the file: it cannot be read, is not such a file, or is damaged.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait forever
            kind = "a directory" if os.path.isdir(path) else "not a regular file"
            raise ValueError(f"{path} is {kind}; name an IDX file, gzipped or not.")
        with open(path, "rb") as file:
            magic = file.read(2)
            file.seek(0)
            file_bytes = os.fstat(file.fileno()).st_size
            if magic == _GZIP_MAGIC:
                return _read_gzip(file, path, file_bytes)
            return _read_values(file, path, file_bytes, f"but it has only {file_bytes:,}")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name an IDX file, gzipped or not.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read_gzip(file: IO[bytes], path: str | os.PathLike[str], file_bytes: int) -> np.ndarray:
    limit, why = file_bytes * _MAX_RATIO, f"which {file_bytes:,} gzipped bytes cannot hold"
    if limit > MAX_GZIP_BYTES:
        limit, why = MAX_GZIP_BYTES, f"above {MAX_GZIP_BYTES:,} unpack it first, with gunzip"
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            return _read_values(stream, path, limit, why)  # type: ignore[arg-type]
    except EOFError:
        raise ValueError(f"{path} is a truncated gzip file; fetch it again.") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a corrupt gzip file ({error}); fetch it again.") from None


def _read_values(
    stream: IO[bytes], path: str | os.PathLike[str], limit: int, why: str
) -> np.ndarray:
    """Reads the whole stream, which can hold `limit` bytes at most, for the reason `why`."""
    shape = _read_header(stream, path)
    size = math.prod(shape)
    promise = f"{path}: its header promises {' x '.join(map(str, shape))} = {size:,} bytes"
    if size > limit:
        raise ValueError(f"{promise}, {why}; if it is truncated or damaged, fetch it again.")
    values = bytearray()
    # Up to one byte more than promised, which is one too many.
    while chunk := stream.read(min(_CHUNK, size + 1 - len(values))):
        values += chunk
    if len(values) < size:
        raise ValueError(f"{promise}, but it ends after {len(values):,}; fetch it again.")
    if len(values) > size:
        raise ValueError(f"{promise}, but more follow; it is damaged, fetch it again.")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _read_header(stream: IO[bytes], path: str | os.PathLike[str]) -> tuple[int, ...]:
    magic = stream.read(4)
    if len(magic) < 4:
        raise ValueError(f"{path} has only {len(magic)} bytes, too few for an IDX file's header.")
    zeros, code, rank = magic[:2], magic[2], magic[3]
    if zeros == b"\0\0" and code in _OTHER_TYPES and 1 <= rank <= _MAX_RANK:
        raise ValueError(
            f"{path} holds {_OTHER_TYPES[code]} values; only IDX files of unsigned bytes "
            "(uint8) are read, use dataset=npz for others."
        )
    if zeros != b"\0\0" or code != _UINT8 or not 1 <= rank <= _MAX_RANK:
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes: it begins with {magic.hex(' ')}, not "
            "with 00 00 08 01 (labels) or 00 00 08 03 (images)."
        )
    sizes = stream.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise ValueError(f"{path} is truncated: it ends within its header; fetch it again.")
    shape = struct.unpack(f">{rank}I", sizes)
    if 0 in shape:
        raise ValueError(f"{path}: no examples: its header says {' x '.join(map(str, shape))}.")
    return shape
