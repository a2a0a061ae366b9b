"""The headers of a Parquet part's pages: what a reader is about to make room for, whatever the footer says.

pyarrow and DuckDB take the sizes that a page declares for true. A file of a few kilobytes can declare pages of
gigabytes, and a footer that knows nothing of them. The headers are Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow.parquet as pq

#: Bytes in which a header begins that is no longer than most, and those of the longest.
_FIRST_LOOK, _LONGEST = 512, 1 << 20
_DICTIONARY = 2
_NESTED = 8  #: structures within structures; a page header has three
_WIDEST = 63  #: bits of a number
#: Pages of a column in one row group; a writer makes one for each mebibyte, or for 20,000 rows.
_MOST_PAGES = 4096
_FALSE, _TRUE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 2, 1, 3, 7, 8, 9, 10, 12
_NUMBERS = frozenset({4, 5, 6})


class ColumnPage(NamedTuple):
    """One page of a column."""

    is_dictionary: bool
    size: int  #: bytes, not compressed, without its header
    values: int


class Chunk(NamedTuple):
    """The pages of one column in one row group, summed up."""

    dictionary: int = 0  #: bytes of its dictionary
    pages: int = 0  #: bytes of all its pages
    values: int = 0


def chunk_of(file: BinaryIO, column: pq.ColumnChunkMetaData) -> Chunk:
    """Sums up the sizes and values that the pages of a column declare.

    Raises:
        ValueError: they are no pages, or declare more than the footer does.
    """
    found = Chunk()
    for number, page in enumerate(_pages(file, column)):
        if number >= _MOST_PAGES:
            raise ValueError(f"its column {column.path_in_schema!r} has more than {_MOST_PAGES:,} pages")
        if page.is_dictionary:
            found = found._replace(dictionary=found.dictionary + page.size, pages=found.pages + page.size)
        else:
            found = found._replace(pages=found.pages + page.size, values=found.values + page.values)
        if found.pages > column.total_uncompressed_size or found.values > column.num_values:
            raise ValueError(f"pages of its column {column.path_in_schema!r} declare more than its footer")
    return found


def _pages(file: BinaryIO, column: pq.ColumnChunkMetaData) -> Iterator[ColumnPage]:
    begins = column.data_page_offset
    if column.has_dictionary_page:
        if not 0 < column.dictionary_page_offset < begins:
            raise ValueError(f"the dictionary of its column {column.path_in_schema!r} lies elsewhere")
        begins = column.dictionary_page_offset
    end = begins + column.total_compressed_size
    while begins < end:
        page, begins = _page(file, begins)
        yield page


def _page(file: BinaryIO, at: int) -> tuple[ColumnPage, int]:
    """The page at a place of the file, and where the next one begins."""
    for length in (_FIRST_LOOK, _LONGEST):
        file.seek(at)
        reader = _Reader(file.read(length))
        try:
            header = reader.struct()
        except IndexError:
            continue
        told: dict[int, Any] = next(
            (header[number] for number in (5, 7, 8) if isinstance(header.get(number), dict)), {}
        )
        found = [each for each in (*map(header.get, (1, 2, 3)), told.get(1)) if isinstance(each, int) and each >= 0]
        if len(found) < 4:
            break
        kind, size, compressed, values = found
        return ColumnPage(kind == _DICTIONARY, size, values), at + reader.place + compressed
    raise ValueError(f"there is no page header at byte {at}")


class _Reader:
    """Reads one structure of the compact protocol; raises IndexError at the end of what it is given."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.place = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Reads a structure's fields by number; what is neither a whole number nor a structure is passed over."""
        if depth > _NESTED:
            raise ValueError("its page headers are nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _NUMBERS:
            return self._number()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_TRUE, _FALSE):
            return None
        if kind in (_BYTE, _DOUBLE, _BINARY):
            self._pass({_BYTE: 1, _DOUBLE: 8}.get(kind) or self._varint())
            return None
        if kind not in (_LIST, _SET):
            raise ValueError(f"its page headers hold a field of kind {kind}")
        head = self._byte()
        for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
            self._element(head & 15, depth)
        return None

    def _element(self, kind: int, depth: int) -> None:
        if kind in (_TRUE, _FALSE):  # a byte each, where it is not a field
            self._pass(1)
        else:
            self._value(kind, depth + 1)

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > _WIDEST:
                raise ValueError("its page headers hold a number that is too long")

    def _byte(self) -> int:
        byte = self._content[self.place]
        self.place += 1
        return byte

    def _pass(self, count: int) -> None:
        self.place += count
        if self.place > len(self._content):
            raise IndexError
