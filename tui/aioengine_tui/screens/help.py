"""The help page: every key, and what the letters and fills mean."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from aioengine_tui.explanations import explained, labels_of
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.base import PageView, View
from aioengine_tui.widgets.block_grid import legend
from aioengine_tui.widgets.block_layout import GridLayout
from aioengine_tui.widgets.glyphs import KIND_FILLS, KIND_LETTERS, STATE_LETTERS
from aioengine_tui.widgets.step_rows import MARKS_LEGEND, STOP_WORDS
from aioengine_tui.widgets.text import Line, Part, fit, fit_line, rule

_KEYS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "everywhere",
        (
            ("1 2 3 4 5 6", "overview, step, batch, KV blocks, log, waterfall (w); tab and shift+tab go round"),
            ("p or space", "pause the view; events are still taken in. In a recording: play or pause"),
            ("? or F1", "this help; esc goes back"),
            ("t", "next theme; ctrl+p has all of them and every command"),
            ("e, E", "save what the screen shows as CSV, as JSON"),
            ("ctrl+s", "save the screen as an SVG picture"),
            ("+ -", "refresh faster or slower; in a recording: play faster or slower"),
            ("ctrl+z, q", "suspend, quit"),
            ("mouse", "tabs, keys, titles, warnings and the names of requests do what they say"),
        ),
    ),
    (
        "lists",
        (
            ("↑ ↓ j k", "move; PgUp PgDn Home End too, and the mouse: a click chooses, two open"),
            ("enter", "the page of the request under the cursor; esc goes back"),
            ("/ or f", "filter: all words must occur; esc clears it"),
            ("← →", "batch: sort by another column; a click on its title too, again turns the order"),
            ("s, r", "batch: sort by the column of that name, turn the order round"),
            ("F", "batch: the cursor follows its request, or stays on its row"),
            ("d", "batch: with or without requests that ended"),
            ("l, z Z", "step: lanes on or off; fewer or more steps in them"),
            ("enter", "step: the step field by field, and what the worker does with it; there ? explains a field"),
            ("← →", "waterfall: the column; shift: ten of them, home: the oldest, end: follow the latest"),
            ("z Z m", "waterfall: more or less in a column; steps or milliseconds"),
            ("o", "waterfall: the step of the column; enter: the request, or the step above the rows"),
            ("o", "request: the settings that have their default"),
            ("n N c", "KV blocks: light the blocks of the next, the previous, no request"),
            ("v T", "KV blocks: the order of eviction; the prefix tree"),
        ),
    ),
    (
        "recordings",
        (
            ("[ ]", "one step back, one step on"),
            ("{ }", "a twentieth back, a twentieth on"),
            ("S", "go to a step (812), a time (12.5s) or a share (50%)"),
            ("! X L", "next preemption, next abort, slowest step"),
        ),
    ),
    (
        "the engine, where it allows control",
        (
            ("P", "pause the engine itself, for everybody (asks once more), or resume it"),
            (".", "run one step of a paused engine"),
            ("x", "abort the selected request (asks once more)"),
            ("a", "send a prompt, as a chat where the model has a template; its page shows the answer"),
        ),
    ),
)


class HelpView(PageView):
    screen_title: ClassVar[str] = "Help"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (("esc", "back"), ("↑↓", "scroll"))

    _about: tuple[str, list[tuple[str, str]]] = ("", [])

    def explain_screen(self, view: View) -> None:
        """Begin with the labels of the screen from which the help was asked for."""
        self._about = (view.screen_title, explained([*view.explained_words, *labels_of(view.lines)]))
        self.scroll_state.top = 0

    def compose_page(self, state: DashboardState, width: int) -> list[Line]:
        title, labels = self._about
        return [*_label_lines(title, labels, width), *help_lines(width)]


def _label_lines(title: str, labels: list[tuple[str, str]], width: int) -> list[Line]:
    """The words on a screen, with what they mean."""
    if not labels:
        return []
    lines = [rule(f"the words on the screen {title}", width)]
    room = min(30, max(len(label) for label, _ in labels) + 2)
    for label, words in labels:
        wrapped = textwrap.wrap(words, max(20, width - room))
        lines += [[Part(fit(label if index == 0 else "", room), "key"), Part(text)] for index, text in enumerate(wrapped)]
    return lines


def help_lines(width: int) -> list[Line]:
    lines: list[Line] = []
    for title, keys in _KEYS:
        lines.append(rule(title, width))
        lines += [[Part(fit(key, 13), "key"), Part(text)] for key, text in keys]
    lines.append(rule("what the signs mean", width))
    lines.append([Part("state   ", "muted")] + [part for s, g in STATE_LETTERS.items() for part in (Part(g, s), Part(f" {s}  ", "muted"))])
    kinds: Line = [Part("tokens  ", "muted")]
    for kind, fill in KIND_FILLS.items():
        kinds += [Part(f"{KIND_LETTERS[kind]} {fill}", kind), Part(f" {kind}  ", "muted")]
    lines += [
        kinds,
        [Part("steps   ", "muted"), *MARKS_LEGEND],
        [Part("blocks  ", "muted"), *legend(GridLayout.of(1, width=80, rows=1), width - 8)],
    ]
    lines.append(
        [Part("…", "value"), Part(" something was cut off   ", "muted"), Part("-", "value"), Part(" nothing was measured", "muted")]
    )
    lines.append([Part("~12 stale", "stale"), Part(" the last value known; it may not be true any more", "muted")])
    lines.append(rule("why admission stopped", width))
    lines += [[Part(fit(stop, 13), "key"), Part(words)] for stop, words in STOP_WORDS.items()]
    return [fit_line(line, width) for line in lines]
