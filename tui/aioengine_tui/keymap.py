"""The keys that work on every screen, and the commands of the palette."""

from __future__ import annotations

from textual.binding import Binding, BindingType

BINDINGS: list[BindingType] = [
    Binding("1", "show('overview')", "overview", show=False),
    Binding("2", "show('step')", "step", show=False),
    Binding("3", "show('batch')", "batch", show=False),
    Binding("4", "show('blocks')", "KV blocks", show=False),
    Binding("5", "show('log')", "log", show=False),
    Binding("6,w", "show('waterfall')", "waterfall", show=False),
    Binding("question_mark,h,f1", "help", "help", show=False),
    Binding("escape", "return", "back", show=False),
    Binding("p,space", "pause", "pause the view, or play and pause a recording", show=False),
    Binding("plus,equals_sign", "faster(1)", "faster", show=False),
    Binding("minus", "faster(-1)", "slower", show=False),
    Binding("left_square_bracket", "step(-1)", "one step back", show=False),
    Binding("right_square_bracket", "step(1)", "one step on", show=False),
    Binding("left_curly_bracket", "seek_by(-0.05)", "seek back", show=False),
    Binding("right_curly_bracket", "seek_by(0.05)", "seek on", show=False),
    Binding("S", "seek", "seek", show=False),
    Binding("exclamation_mark", "jump('preemption')", "next preemption", show=False),
    Binding("X", "jump('abort')", "next abort", show=False),
    Binding("L", "jump('slowest')", "slowest step", show=False),
    Binding("V", "verify", "run the recording again, or go to the first difference", show=False),
    Binding("W", "what_if", "simulate the advice", show=False),
    Binding("P", "engine_pause", "pause or resume the engine", show=False),
    Binding("full_stop", "engine_step", "run one step", show=False),
    Binding("x", "abort", "abort the selected request", show=False),
    Binding("a", "ask", "send a prompt", show=False),
    Binding("e", "export('csv')", "save as CSV", show=False),
    Binding("E", "export('json')", "save as JSON", show=False),
    Binding("ctrl+s", "picture", "save the screen as SVG", show=False),
    Binding("t", "next_theme", "next theme", show=False),
    Binding("ctrl+z", "suspend_process", "suspend", show=False),
    Binding("q", "quit", "quit", show=False),
]

TOUR_BINDINGS: list[BindingType] = [
    Binding("n", "scene(1)", "next scene", show=False, priority=True),
    Binding("b", "scene(-1)", "scene before", show=False, priority=True),
    Binding("r", "replay_scene", "this scene again", show=False, priority=True),
]

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("Overview", "The engine at a glance", "show('overview')"),
    ("Step", "One step in full, and the timeline", "show('step')"),
    ("Batch", "A row per request", "show('batch')"),
    ("KV blocks", "Every block a cell", "show('blocks')"),
    ("Log", "What happened, in words", "show('log')"),
    ("Frame", "One step field by field, and what the worker does with it", "show('frame')"),
    ("Prefix tree", "Which prefixes the KV cache holds", "show('prefix')"),
    ("Waterfall", "A row per request, a column per step", "show('waterfall')"),
    ("Pause view", "Freeze the screen; events are still taken in (in a recording: play or pause)", "pause"),
    ("Export CSV", "Save what the screen shows as CSV", "export('csv')"),
    ("Export JSON", "Save what the screen shows as JSON", "export('json')"),
    ("Save SVG picture", "Save the screen as an SVG picture", "picture"),
    ("Next theme", "Dark, light, high contrast, colour-blind safe, the terminal's own colours", "next_theme"),
    ("Next preemption", "Recording: go to the next step that preempts", "jump('preemption')"),
    ("Next abort", "Recording: go to the next abort", "jump('abort')"),
    ("Slowest step", "Recording: go to the slowest step", "jump('slowest')"),
    ("Seek", "Recording: go to a step, a time or a share", "seek"),
    ("Verify", "Recording: run it again and compare every frame; then go to the first difference", "verify"),
    ("What if", "Recording: simulate what the advice would have brought", "what_if"),
    ("Pause engine", "Pause or resume the engine itself, where it allows control", "engine_pause"),
    ("Step engine", "Run one step of a paused engine", "engine_step"),
    ("Send prompt", "Submit a prompt to the engine, where it allows control", "ask"),
)
"""(title, help, action)"""
