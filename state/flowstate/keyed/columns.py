"""State of one value per key as Arrow columns: found, changed and written many keys at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from flowstate.checkpoint.identity import codes_of

__all__ = ["ValueColumns"]

_Places = npt.NDArray[np.int64]


class ValueColumns:
    """Keys, each once, and their values; a null is what a key has that holds nothing.

    There is no index that lasts. A look-up numbers all keys, those here and those asked for, in
    one pass of Arrow's: so it costs some nanoseconds for each key that is here, too. That is
    little where a batch touches a fair part of the state, and bounded where the state is small.
    """

    def __init__(self, key_type: pa.DataType, value_type: pa.DataType) -> None:
        self.keys: pa.Array = pa.array([], key_type)
        self.values: pa.Array = pa.array([], value_type)
        self._dirty = np.zeros(0, np.bool_)
        self._sought: pa.Array | None = None
        self._found: _Places = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        """How much memory the keys and values take."""
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def present_count(self) -> int:
        """How many keys hold something."""
        return len(self.keys) - int(self.values.null_count)

    @property
    def changed_count(self) -> int:
        """How many keys have been put since ``settle``."""
        return int(np.count_nonzero(self._dirty))

    def get(self, keys: pa.Array) -> pa.Array:
        """Return the value of each key, or null."""
        places = self._places(keys)
        return self.values.take(pa.array(places, mask=places >= len(self.keys)))

    def put(self, keys: pa.Array, values: pa.Array) -> None:
        """Set the value of each key; null empties it. Of a key given twice the last one stays."""
        places, old = self._places(keys), len(self.keys)
        size = max(old, int(places.max(initial=-1)) + 1)
        self._dirty = np.concatenate((self._dirty, np.zeros(size - old, np.bool_)))
        self._dirty[places] = True
        # numpy assigns in order, so of several values for one place the last remains.
        sources = np.arange(size)
        sources[places] = np.arange(len(places)) + old
        self.values = pa.concat_arrays([self.values, values]).take(pa.array(sources))
        if size > old:
            firsts = pa.array(sources[old:] - old)
            # In the order of their numbers, so that what was found is right from now on, too.
            self.keys = pa.concat_arrays([self.keys, keys.take(firsts)])

    def load(self, keys: pa.Array, values: pa.Array) -> None:
        """Put what a checkpoint has, each key once, so that it is no change."""
        if len(self.keys):
            self.put(keys, values)
        else:
            self.keys, self.values, self._sought = keys, values, None
        self.settle()

    def changes(self) -> tuple[pa.Array, pa.Array]:
        """Return what has been put since ``settle``."""
        changed = pa.array(np.flatnonzero(self._dirty))
        return self.keys.take(changed), self.values.take(changed)

    def settle(self) -> None:
        """Take note that the changes are written, and forget the keys that hold nothing."""
        if self.values.null_count:
            there = self.values.is_valid()
            self.keys, self.values = self.keys.filter(there), self.values.filter(there)
            self._sought = None
        self._dirty = np.zeros(len(self.keys), np.bool_)

    def unsettle(self, keys: pa.Array) -> None:
        """Take note that what was written of these keys is void."""
        self.put(keys, self.get(keys))

    def present(self) -> pa.Array:
        """Return the keys that hold something."""
        return self.keys.filter(self.values.is_valid()) if self.values.null_count else self.keys

    def _places(self, keys: pa.Array) -> _Places:
        """Return where each key is; those that are new get the places behind, as they come."""
        if keys is not self._sought:
            numbers = codes_of(pa.concat_arrays([self.keys, keys])).numbers
            if pat.is_nested(keys.type):
                # Those of nested keys are not in the order in which the keys come first.
                encoded = pc.dictionary_encode(pa.array(numbers))
                numbers = encoded.indices.to_numpy().astype(np.int64)
            self._sought, self._found = keys, numbers[len(self.keys) :]
        return self._found
