"""The grid of KV blocks: cells that fill the screen at any size of the cache, and say what the blocks are."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine_tui.model.blocks import ALLOCATED, EMPTY, FREE_CACHED, RELEASED, SHARED, USED
from aioengine_tui.model.owner_marks import NUM_OWNER_COLOURS, OwnerMark, OwnerMarks
from aioengine_tui.widgets.block_grid import CellLooks, GridContent, grid_lines, legend, owner_legend
from aioengine_tui.widgets.block_layout import GridLayout
from aioengine_tui.widgets.text import line_text, width_of

POEM, LETTER = OwnerMark("poem", 0, "A"), OwnerMark("letter", 1, "B")


def small(content: GridContent, *, cursor: int | None = None, with_places: bool = False) -> str:
    """One row of cells of one character."""
    layout = GridLayout(len(content.codes), columns=len(content.codes), per_cell=1, cell_width=1, cell_height=1, gutter=0)
    return line_text(grid_lines(content, layout, cursor=cursor, with_places=with_places)[0])


# ---------------------------------------------------------------------------------------------------- geometry
@given(st.integers(1, 120_000), st.integers(1, 200), st.integers(1, 58))
def test_every_block_has_a_cell_on_the_screen_and_a_click_finds_it(num_blocks: int, width: int, rows: int) -> None:
    layout = GridLayout.of(num_blocks, width=width, rows=rows)
    cell_rows = -(-layout.num_cells // layout.columns)
    assert cell_rows * layout.cell_height <= rows
    assert layout.gutter + layout.columns * layout.cell_width <= max(width, layout.gutter + 1)
    for block in {1, num_blocks // 2 or 1, num_blocks}:
        cell = layout.cell_of(block)
        assert block in layout.blocks_of(cell)
        x = layout.gutter + cell % layout.columns * layout.cell_width
        y = cell // layout.columns * layout.cell_height
        for corner in ((x, y), (x + layout.cell_width - 1, y + layout.cell_height - 1)):
            assert layout.cell_at(*corner) == cell
    assert layout.cell_at(layout.gutter - 1, 0) is None
    assert sum(len(layout.blocks_of(cell)) for cell in {0, layout.num_cells - 1}) <= num_blocks
    assert not layout.blocks_of(layout.num_cells)


@pytest.mark.parametrize("num_blocks", [16, 40, 119, 256, 1000, 10_000, 100_000])
@pytest.mark.parametrize(("width", "rows"), [(60, 8), (80, 17), (160, 50)])
def test_the_grid_fills_most_of_the_screen(num_blocks: int, width: int, rows: int) -> None:
    layout = GridLayout.of(num_blocks, width=width, rows=rows)
    taken = layout.columns * layout.cell_width * -(-layout.num_cells // layout.columns) * layout.cell_height
    assert taken >= 0.5 * width * rows
    if num_blocks <= width * rows // 2:
        assert layout.per_cell == 1


@pytest.mark.parametrize(("num_blocks", "width", "rows"), [(1, 1, 1), (16, 160, 50), (119, 80, 17), (10_000, 60, 9), (65_536, 160, 40)])
def test_lines_fit_and_name_the_first_block_of_each_row(num_blocks: int, width: int, rows: int) -> None:
    layout = GridLayout.of(num_blocks, width=width, rows=rows)
    lines = grid_lines(GridContent(bytes(num_blocks)), layout)
    assert len(lines) <= rows
    assert all(width_of(line_text(line)) <= width for line in lines)
    if layout.gutter:
        firsts = [int(line_text(line)[: layout.gutter]) for line in lines[:: layout.cell_height]]
        assert firsts == [layout.blocks_of(cell).start for cell in range(0, layout.num_cells, layout.columns)]


# ---------------------------------------------------------------------------------------------------- one character a block
def test_every_state_of_a_block_has_a_sign_of_its_own() -> None:
    content = GridContent(
        bytes([EMPTY, FREE_CACHED, USED, SHARED, ALLOCATED, ALLOCATED, RELEASED, USED, USED]),
        marks={3: POEM, 4: POEM, 5: LETTER, 6: LETTER, 8: LETTER, 9: POEM},
        block_size=16,
        ref_cnts={4: 3},
        fills={8: 4},
        evicted=frozenset({6}),
        lit=frozenset({9}),
    )
    assert small(content) == "·░A3+x-▂#"


def test_the_cell_under_the_cursor_shows_what_it_is() -> None:
    content = GridContent(bytes([EMPTY, USED, FREE_CACHED]), marks={2: POEM})
    for cursor in (1, 2, 3):
        assert small(content, cursor=cursor) == "·A░"
        layout = GridLayout(3, columns=3, per_cell=1, cell_width=1, cell_height=1, gutter=0)
        roles = [part.role for part in grid_lines(content, layout, cursor=cursor)[0] if part.text.strip()]
        assert [role.endswith("^") for role in roles] == [number == cursor for number in (1, 2, 3)]


def test_the_order_of_eviction_is_shown_in_tenths_where_there_is_room_for_no_more() -> None:
    places = {block: 21 - block for block in range(1, 21)}  # block 20 is taken next
    text = small(GridContent(bytes([FREE_CACHED] * 20), places=places), with_places=True)
    assert text == "99887766554433221100"


# ---------------------------------------------------------------------------------------------------- several characters a block
def test_a_large_cell_tells_owner_slots_sharing_and_hash() -> None:
    content = GridContent(
        bytes([SHARED, USED, FREE_CACHED]),
        marks={1: POEM, 2: LETTER},
        block_size=16,
        ref_cnts={1: 2},
        fills={2: 4},
        places={3: 1},
        hashes={1: "cafe0123", 3: "beef4567"},
    )
    layout = GridLayout.of(3, width=39, rows=7)
    texts = [line_text(line) for line in grid_lines(content, layout)]
    cells = [[text[i * layout.cell_width : (i + 1) * layout.cell_width].strip(" ·░") for text in texts] for i in range(3)]
    assert cells[0][:5] == ["A2         1", "poem", "16/16 slots", "cafe0123", "2 owners"]
    assert ["".join(text.split()).replace("·", "") for text in cells[1][:3]] == ["B2", "letter", "4/16slots"]
    assert cells[2][:3] == ["»1░░░░░░░░░3", "cached", "beef4567"]


@pytest.mark.parametrize(("filled", "coloured"), [(1, 0), (8, 5), (12, 8), (16, 11)])
def test_a_cell_is_coloured_as_far_as_its_slots_are_in_use(filled: int, coloured: int) -> None:
    layout = GridLayout(1, columns=1, per_cell=1, cell_width=12, cell_height=1, gutter=0)
    fills = {} if filled == 16 else {1: filled}
    (line,) = grid_lines(GridContent(bytes([USED]), marks={1: POEM}, block_size=16, fills=fills), layout)
    assert sum(len(part.text) for part in line if part.role == "owner_0") == coloured


# ---------------------------------------------------------------------------------------------------- several blocks a cell
def test_a_cell_of_several_blocks_says_how_many_are_owned_and_by_whom() -> None:
    layout = GridLayout(num_blocks=40, columns=5, per_cell=8, cell_width=1, cell_height=1, gutter=0)
    codes = [USED] * 8 + [USED] * 4 + [EMPTY] * 4 + [USED] + [FREE_CACHED] * 7 + [EMPTY] * 7 + [FREE_CACHED] + [EMPTY] * 7 + [RELEASED]
    marks = dict.fromkeys(range(1, 9), POEM) | {9: POEM, 10: POEM, 11: LETTER, 12: LETTER, 17: LETTER}
    (line,) = grid_lines(GridContent(bytes(codes), marks=marks), layout)
    assert line_text(line) == "█▄▁░-"
    roles = [part.role for part in line for _ in part.text]
    assert roles[:3] == ["owner_0_ink", "block_mixed", "owner_1_ink"]
    assert "cell = 8 blocks" in line_text(legend(layout, 80))


def test_the_cursor_on_a_cell_of_several_blocks_tells_its_height_in_eighths() -> None:
    layout = GridLayout(num_blocks=16, columns=2, per_cell=8, cell_width=1, cell_height=1, gutter=0)
    content = GridContent(bytes([USED] * 8 + [USED] * 3 + [EMPTY] * 5))
    assert line_text(grid_lines(content, layout, cursor=1)[0]) == "8▃"
    assert line_text(grid_lines(content, layout, cursor=9)[0]) == "█3"


@given(st.lists(st.sampled_from([EMPTY, FREE_CACHED, USED, SHARED]), min_size=1, max_size=300), st.integers(2, 20))
def test_the_height_of_a_cell_is_the_share_of_its_blocks_that_is_owned(codes: list[int], per_cell: int) -> None:
    layout = GridLayout(len(codes), columns=1000, per_cell=per_cell, cell_width=1, cell_height=1, gutter=0)
    text = line_text(grid_lines(GridContent(bytes(codes)), layout)[0])
    for cell, glyph in enumerate(text):
        blocks = [codes[block - 1] for block in layout.blocks_of(cell)]
        num_owned = sum(code in (USED, SHARED) for code in blocks)
        eighths = " ▁▂▃▄▅▆▇█".find(glyph)
        assert (eighths > 0) == (num_owned > 0)
        assert eighths <= 0 or eighths == max(1, num_owned * 8 // len(blocks))


# ---------------------------------------------------------------------------------------------------- owners
def test_a_request_keeps_its_colour_and_letter_and_neighbours_differ() -> None:
    marks = OwnerMarks()
    dealt = [marks.of(f"r{number}") for number in range(NUM_OWNER_COLOURS)]
    assert len({mark.colour for mark in dealt}) == len({mark.letter for mark in dealt}) == NUM_OWNER_COLOURS
    for number in range(8000):
        marks.of(f"later-{number}")
    marks.forget_all_but({"r0", "r1"})
    assert [marks.of(f"r{number}") for number in range(2)] == dealt[:2]


def test_the_legend_of_owners_says_how_many_it_leaves_out() -> None:
    owners = [(OwnerMark(f"request-{number}", 0, "A"), 3) for number in range(9)]
    for width in range(20, 200):
        text = line_text(owner_legend(owners, width))
        assert len(text) <= width
        shown = text.count("request-")
        assert shown == 9 or text.endswith(f"… {9 - shown} more")
    assert Counter(line_text(owner_legend(owners, 400)).split())["3"] == 9


def test_looks_that_are_kept_give_the_picture_that_would_be_drawn_without_them() -> None:
    rng = random.Random(0)
    kept: CellLooks = {}
    marks = [POEM, LETTER]
    for num_blocks in [203, 203, 500, 203] * 10:
        codes = bytes(rng.choices((EMPTY, FREE_CACHED, USED, SHARED, ALLOCATED, RELEASED), k=num_blocks))
        owned = {block: rng.choice(marks) for block in range(1, num_blocks + 1) if codes[block - 1] in (USED, SHARED, ALLOCATED)}
        lit = frozenset(rng.sample(sorted(owned), 3)) if rng.random() < 0.3 else frozenset()
        places = {block: place for place, block in enumerate(sorted(set(range(1, num_blocks + 1)) - set(owned)), 1)}
        content, layout = GridContent(codes, owned, places=places, lit=lit), GridLayout.of(num_blocks, width=30, rows=4)
        assert layout.per_cell > 1
        for with_places in (False, True):
            drawn = grid_lines(content, layout, cursor=7, with_places=with_places, looks=kept)
            assert drawn == grid_lines(content, layout, cursor=7, with_places=with_places)
