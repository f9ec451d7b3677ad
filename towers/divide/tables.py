"""Rules of lookups and counts, of whose results TensorFlow's shape inference knows nothing."""

from towers.divide.facts import OWN, WHOLE, Each, rows, rows_of
from towers.divide.rule import Look, Rule, rule

TABLES: dict[str, Rule] = {}
_CHANGES = ("LookupTableInsertV2", "LookupTableImportV2", "LookupTableRemoveV2")


@rule("LookupTableFindV2", table=TABLES)
def table_entries(look: Look) -> Each | None:
    """Looks up each key, in a table that the step does not change."""
    default = look.inputs[2].shape
    operations = look.op.source.graph.get_operations()
    is_changed = any(operation.type in _CHANGES for operation in operations)
    if look.fact(1).kind != "rows" or default.rank != 0 or is_changed:
        return None
    return look.each([WHOLE, OWN, WHOLE], look.fact(1), shapes=[look.probes.shapes(look.inputs[1])])


@rule("DenseBincount", table=TABLES)
def counts_of_each_row(look: Look) -> Each | None:
    """Counts the numbers in each row of a matrix, of as many kinds as the trace knows."""
    dims, out = look.dims(0), look.outputs[0].shape
    num_kinds = out[-1] if out.rank else None
    if dims is None or len(dims) != 2 or look.fact(0) != rows(0) or num_kinds is None:
        return None
    is_weighed = look.inputs[2].shape.num_elements() != 0
    weights = rows_of(0) if is_weighed else WHOLE
    return look.each([OWN, WHOLE, weights], rows(0), shapes=[[[n, num_kinds] for n in dims[0]]])
