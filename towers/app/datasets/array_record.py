"""ArrayRecord files: any record by its index, read by processes that open the files themselves."""

from towers.app.datasets import pixels
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.random_access import from_source
from towers.app.datasets.record_files import find, import_features
from towers.app.reading.array_records import ArrayRecords

SUFFIX = ".array_record"


def load(data_dir: str | None, features: str | None) -> Dataset:
    """The records below a directory, each parsed when its turn comes.

    Args:
        data_dir: the directory, see `record_files`.
        features: "package.module:function", bytes -> (x, y), NumPy arrays or structures of them.
            Where y is one integer, its module's NUM_CLASSES is the number of labels.

    Raises:
        ValueError: a file cannot be read, or the first record cannot be parsed.
    """
    files = find("array_record", data_dir, SUFFIX)
    _, num_classes = import_features("array_record", features)
    assert features is not None
    train, test = (
        from_source(ArrayRecords(files.paths(names), features), where, num_classes)
        for names, where in (
            (files.train, f"{files.directory} (train)"), (files.test, f"{files.directory} (test)")
        )
    )
    found = pixels.notes(*(split.structure[0] for split in (train, test)))
    parts = pixels.divided_parts(train.structure[0])
    return Dataset(
        "array_record", train, test, num_classes or 1, train.shape, found, divided=parts
    )
