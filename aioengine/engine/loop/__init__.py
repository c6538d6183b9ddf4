"""The core-side loop: schedules, executes, samples and updates, and tells observers about it."""
