"""How large an image is, from the first bytes of its file: nothing is decoded.

    PNG, JPEG, GIF, BMP  ->  (height, width, 1 or 3 channels)
"""

import struct
from pathlib import Path
from typing import BinaryIO

Shape = tuple[int, int, int]

_ENOUGH = 32  # bytes: where PNG, GIF and BMP say it
_GRAY_PNG = (0, 4)  # color types: gray, and gray with transparency
# JPEG's frame headers, which say it; 0xC4, 0xC8 and 0xCC are no frames (ITU T.81, table B.1).
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length


def header_shape(path: Path) -> Shape | None:
    """What a file's header says; None where it cannot be read, or is of none of the four kinds."""
    try:
        with path.open("rb") as file:
            head = file.read(_ENOUGH)
            shape = _jpeg(file) if head.startswith(b"\xff\xd8") else _fixed(head)
    except (OSError, struct.error):
        return None
    return shape if shape is not None and min(shape) > 0 else None


def _fixed(head: bytes) -> Shape | None:
    """Of the kinds that say it at a fixed place."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height, _, color = struct.unpack_from(">IIBB", head, 16)
        return height, width, 1 if color in _GRAY_PNG else 3
    if head.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", head, 6)
        return height, width, 3
    if head.startswith(b"BM"):
        width, height, _, bits = struct.unpack_from("<iiHH", head, 18)
        return abs(height), width, 1 if bits == 8 else 3  # TensorFlow takes 8 bits for gray
    return None


def _jpeg(file: BinaryIO) -> Shape | None:
    """Of JPEG, which says it after any number of segments: a marker, a length, that many bytes."""
    file.seek(2)
    while True:
        fill, marker = struct.unpack(">BB", file.read(2))
        if fill != 0xFF:
            return None
        while marker == 0xFF:
            (marker,) = struct.unpack(">B", file.read(1))
        if marker in _ALONE:
            continue
        (length,) = struct.unpack(">H", file.read(2))
        if marker in _FRAMES:
            _, height, width, channels = struct.unpack(">BHHB", file.read(6))
            return height, width, 1 if channels == 1 else 3
        if length < 2:
            return None
        file.seek(length - 2, 1)
