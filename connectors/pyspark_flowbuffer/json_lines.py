"""Rows as JSON lines, a column at a time.

The text is what Spark's own JSON files have: fields that are null are left out, times are in UTC
with a Z, NaN and the infinities are strings, bytes are base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

__all__ = ["encode_json_lines", "unsupported_in_json"]

_WIDE = pa.large_string()
_CONTROL = r"[\x00-\x1f]"
_SHORT = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_NOT_FINITE = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


def encode_json_lines(table: pa.Table) -> pa.Buffer:
    """Return the rows as UTF-8 text, one JSON object in each line."""
    batches = table.combine_chunks().to_batches()
    return _concatenated([_lines(batch) for batch in batches if batch.num_rows])


def unsupported_in_json(kind: pa.DataType) -> bool:
    """Say whether values of a type cannot be written; a map's keys become names."""
    if pat.is_map(kind):
        return not _is_plain(kind.key_type) or unsupported_in_json(kind.item_type)
    if pat.is_nested(kind):
        return any(unsupported_in_json(kind.field(i).type) for i in range(kind.num_fields))
    return not (_is_plain(kind) or pat.is_binary(kind))


def _is_plain(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in _PLAIN)


_PLAIN = (
    pat.is_string,
    pat.is_integer,
    pat.is_boolean,
    pat.is_floating,
    pat.is_decimal,
    pat.is_date,
    pat.is_timestamp,
    pat.is_null,
)


def _lines(batch: pa.RecordBatch) -> pa.Array:
    objects = _object(batch.schema.names, batch.columns, len(batch))
    return _wrapped("", objects, "\n")


def _concatenated(arrays: Sequence[pa.Array]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    for array in arrays:
        _, offsets, data = array.buffers()
        starts = memoryview(offsets).cast("i" if pat.is_string(array.type) else "q")
        first, last = starts[array.offset], starts[array.offset + len(array)]
        if last > first:
            sink.write(data.slice(first, last - first))
    return sink.getvalue()


def _object(names: Sequence[str], columns: Sequence[pa.Array], rows: int) -> pa.Array:
    """Join ``,"name":value`` of all columns, of which a null has nothing, without the first comma.

    (Arrow's own way to skip nulls loses the rows in which everything is null.)
    """
    fields = [_field(name, column) for name, column in zip(names, columns, strict=True)]
    if not fields:
        return pa.array(["{}"] * rows, _WIDE)
    return _wrapped("{", pc.ascii_ltrim(_glued(fields, ""), characters=","), "}")


def _field(name: str, column: pa.Array) -> pa.Array:
    before = f",{json.dumps(name, ensure_ascii=False)}:"
    return pc.fill_null(_wrapped(before, _values(column), ""), "")


def _wrapped(before: str, texts: pa.Array, after: str) -> pa.Array:
    return _glued([_text(before), texts, _text(after)], "")


def _glued(parts: Sequence[pa.Array | pa.Scalar], separator: str) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _text(separator))


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, _WIDE)


def _values(column: pa.Array) -> pa.Array:
    """Return each value as JSON; nulls stay nulls."""
    kind = column.type
    if pat.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        columns = [column.field(i) for i in range(kind.num_fields)]
        texts = _object(names, columns, len(column))
        return _null_where(column, texts)
    if pat.is_map(kind):
        return _map(column)
    if pat.is_list(kind) or pat.is_large_list(kind):
        elements = pc.fill_null(_values(column.flatten()), "null")
        return _joined(column, elements, "[", "]")
    if pat.is_string(kind) or pat.is_large_string(kind):
        return _quoted(column)
    if pat.is_binary(kind):
        encoded = [None if v is None else base64.b64encode(v).decode() for v in column.to_pylist()]
        return _wrapped('"', pa.array(encoded, _WIDE), '"')
    texts = _plain_texts(column)
    if pat.is_date(kind) or pat.is_timestamp(kind):
        return _wrapped('"', texts, '"')
    return _float_texts(texts) if pat.is_floating(kind) else texts


def _plain_texts(column: pa.Array) -> pa.Array:
    """Return each value as text without quotes."""
    if pat.is_timestamp(column.type):
        zoned = column.type.tz is not None
        plain = column.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us")) if zoned else column
        texts = pc.replace_substring(plain.cast(pa.string()), " ", "T")
        return _wrapped("", texts.cast(_WIDE), "Z" if zoned else "")
    return column.cast(_WIDE)


def _map(column: pa.Array) -> pa.Array:
    kind = column.type
    as_list = column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    entries = as_list.flatten()
    keys = entries.field("key")
    texts = keys if pat.is_string(keys.type) else _plain_texts(keys)
    items = pc.fill_null(_values(entries.field("value")), "null")
    pairs = _glued([_quoted(texts), items], ":")
    return _joined(as_list, pairs, "{", "}")


def _joined(column: pa.Array, elements: pa.Array, before: str, after: str) -> pa.Array:
    """Join the elements of each list; they must be those of ``flatten``, in order."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    lists = pa.LargeListArray.from_arrays(offsets, elements)
    joined = pc.binary_join(lists, _text(","))
    return _null_where(column, _wrapped(before, joined, after))


def _null_where(column: pa.Array, texts: pa.Array) -> pa.Array:
    if not column.null_count:
        return texts
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, _WIDE))


def _float_texts(texts: pa.Array) -> pa.Array:
    for plain, quoted in _NOT_FINITE.items():
        texts = pc.if_else(pc.equal(texts, plain), _text(quoted), texts)
    # Without a point a reader that infers types would take a column for whole numbers.
    is_whole = pc.match_substring_regex(texts, r"^-?[0-9]+$")
    return pc.if_else(is_whole, _wrapped("", texts, ".0"), texts)


def _quoted(texts: pa.Array) -> pa.Array:
    texts = pc.replace_substring(texts.cast(_WIDE), "\\", "\\\\")
    texts = pc.replace_substring(texts, '"', '\\"')
    if pc.any(pc.match_substring_regex(texts, _CONTROL)).as_py():
        for code in range(32):
            escaped = _SHORT.get(code, f"\\u{code:04x}")
            texts = pc.replace_substring(texts, chr(code), escaped)
    return _wrapped('"', texts, '"')
