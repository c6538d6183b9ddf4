"""Colours: the themes of the dashboard, and what each role of a styled text looks like in them.

Colour is never the only difference: every state has a letter or a fill of its own (`widgets/glyphs.py`), so the screens
stay readable in one colour, on 16 colours and for colour-blind people.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme

from aioengine_tui.model.owner_marks import NUM_OWNER_COLOURS


@dataclass(frozen=True, slots=True)
class Colors:
    """The colours of one palette, as Rich names them."""

    text: str
    muted: str
    border: str
    accent: str
    good: str
    warn: str
    bad: str
    prefill: str
    chunk: str
    decode: str
    resumed: str
    shared: str
    cached: str


_DARK = Colors(
    text="#d8dee9", muted="#8a94a6", border="#4c566a", accent="#88c0d0", good="#a3be8c", warn="#ebcb8b", bad="#f0717a",
    prefill="#5aa9e6", chunk="#b48ead", decode="#a3be8c", resumed="#ebcb8b", shared="#d08770", cached="#6b7f99",
)  # fmt: skip
_LIGHT = Colors(
    text="#1f2933", muted="#5b6673", border="#a9b4c0", accent="#0b6e8a", good="#2f7d32", warn="#8a5a00", bad="#b3261e",
    prefill="#1565c0", chunk="#7b1fa2", decode="#2f7d32", resumed="#8a5a00", shared="#b5460f", cached="#6b7c93",
)  # fmt: skip
_HIGH_CONTRAST = Colors(
    text="#ffffff", muted="#d0d0d0", border="#ffffff", accent="#00ffff", good="#00ff66", warn="#ffff00", bad="#ff8080",
    prefill="#66b3ff", chunk="#ff9dff", decode="#00ff66", resumed="#ffff00", shared="#ffb366", cached="#c0c0c0",
)  # fmt: skip
# Okabe and Ito's eight colours, which differ in lightness too and are told apart under all common colour deficiencies.
_COLOUR_BLIND = Colors(
    text="#e6e6e6", muted="#9a9a9a", border="#5a5a5a", accent="#56b4e9", good="#009e73", warn="#f0e442", bad="#d55e00",
    prefill="#56b4e9", chunk="#cc79a7", decode="#009e73", resumed="#f0e442", shared="#e69f00", cached="#7f8c99",
)  # fmt: skip
# The terminal's own 16 colours: whatever the user made of them, on the terminal's own background.
_ANSI = Colors(
    text="default", muted="default", border="default", accent="cyan", good="green", warn="yellow", bad="red",
    prefill="blue", chunk="magenta", decode="green", resumed="yellow", shared="red", cached="default",
)  # fmt: skip


def _theme(name: str, colors: Colors, background: str, surface: str, *, dark: bool) -> Theme:
    return Theme(
        name=name, primary=colors.accent, secondary=colors.prefill, accent=colors.accent, warning=colors.warn, error=colors.bad,
        success=colors.good, foreground=colors.text, background=background, surface=surface, panel=surface, dark=dark,
    )  # fmt: skip


THEMES: dict[str, Theme] = {
    "dark": _theme("aioengine-dark", _DARK, "#14181f", "#1d232d", dark=True),
    "light": _theme("aioengine-light", _LIGHT, "#fbfbf8", "#eceff1", dark=False),
    "high-contrast": _theme("aioengine-high-contrast", _HIGH_CONTRAST, "#000000", "#1a1a1a", dark=True),
    "colour-blind": _theme("aioengine-colour-blind", _COLOUR_BLIND, "#101010", "#202020", dark=True),
}
"""By the name that `--theme` takes; `ansi` is added by Textual's own themes."""

THEME_NAMES: tuple[str, ...] = (*THEMES, "ansi")
"""What `--theme` takes, and the order in which the key `t` goes through them."""

_TEXTUAL_NAMES: dict[str, str] = {**{name: theme.name for name, theme in THEMES.items()}, "ansi": "ansi-dark"}
_COLORS: dict[str, Colors] = {
    "aioengine-dark": _DARK,
    "aioengine-light": _LIGHT,
    "aioengine-high-contrast": _HIGH_CONTRAST,
    "aioengine-colour-blind": _COLOUR_BLIND,
}


def textual_name(name: str) -> str:
    """The name that Textual knows the theme by. Raises KeyError for a name not in THEME_NAMES."""
    return _TEXTUAL_NAMES[name]


class Palette:
    """The style of each role under one theme. Made when the theme changes, and shared by all widgets."""

    def __init__(self, theme: Theme, *, no_color: bool = False, ascii_only: bool = False) -> None:
        """no_color: attributes only (bold, reverse, underline), no colours at all. ascii_only: the terminal knows no other signs."""
        self.ascii_only = ascii_only
        if no_color:
            self._styles = _attribute_styles()
            self._cursor = Style(reverse=False, bold=True, underline=True)
            return
        fallback = _ANSI if theme.ansi else _DARK if theme.dark else _LIGHT
        colors = _COLORS.get(theme.name, fallback)
        self._styles = _styles(colors)
        # On a cell that has a colour of its own, a reversed one would look like a cell of nobody.
        is_default = colors.text == "default"
        self._cursor = (
            Style(color="black", bgcolor="white", bold=True)
            if is_default
            else Style(color=theme.background, bgcolor=colors.text, bold=True)
        )

    def __getitem__(self, role: str) -> Style:
        """Raises KeyError for a role that no palette has. `^` behind a role: the same under the cursor."""
        if role.endswith("^"):
            return self._styles[role[:-1]] + self._cursor
        return self._styles[role]

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(self._styles)


def _styles(colors: Colors) -> dict[str, Style]:
    plain = {
        role: Style(color=getattr(colors, color))
        for role, color in {
            "text": "text", "muted": "muted", "border": "border", "accent": "accent", "good": "good", "warn": "warn", "bad": "bad",
            "prefill": "prefill", "chunk": "chunk", "decode": "decode", "resumed": "resumed", "prefix": "cached",
            "waiting": "muted", "running": "good", "preempted": "warn", "finished": "muted", "cleaning_up": "bad", "aborted": "bad",
            "block_empty": "border", "block_free_cached": "cached", "block_used": "prefill", "block_shared": "shared",
            "lane_schedule": "prefill", "lane_execute": "decode", "lane_sample": "chunk", "lane_update": "resumed",
            "graph": "accent", "graph2": "resumed", "budget_left": "border",
        }.items()
    }  # fmt: skip
    dim = {} if colors.muted != "default" else {role: Style(dim=True) for role in ("muted", "border", "waiting", "finished", "block_empty")}
    bold = {
        "title": Style(color=colors.accent, bold=True), "value": Style(color=colors.text, bold=True),
        "key": Style(color=colors.accent, bold=True), "header": Style(color=colors.muted, underline=True),
        "header_on": Style(color=colors.accent, underline=True, bold=True),
        "alert": Style(color=colors.bad, bold=True), "stale": Style(color=colors.warn, italic=True),
        "block_allocated": Style(color=colors.good, bold=True), "block_released": Style(color=colors.bad, bold=True),
        "block_lit": Style(color=colors.warn, bold=True),
        "tab_on": Style(color=colors.accent, bold=True, reverse=True), "cursor": Style(reverse=True),
    }  # fmt: skip
    return {**plain, **dim, **bold, **_owner_styles(colors)}


def _owner_styles(colors: Colors) -> dict[str, Style]:
    """owner_N: the ground of a cell; owner_N_ink: the same colour as ink. block_mixed, place: cells of several owners, and of none."""
    own = _OWNER_COLOURS.get(colors.text, _OWNER_COLOURS["default"])
    text = "black" if colors.text == "default" else _OWNER_TEXT.get(colors.text, "#14181f")
    styles = {"block_mixed": Style(color=colors.muted), "place": Style(color=colors.warn)}
    for index, colour in enumerate(own):
        styles[f"owner_{index}"] = Style(color=text, bgcolor=colour)
        styles[f"owner_{index}_ink"] = Style(color=colour)
    return styles


# Twelve colours by the text colour of the palette: light ones on dark ground, dark ones on light ground; neighbours differ in lightness.
_BRIGHT = (
    "#5aa9e6", "#ebcb8b", "#a3be8c", "#d08770", "#c39ac9", "#7fd1c7", "#f28ba8", "#9fb4d9", "#d7d36b", "#e0a458", "#8fd17f", "#b0a1f5",
)  # fmt: skip
_DEEP = (
    "#1565c0", "#8a5a00", "#2f7d32", "#b5460f", "#7b1fa2", "#00707a", "#ad1457", "#455a80", "#6b6500", "#9c5700", "#3c6e1f", "#5336b8",
)  # fmt: skip
_TERMINAL = (
    "cyan",
    "yellow",
    "green",
    "magenta",
    "blue",
    "red",
    "bright_cyan",
    "bright_yellow",
    "bright_green",
    "bright_magenta",
    "bright_blue",
    "bright_red",
)
_OKABE_ITO = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#cc79a7",
    "#d55e00",
    "#7fb2ff",
    "#ffc966",
    "#4fd6ae",
    "#fff6a0",
    "#e8b3d2",
    "#ff9a5c",
)
_OWNER_COLOURS = {
    "default": _TERMINAL,
    _LIGHT.text: _DEEP,
    _COLOUR_BLIND.text: _OKABE_ITO,
    _DARK.text: _BRIGHT,
    _HIGH_CONTRAST.text: _BRIGHT,
}
_OWNER_TEXT = {_LIGHT.text: "#ffffff"}


def _attribute_styles() -> dict[str, Style]:
    """Every role by attributes alone, for NO_COLOR."""
    plain, bold, dim = Style(), Style(bold=True), Style(dim=True)
    styles = dict.fromkeys(_styles(_DARK), plain)
    for role in ("muted", "border", "waiting", "finished", "block_empty", "budget_left", "prefix"):
        styles[role] = dim
    for role in ("title", "value", "key", "bad", "alert", "warn", "preempted", "aborted", "block_allocated", "block_released"):
        styles[role] = bold
    styles["header"] = Style(underline=True)
    styles["header_on"] = Style(underline=True, bold=True)
    styles["stale"] = Style(italic=True)
    styles["cursor"] = styles["tab_on"] = Style(reverse=True)
    styles["block_lit"] = Style(bold=True, underline=True)
    styles["block_mixed"] = styles["place"] = plain
    for index in range(NUM_OWNER_COLOURS):  # the letters tell owners apart; the ground, how far a block is filled
        styles[f"owner_{index}"] = Style(reverse=True)
        styles[f"owner_{index}_ink"] = plain
    return styles
