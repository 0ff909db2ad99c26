"""A kv_cache that is a state of the graph: how K/V are written into it, and what attention then sees.

A cache [slots, 1, kv_heads, columns, head_dim] is one state for keys and one for values; slot i of a layer type is its
i-th layer that owns K/V. No write is indexed by data, which the first system releases could not do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING, TextConfig
from workflow_scripts.model.attention import KeyValue

Place = Callable[[Tensor, Tensor], Tensor]
"""(old [..., columns, head_dim], rows of the current positions [..., S, head_dim]) -> a new tensor of both."""


@dataclass(frozen=True)
class Columns:
    """How rows go into the columns of a cache: what the state becomes, and what attention sees meanwhile."""

    write: Place
    see: Place


class StateCaches:
    """The caches of both layer types; what `Decoder.walk` calls for the K/V of each layer that owns some.

    The states are read as they were before the call, and written once, at its end: a write of one slot among several
    becomes a rewrite of the whole state in the converter, or none that the Linux runtime could read (measured).
    """

    def __init__(
        self, config: TextConfig, caches: Mapping[str, KeyValue], columns: Mapping[str, Columns]
    ) -> None:
        self._config, self._caches, self._columns = config, caches, columns
        self._rows: dict[str, list[KeyValue]] = {kind: [] for kind in caches}

    def __call__(self, layer: int, new: KeyValue) -> KeyValue:
        """Take the current K/V of a layer, in the order of the layers; return all that it and its sharers see."""
        kind = self._config.layer_types[layer]
        slot, cache, see = len(self._rows[kind]), self._caches[kind], self._columns[kind].see
        self._rows[kind].append(new)
        return KeyValue(see(cache.key[slot], new.key), see(cache.value[slot], new.value))

    def write(self) -> None:
        """Write what was taken into the states."""
        for kind, rows in self._rows.items():
            cache, write = self._caches[kind], self._columns[kind].write
            cache.key.copy_(write(cache.key, torch.stack([row.key for row in rows])))
            cache.value.copy_(write(cache.value, torch.stack([row.value for row in rows])))


class UnifiedCaches:
    """Both layer types in one cache: the sliding slots first, every head zero-padded to the widest.

    One position per call, in column `count` - 1; column c holds position c. Each layer's row is written by itself, as a
    slice (the converter takes index_copy only along static dimensions): all else of the state stays where it is.
    """

    def __init__(self, config: TextConfig, cache: KeyValue, count: int | torch.SymInt) -> None:
        self._config, self._cache, self._count = config, cache, count
        self._slots = config.slots(SLIDING) + config.slots(FULL)

    def __call__(self, layer: int, new: KeyValue) -> KeyValue:
        """Write the current K/V of a layer and return all columns of its slot."""
        slot, head_dim = self._slots.index(layer), self._config.layer_head_dim(layer)
        seen = []
        for cache, row in zip(self._cache, new, strict=True):
            missing = cache.shape[-1] - head_dim
            wide = nn.functional.pad(row, (0, missing)) if missing else row
            cache[slot : slot + 1, :, :, self._count - 1 : self._count] = wide[None]
            seen.append(cache[slot][..., :head_dim] if missing else cache[slot])
        return KeyValue(*seen)


def block_columns(first: int | torch.SymInt, end: int | torch.SymInt) -> Columns:
    """Column c holds position c; the rows go to the columns `first` up to `end`."""

    def place(old: Tensor, rows: Tensor) -> Tensor:
        return torch.slice_scatter(old, rows, -2, first, end)

    return Columns(place, place)


def chosen_column(column: Tensor, numbers: Tensor) -> Columns:
    """One row goes to the column that `column` [1] int32 names; `numbers` are all columns', in order."""
    written = (numbers == column)[:, None]

    def place(old: Tensor, rows: Tensor) -> Tensor:
        return torch.where(written, rows, old)

    return Columns(place, place)


def blended_column(write_mask: Tensor) -> Columns:
    """One row goes to the column where `write_mask` [1, 1, 1, columns] is 1, and not 0."""
    taken = write_mask.transpose(-1, -2)
    kept = 1 - taken

    def place(old: Tensor, rows: Tensor) -> Tensor:
        return old * kept + rows * taken

    return Columns(place, place)


class Ring(nn.Module):
    """A cache of W columns where position p is in column p % W.

    The remainder is a table look-up: other ways convert to nothing, or to wrong numbers. The columns' `numbers`, and
    those of a second round, are buffers: the converter folds an arange of fixed length, and its sums, into new
    constants that escape content naming (measured at 512 columns; constants under 256 elements hide it).
    """

    def __init__(self, window: int, positions: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("numbers", torch.arange(window, dtype=torch.int32))
        self.register_buffer("second_round", self.numbers + window)
        self.register_buffer("column", torch.arange(positions, dtype=torch.int32) % window)

    def column_of(self, position: Tensor) -> Tensor:
        """[1] int32 -> its column, [1] int32."""
        return torch.index_select(self.column, 0, position)

    def held_before(self, position: Tensor) -> Tensor:
        """The position in each column before `position` [1] comes, [W] int32; negative where there is none yet."""
        return position - self.window + self._ahead(position)

    def block_columns(self, first: Tensor, last: Tensor) -> Columns:
        """The rows are the positions `first` to `last`, each [1] int32: at most W.

        Attention sees the ring as it was, and then the rows: so no row loses a key that a later one overwrites.
        """
        ahead = self._ahead(first)
        written = ahead <= last - first
        source = torch.where(written, ahead, 0)

        def write(old: Tensor, rows: Tensor) -> Tensor:
            return torch.where(written[:, None], torch.index_select(rows, rows.dim() - 2, source), old)

        return Columns(write, see=lambda old, rows: torch.cat([old, rows], -2))

    def _ahead(self, position: Tensor) -> Tensor:
        """How many columns after that of `position` each column is, going around: [W] int32 in 0..W-1."""
        start = self.column_of(position)
        return torch.where(self.numbers < start, self.second_round, self.numbers) - start


class LongColumn(nn.Module):
    """The column of one position where both layer types have one for each of `positions`; all is static."""

    def __init__(self, window: int, positions: int) -> None:
        super().__init__()
        self.window = window
        # A buffer, as in `Ring`.
        self.register_buffer("numbers", torch.arange(positions, dtype=torch.int32))

    def seen(self, position: Tensor) -> dict[str, Tensor]:
        """Layer type -> which columns the position [1] sees, its own among them: bool [1, columns]."""
        full = (self.numbers <= position)[None]
        return {SLIDING: full & (position - self.numbers < self.window)[None], FULL: full}

    def columns(self, position: Tensor) -> dict[str, Columns]:
        """Layer type -> the column of the position [1]."""
        return dict.fromkeys((SLIDING, FULL), chosen_column(position, self.numbers))


class RingColumn(nn.Module):
    """As `LongColumn`, but the sliding layers have rings of the window's size."""

    def __init__(self, window: int, positions: int) -> None:
        super().__init__()
        self.ring = Ring(window, positions)
        # A buffer, as in `Ring`.
        self.register_buffer("numbers", torch.arange(positions, dtype=torch.int32))

    def seen(self, position: Tensor) -> dict[str, Tensor]:
        """Layer type -> which columns the position [1] sees, its own among them: bool [1, columns].

        Column r of a ring holds a position of the window as soon as position r has come: no remainder needed.
        """
        return {SLIDING: (self.ring.numbers <= position)[None], FULL: (self.numbers <= position)[None]}

    def columns(self, position: Tensor) -> dict[str, Columns]:
        """Layer type -> the column of the position [1]."""
        return {
            SLIDING: chosen_column(self.ring.column_of(position), self.ring.numbers),
            FULL: chosen_column(position, self.numbers),
        }
