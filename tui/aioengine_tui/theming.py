"""Gives an app our themes, and takes its colours away where NO_COLOR asks for that."""

from __future__ import annotations

from typing import Any

from textual.app import App
from textual.filter import Monochrome, NoColor

from aioengine_tui.themes import THEMES, textual_name


def set_up_theme(app: App[Any], theme: str) -> None:
    """theme: one of `THEME_NAMES`."""
    for own in THEMES.values():
        app.register_theme(own)
    if app.no_color:
        # Textual 8.2.8 decides by the default theme how to drop colours. Under an ansi theme its monochrome filter
        # then takes the terminal's default colours for black, both of them: black on black. Removing colours
        # altogether is right under every theme, and leaves bold, reverse and underline.
        app._filters = [line_filter for line_filter in app._filters if not isinstance(line_filter, Monochrome)]
        if not any(isinstance(line_filter, NoColor) for line_filter in app._filters):
            app._filters.append(NoColor())
        theme = "ansi"
    app.theme = textual_name(theme)
