"""The KV cache as a grid: a block is a cell in its owner's colour, filled as far as its slots are; or a cell is many blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from aioengine_tui.model.blocks import ALLOCATED, EMPTY, FREE_CACHED, RELEASED, SHARED, USED
from aioengine_tui.model.owner_marks import OwnerMark
from aioengine_tui.widgets.block_layout import GridLayout
from aioengine_tui.widgets.glyphs import BLOCK_GLYPHS, EIGHTHS, EVICTED, LIT, PLACE
from aioengine_tui.widgets.text import Line, Part, clean, fit, fit_middle

LEFT_EIGHTHS = " ▏▎▍▌▋▊▉"
_OWNED = frozenset({USED, SHARED, ALLOCATED})
_IS_OWNED = bytes(code in _OWNED for code in range(256))
_MIXED = "block_mixed"


@dataclass(frozen=True, slots=True)
class GridContent:
    """What is drawn. codes: one state code a block, block 1 first; everything else is by block id, and need not be known."""

    codes: bytes
    marks: Mapping[int, OwnerMark] = field(default_factory=dict)  # of the first owner
    block_size: int | None = None
    fills: Mapping[int, int] = field(default_factory=dict)  # slots in use, of owned blocks that are not full
    ref_cnts: Mapping[int, int] = field(default_factory=dict)  # of blocks with several owners
    places: Mapping[int, int] = field(default_factory=dict)  # of free blocks: 1 is taken next
    evicted: frozenset[int] = frozenset()  # lost their cached content in the latest step
    lit: frozenset[int] = frozenset()  # blocks of the selected request, or of a KV-cache group
    hashes: Mapping[int, str] = field(default_factory=dict)  # read for large cells only


CellLooks = dict[tuple[bytes, bytes], tuple[str, str]]
"""Glyph and role of cells of many blocks, by the codes and the colours of their blocks: most cells are as in the picture before."""

_MAX_KEPT_LOOKS = 20_000


def grid_lines(
    content: GridContent, layout: GridLayout, *, cursor: int | None = None, with_places: bool = False, looks: CellLooks | None = None
) -> list[Line]:
    """The cells as lines. cursor: a block id, whose cell is drawn reversed. with_places: small cells show the order of eviction.

    looks: kept by the caller from picture to picture, and filled here.
    """
    cursor_cell = layout.cell_of(cursor) if cursor is not None and 1 <= cursor <= layout.num_blocks else -1
    painter = _Painter(content, layout, with_places)
    kept = looks if looks is not None and layout.per_cell > 1 and not with_places and not content.lit else None
    if kept is not None and len(kept) > _MAX_KEPT_LOOKS:
        kept.clear()
    lines: list[Line] = []
    for start in range(0, layout.num_cells, layout.columns):
        cells = range(start, min(start + layout.columns, layout.num_cells))
        label = f"{layout.blocks_of(start).start:>{layout.gutter - 1}} " if layout.gutter else ""
        if layout.inner_width == 1:
            row = [painter.small(cell) for cell in cells] if kept is None else painter.small_row(cells, kept)
            if cursor_cell in cells:
                glyph, role = row[cursor_cell - start]
                level = EIGHTHS.find(glyph)  # a full cell would be all ground: the number of eighths is never blank
                row[cursor_cell - start] = (str(level) if level > 0 else glyph, role + "^")
            lines.append([Part(label, "muted"), *_run_lengths(row)])
            continue
        rows: list[Line] = [[Part(label if y == 0 else " " * layout.gutter, "muted")] for y in range(layout.cell_height)]
        for cell in cells:
            for y, parts in enumerate(painter.large(cell + 1)):
                is_lit = cell == cursor_cell and y < layout.inner_height
                rows[y] += [Part(text, role + "^") for text, role in parts] if is_lit else parts
                rows[y].append(Part(" " * layout.gap))
        lines += rows
    return lines


class _Painter:
    def __init__(self, content: GridContent, layout: GridLayout, with_places: bool) -> None:
        self._content = content
        self._layout = layout
        self._places = content.places if with_places else {}
        self._owned = content.codes.translate(_IS_OWNED)  # 1: somebody has the block; block 1 first
        colours = bytearray(len(content.codes))
        if layout.per_cell > 1:
            for block_id, mark in content.marks.items():
                colours[block_id - 1] = mark.colour + 1
        self._colours = bytes(colours)  # 0: nobody has it, else the colour of its first owner, plus 1

    # ------------------------------------------------------------------ one character
    def small(self, cell: int) -> tuple[str, str]:
        """Glyph and role."""
        return self._one(cell + 1) if self._layout.per_cell == 1 else self._several(cell)

    def small_row(self, cells: range, kept: CellLooks) -> list[tuple[str, str]]:
        """`small` of cells of many blocks, where nothing is lit and no places are shown: codes and colours say it all."""
        codes, colours, size = self._content.codes, self._colours, self._layout.per_cell
        row: list[tuple[str, str]] = []
        for cell in cells:
            start = cell * size
            key = codes[start : start + size], colours[start : start + size]
            look = kept.get(key)
            if look is None:
                look = kept[key] = self._several(cell)
            row.append(look)
        return row

    def _one(self, block_id: int) -> tuple[str, str]:
        content = self._content
        code = content.codes[block_id - 1]
        if code not in _OWNED:
            place = self._places.get(block_id)
            return _looks(code) if place is None else (self._decile(place), "place")
        mark = content.marks.get(block_id)
        ground, ink = _owner_roles(mark)
        if block_id in content.lit:
            return LIT, ground
        if code == ALLOCATED:
            return EVICTED if block_id in content.evicted else BLOCK_GLYPHS["allocated"], ground
        if (ref_cnt := content.ref_cnts.get(block_id, 1)) > 1:
            return _digit(ref_cnt), ground
        filled = content.fills.get(block_id)
        if filled is not None and content.block_size:
            return EIGHTHS[max(1, filled * 8 // content.block_size)], ink
        return (mark.letter if mark is not None else BLOCK_GLYPHS["used"]), ground

    def _several(self, cell: int) -> tuple[str, str]:
        """What changed a moment ago comes first; then the height says how many are owned, and the colour by whom: one request that
        owns more than half of them, or several."""
        start = cell * self._layout.per_cell
        end = min(start + self._layout.per_cell, self._layout.num_blocks)
        num_owned = self._owned.count(1, start, end)
        if not num_owned:
            if self._places:
                return self._decile(min((self._places[b] for b in range(start + 1, end + 1) if b in self._places), default=0)), "place"
            codes = self._content.codes
            return _looks(next(code for code in (RELEASED, FREE_CACHED, EMPTY) if codes.find(code, start, end) >= 0))
        if self._content.lit and not self._content.lit.isdisjoint(range(start + 1, end + 1)):
            return LIT, "block_lit"
        glyph = EIGHTHS[max(1, num_owned * 8 // (end - start))]
        for colour in set(self._colours[start:end]):
            if colour and self._colours.count(colour, start, end) * 2 > num_owned:
                return glyph, f"owner_{colour - 1}_ink"
        return glyph, _MIXED

    def _decile(self, place: int) -> str:
        """In which tenth of the free queue: 0 goes first."""
        return str(min(9, max(0, place - 1) * 10 // max(1, len(self._content.places))))

    # ------------------------------------------------------------------ several characters
    def large(self, block_id: int) -> list[Line]:
        """`cell_height` lines of `inner_width` characters."""
        layout, content = self._layout, self._content
        width = layout.inner_width
        code = content.codes[block_id - 1]
        texts = list(itertools.islice(self._texts(block_id, code, width), layout.inner_height))
        texts += [""] * (layout.inner_height - len(texts))
        if code in _OWNED:
            ground, ink = _owner_roles(content.marks.get(block_id))
            filled, size = content.fills.get(block_id), content.block_size
            eighths = width * 8 if filled is None or not size else max(1, filled * width * 8 // size)
            lines = [_filled(text, width, eighths, ground, ink) for text in texts]
        else:
            glyph, role = _looks(code)
            blank = glyph if code != EMPTY else " "
            lines = [[Part(_over(text, blank, width), role)] for text in texts]
        return lines + [[Part(" " * width)] for _ in range(layout.cell_height - layout.inner_height)]

    def _texts(self, block_id: int, code: int, width: int) -> Iterator[str]:
        """What is written on a cell, line by line, the most important first."""
        content = self._content
        mark, place = content.marks.get(block_id), content.places.get(block_id)
        if code in _OWNED:
            sign = LIT if block_id in content.lit else mark.letter if mark is not None else ""
            ref_cnt = content.ref_cnts.get(block_id, 1)
            sign += _digit(ref_cnt) if ref_cnt > 1 else ""
            if code == ALLOCATED:
                sign += EVICTED if block_id in content.evicted else BLOCK_GLYPHS["allocated"]
        else:
            sign = "-" if code == RELEASED else BLOCK_GLYPHS["empty"] if code == EMPTY else ""
            if place is not None and (self._places or width >= 8) and width >= len(sign) + len(str(place)) + 1:
                sign += f"{PLACE}{place}"
        label = str(block_id)
        yield sign[:width] if len(sign) + len(label) + 1 > width else sign + label.rjust(width - len(sign))
        if code in _OWNED and mark is not None and width >= 4:
            yield fit_middle(clean(mark.request_id), min(width, len(clean(mark.request_id))))
        elif code not in _OWNED and width >= 6:
            yield {EMPTY: "empty", RELEASED: "freed"}.get(code, "cached")
        if code in _OWNED and content.block_size and width >= 5:
            filled = content.fills.get(block_id, content.block_size)
            text = f"{filled}/{content.block_size}"
            yield text + (" slots" if width >= len(text) + 6 else "")
        if block_id in content.hashes and width >= 8:
            yield content.hashes[block_id][:width]
        if ref_cnt_text := content.ref_cnts.get(block_id):
            yield f"{ref_cnt_text} owners" if width >= 9 else ""


def _owner_roles(mark: OwnerMark | None) -> tuple[str, str]:
    return ("block_used", "block_used") if mark is None else (f"owner_{mark.colour}", f"owner_{mark.colour}_ink")


def _looks(code: int) -> tuple[str, str]:
    return _LOOKS[code]


def _digit(count: int) -> str:
    return str(count) if count < 10 else "+"


def _over(text: str, blank: str, width: int) -> str:
    """The text, with `blank` where it has nothing to say."""
    return fit(text, width).replace(" ", blank) if blank != " " else fit(text, width)


def _filled(text: str, width: int, eighths: int, ground: str, ink: str) -> Line:
    """A line of a cell that is filled from the left: text on the owner's colour, and in it where nothing is filled."""
    text = fit(text, width)
    whole, rest = divmod(min(eighths, width * 8), 8)
    line = [Part(text[:whole], ground)] if whole else []
    if whole < width:
        tail = text[whole:].replace(" ", "·")
        if rest and tail[0] == "·":
            tail = LEFT_EIGHTHS[rest] + tail[1:]
        line.append(Part(tail, ink))
    return line


def _run_lengths(cells: list[tuple[str, str]]) -> Line:
    """One part a run of cells of the same role: fewer segments for the terminal."""
    return [Part("".join(glyph for glyph, _ in run), role) for role, run in itertools.groupby(cells, key=itemgetter(1))]


_LOOKS: dict[int, tuple[str, str]] = {
    EMPTY: (BLOCK_GLYPHS["empty"], "block_empty"),
    FREE_CACHED: (BLOCK_GLYPHS["free_cached"], "block_free_cached"),
    USED: (BLOCK_GLYPHS["used"], "block_used"),
    SHARED: (BLOCK_GLYPHS["shared"], "block_shared"),
    ALLOCATED: (BLOCK_GLYPHS["allocated"], "block_allocated"),
    RELEASED: (BLOCK_GLYPHS["released"], "block_released"),
}


def legend(layout: GridLayout, width: int, *, lit: str = "") -> Line:
    """What the cells mean, as much of it as fits. `lit`: whose blocks are lit, which is said first."""
    cached, empty, released = _LOOKS[FREE_CACHED], _LOOKS[EMPTY], _LOOKS[RELEASED]
    if layout.per_cell == 1:
        partly = "▄" if layout.inner_width == 1 else "▌"
        signs = [
            ("A", "owner_0", "owner"), (partly, "owner_0_ink", "partly full"), ("2", "owner_0", "owners"), (*cached, "free, cached"),
            (*empty, "empty"), (BLOCK_GLYPHS["allocated"], "owner_0", "new"), (EVICTED, "owner_0", "evicted for it"), (*released, "freed"),
            (f"{PLACE}1", "block_free_cached", "taken next"),
        ]  # fmt: skip
    else:
        signs = [
            ("▂▅█", "owner_0_ink", "owned, most by one"), ("▂▅█", _MIXED, "by several"), (*cached, "free, some cached"), (*empty, "empty"),
            (*released, "freed"),
        ]  # fmt: skip
    if lit:
        signs.insert(0, (LIT, "owner_0" if layout.per_cell == 1 else "block_lit", lit))
    line: Line = [Part(f"cell = {layout.per_cell} blocks  ", "muted")] if layout.per_cell > 1 else []
    used = sum(len(part.text) for part in line)
    for glyph, role, words in signs:
        used += len(glyph) + len(words) + 2
        if used <= width:
            line += [Part(glyph, role), Part(f" {words} ", "muted")]
    return line


def owner_legend(marks: Iterable[tuple[OwnerMark, int]], width: int) -> Line:
    """Letter, request and blocks of as many owners as fit; says how many do not."""
    entries = list(marks)
    line: Line = []
    used = 0
    for index, (mark, num_blocks) in enumerate(entries):
        text = f" {clean(mark.request_id)} {num_blocks}  "
        left = len(entries) - index
        if used + 1 + len(text) > width - (9 if left > 1 else 0):
            return [*line, Part(f"… {left} more", "muted")]
        line += [Part(mark.letter, f"owner_{mark.colour}"), Part(text)]
        used += 1 + len(text)
    return line
