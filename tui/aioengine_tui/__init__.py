"""The dashboard: `state` folds the engine's events without drawing anything, the rest draws."""
