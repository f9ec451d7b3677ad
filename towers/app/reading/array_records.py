"""ArrayRecord files as one source: record i, wherever it is, parsed."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from towers.app import named
from towers.app.named import one_line


class ArrayRecords:
    """The records of several files, one after the other.

    It is pickled by its files' names: each process opens them for itself.
    """

    def __init__(self, paths: Sequence[str], features: str) -> None:
        """
        Args:
            paths: the files.
            features: "package.module:function", bytes -> (x, y).

        Raises:
            ValueError: a file cannot be read, or the package array_record is missing.
        """
        try:
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError:
            raise ValueError(
                "dataset=array_record needs the package array_record: "
                "pip install 'tf-towers[data]'."
            ) from None
        self._given = list(paths), features
        self._parse = named.import_function(features, "features")
        self._readers: list[Any] = []
        for path in paths:
            reader = ArrayRecordReader(path)
            try:
                if not reader.ok():
                    reader.close()  # which raises what is wrong
            except Exception as error:  # it raises RuntimeError for everything
                raise ValueError(
                    f"{path} cannot be read: {one_line(error)}; copy it again."
                ) from None
            self._readers.append(reader)
        self._ends = list(accumulate(reader.num_records() for reader in self._readers))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        file = bisect_right(self._ends, index)
        begin = self._ends[file - 1] if file else 0
        (record,) = self._readers[file].read([index - begin])
        return self._parse(record)

    def __reduce__(self) -> Any:
        return ArrayRecords, self._given

    def identity(self) -> Iterator[bytes]:
        """The files' names and sizes, wherever their directory lies."""
        for path in self._given[0]:
            yield os.fsencode(f"{os.path.basename(path)}\0{os.path.getsize(path)}\0")
